"""Tests of every collective on real gloo ranks against numpy.

Inputs are small whole numbers, so sums are exact in every dtype and a result is right or wrong, never nearly right.
"""

import random
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.processes import run_ranks
from torch import Tensor

from megazero.comm.interface import LabelMismatch, Work
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.shared_memory import share_memory
from megazero.comm.startup import data_parallel
from megazero.memory.fused_buffers import FusedBuffers

pytestmark = pytest.mark.gloo

SIZES = (2, 3, 4)
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NUMEL = 6  # elements of one rank's slice
BUFFER_BYTES = 4 * NUMEL * 8


def values(rank: int, numel: int = NUMEL) -> NDArray[np.int64]:
    """Return a rank's input: whole numbers from -8 to 8."""
    return np.random.default_rng(100 + rank).integers(-8, 9, numel)


def tensor(rank: int, dtype: torch.dtype, numel: int = NUMEL) -> Tensor:
    return torch.from_numpy(values(rank, numel)).to(dtype)


@pytest.fixture(params=["gloo", "memory"])
def way(request: pytest.FixtureRequest) -> Any:
    """The ways in which messages travel."""
    return request.param


def communicator(way: str) -> tuple[ProcessGroupCommunicator, FusedBuffers]:
    """Return a communicator over all ranks of the job, and the pool that lends it scratch memory."""
    pool = FusedBuffers(BUFFER_BYTES, torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    made = ProcessGroupCommunicator(group, pool)
    if way == "memory":
        through_memory({"all": made})
    return made, pool


def through_memory(made: dict[str, ProcessGroupCommunicator]) -> None:
    """Let the messages of communicators over all ranks travel through memory."""
    axis = next(iter(made.values()))
    groups = dict.fromkeys(made, range(axis.size)) if axis.size > 1 else {}
    memory, problem = share_memory(axis, list(made), groups, axis.rank)
    assert not problem
    for key, communicator in made.items():
        memory.join(key, communicator)


def everything(rank: int, size: int, dtype: torch.dtype, way: str) -> dict[str, Any]:
    """Return the results of all collectives on one rank."""
    axis, pool = communicator(way)
    found: dict[str, Any] = {"place": (axis.rank, axis.size)}

    gathered = torch.empty(size * NUMEL, dtype=dtype)
    axis.all_gather_into(gathered, tensor(rank, dtype)).wait()
    found["all_gather"] = gathered

    source, scattered = tensor(rank, dtype, size * NUMEL), torch.empty(NUMEL, dtype=dtype)
    axis.reduce_scatter_into(scattered, source).wait()
    found["reduce_scatter"] = scattered
    found["reduce_scatter leaves its input"] = torch.equal(source, tensor(rank, dtype, size * NUMEL))

    exchanged = torch.empty_like(source)
    axis.all_to_all_into(exchanged, source).wait()
    found["all_to_all"] = exchanged
    found["all_to_all leaves its input"] = torch.equal(source, tensor(rank, dtype, size * NUMEL))

    for kind in ("sum", "max", "min"):
        for name in ("all_reduce", "all_reduce_scalars"):
            reduced = tensor(rank, dtype)
            getattr(axis, name)(reduced, kind).wait()
            found[f"{name} {kind}"] = reduced
    for source_rank in range(size):
        sent = tensor(rank, dtype)
        axis.broadcast(sent, source_rank).wait()
        found[f"broadcast {source_rank}"] = sent
    pool.resize(1)  # raises an error while a buffer is leased
    return found


@pytest.mark.parametrize("size", [1, *SIZES])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_collectives(size: int, dtype: torch.dtype, way: str) -> None:
    short = np.stack([values(rank) for rank in range(size)])  # [size, n]
    long = np.stack([values(rank, size * NUMEL) for rank in range(size)])  # [size, size * n]
    for rank, found in enumerate(run_ranks(size, everything, size, dtype, way)):
        expected: dict[str, Any] = {
            "place": (rank, size),
            "all_gather": short.reshape(-1),
            "reduce_scatter": long.sum(0)[rank * NUMEL : (rank + 1) * NUMEL],
            "reduce_scatter leaves its input": True,
            "all_to_all": long.reshape(size, size, NUMEL)[:, rank].reshape(-1),
            "all_to_all leaves its input": True,
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


def in_place(rank: int, size: int, dtype: torch.dtype, way: str) -> tuple[Tensor, Tensor]:
    """Return the tensors after a reduce-scatter into a slice of its input and an all-gather from one of its output."""
    axis, _ = communicator(way)
    mine = slice(rank * NUMEL, (rank + 1) * NUMEL)
    scattered = tensor(rank, dtype, size * NUMEL)
    axis.reduce_scatter_into(scattered[mine], scattered).wait()
    gathered = torch.full((size * NUMEL,), -99, dtype=dtype)
    gathered[mine] = tensor(rank, dtype)
    axis.all_gather_into(gathered, gathered[mine]).wait()
    return scattered, gathered


@pytest.mark.parametrize("size", [1, *SIZES])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_in_place_on_this_ranks_slice(size: int, dtype: torch.dtype, way: str) -> None:
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    everyone = np.concatenate([values(rank) for rank in range(size)])
    for rank, (scattered, gathered) in enumerate(run_ranks(size, in_place, size, dtype, way)):
        expected = values(rank, size * NUMEL)  # the slices of others stay as they were
        expected[rank * NUMEL : (rank + 1) * NUMEL] = total[rank * NUMEL : (rank + 1) * NUMEL]
        assert scattered.tolist() == expected.tolist()
        assert gathered.tolist() == everyone.tolist()


def together(rank: int, size: int, way: str) -> list[list[Tensor]]:
    """Return tensors of several sizes and dtypes that one call has gathered in place, by messages and by torch's own.

    The latter is what NCCL gets, which no CPU has; gloo has it too.
    """
    found = []
    for by_messages in (True, False):
        axis, _ = communicator(way)
        axis._exchanges = by_messages
        outputs = [torch.full((size * numel,), -99.0, dtype=dtype) for numel, dtype in TOGETHER]
        mine = [output.view(size, -1)[rank] for output in outputs]
        for place in mine:
            place.copy_(tensor(rank, place.dtype, place.numel()))
        axis.all_gather_coalesced(outputs, mine, None).wait()
        found.append(outputs)
    return found


TOGETHER = ((6, torch.float32), (1, torch.float32), (9, torch.bfloat16))


@pytest.mark.parametrize("size", SIZES)
def test_several_tensors_are_gathered_by_one_call(size: int, way: str) -> None:
    for both in run_ranks(size, together, size, way):
        for outputs in both:
            for output, (numel, dtype) in zip(outputs, TOGETHER, strict=True):
                expected = np.concatenate([values(rank, numel) for rank in range(size)])
                assert output.dtype == dtype and output.tolist() == expected.tolist()


def summed_together(rank: int, size: int, way: str) -> list[list[Tensor]]:
    """Return sums of tensors of several sizes that one call has made in place, by messages and by torch's own."""
    found = []
    for by_messages in (True, False):
        axis, pool = communicator(way)
        axis._exchanges = by_messages
        inputs = [tensor(rank, torch.float32, size * numel) for numel in SUMMED]
        outputs = [input.view(size, -1)[rank] for input in inputs]
        axis.reduce_scatter_coalesced(outputs, inputs).wait()
        assert pool.num_buffers <= 1, "one for all tensors"
        found.append(outputs)
    return found


SUMMED = (6, 1, 4)


@pytest.mark.parametrize("size", [1, *SIZES])
def test_several_tensors_are_summed_by_one_call(size: int, way: str) -> None:
    for rank, both in enumerate(run_ranks(size, summed_together, size, way)):
        for outputs in both:
            for output, numel in zip(outputs, SUMMED, strict=True):
                total = sum(values(other, size * numel) for other in range(size))
                assert output.tolist() == total[rank * numel : (rank + 1) * numel].tolist()


def halves(rank: int, dtype: torch.dtype, large: float, way: str) -> list[float]:
    """Sum a number of rank 0 so large that adding 1 in `dtype` does not change it, and a 1 of every other rank."""
    axis, _ = communicator(way)
    output = torch.empty(1, dtype=dtype)
    axis.reduce_scatter_into(output, torch.full((4,), large if rank == 0 else 1.0, dtype=dtype)).wait()
    return output.tolist()


@pytest.mark.parametrize(("dtype", "large", "total"), [(torch.bfloat16, 256, 260), (torch.float16, 2048, 2052)])
def test_narrow_sums_are_rounded_once(dtype: torch.dtype, large: float, total: float, way: str) -> None:
    """256 + 1 + 1 + 1 in bf16 is 256 when every sum is rounded, and 260 (259 rounded to even) when only the last is."""
    one_by_one = torch.tensor(large, dtype=dtype)
    for _ in range(3):
        one_by_one += 1
    assert one_by_one.item() == large, "the example distinguishes nothing"
    assert run_ranks(4, halves, dtype, large, way) == [[total]] * 4


def drawn(size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random numbers [size, size * numel], one row for each rank's input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, size * numel, generator=generator, dtype=torch.float64).to(dtype)


def sums_of_drawn(rank: int, size: int, dtype: torch.dtype, way: str) -> Tensor:
    axis, pool = communicator(way)
    pool.resize(size * 50 * 8)
    output = torch.empty(50, dtype=dtype)
    axis.reduce_scatter_into(output, drawn(size, 50, dtype)[rank]).wait()
    return output


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_sums_are_those_of_float32(size: int, dtype: torch.dtype, way: str) -> None:
    contributions = drawn(size, 50, dtype)
    expected = contributions.float().sum(0).to(dtype).view(size, 50)
    one_by_one = contributions[0].clone()
    for other in contributions[1:]:
        one_by_one += other
    assert torch.equal(one_by_one.view(size, 50), expected) == (size == 2), "the example distinguishes nothing"
    for rank, found in enumerate(run_ranks(size, sums_of_drawn, size, dtype, way)):
        assert torch.equal(found, expected[rank])


# The collective of each call in turn; every rank waits for the calls in an order of its own.
TURNS = (
    *("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "all_gather", "broadcast", "reduce_scatter"),
    *("reduce_scatter", "all_to_all"),
)
LENGTHS = (1, 6, 5_000)
REPETITIONS = 12


def call_in_turn(axis: ProcessGroupCommunicator, turn: int, numel: int) -> tuple[Tensor, Any]:
    """Start one call and return its output and its work; element i of rank r's input is i * (r + 1) + turn."""
    name, size = TURNS[turn], axis.size
    here = torch.arange(numel * size, dtype=torch.float64) * (axis.rank + 1) + turn
    mine = slice(axis.rank * numel, (axis.rank + 1) * numel)
    if name == "reduce_scatter":
        output = here[mine] if turn == 0 else torch.empty(numel, dtype=torch.float64)
        return output, axis.reduce_scatter_into(output, here)
    if name == "all_to_all":
        output = torch.empty_like(here)
        return output, axis.all_to_all_into(output, here)
    if name == "all_gather":
        output = torch.full((numel * size,), torch.nan, dtype=torch.float64)
        if turn == 1:
            output[mine] = here[:numel]
        return output, axis.all_gather_into(output, output[mine] if turn == 1 else here[:numel])
    return here, axis.all_reduce(here) if name == "all_reduce" else axis.broadcast(here, size - 1)


def expected_in_turn(turn: int, numel: int, rank: int, size: int) -> Tensor:
    place = torch.arange(numel * size, dtype=torch.float64)
    everyone = torch.stack([place * (other + 1) + turn for other in range(size)])
    return {
        "reduce_scatter": everyone.sum(0)[rank * numel : (rank + 1) * numel],
        "all_gather": everyone[:, :numel].reshape(-1),
        "all_to_all": everyone[:, rank * numel : (rank + 1) * numel].reshape(-1),
        "all_reduce": everyone.sum(0),
        "broadcast": everyone[size - 1],
    }[TURNS[turn]]


def all_in_flight(rank: int, size: int, way: str) -> list[str]:
    """Have calls of every kind under way on one group at once, repeatedly; return those whose results are wrong."""
    axis, pool = communicator(way)
    pool.resize(size * max(LENGTHS) * 8)
    wrong = []
    for repetition in range(REPETITIONS):
        lengths = [LENGTHS[(turn + repetition) % len(LENGTHS)] for turn in range(len(TURNS))]
        calls = [call_in_turn(axis, turn, numel) for turn, numel in enumerate(lengths)]
        order = list(range(len(TURNS)))
        random.Random(rank + 10 * repetition).shuffle(order)
        for turn in order:
            output, work = calls[turn]
            work.wait()
            if not torch.equal(output, expected_in_turn(turn, lengths[turn], rank, size)):
                wrong.append(f"{TURNS[turn]} {turn} of {lengths[turn]} in repetition {repetition}")
    pool.resize(1)  # raises an error while a buffer is leased
    return wrong


@pytest.mark.parametrize("size", SIZES)
def test_calls_of_all_kinds_are_under_way_at_once(size: int, way: str) -> None:
    assert run_ranks(size, all_in_flight, size, way) == [[]] * size


def several_in_flight(rank: int, size: int, way: str) -> tuple[list[Tensor], int, int]:
    """Have three reduce-scatters under way at once; return their outputs and the leased buffers, at most and after."""
    axis, pool = communicator(way)
    outputs = [torch.empty(NUMEL) for _ in range(3)]
    works = [
        axis.reduce_scatter_into(output, tensor(rank, torch.float32, size * NUMEL) * (index + 1))
        for index, output in enumerate(outputs)
    ]
    at_most = pool.num_buffers
    for index in (1, 2, 0):
        works[index].wait()
    pool.resize(BUFFER_BYTES)  # raises an error while a buffer is leased
    return outputs, at_most, pool.num_buffers


@pytest.mark.parametrize("size", SIZES)
def test_reductions_in_flight_have_scratch_memory_of_their_own(size: int, way: str) -> None:
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    for rank, (outputs, at_most, afterwards) in enumerate(run_ranks(size, several_in_flight, size, way)):
        mine = total[rank * NUMEL : (rank + 1) * NUMEL]
        assert [output.tolist() for output in outputs] == [(mine * factor).tolist() for factor in (1, 2, 3)]
        assert (at_most, afterwards) == (3, 0)


def start_before_the_others(rank: int, folder: Path, way: str) -> list[bool]:
    """Let the other ranks begin their calls after rank 0's have returned; return, for each call, True if they did."""
    axis, _ = communicator(way)
    found = []
    for name in ("all_gather", "reduce_scatter"):
        give_up = time.monotonic() + 10
        while rank > 0 and not (folder / name).exists() and time.monotonic() < give_up:
            time.sleep(0.01)
        found.append(rank == 0 or (folder / name).exists())
        short, long = torch.ones(NUMEL), torch.ones(axis.size * NUMEL)
        work = axis.all_gather_into(long, short) if name == "all_gather" else axis.reduce_scatter_into(short, long)
        (folder / name).touch()
        work.wait()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_call_waits_for_nobody(size: int, tmp_path: Path, way: str) -> None:
    assert run_ranks(size, start_before_the_others, tmp_path, way) == [[True, True]] * size


def both_ways(rank: int, size: int, way: str) -> list[list[list[float]]]:
    """Begin the same calls on the two communicators of one axis, on every second rank in another order."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    axes = data_parallel(*groups, FusedBuffers(BUFFER_BYTES, torch.device("cpu")))
    if way == "memory":
        through_memory({str(number): cast(ProcessGroupCommunicator, axis) for number, axis in enumerate(axes)})
    begun: dict[int, list[tuple[Tensor, Work]]] = {}
    for number in (0, 1) if rank % 2 else (1, 0):
        short, long = tensor(rank, torch.float32) + number, tensor(rank, torch.float32, size * NUMEL) + number
        labelled, gathered, scattered = torch.empty_like(long), torch.empty_like(long), torch.empty_like(short)
        begun[number] = [
            (labelled, axes[number].all_gather_into(labelled, short, 5 + number)),
            (scattered, axes[number].reduce_scatter_into(scattered, long)),
            (gathered, axes[number].all_gather_into(gathered, short)),
        ]
    for _, work in (*begun[0], *begun[1]):
        work.wait()
    return [[output.tolist() for output, _ in begun[number]] for number in (0, 1)]


@pytest.mark.parametrize("size", SIZES)
def test_two_communicators_share_two_groups(size: int, way: str) -> None:
    """Messages of one direction share a connection, and yet each communicator gets its own."""
    everyone = np.concatenate([values(rank) for rank in range(size)])
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    for rank, found in enumerate(run_ranks(size, both_ways, size, way)):
        mine = total[rank * NUMEL : (rank + 1) * NUMEL]
        for number, outputs in enumerate(found):
            gathered = (everyone + number).tolist()
            assert outputs == [gathered, (mine + size * number).tolist(), gathered]


def forgetful(rank: int, size: int, number: int, way: str) -> list[list[float]]:
    """Start calls, which rank 0 drops without waiting for them; return the results of the other ranks."""
    axis, _ = communicator(way)
    outputs = []
    for index in range(number):
        gathered, scattered = torch.empty(size * NUMEL), torch.empty(NUMEL)
        works = [
            axis.all_gather_into(gathered, tensor(rank, torch.float32) + index),
            axis.reduce_scatter_into(scattered, tensor(rank, torch.float32, size * NUMEL) + index),
        ]
        if rank > 0:
            [work.wait() for work in works]
            outputs.append([*gathered.tolist(), *scattered.tolist()])
        del works, gathered, scattered
    axis.barrier()
    return outputs


@pytest.mark.parametrize("number", [1, 70])
@pytest.mark.parametrize("size", SIZES)
def test_what_a_rank_forgets_still_reaches_the_others(size: int, number: int, way: str) -> None:
    everyone = np.concatenate([values(rank) for rank in range(size)])
    total = sum(values(rank, size * NUMEL) for rank in range(size))
    for rank, outputs in enumerate(run_ranks(size, forgetful, size, number, way)):
        mine = total[rank * NUMEL : (rank + 1) * NUMEL]
        expected = [[*(everyone + index), *(mine + size * index)] for index in range(number)]
        assert outputs == (expected if rank else [])


def arrive(rank: int, folder: Path, size: int, way: str) -> list[bool]:
    """Create a file, late on rank 0, and return, for each rank, True if its file is there after the barrier."""
    axis, _ = communicator(way)
    if rank == 0:
        time.sleep(0.05)
    (folder / str(rank)).touch()
    axis.barrier()
    return [(folder / str(other)).exists() for other in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_a_barrier_before_all_have_come(size: int, tmp_path: Path, way: str) -> None:
    assert run_ranks(size, arrive, tmp_path, size, way) == [[True] * size] * size


def with_labels(rank: int, size: int, way: str) -> list[str]:
    """Gather under one label, then under others on the last rank; return the results, or errors, in words."""
    group = dist.new_group(list(range(size)))
    assert group is not None
    axis, found = ProcessGroupCommunicator(group, FusedBuffers(BUFFER_BYTES, torch.device("cpu"))), []
    if way == "memory":
        through_memory({"all": axis})
    for label in (7, 8 if rank < size - 1 else 9):
        gathered = torch.empty(size * NUMEL, dtype=torch.float64)
        work = axis.all_gather_into(gathered, tensor(rank, torch.float64), label)
        try:
            work.wait()
            whole = torch.cat([tensor(other, torch.float64) for other in range(size)])
            found.append("whole" if torch.equal(gathered, whole) else "wrong")
        except LabelMismatch as error:
            found.append(f"rank {error.rank} has {error.label}: {error}")
            # gloo's thread never rests while one that was freed is on its way
            for message in cast(Any, work)._works[1:] if way == "gloo" else ():
                message.wait()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_with_another_label_is_named_by_its_neighbours(size: int, way: str) -> None:
    runs = run_ranks(size, with_labels, size, way)
    assert [run[0] for run in runs] == ["whole"] * size
    last, text = size - 1, "rank {} of the axis gathers number {} where this rank gathers number {}"
    assert runs[0][1] == f"rank {last} has 9: {text.format(last, 9, 8)}"
    assert runs[last][1] == f"rank {last - 1} has 8: {text.format(last - 1, 8, 9)}"
    # Messages compare the labels of neighbours, memory all.
    others = "whole" if way == "gloo" else runs[0][1]
    assert size == 2 or runs[1][1] == others
