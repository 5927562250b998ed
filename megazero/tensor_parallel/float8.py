"""Matrix products of 8-bit numbers (Micikevicius et al., arXiv 2209.05433).

A tensor x is *quantised* to 8-bit numbers q and one *scale* s, so that x is about s q:

    s = max|x| / largest of the format, rounded to x's format        q = x / s, rounded to 8 bits

The product of two such tensors is s_a s_b (q_a q_b), summed up before it is rounded, once, to x's format.  There are
two formats: e4m3 (3 bits of mantissa, up to 448) and e5m2 (2 bits, up to 57,344, a range 2^14 times as wide).
Activations and weights are e4m3; gradients of outputs, whose magnitudes spread further, are e5m2 in "hybrid".

Scales are computed on the device, without synchronising the host: by the recipe "tensorwise" from the tensor itself, by
"delayed" from the maxima of earlier steps (`float8_scales.py`).  Those of the tensor itself are of one rank: of its
slice of a weight, and of its micro-batch.  So two sizes of tensor parallelism round differently, while data-parallel
layouts of the same micro-batches don't.

Cost: every product quantises both of its operands by itself, each by a search for the maximum, a division and a
rounding (the recipe "tensorwise"): 9 bytes read and written an element of a bf16 tensor, and 2 more to lay it out anew
where the library requires the other order: the weight for the input gradient, both operands for the weight gradient.  A
linear layer does this for three products, so for x, W and dy twice each.  Between passes the 16-bit tensors are saved,
none of 8 bits.  Weights change once a step only: `float8_weights.py` quantises them as often.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.engine_sections import Fp8Format
from megazero.errors import ConfigError, Problem
from megazero.parallel.gradient_slot import add_to
from megazero.rules.float8 import has_8bit_products
from megazero.tensor_parallel.products import TORCH, Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_CAPABILITY = (8, 9)  # of GPUs with 8-bit matrix products


class Quantised(NamedTuple):
    """A tensor x [..] as 8-bit values [..] times scale [], fp32."""

    values: Tensor
    scale: Tensor

    @property
    def transposed(self) -> "Quantised":
        return Quantised(self.values.t(), self.scale)


class StepWeight(NamedTuple):
    """The 8-bit form of a weight [out, in] that serves all products between two updates.

    scale []: fp32.  values [out, in] and transposed [in, out], both by rows, as the products read them; None where the
    scale alone is kept, and every product rounds the weight by it.
    """

    scale: Tensor
    values: Tensor | None = None
    transposed: Tensor | None = None


def quantise(x: Tensor, dtype: torch.dtype) -> Quantised:
    """Quantise x [.., ..] with one scale; a NaN or an infinity makes the scale, and so every product, not finite.

    x / s is rounded to x's format before it is rounded to 8 bits, which takes less memory than fp32 in between: the
    error is about 2^-9 (bf16) + 2^-4 (e4m3) or 2^-3 (e5m2) of a number that is not subnormal in the 8-bit format.
    """
    largest = torch.linalg.vector_norm(x, ord=math.inf)
    # In x's format like the division, which would otherwise round it: s would not be what x was divided by.  The
    # largest x / s may then exceed the format's largest by 2^-9 of it, and is rounded to that.
    scale = (largest / torch.finfo(dtype).max).clamp(min=torch.finfo(x.dtype).tiny)
    return Quantised((x / scale).to(dtype), scale.float())


def round_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times scale in 8 bits; what exceeds the format's largest number becomes that."""
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def round_and_measure(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `round_by` and the maximum of |x|, fp32 []."""
    return round_by(x, scale, dtype), torch.linalg.vector_norm(x, ord=math.inf).float()


def round_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """Return `round_by` of a weight; a function of its own, since torch compiles one for no more than eight shapes."""
    return round_by(weight, scale, E4M3)


class Rounding(NamedTuple):
    """The passes of delayed scaling over a tensor, as they are or compiled."""

    by: Callable[[Tensor, Tensor, torch.dtype], Tensor] = round_by
    and_measure: Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]] = round_and_measure
    weight: Callable[[Tensor, Tensor], Tensor] = round_weight


AS_WRITTEN = Rounding()


class LayerScales:
    """The scales of one layer's delayed scaling, and the maxima from which later ones follow (`float8_scales.py`).

    scales and maxima [3], fp32: those of the input, the weight and the output's gradient.  x is multiplied by a scale,
    which is a reciprocal of s above; a number past the format's largest becomes the largest.
    """

    def __init__(self, scales: Tensor, maxima: Tensor, rounding: Rounding = AS_WRITTEN) -> None:
        self.scales = scales
        self.maxima = maxima
        self._rounding = rounding

    def quantise(self, which: int, x: Tensor, dtype: torch.dtype) -> Quantised:
        """Quantise x [.., ..] by the scale in force; an infinity becomes the largest number."""
        scale = self.scales[which]
        # Detached, x is compiled once for passes with a graph and without.
        return Quantised(self._rounding.by(x.detach(), scale, dtype), scale.reciprocal())

    def quantise_and_record(self, which: int, x: Tensor, dtype: torch.dtype) -> Quantised:
        """Quantise x and record its maximum; a NaN or an infinity makes the scale, and so every product, not finite."""
        scale = self.scales[which]
        values, largest = self._rounding.and_measure(x.detach(), scale, dtype)
        return Quantised(values, scale.reciprocal() + self.record(which, largest))

    def values_of_weight(self, weight: Tensor) -> Tensor:
        """Round a weight by the scale in force."""
        return self._rounding.weight(weight.detach(), self.scales[WEIGHT])

    def record(self, which: int, largest: Tensor) -> Tensor:
        """Record a maximum, fp32 []; return 0, or a NaN if it is not finite."""
        self.maxima[which].copy_(torch.maximum(self.maxima[which], largest))
        return torch.mul(largest, 0)


INPUT, WEIGHT, GRADIENT = range(3)  # of a layer's scales


def quantise_weight(weight: Tensor, scales: LayerScales | None = None) -> StepWeight:
    """Quantise a weight [out, in] in the two orders that its products read."""
    found = quantise(weight, E4M3) if scales is None else scales.quantise_and_record(WEIGHT, weight, E4M3)
    return StepWeight(found.scale, found.values, found.values.t().contiguous())


def weight_scale(weight: Tensor, scales: LayerScales | None = None) -> StepWeight:
    """Return the scale of a weight [out, in] alone."""
    if scales is None:
        return StepWeight(quantise(weight, E4M3).scale)
    largest = torch.linalg.vector_norm(weight, ord=math.inf).float()
    return StepWeight(scales.scales[WEIGHT].reciprocal() + scales.record(WEIGHT, largest))


@dataclass
class Float8Products:
    """The products of 8-bit numbers, of two-dimensional tensors on the CPU or on GPUs that have them.

    gradients: the 8-bit format of outputs' gradients.  otherwise: the products of layers one of whose dims (n, in, out)
    is no multiple of 16; the choice depends on the dims alone, so a layer's three products are of one kind.
    weight: the 8-bit form of the one weight that these products are of; None: each product quantises its weight.
    scales: those of delayed scaling, where weights have an 8-bit form; None: each product finds its scales.
    """

    gradients: torch.dtype
    otherwise: Products = TORCH
    weight: StepWeight | None = None
    scales: LayerScales | None = None

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not has_8bit_products(*x.shape, weight.shape[0]):
            return self.otherwise.output(x, weight, bias)
        scales, right = self.scales, self._by_rows(weight).transposed
        left = quantise(x, E4M3) if scales is None else scales.quantise_and_record(INPUT, x, E4M3)
        # A GPU may accumulate these sums in fewer bits than fp32, which is faster, but not those of gradients.
        return _product(left, right, x.dtype, bias=bias, fast=True)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        if not has_8bit_products(*grad.shape, weight.shape[1]):
            return self.otherwise.input_gradient(grad, weight)
        scales, right = self.scales, self._by_columns(weight)
        left = quantise(grad, self.gradients) if scales is None else scales.quantise(GRADIENT, grad, self.gradients)
        return _product(left, right, grad.dtype)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        if not has_8bit_products(*grad.shape, x.shape[1]):
            return self.otherwise.weight_gradient(grad, x)
        if self.scales is None:
            return _product(quantise(grad, self.gradients).transposed, quantise(x, E4M3), grad.dtype)
        left = self.scales.quantise_and_record(GRADIENT, grad, self.gradients)
        return _product(left.transposed, self.scales.quantise(INPUT, x, E4M3), grad.dtype)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        if not has_8bit_products(*grad.shape, x.shape[1]):
            self.otherwise.add_weight_gradient(total, grad, x, is_first=is_first)
        else:
            add_to(total, self.weight_gradient(grad, x), is_first=is_first)

    def _by_rows(self, weight: Tensor) -> Quantised:
        if self.weight is None or self.weight.values is None:
            return self._rounded(weight)
        return Quantised(self.weight.values, self.weight.scale)

    def _by_columns(self, weight: Tensor) -> Quantised:
        if self.weight is None or self.weight.transposed is None:
            return self._rounded(weight)
        return Quantised(self.weight.transposed.t(), self.weight.scale)

    def _rounded(self, weight: Tensor) -> Quantised:
        if self.weight is None:
            return quantise(weight, E4M3)
        scale = self.weight.scale
        if self.scales is not None:
            return Quantised(self.scales.values_of_weight(weight), scale)
        return Quantised((weight / scale.to(weight.dtype)).to(E4M3), scale)


def float8_products(format: Fp8Format, otherwise: Products = TORCH) -> Products:
    """Return the products for `--fp8-format`."""
    return Float8Products({"e4m3": E4M3, "hybrid": E5M2}[format], otherwise)


def check_device(format: Fp8Format | None, device: torch.device) -> tuple[str, ...]:
    """Return notices about 8-bit products on this device; raises ConfigError where it has none."""
    if format is None:
        return ()
    if device.type != "cuda":
        return (f"--fp8-format {format}: a CPU has no 8-bit products; numbers are right, the run is far slower",)
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        has, needs = (".".join(map(str, pair)) for pair in (capability, _CAPABILITY))
        given = f"--fp8-format {format} on {torch.cuda.get_device_name(device)} (compute capability {has})"
        rule = f"8-bit products need compute capability {needs} or more (Ada, Hopper)"
        raise ConfigError(Problem(given, rule, "leave out --fp8-format"))
    return ()


def _product(
    left: Quantised, right: Quantised, dtype: torch.dtype, *, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """Multiply left [m, k] by right [k, n], laid out as the library requires: by rows and by columns."""
    return torch._scaled_mm(
        left.values.contiguous(),
        right.values.t().contiguous().t(),
        scale_a=left.scale,
        scale_b=right.scale,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
