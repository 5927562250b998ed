"""The kernels on a training step's path, one at a time, with the least operations and bytes that each needs.

Every kernel comes with the floating-point operations that its mathematics requires, and the bytes that any
implementation must read and write once; `ceilings.py` makes its roofline of both.  Operations outside of matrix
products are not counted: such kernels are bound by bytes.

Shapes, in comments: n = tokens of a micro-batch, b = its samples, s = sequence, h = hidden, f = inner, a = heads,
V = padded vocabulary.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megazero.activations.recompute_plan import LOGITS_CHUNK_BYTES
from megazero.comm.local import LocalCommunicator
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.grad_norm import fragment_norms, sum_dtype
from megazero.optim.inner import AdamWSettings, ElementRun, FusedAdamW, StepInputs
from megazero.tensor_parallel.bias_gradients import gelu_gradient, packed_gradient
from megazero.tensor_parallel.head_loss import Targets, summed_cross_entropy
from megazero.tensor_parallel.products import Products
from megazero.tensor_parallel.regions import Border

_EPSILON = 1e-5
_ADAMW = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_BACKENDS: Mapping[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass(frozen=True)
class Kernel:
    """A kernel on operands that exist.

    call: runs it once.  flops, nbytes: the operations and bytes that it needs at the least.  products: the name of the
    library that computes its matrix products, or "".  operands: tensors that exist before and after the call, where the
    memory beside them is to be measured.
    """

    name: str
    call: Callable[[], object]
    flops: float
    nbytes: float
    products: str = ""
    operands: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The sizes of a micro-batch and of a model, with the working precision and the device."""

    samples: int
    length: int
    hidden: int
    heads: int
    inner: int
    vocabulary: int
    padded_vocabulary: int
    dtype: torch.dtype
    device: torch.device

    @property
    def tokens(self) -> int:
        return self.samples * self.length

    @property
    def block(self) -> tuple[tuple[int, int], ...]:
        """The shapes of a block's matrices, [out, in]: query, key and value; projection; up; down."""
        h, f = self.hidden, self.inner
        return (3 * h, h), (h, h), (f, h), (h, f)

    def random(self, *shape: int, grad: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype or self.dtype).requires_grad_(grad)

    def nbytes(self, *numels: int) -> int:
        """Return the bytes of tensors of so many elements in the working precision."""
        return sum(numels) * self.dtype.itemsize


def kernels(sizes: Sizes, libraries: Mapping[str, Products]) -> Iterator[Kernel]:
    """Yield all kernels, made one after the other, so that their operands need not be in memory together."""
    yield from linear(sizes, libraries)
    yield from attention(sizes)
    yield from pointwise(sizes)
    yield from head(sizes, libraries)
    yield from optimizer(sizes)


def linear(sizes: Sizes, libraries: Mapping[str, Products]) -> Iterator[Kernel]:
    """Yield the three products of each of a block's four linear layers."""
    n = sizes.tokens
    for layer, (outputs, inputs) in zip(("qkv", "projection", "up", "down"), sizes.block, strict=True):
        x, weight, bias = sizes.random(n, inputs), sizes.random(outputs, inputs), sizes.random(outputs)
        grad = sizes.random(n, outputs)
        flops, nbytes = 2 * n * inputs * outputs, sizes.nbytes(n * inputs, n * outputs, inputs * outputs)
        for name, products in libraries.items():
            calls: dict[str, Callable[[], object]] = {
                "output": partial(products.output, x, weight, bias),
                "input gradient": partial(products.input_gradient, grad, weight),
                "weight gradient": partial(products.weight_gradient, grad, x),
            }
            for what, call in calls.items():
                yield Kernel(f"{layer}, {what} ({name})", call, flops, nbytes, name)


