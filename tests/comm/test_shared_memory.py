"""Tests of messages through memory beside those of every collective in `test_process_group.py`."""

import mmap
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks
from torch import Tensor

from megazero.comm import shared_memory
from megazero.comm.interface import LabelMismatch
from megazero.comm.messages import BegunExchanges, ExchangePart, MessageExchange
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.comm.shared_memory import NO_MEMORY, SharedMessages, share_memory
from megazero.memory.fused_buffers import FusedBuffers
from megazero.operating_system import SharedCounters, nameless_file
from megazero.owner import Owner, process_start

ME = Owner.of_this_process()


class NoGloo:
    """Messages where memory takes all of them."""

    def exchange(self, parts: Sequence[ExchangePart], label: int | None = None) -> MessageExchange:
        raise AssertionError("a message by gloo")


def ranks_here(size: int, owner: Owner = ME, limit: float = 5.0) -> list[SharedMessages]:
    """Return the messages of ranks that share this process; owner, limit: of the others, as each sees them."""
    memories, counters = [], SharedCounters()
    for _ in range(size):
        file = nameless_file(shared_memory._BOX_BYTES)
        memories.append(mmap.mmap(file, shared_memory._BOX_BYTES))
        os.close(file)
    boxes = [shared_memory._Box(memory, 0, counters) for memory in memories]
    for box in boxes:
        box.reset(size)
    return [
        SharedMessages(
            NoGloo(),
            shared_memory._Outbox(boxes[rank], rank, size),
            {
                other: shared_memory._Inbox(boxes[other], rank, other, owner, limit)
                for other in range(size)
                if other != rank
            },
        )
        for rank in range(size)
    ]


def part(rank: int, value: float, numel: int) -> tuple[ExchangePart, Tensor]:
    """Return the part that one of two ranks sends to the other, and where it receives."""
    place = torch.full((numel,), -1.0)
    return ExchangePart(1 - rank, [torch.full((numel,), value)], [place]), place


def test_the_same_memory_is_used_again() -> None:
    """Exchanges come in any order of waits, some are left for later, and no more is stored than is under way."""
    pair, numel, late = ranks_here(2), 1000, []
    for number in range(600):
        parts = [part(rank, number + rank / 2, numel + number) for rank in range(2)]
        works = [pair[rank].exchange([parts[rank][0]]) for rank in range(2)]
        late.append((works, parts, number))
        if number % 3 == 2:
            for works, parts, number in (late[1], late[2], late[0]):
                for rank, (work, (_, place)) in enumerate(zip(works, parts, strict=True)):
                    work.wait()
                    assert place.tolist() == [number + (1 - rank) / 2] * (numel + number)
            late = []
    for messages in pair:
        taken = messages._outbox._taken
        assert max(stop for _, stop in taken) < 5 * 4 * 1600


@pytest.mark.parametrize("is_gather", [True, False])
def test_a_late_rank_gets_what_was_sent_first(is_gather: bool) -> None:
    size, numel, number = 3, 7, 5
    axis, late = ranks_here(size), []
    for turn in range(number):
        for rank, messages in enumerate(axis):
            same = [torch.full((numel,), 10.0 * turn + rank)]
            sent = {peer: same if is_gather else [same[0] + peer / 8] for peer in range(size)}
            places = {peer: torch.empty(numel) for peer in range(size)}
            parts = [ExchangePart(peer, sent[peer], [places[peer]]) for peer in range(size) if peer != rank]
            late.append((rank, turn, places, messages.exchange(parts)))
        for rank, _, _, work in late[-size:]:
            if rank < 2:
                work.wait()
    for rank, turn, places, work in late:
        work.wait()
        for peer in {0, 1, 2} - {rank}:
            assert places[peer].tolist() == [10.0 * turn + peer + (0 if is_gather else rank / 8)] * numel


def test_what_is_stored_for_others_is_bounded() -> None:
    """An exchange beyond the bound waits for the oldest ones that have begun."""
    waited: list[int] = []

    class Noted(MessageExchange):
        def __init__(self, number: int) -> None:
            super().__init__([])
            self.number, self.nbytes = number, 10

        def wait(self) -> None:
            waited.append(self.number)
            super().wait()

    begun = BegunExchanges(most_stored=25)
    seen = []
    for number in range(4):
        begun.retain(Noted(number))
        seen.append(len(waited))
    assert seen == [0, 0, 1, 2] and waited == [0, 1]
    begun, last = BegunExchanges(most_stored=5), Noted(9)
    begun.retain(last)
    assert not last.is_complete, "one exchange alone goes on, however large it is"


