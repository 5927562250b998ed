"""Every collective on real gloo ranks against numpy.

Inputs are small whole numbers, so sums are exact in every dtype and a result is right or wrong, never nearly right.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.processes import run_ranks
from torch import Tensor

from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.memory.fused_buffers import FusedBuffers

pytestmark = pytest.mark.gloo

SIZES = (2, 4)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUMEL = 6  # of one rank's slice
BUFFER_BYTES = 4 * NUMEL * 8


def values(rank: int, numel: int = NUMEL) -> NDArray[np.int64]:
    """What a rank puts in: whole numbers from -8 to 8."""
    return np.random.default_rng(100 + rank).integers(-8, 9, numel)


def tensor(rank: int, dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    return torch.from_numpy(values(rank, numel)).to(dtype)


def communicator() -> tuple[ProcessGroupCommunicator, FusedBuffers]:
    """All ranks of the job, and the pool that lends scratch memory."""
    pool = FusedBuffers(BUFFER_BYTES, torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    return ProcessGroupCommunicator(group, pool), pool


def everything(rank: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """The results of all collectives on one rank."""
    axis, pool = communicator()
    found: dict[str, Any] = {"place": (axis.rank, axis.size)}

    gathered = torch.empty(size * NUMEL, dtype=dtype)
    axis.all_gather_into(gathered, tensor(rank, dtype)).wait()
    found["all_gather"] = gathered

    source, scattered = tensor(rank, dtype, size * NUMEL), torch.empty(NUMEL, dtype=dtype)
    axis.reduce_scatter_into(scattered, source).wait()
    found["reduce_scatter"] = scattered
    found["reduce_scatter leaves its input"] = torch.equal(source, tensor(rank, dtype, size * NUMEL))

    for kind in ("sum", "max", "min"):
        for name in ("all_reduce", "all_reduce_scalars"):
            reduced = tensor(rank, dtype)
            getattr(axis, name)(reduced, kind).wait()
            found[f"{name} {kind}"] = reduced
    for source_rank in range(size):
        sent = tensor(rank, dtype)
        axis.broadcast(sent, source_rank).wait()
        found[f"broadcast {source_rank}"] = sent
    pool.resize(1)  # refused while a buffer is out
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_collectives(size: int, dtype: torch.dtype) -> None:
    short = np.stack([values(rank) for rank in range(size)])  # [size, n]
    long = np.stack([values(rank, size * NUMEL) for rank in range(size)])  # [size, size * n]
    for rank, found in enumerate(run_ranks(size, everything, size, dtype)):
        expected: dict[str, Any] = {
            "place": (rank, size),
            "all_gather": short.reshape(-1),
            "reduce_scatter": long.sum(0)[rank * NUMEL : (rank + 1) * NUMEL],
            "reduce_scatter leaves its input": True,
        }
        for name in ("all_reduce", "all_reduce_scalars"):
            expected |= {f"{name} sum": short.sum(0), f"{name} max": short.max(0), f"{name} min": short.min(0)}
        expected |= {f"broadcast {source}": short[source] for source in range(size)}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, np.ndarray):
                assert found[name].dtype == dtype
                assert found[name].tolist() == value.tolist(), name
            else:
                assert found[name] == value, name


def in_place(rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(reduce-scatter into a slice of its input, all-gather from a slice of its output)."""
    axis, _ = communicator()
    mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
    scattered = tensor(rank, dtype, size * NUMEL)
    axis.reduce_scatter_into(scattered[mine], scattered).wait()
    gathered = torch.full((size * NUMEL,), -99, dtype=dtype)
    gathered[mine] = tensor(rank, dtype)
    axis.all_gather_into(gathered, gathered[mine]).wait()
    return scattered, gathered


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_in_place_on_this_ranks_slice(size: int, dtype: torch.dtype) -> None:
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    everyone = np.concatenate([values(rank) for rank in range(size)])
    for rank, (scattered, gathered) in enumerate(run_ranks(size, in_place, size, dtype)):
        expected = values(rank, size * NUMEL)  # the slices of others stay as they were
        expected[rank * NUMEL : (rank + 1) * NUMEL] = total[rank * NUMEL : (rank + 1) * NUMEL]
        assert scattered.tolist() == expected.tolist()
        assert gathered.tolist() == everyone.tolist()


def halves(rank: int, dtype: torch.dtype, large: float) -> list[float]:
    """Rank 0 gives a number so large that adding 1 to it in `dtype` gives it back; the others give 1."""
    axis, _ = communicator()
    output = torch.empty(1, dtype=dtype)
    axis.reduce_scatter_into(output, torch.full((4,), large if rank == 0 else 1.0, dtype=dtype)).wait()
    return output.tolist()


@pytest.mark.parametrize(("dtype", "large", "total"), [(torch.bfloat16, 256, 260), (torch.float16, 2048, 2052)])
def test_narrow_sums_are_rounded_once(dtype: torch.dtype, large: float, total: float) -> None:
    """256 + 1 + 1 + 1 in bf16 is 256 when every sum is rounded, and 260 (259 to the even side) when only one is."""
    one_by_one = torch.tensor(large, dtype=dtype)
    for _ in range(3):
        one_by_one += 1
    assert one_by_one.item() == large, "the example distinguishes nothing"
    assert run_ranks(4, halves, dtype, large) == [[total]] * 4


def several_in_flight(rank: int, size: int) -> tuple[list[Tensor], int, int]:
    """Three reduce-scatters under way at once, waited for in another order; buffers out at most, and afterwards."""
    axis, pool = communicator()
    outputs = [torch.empty(NUMEL) for _ in range(3)]
    works = [
        axis.reduce_scatter_into(output, tensor(rank, torch.float32, size * NUMEL) * (index + 1))
        for index, output in enumerate(outputs)
    ]
    at_most = pool.num_buffers
    for index in (1, 2, 0):
        works[index].wait()
    pool.resize(BUFFER_BYTES)  # refused while a buffer is out
    return outputs, at_most, pool.num_buffers


@pytest.mark.parametrize("size", SIZES)
def test_reductions_in_flight_have_scratch_memory_of_their_own(size: int) -> None:
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    for rank, (outputs, at_most, afterwards) in enumerate(run_ranks(size, several_in_flight, size)):
        mine = total[rank * NUMEL : (rank + 1) * NUMEL]
        assert [output.tolist() for output in outputs] == [(mine * factor).tolist() for factor in (1, 2, 3)]
        assert (at_most, afterwards) == (3, 0)


def arrive(rank: int, folder: Path, size: int) -> list[bool]:
    """Leave a sign, the first rank late, and look for everyone's after the barrier."""
    axis, _ = communicator()
    if rank == 0:
        time.sleep(0.05)
    (folder / str(rank)).touch()
    axis.barrier()
    return [(folder / str(other)).exists() for other in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(size: int, tmp_path: Path) -> None:
    assert run_ranks(size, arrive, tmp_path, size) == [[True] * size] * size