def attention(sizes: Sizes) -> Iterator[Kernel]:
    """Yield the causal attention core by every backend that takes these tensors, and by the one that torch chooses.

    A mask spares half of each product: two forward, four backward, of 2 b s s h operations when whole.
    """
    n, h = sizes.tokens, sizes.hidden
    product = sizes.samples * sizes.length**2 * h
    for name, backend in {"torch's choice": None, **_BACKENDS}.items():
        qkv = sizes.random(sizes.samples, sizes.length, 3, sizes.heads, h // sizes.heads, grad=True)
        parts = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [b, a, s, h / a], as the model has them
        forward = partial(_attend, parts, backend)
        try:
            output = forward()
            gradient = torch.randn_like(output)
            backward = partial(torch.autograd.grad, output, parts, gradient, retain_graph=True)
            backward()
        except RuntimeError:  # raised where the backend is missing or does not take these tensors
            continue
        yield Kernel(f"attention, forward ({name})", forward, 2 * product, sizes.nbytes(4 * n * h))
        yield Kernel(f"attention, backward ({name})", backward, 4 * product, sizes.nbytes(8 * n * h))


def _attend(parts: Sequence[Tensor], backend: SDPBackend | None) -> Tensor:
    chosen: AbstractContextManager[None] = nullcontext() if backend is None else sdpa_kernel(backend)
    with warnings.catch_warnings(), chosen:
        warnings.simplefilter("ignore")  # which give the reasons why a backend cannot be used
        return F.scaled_dot_product_attention(*parts, is_causal=True)


def pointwise(sizes: Sizes) -> Iterator[Kernel]:
    """Yield the layer norm of [n, h] and the GELU of [n, f], forward and backward; then passes that sum for a bias."""
    n, h, f = sizes.tokens, sizes.hidden, sizes.inner
    weight, bias = sizes.random(h, grad=True), sizes.random(h, grad=True)
    x, inner = sizes.random(n, h, grad=True), sizes.random(n, f, grad=True)
    norm = partial(F.layer_norm, x, (h,), weight, bias, _EPSILON)
    gelu = partial(F.gelu, inner, approximate="tanh")
    for name, call, inputs in (("layer norm", norm, (x, weight, bias)), ("GELU", gelu, (inner,))):
        output = call()
        gradient, numel = torch.randn_like(output), output.numel()
        backward = partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
        yield Kernel(f"{name}, forward", call, 0, sizes.nbytes(2 * numel))
        yield Kernel(f"{name}, backward", backward, 0, sizes.nbytes(3 * numel))
    summed = partial(gelu_gradient, sizes.random(n, f), inner.detach())
    yield Kernel("GELU, backward with its bias", summed, 0, sizes.nbytes(3 * n * f))
    parts = [sizes.random(sizes.samples, sizes.length, sizes.heads, h // sizes.heads) for _ in range(3)]
    packing = partial(packed_gradient, *parts)
    yield Kernel("query, key and value gradients into one, with its bias", packing, 0, sizes.nbytes(6 * n * h))


def head(sizes: Sizes, libraries: Mapping[str, Products]) -> Iterator[Kernel]:
    """Yield the LM head with its loss, forward and backward: in chunks, and with whole logits."""
    n, h, rows = sizes.tokens, sizes.hidden, sizes.padded_vocabulary
    x, weight = sizes.random(n, h, grad=True), sizes.random(rows, h, grad=True)
    labels = torch.randint(sizes.vocabulary, (n,), device=sizes.device)
    targets = Targets(labels, None, sizes.vocabulary, LOGITS_CHUNK_BYTES[sizes.device.type])
    border = Border(LocalCommunicator())
    flops, nbytes = 6 * n * h * rows, sizes.nbytes(2 * n * h, 2 * rows * h)

    def plain() -> object:
        logits = F.linear(x, weight)[:, : sizes.vocabulary].to(sum_dtype(sizes.dtype))
        return torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), (x, weight))

    def fused(products: Products) -> object:
        loss = summed_cross_entropy(x, weight, targets, border, products=products)
        return torch.autograd.grad(loss, (x, weight))

    for name, products in libraries.items():
        call = partial(fused, products)
        yield Kernel(f"head and loss, in chunks ({name})", call, flops, nbytes, name, (x, weight, labels))
    yield Kernel("head and loss, whole logits (torch)", plain, flops, nbytes, "torch", (x, weight, labels))


def optimizer(sizes: Sizes) -> Iterator[Kernel]:
    """Yield AdamW's update and the gradient norm, of a block's matrices in one flat piece."""
    numels = [rows * columns for rows, columns in sizes.block]
    numel, master = sum(numels), sum_dtype(sizes.dtype)
    gradient = sizes.random(numel)
    buffers = FusedBuffers(numel * master.itemsize, sizes.device)
    moments = {name: sizes.random(numel, dtype=master).abs_() for name in FusedAdamW.moments}
    run = ElementRun(sizes.random(numel, dtype=master), gradient, moments, group=1)
    step = torch.ones((), device=sizes.device)
    inputs = StepInputs(1e-4, torch.ones((), dtype=torch.float64, device=sizes.device), None).for_masters(master)
    update = partial(FusedAdamW(_ADAMW).update, 0, run, step, inputs, buffers=buffers)
    # The gradient is read; the weights and both moments are read and written.
    yield Kernel("AdamW", update, 0, gradient.nbytes + 6 * numel * master.itemsize)
    norms = partial(fragment_norms, gradient.split(numels), sizes.device, buffers)
    yield Kernel("gradient norm", norms, 0, gradient.nbytes)
