"""Tests of the late communicator: results come with their waits, and code that relies on more fails."""

from collections.abc import Callable

import pytest
import torch
from support.each import each
from support.late_communicator import LateCommunicator, unfinished, unproven_waits
from support.processes import RankFailure, mesh_in_worker, run_ranks
from support.thread_world import run_threads
from torch import Tensor

from megazero.comm.interface import Work

SIZE = 3


def tensor(rank: int, numel: int = 2) -> Tensor:
    return torch.arange(numel, dtype=torch.float64) + 10.0 * rank


def gather(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = torch.zeros(2 * SIZE, dtype=torch.float64)
    return axis.all_gather_into(output, tensor(axis.rank)), output


def gather_in_place(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = torch.zeros(2 * SIZE, dtype=torch.float64)
    mine = output[2 * axis.rank :][:2]
    mine.copy_(tensor(axis.rank))
    work = axis.all_gather_into(output, mine)
    assert torch.equal(mine, tensor(axis.rank)), "which is input too"
    return work, output


def scatter(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = torch.zeros(2, dtype=torch.float64)
    return axis.reduce_scatter_into(output, tensor(axis.rank, 2 * SIZE)), output


def scatter_in_place(axis: LateCommunicator) -> tuple[Work, Tensor]:
    whole = tensor(axis.rank, 2 * SIZE)
    output = whole[2 * axis.rank :][:2]
    return axis.reduce_scatter_into(output, whole), output


def exchange(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = torch.zeros(2 * SIZE, dtype=torch.float64)
    return axis.all_to_all_into(output, tensor(axis.rank, 2 * SIZE)), output


def reduce(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = tensor(axis.rank)
    return axis.all_reduce(output, "max"), output


def reduce_scalars(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = torch.tensor(axis.rank)
    return axis.all_reduce_scalars(output), output


def broadcast(axis: LateCommunicator) -> tuple[Work, Tensor]:
    output = tensor(axis.rank)
    return axis.broadcast(output, 1), output


Call = Callable[[LateCommunicator], tuple[Work, Tensor]]
EXPECTED: dict[Call, Callable[[int], list[float]]] = {
    gather: lambda rank: [0, 1, 10, 11, 20, 21],
    gather_in_place: lambda rank: [0, 1, 10, 11, 20, 21],
    scatter: lambda rank: [30 + 6 * rank, 33 + 6 * rank],
    scatter_in_place: lambda rank: [30 + 6 * rank, 33 + 6 * rank],
    exchange: lambda rank: [10 * source + 2 * rank + place for source in range(SIZE) for place in range(2)],
    reduce: lambda rank: [20, 21],
    reduce_scalars: lambda rank: [3],
    broadcast: lambda rank: [10, 11],
}


@each("call", EXPECTED)
def test_results_come_with_the_wait(call: Call) -> None:
    def on(axis: LateCommunicator) -> tuple[Tensor, list[float]]:
        work, output = call(axis)
        assert len(axis.unfinished) == axis.most_unfinished == 1
        early = output.clone()
        work.wait()
        work.wait()
        assert not axis.unfinished
        return early, output.flatten().tolist()

    for rank, (early, found) in enumerate(run_threads(SIZE, on)):
        expected = torch.tensor(EXPECTED[call](rank), dtype=early.dtype)
        assert found == expected.tolist()
        if call is not broadcast or rank != 1:
            assert not torch.equal(early.flatten(), expected)
            assert early.dtype is torch.int64 or early.isnan().any()


@each("call", EXPECTED)
def test_the_output_must_be_left_alone(call: Call) -> None:
    def on(axis: LateCommunicator) -> None:
        work, output = call(axis)
        output.fill_(5)
        work.wait()

    assert all(
        isinstance(error, AssertionError) and "put was written to before its wait" in str(error)
        for error in run_threads(SIZE, on)
    )


@pytest.mark.parametrize("is_gather", [True, False])
def test_the_input_must_be_left_alone(is_gather: bool) -> None:
    def on(axis: LateCommunicator) -> None:
        long, short = torch.zeros(2 * SIZE), torch.zeros(2)
        work = axis.all_gather_into(long, short) if is_gather else axis.reduce_scatter_into(short, long)
        (short if is_gather else long)[-1] = 1.0
        work.wait()

    assert all(str(error).endswith("its input was written to before its wait") for error in run_threads(SIZE, on))


def test_with_a_seed_others_finish_too_and_in_another_order() -> None:
    def on(axis: LateCommunicator) -> list[list[bool]]:
        seen = []
        for seed in range(4):
            seeded = LateCommunicator(axis.inner, seed=seed)
            begun = [gather(seeded) for _ in range(5)]
            begun[3][0].wait()
            seen.append([not bool(output.isnan().any()) for _, output in begun])
            for work, _ in reversed(begun):
                work.wait()
            assert all(output.tolist() == EXPECTED[gather](0) for _, output in begun)
        return seen

    for seen in run_threads(SIZE, on):
        assert all(row[3:] == [True, False] for row in seen), "what began later has not come"
        assert {flag for row in seen for flag in row[:3]} == {True, False}


def test_dense_tensors_only() -> None:
    def on(axis: LateCommunicator) -> None:
        axis.broadcast(torch.zeros(4, 4)[:, ::2], axis.rank)

    assert all(str(error).endswith("its input is not dense") for error in run_threads(SIZE, on))


def ping_pong(rank: int, first: int) -> tuple[list[float], int, list[str]]:
    """Send a message from rank 0 to rank 1 and one back.

    first: 0 if rank 0 waits for its send before it has the answer, 1 if after.  Returns the received values, the number
    of waits without proof of delivery, and the unfinished works.
    """
    mesh = mesh_in_worker(rank, pp=2)
    axis, early = mesh.channel("pp", link=0), unproven_waits(mesh)
    early.clear()
    found = torch.zeros(2, dtype=torch.float64)
    if rank == 1:
        axis.receive_into(found, 0).wait()
        axis.send(tensor(1), 0).wait()
        return found.tolist(), 0, unfinished(mesh)
    sending, receiving = axis.send(tensor(0), 1), axis.receive_into(found, 1)
    assert found.isnan().all()
    (sending, receiving)[first].wait()
    (sending, receiving)[1 - first].wait()
    return found.tolist(), len(early), unfinished(mesh)


@pytest.mark.gloo
def test_an_answer_proves_that_a_message_has_been_delivered() -> None:
    sent_first, answer_first = run_ranks(2, ping_pong, 0), run_ranks(2, ping_pong, 1)
    assert sent_first == [([10.0, 11.0], 1, []), ([0.0, 1.0], 0, [])]
    assert answer_first == [([10.0, 11.0], 0, []), ([0.0, 1.0], 0, [])]


def forget(rank: int) -> None:
    gather_of = mesh_in_worker(rank, dp=2).axis("dp")
    gather_of.all_gather_into(torch.zeros(4), torch.zeros(2))


@pytest.mark.gloo
def test_a_work_that_is_never_waited_for_fails_its_test() -> None:
    with pytest.raises(RankFailure, match="never waited for: all_gather_into of 2 elements"):
        run_ranks(2, forget)
