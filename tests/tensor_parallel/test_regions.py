"""The exit of a region against the same computation on one process, forward and backward, in float64."""

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.local import LocalCommunicator
from megazero.tensor_parallel.regions import reduce_from_region

pytestmark = pytest.mark.gloo


def inputs(rank: int) -> Tensor:
    return torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def leave_region(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Output and input gradient, with a loss that weighs every element and rank differently."""
    x = inputs(rank).requires_grad_(True)
    y = reduce_from_region(x * 1.0, mesh_in_worker(rank, tp=size).axis("tp"))
    (y * inputs(100 + rank)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_sums_values_and_passes_gradients(size: int) -> None:
    total = sum((inputs(rank) for rank in range(size)), torch.zeros(()))
    for rank, (y, grad) in enumerate(run_ranks(size, leave_region, size)):
        torch.testing.assert_close(y, total)
        torch.testing.assert_close(grad, inputs(100 + rank), rtol=0, atol=0)


def test_reduce_refuses_a_strided_tensor() -> None:
    with pytest.raises(AssertionError, match="strided"):
        reduce_from_region(torch.ones(4, 4)[:, ::2], LocalCommunicator())
