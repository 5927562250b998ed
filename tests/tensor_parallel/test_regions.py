"""The borders of a tensor-parallel region give, forward and backward, what one process computes in float64."""

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.comm.local import LocalCommunicator
from megazero.tensor_parallel.regions import Border, exit_region

pytestmark = pytest.mark.gloo


def inputs(rank: int) -> Tensor:
    return torch.randn(3, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def leave(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return output and input gradient under a loss that weighs every element and rank differently."""
    x = inputs(rank).requires_grad_(True)
    y = exit_region(x * 1.0, Border(mesh_in_worker(rank, tp=size).axis("tp")))
    (y * inputs(100 + rank)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [1, 2, 4])
def test_reduce_sums_values_and_passes_gradients(size: int) -> None:
    total = sum((inputs(rank) for rank in range(size)), torch.zeros(()))
    for rank, (y, grad) in enumerate(run_ranks(size, leave, size)):
        torch.testing.assert_close(y, total)
        torch.testing.assert_close(grad, inputs(100 + rank), rtol=0, atol=0)


def test_reduce_refuses_a_strided_tensor() -> None:
    with pytest.raises(AssertionError, match="strided"):
        exit_region(torch.ones(4, 4)[:, ::2], Border(LocalCommunicator()))


TOKENS_EACH = 3


def partial_sums(rank: int, size: int) -> Tensor:
    return torch.randn(size * TOKENS_EACH, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def leave_split(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return output and input gradient under a loss that weighs every element and rank differently."""
    border = Border(mesh_in_worker(rank, tp=size).axis("tp"), splits_sequence=True)
    x = partial_sums(rank, size).requires_grad_(True)
    y = exit_region((x * 1.0).view(size, TOKENS_EACH, 5), border)
    (y * partial_sums(100 + rank, 1)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("size", [2, 3, 4])
def test_split_tokens_are_reduced_and_scattered_and_their_gradients_gathered(size: int) -> None:
    total = sum((partial_sums(rank, size) for rank in range(size)), torch.zeros(()))
    weights = torch.cat([partial_sums(100 + rank, 1) for rank in range(size)])
    for rank, (y, grad) in enumerate(run_ranks(size, leave_split, size)):
        torch.testing.assert_close(y, total.chunk(size)[rank], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(grad, weights, rtol=0, atol=0)


def gather_and_reduce(rank: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows gathered from strided and from expanded memory, and memory into which sums are reduced."""
    border = Border(mesh_in_worker(rank, tp=size).axis("tp"), splits_sequence=True)
    mine = partial_sums(rank, 1)
    strided, expanded = border.gather(mine.t().contiguous().t()), border.gather(mine[:, :1].expand(-1, 5))
    out = torch.zeros(size * TOKENS_EACH, 5, dtype=torch.float64)
    place = out[rank * TOKENS_EACH : (rank + 1) * TOKENS_EACH]
    border.reduce(partial_sums(rank, size), out=place).wait()
    return strided.wait(), expanded.wait(), out


def test_strided_rows_come_in_and_sums_go_where_they_are_told() -> None:
    size = 3
    whole = torch.cat([partial_sums(rank, 1) for rank in range(size)])
    total = torch.stack([partial_sums(rank, size) for rank in range(size)]).sum(0)
    for rank, (strided, expanded, out) in enumerate(run_ranks(size, gather_and_reduce, size)):
        torch.testing.assert_close(strided, whole, rtol=0, atol=0)
        torch.testing.assert_close(expanded, whole[:, :1].expand(-1, 5), rtol=0, atol=0)
        rows = slice(rank * TOKENS_EACH, (rank + 1) * TOKENS_EACH)
        torch.testing.assert_close(out[rows], total[rows], rtol=1e-14, atol=1e-14)
        out[rows] = 0
        assert not out.any()


def test_tokens_that_do_not_divide_are_our_own_bug() -> None:
    class Three:
        size, rank = 3, 0

    with pytest.raises(AssertionError, match="4 tokens over 3 ranks"):
        Border(Three(), splits_sequence=True).reduce(torch.ones(4, 2))
