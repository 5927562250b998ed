"""Tests what operator calls are to a machine: bytes and floating-point operations that can be counted by hand."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from support.each import each
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.planner.dry.operations import Operations
from megazero.planner.trace import Operation


class _Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()
        self.found: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (call := self.operations.of_call(func, args, kwargs or {}, result)) is not None:
            self.found.append(call[0])
        return result


def kernels(call: Callable[[], object]) -> list[Operation]:
    """Return the kernels that a call runs."""
    with _Calls() as calls:
        call()
    return calls.found


A, B = torch.zeros(3, 5), torch.zeros(5, 7)
HALF = torch.zeros(4, 6, dtype=torch.bfloat16)
TABLE, ROWS = torch.zeros(100, 8), torch.tensor([3, 4, 5])
HEADS = torch.zeros(2, 3, 16, 8)


@each(
    ("call", "name", "flops", "read", "written"),
    [
        (lambda: A @ B, "mm", 2 * 3 * 5 * 7, 4 * (15 + 35), 4 * 21),
        (lambda: HALF + HALF, "add", 0, 2 * 48, 48),
        (lambda: HALF.mul_(2.0), "mul_", 0, 48, 48),
        (lambda: torch.zeros(3, 7).addmm_(A, B), "addmm_", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21), 4 * 21),
        (lambda: A.zero_(), "zero_", 0, 0, 60),
        (lambda: HALF.copy_(torch.empty(4, 6)), "copy_", 0, 96, 48),
        (lambda: F.embedding(ROWS, TABLE), "embedding", 0, 4 * 24 + 24, 4 * 24),
        (lambda: torch.mul(A, 2.0, out=torch.empty(3, 5)), "mul", 0, 60, 60),
    ],
)
def test_bytes_and_operations(call: Callable[[], Tensor], name: str, flops: int, read: int, written: int) -> None:
    *_, found = kernels(call)
    assert (found.name, found.flops, found.read_bytes, found.written_bytes) == (name, flops, read, written)


def test_a_cpus_attention_has_two_products() -> None:
    (found,) = kernels(lambda: F.scaled_dot_product_attention(HEADS, HEADS, HEADS))
    assert found.flops == 2 * (2 * 2 * 3 * 16 * 16 * 8)


@each("call", [lambda: A.view(15), lambda: A.t(), lambda: A[1:], lambda: torch.empty(7), lambda: A.detach()])
def test_views_and_empty_memory_are_no_kernels(call: Callable[[], Tensor]) -> None:
    assert kernels(call) == []


def test_the_order_of_a_products_first_factor() -> None:
    x, wide = torch.zeros(4, 3), torch.zeros(3, 1 << 12)
    calls = [lambda: x @ A, lambda: x.t() @ x, lambda: torch.addmm(A, A.t()[:3, :3], A), lambda: wide[:, 5:9].t() @ A]
    assert [kernels(call)[-1].order for call in calls] == ["rows", "columns", "columns", "far columns"]
    recorded = Operations()
    by_rows, by_columns = (
        recorded.of_call(torch.ops.aten.mm.default, (first, A), {}, A) for first in (torch.zeros(3, 3), B.t()[:3, :3])
    )
    assert by_rows is not None
    assert by_columns is not None
    assert (by_rows[0].order, by_columns[0].order) == ("rows", "columns")


def test_equal_kernels_are_one_object() -> None:
    def twice() -> None:
        for _ in range(2):
            A @ B

    first, second = kernels(twice)
    assert first is second
