"""Matrix products of 8-bit numbers (Micikevicius et al., arXiv 2209.05433).

A tensor x is *quantised* to 8-bit numbers q by one *factor* f:

    f = largest of the format / max|x|        q = x f, rounded to 8 bits        x is about q / f

The product of two such tensors is (q_a q_b) / (f_a f_b), summed up before it is rounded, once, to x's format.  There
are two formats: e4m3 (3 bits of mantissa, up to 448) and e5m2 (2 bits, up to 57,344, a range 2^14 times as wide).
Activations and weights are e4m3; gradients of outputs, whose magnitudes spread further, are e5m2 in "hybrid".

Factors are computed on the device, without synchronising the host: by the recipe "tensorwise" from the tensor itself,
by "delayed" from the maxima of earlier steps (`float8_scales.py`).  Those of the tensor itself are of one rank: of its
slice of a weight, and of its micro-batch.  So two sizes of tensor parallelism round differently, while data-parallel
layouts of the same micro-batches don't.

Cost: in a block that is compiled as a whole, one pass over x and one over dy read 2 bytes an element (bf16) and write
2, the 8-bit numbers in both orders (`float8_rounding.py`); "tensorwise" reads 2 more for the maximum.  Backward's order
of x is saved, 1 byte an element, in place of x.  Elsewhere every product quantises its operands by itself, in the order
that it reads, and the 16-bit tensors are saved.  Weights change once a step only: `float8_weights.py` quantises them as
often.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.engine_sections import Fp8Format
from megazero.errors import ConfigError, Problem
from megazero.parallel.gradient_slot import add_to
from megazero.rules.float8 import has_8bit_products
from megazero.tensor_parallel.float8_rounding import largest_magnitude, round_by_factor, round_by_maximum
from megazero.tensor_parallel.products import TORCH, Products

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

_CAPABILITY = (8, 9)  # of GPUs with 8-bit matrix products


class Quantised(NamedTuple):
    """A tensor x [n, k] as 8-bit values times scale [], fp32.

    rows [n, k], columns [k, n]: the values in both orders, one of them empty if it is not wanted.
    """

    rows: Tensor
    columns: Tensor
    scale: Tensor


class StepWeight(NamedTuple):
    """The 8-bit form of a weight [out, in] that serves all products between two updates.

    quantised: its values in both orders; None where every product makes those that it reads.
    maximum: the largest magnitude, fp32 [], by which it does so; None where `quantised` is there.
    """

    quantised: Quantised | None = None
    maximum: Tensor | None = None


def quantise(x: Tensor, dtype: torch.dtype, *, by_rows: bool = True, by_columns: bool = True) -> Quantised:
    """Quantise x [n, k] by its own maximum; the error is 2^-4 (e4m3) or 2^-3 (e5m2) of a number that stays normal."""
    return Quantised(*round_by_maximum(x, dtype, by_rows=by_rows, by_columns=by_columns))


class LayerScales:
    """The factors of one layer's delayed scaling, and the maxima from which later ones follow (`float8_scales.py`).

    scales, their reciprocals, and maxima [3], fp32: those of the input, the weight and the output's gradient.  Where x
    times a factor is past the format's largest number, it becomes that.
    """

    def __init__(self, scales: Tensor, reciprocals: Tensor, maxima: Tensor) -> None:
        self.scales = scales
        self.maxima = maxima
        # Single numbers, as compiled code has to read them.
        self._each = list(zip(scales.unbind(), reciprocals.unbind(), maxima.unbind(), strict=True))

    def quantise(
        self, which: int, x: Tensor, dtype: torch.dtype, *, by_rows: bool = True, by_columns: bool = True
    ) -> Quantised:
        """Quantise x [n, k] by the factor in force; its maximum counts for later ones."""
        factor, reciprocal, maximum = self._each[which]
        rows, columns = round_by_factor(x, factor, maximum, dtype, by_rows=by_rows, by_columns=by_columns)
        return Quantised(rows, columns, reciprocal)


INPUT, WEIGHT, GRADIENT = range(3)  # of a layer's scales


def quantise_weight(weight: Tensor, scales: LayerScales | None = None) -> StepWeight:
    """Quantise a weight [out, in] in the two orders that its products read."""
    return StepWeight(quantise(weight, E4M3) if scales is None else scales.quantise(WEIGHT, weight, E4M3))


def search_weight(weight: Tensor, scales: LayerScales | None = None) -> StepWeight:
    """Find the largest magnitude of a weight [out, in] alone; scales are None, since by delayed ones none is needed."""
    assert scales is None, "delayed scales are known before"
    return StepWeight(maximum=largest_magnitude(weight))


@dataclass
class Float8Products:
    """The products of 8-bit numbers, of two-dimensional tensors on the CPU or on GPUs that have them.

    gradients: the 8-bit format of outputs' gradients.  otherwise: the products of layers one of whose dims (n, in, out)
    is no multiple of 16; the choice depends on the dims alone, so a layer's three products are of one kind.
    weight: the 8-bit form of the one weight that these products are of; None: each product quantises its weight.
    scales: those of delayed scaling; None: each product finds its factors.
    """

    gradients: torch.dtype
    otherwise: Products = TORCH
    weight: StepWeight | None = None
    scales: LayerScales | None = None

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not has_8bit_products(*x.shape, weight.shape[0]):
            return self.otherwise.output(x, weight, bias)
        left, right = self._of_input(x, by_rows=True), self._of_weight(weight, by_rows=True)
        # A GPU may accumulate these sums in fewer bits than fp32, which is faster, but not those of gradients.
        scales = left.scale, right.scale
        return _product(left.rows, right.rows, scales, x.dtype, bias=bias, fast=True)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        if not has_8bit_products(*grad.shape, weight.shape[1]):
            return self.otherwise.input_gradient(grad, weight)
        left, right = self._of_gradient(grad, by_rows=True), self._of_weight(weight, by_rows=False)
        return _product(left.rows, right.columns, (left.scale, right.scale), grad.dtype)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        if not has_8bit_products(*grad.shape, x.shape[1]):
            return self.otherwise.weight_gradient(grad, x)
        left, right = self._of_gradient(grad, by_rows=False), self._of_input(x, by_rows=False)
        return _product(left.columns, right.columns, (left.scale, right.scale), grad.dtype)

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        if not has_8bit_products(*grad.shape, x.shape[1]):
            self.otherwise.add_weight_gradient(total, grad, x, is_first=is_first)
        else:
            add_to(total, self.weight_gradient(grad, x), is_first=is_first)

    def _of_input(self, x: Tensor, *, by_rows: bool) -> Quantised:
        return self._quantised(INPUT, x, E4M3, by_rows=by_rows)

    def _of_gradient(self, grad: Tensor, *, by_rows: bool) -> Quantised:
        return self._quantised(GRADIENT, grad, self.gradients, by_rows=by_rows)

    def _quantised(self, which: int, x: Tensor, dtype: torch.dtype, *, by_rows: bool) -> Quantised:
        """Quantise in one order, or in a compiled block in both: the same call serves the product of the other one."""
        is_shared = torch.compiler.is_compiling()
        orders = {"by_rows": by_rows or is_shared, "by_columns": not by_rows or is_shared}
        if self.scales is None:
            return quantise(x, dtype, **orders)
        return self.scales.quantise(which, x, dtype, **orders)

    def _of_weight(self, weight: Tensor, *, by_rows: bool) -> Quantised:
        """Return the weight in one order: both would be kept from a compiled block's forward to its backward."""
        if self.weight is not None and self.weight.quantised is not None:
            return self.weight.quantised
        orders = {"by_rows": by_rows, "by_columns": not by_rows}
        if self.scales is not None:
            return self.scales.quantise(WEIGHT, weight, E4M3, **orders)
        maximum = None if self.weight is None else self.weight.maximum
        return Quantised(*round_by_maximum(weight, E4M3, maximum=maximum, **orders))


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
    left: Tensor,
    right: Tensor,
    scales: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """Multiply left [m, k] by right [n, k]: the library reads the one by rows, and the other's transpose by columns."""
    return torch._scaled_mm(
        left,
        right.t(),
        scale_a=scales[0],
        scale_b=scales[1],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
