"""Each border against the same computation on one process, forward and backward, in float64."""

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.local import LocalCommunicator
from megazero.tensor_parallel.regions import (
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    scatter_to_region,
)

pytestmark = pytest.mark.gloo


def inputs(rank: int, width: int = 8) -> Tensor:
    return torch.randn(3, 2, width, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def border(rank: int, size: int, name: str) -> tuple[Tensor, Tensor]:
    """Output and input gradient of a border, with a loss that weighs every element and rank differently."""
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    fn = {
        "copy": copy_to_region,
        "reduce": reduce_from_region,
        "scatter": scatter_to_region,
        "gather": gather_from_region,
    }[name]
    x = inputs(0 if name in ("copy", "scatter") else rank).requires_grad_(True)
    y = fn(x * 1.0, axis)
    (y * inputs(100 + rank, y.shape[-1])).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_copy_sums_gradients(size: int) -> None:
    total = sum((inputs(100 + rank) for rank in range(size)), torch.zeros(()))
    for y, grad in run_ranks(size, border, size, "copy"):
        torch.testing.assert_close(y, inputs(0), rtol=0, atol=0)
        torch.testing.assert_close(grad, total)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_sums_values_and_passes_gradients(size: int) -> None:
    total = sum((inputs(rank) for rank in range(size)), torch.zeros(()))
    for rank, (y, grad) in enumerate(run_ranks(size, border, size, "reduce")):
        torch.testing.assert_close(y, total)
        torch.testing.assert_close(grad, inputs(100 + rank), rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_scatter_keeps_a_slice_and_gathers_gradients(size: int) -> None:
    grads = torch.cat([inputs(100 + rank, 8 // size) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(run_ranks(size, border, size, "scatter")):
        torch.testing.assert_close(y, inputs(0).chunk(size, -1)[rank], rtol=0, atol=0)
        torch.testing.assert_close(grad, grads, rtol=0, atol=0)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gather_joins_slices_and_keeps_its_gradient(size: int) -> None:
    whole = torch.cat([inputs(rank) for rank in range(size)], dim=-1)
    for rank, (y, grad) in enumerate(run_ranks(size, border, size, "gather")):
        torch.testing.assert_close(y, whole, rtol=0, atol=0)
        torch.testing.assert_close(grad, inputs(100 + rank, 8 * size).chunk(size, -1)[rank], rtol=0, atol=0)


def test_reduce_refuses_a_strided_tensor() -> None:
    with pytest.raises(AssertionError, match="strided"):
        reduce_from_region(torch.ones(4, 4)[:, ::2], LocalCommunicator())