def test_what_has_no_bytes_in_a_row_is_refused() -> None:
    first, _ = ranks_here(2)
    sent, _ = part(0, 1.0, 6)
    with pytest.raises(ValueError, match="contiguous CPU tensors, not one on cpu of \\(2,\\)"):
        first.exchange([sent._replace(sent=[torch.ones(6)[::2]])])


def test_a_rank_whose_process_has_ended_is_named() -> None:
    process = subprocess.Popen(["sleep", "60"])
    first, second = ranks_here(
        2, Owner(process.pid, process_start(process.pid) or 0, ME.machine, ME.boot, ME.namespace), limit=600
    )
    sent, place = part(0, 1.0, 3)
    second.exchange([part(1, 2.0, 3)[0]])
    first.exchange([sent]).wait()  # it had sent this
    process.kill()
    process.wait()
    assert place.tolist() == [2.0] * 3
    begun = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="the process of rank 1 of the axis has ended"):
        first.exchange([sent]).wait()
    assert time.monotonic() - begun < 60


def test_a_rank_that_does_not_come_is_named_at_the_limit() -> None:
    first, _ = ranks_here(2, limit=0.05)
    with pytest.raises(dist.DistNetworkError, match=r"Timed out waiting 0\.05 s for rank 1 of the axis"):
        first.exchange([part(0, 1.0, 3)[0]]).wait()


def test_exchanges_of_other_sizes_and_labels_are_errors() -> None:
    first, second = ranks_here(2)
    second.exchange([part(1, 2.0, 4)[0]], label=5)
    with pytest.raises(RuntimeError, match="rank 1 of the axis exchanges 16 bytes where this rank exchanges 12"):
        first.exchange([part(0, 1.0, 3)[0]], label=5).wait()
    second.exchange([part(1, 2.0, 4)[0]], label=6)
    with pytest.raises(LabelMismatch, match="rank 1 of the axis gathers number 6 where this rank gathers number 7"):
        first.exchange([part(0, 1.0, 3)[0]], label=7).wait()


def beyond(rank: int, size: int, most: int) -> list[Any]:
    """Gather and sum up tensors around the largest that memory takes; then come to a gather with another label."""
    group = dist.new_group(list(range(size)))
    assert group is not None
    axis = ProcessGroupCommunicator(group, FusedBuffers(8 * most, torch.device("cpu")))
    memory, problem = share_memory(axis, ["other", "all"], {"all": range(size)}, rank)
    assert not problem
    memory.join("all", axis)
    found: list[Any] = []
    with patch.object(shared_memory, "_LARGEST", most):
        for numel in (most // 8, most // 4, most // 4 + 1, most // 2, 0):
            gathered, total = torch.empty(size * numel), torch.empty(numel)
            works = [
                axis.all_gather_into(gathered, torch.full((numel,), float(rank)), 3),
                axis.reduce_scatter_into(total, torch.arange(size * numel).float() + rank),
            ]
            for work in works:
                work.wait()
            found.append((gathered.tolist(), total.tolist()))
        work = axis.all_gather_into(torch.empty(size * most), torch.empty(most), 4 + rank)
        try:
            work.wait()
        except LabelMismatch as error:
            found.append(error.rank)
            cast(Any, work)._rest.wait()  # gloo's thread never rests while a message that was freed is on its way
    return found


@pytest.mark.gloo
def test_what_is_large_travels_by_gloo() -> None:
    size, most = 2, 512
    for rank, found in enumerate(run_ranks(size, beyond, size, most)):
        *results, mismatch = found
        for (gathered, total), numel in zip(results, (64, 128, 129, 256, 0), strict=True):
            assert gathered == [0.0] * numel + [1.0] * numel
            assert total == [2.0 * element + 1 for element in range(rank * numel, (rank + 1) * numel)]
        assert mismatch == 1 - rank


def refused(rank: int, size: int, who: int) -> tuple[bool, str]:
    """Share memory where one rank may not open that of another."""
    group = dist.group.WORLD
    assert group is not None
    axis = ProcessGroupCommunicator(group, FusedBuffers(0, torch.device("cpu")))

    def refuse(pid: int, number: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    replaced: Callable[..., int] = refuse if rank == who else shared_memory.open_shared_file
    with patch.object(shared_memory, "open_shared_file", replaced):
        memory, problem = share_memory(axis, ["all"], {"all": range(size)}, rank)
    return memory is NO_MEMORY, problem


@pytest.mark.gloo
def test_memory_that_one_rank_cannot_open_is_used_by_none() -> None:
    expected = "rank 1 cannot map the memory of rank 0: Operation not permitted"
    assert run_ranks(3, refused, 3, 1) == [(True, expected)] * 3
