"""oneDNN's matrix products, for CPUs on which torch's own are slower.

torch leaves float32 products to MKL, which uses no AVX-512 on processors of other makers than its own; oneDNN, which
comes with torch as well, does.  On such processors it takes about half the time, at the same precision
(`benchmarks/kernels.py` measures both).  The choice depends on the processor's vendor, not on a measurement at
start-up, so that a run has the same products, and the same losses to the bit, whenever it is repeated.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.parallel.gradient_slot import add_to
from megazero.tensor_parallel.products import TORCH, Products

_PROCESSOR = Path("/proc/cpuinfo")
_LARGEST_NUMEL = 1 << 18  # of a temporary product: 1 MiB


class OneDnnProducts:
    """The products of float32 tensors on the CPU by oneDNN."""

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, weight, bias)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        return _linear(grad, weight.t())

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        if grad.shape[1] * x.shape[1] <= _LARGEST_NUMEL:
            return _linear(grad.t(), x.t())
        total = grad.new_empty((grad.shape[1], x.shape[1]))
        self.add_weight_gradient(total, grad, x, is_first=True)
        return total

    def add_weight_gradient(self, total: Tensor, grad: Tensor, x: Tensor, *, is_first: bool) -> None:
        # A product cannot be written to given memory, so a large one is computed in parts, one after the other.
        num_rows = max(_LARGEST_NUMEL // max(x.shape[1], 1), 1)
        for start in range(0, grad.shape[1], num_rows):
            rows = slice(start, start + num_rows)
            add_to(total[rows], _linear(grad[:, rows].t(), x.t()), is_first=is_first)


def fastest_products(device: torch.device, dtype: torch.dtype) -> Products:
    """Return the fastest products of such tensors on this machine."""
    return OneDnnProducts() if is_faster(device, dtype) else TORCH


def is_faster(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if oneDNN is the faster library for products of such tensors on this machine."""
    if device.type != "cpu" or dtype != torch.float32:
        return False
    has_both = torch._C.has_mkl and torch._C._has_mkldnn
    return has_both and torch.backends.cpu.get_cpu_capability() == "AVX512" and _vendor() not in ("", "GenuineIntel")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, for any strides."""
    # torch's compiler treats the weights of this operator as constants, and oneDNN refuses empty sums.
    if torch.compiler.is_compiling() or x.shape[1] == 0:
        return F.linear(x, weight, bias)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def _vendor() -> str:
    """Return the processor's vendor; empty where the system doesn't name it."""
    try:
        lines = _PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")
