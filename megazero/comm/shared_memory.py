"""Messages through memory that the ranks of one node share, in place of gloo's connections.

A message over the loopback is copied by the system twice, and costs calls and a thread that takes a core from a rank.
Through shared memory the sender copies it into a *box* of its own and raises a counter of the receiver's; the receiver
copies it to where it belongs when it waits for it, or adds it up right there.  Sending never waits for a receiver.

    file of a rank      a box for each communicator that has all its ranks on the node; all of them map the file
    box                 counters (for each receiver: messages sent, messages received), entries, messages
    entry               of one exchange: bytes, place, the distance to the next receiver's part (0: all get the same),
                        label.  So labels are compared without messages of their own

The file has no name: nothing is left of it when the processes have ended, however they end.  It is sparse: as much of
it takes memory as has been under way at a time.  That is bounded: a rank that has stored `_MOST_STORED` bytes in
exchanges that it has not waited for waits for all but the last, and what is larger than `_LARGEST` travels by gloo.
Where ranks cannot map each other's memory, all messages do.
"""

import ctypes
import errno
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.interface import Communicator, LabelMismatch
from megazero.comm.mesh import gather_json
from megazero.comm.messages import BegunExchanges, ExchangePart, MessageExchange, Messages
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.operating_system import SharedCounter, SharedCounters, nameless_file
from megazero.owner import Owner, ProcessState, open_shared_file, process_state

_LARGEST = 32 << 20  # bytes of an exchange that a rank stores
_MOST_STORED = 8 << 20  # bytes of the exchanges of one communicator that a rank has begun and not waited for
# Both ends of every pair of ranks may be so far behind, with gaps in between.
_BOX_BYTES = 1 << 30
_MOST_RANKS = 512  # of a node
_ENTRIES = 256  # more than exchanges can be under way
_ENTRY_NUMBERS = 4
_ENTRIES_START = 2 * _MOST_RANKS * SharedCounters.NBYTES
_MESSAGES_START = _ENTRIES_START + 8 * _ENTRIES * _ENTRY_NUMBERS
_ALIGNMENT = 64
_NO_LABEL = -1
_BY_GLOO = -1  # the place of a message that travels by gloo
_LOOK_SECONDS = 0.5  # between two looks whether the sender lives


class _Box:
    """The view that a process has of one rank's box."""

    def __init__(self, memory: mmap.mmap, index: int, counters: SharedCounters) -> None:
        start = index * _BOX_BYTES
        self._memory, self._start, self._counters = memory, start, counters
        entries = memoryview(memory)[start + _ENTRIES_START : start + _MESSAGES_START]
        self.entries = entries.cast("q")
        self._first = start + _MESSAGES_START
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory, self._first))
        """The address of messages in this process."""

    def reset(self, size: int) -> None:
        """Set the counters of all receivers to 0; size: the ranks of the communicator."""
        for receiver in range(size):
            self.sent(receiver).reset()
            self.received(receiver).reset()

    def sent(self, receiver: int) -> SharedCounter:
        """Return the counter of the messages sent to a rank of the communicator."""
        return self._counter(2 * receiver)

    def received(self, receiver: int) -> SharedCounter:
        """Return the counter of the messages that it has received, all those before included."""
        return self._counter(2 * receiver + 1)

    def _counter(self, number: int) -> SharedCounter:
        return self._counters.at(self._memory, self._start + number * SharedCounters.NBYTES)

    def view(self, place: int, tensor: Tensor) -> Tensor:
        """Return a tensor of a message as a flat one, of the size and format of another tensor."""
        if not tensor.numel():
            return tensor
        # Not a view of a tensor of the whole box, which the ledger would take for memory of this rank.
        return torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel(), offset=self._first + place)


class _Outbox:
    """The messages of this rank to the others."""

    def __init__(self, box: _Box, rank: int, size: int) -> None:
        self._entries, self._address = box.entries, box.address
        receivers = [receiver for receiver in range(size) if receiver != rank]
        self._size = size
        self._sent = [box.sent(receiver) for receiver in receivers]
        self._received = [box.received(receiver) for receiver in receivers]
        self._num_received = [0] * len(receivers)
        self._number = self._oldest = 0
        self._taken: deque[tuple[int, int]] = deque()  # the range of each message from the oldest

    def send(self, parts: Sequence[ExchangePart], nbytes: int, label: int | None) -> int:
        """Store what the parts send, `nbytes` to each rank; return the bytes that are stored, 0 if it is too much."""
        for index, counter in enumerate(self._received):
            while not counter.is_zero():
                self._num_received[index] += 1
        by_all = min(self._num_received)
        while self._oldest < by_all:
            self._taken.popleft()
            self._oldest += 1
        assert self._number - by_all < _ENTRIES, "far fewer exchanges are under way"
        sent, distance, needed = parts[0].sent, 0, nbytes + _ALIGNMENT * len(parts[0].sent)
        stored = needed = needed // _ALIGNMENT * _ALIGNMENT
        if parts[-1].sent is not sent:
            distance, stored = needed, needed * self._size
        start = self._place_for(stored) if self._taken and stored <= _LARGEST else 0
        if stored > _LARGEST:
            stored, start = 0, _BY_GLOO
        else:
            for part in parts if distance else parts[:1]:
                address = self._address + start + part.peer * distance
                for tensor in part.sent:
                    ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
                    address += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._taken.append((start, start + stored))
        at = self._number % _ENTRIES * _ENTRY_NUMBERS
        for value in (nbytes, start, distance, _NO_LABEL if label is None else label):
            self._entries[at] = value
            at += 1
        self._number += 1
        for counter in self._sent:
            counter.add_one()
        return stored

    def _place_for(self, nbytes: int) -> int:
        """Return the lowest place that is free, so that the same memory is used again and again."""
        place = 0
        for start, stop in sorted(self._taken):
            if start - place >= nbytes:
                break
            place = max(place, stop)
        assert place + nbytes <= _BOX_BYTES - _MESSAGES_START, "far less is under way"
        return place


class _Inbox:
    """The messages of one other rank to this one."""

    def __init__(self, box: _Box, rank: int, sender: int, owner: Owner, limit_seconds: float) -> None:
        self._box, self._rank, self._sender = box, rank, sender
        self._owner = owner
        self._limit_seconds = limit_seconds
        self._sent, self._received = box.sent(rank), box.received(rank)
        self._num_sent = self._num_received = 0
        self._early: set[int] = set()  # messages received before an earlier one

    def receive(self, number: int, part: ExchangePart, nbytes: int, label: int | None) -> None:
        """Wait for the sender's exchange of a number, and take what it has stored for this rank.

        Raises LabelMismatch, or RuntimeError where the sender has ended, does not come, or sends something else.
        """
        while self._num_sent <= number:
            if self._sent.is_zero():
                self._wait_for_one()
            self._num_sent += 1
        at = number % _ENTRIES * _ENTRY_NUMBERS
        their_nbytes, start, distance, their_label = self._box.entries[at : at + _ENTRY_NUMBERS]
        if label is not None and their_label not in (label, _NO_LABEL):
            raise LabelMismatch(self._sender, their_label, label)
        if their_nbytes != nbytes:
            raise RuntimeError(
                f"rank {self._sender} of the axis exchanges {their_nbytes} bytes where this rank exchanges {nbytes}"
            )
        if start != _BY_GLOO:
            place, views = start + self._rank * distance, []
            for tensor in part.places:
                if part.take is None:
                    ctypes.memmove(tensor.data_ptr(), self._box.address + place, tensor.nbytes)
                else:
                    views.append(self._box.view(place, tensor))
                place += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            if part.take is not None:
                part.take(views)
        self._early.add(number)
        while self._num_received in self._early:
            self._early.remove(self._num_received)
            self._num_received += 1
            self._received.add_one()

    def _wait_for_one(self) -> None:
        deadline = time.monotonic() + self._limit_seconds
        while not self._sent.wait_for_one(min(_LOOK_SECONDS, max(deadline - time.monotonic(), 0.001))):
            if process_state(self._owner.pid, self._owner.started) is ProcessState.GONE:
                if self._sent.is_zero():
                    raise dist.DistNetworkError(f"the process of rank {self._sender} of the axis has ended")
                return
            if time.monotonic() > deadline:
                given = f"Timed out waiting {self._limit_seconds:g} s for rank {self._sender} of the axis"
                raise dist.DistNetworkError(given)


class SharedMessages:
    """Messages of one communicator whose ranks share memory."""

    def __init__(self, gloo: Messages, outbox: _Outbox, inboxes: Mapping[int, _Inbox]) -> None:
        """gloo: for what is too large."""
        self._gloo = gloo
        self._outbox, self._inboxes = outbox, inboxes
        self._number = 0
        self._begun = BegunExchanges(_MOST_STORED)

    def exchange(self, parts: Sequence[ExchangePart], label: int | None = None) -> MessageExchange:
        nbytes = 0
        for tensor in parts[0].sent:
            # It is copied by its address.
            if not (tensor.is_cpu and tensor.is_contiguous()):
                raise ValueError(
                    f"ranks exchange contiguous CPU tensors, not one on {tensor.device} of {tensor.stride()}"
                )
            nbytes += tensor.nbytes
        stored = self._outbox.send(parts, nbytes, label)
        receive: list[Callable[[], None]] = []
        for part in reversed(parts):  # the rank before first: where labels differ, neighbours name each other
            receive.append(partial(self._inboxes[part.peer].receive, self._number, part, nbytes, label))
        self._number += 1
        rest = self._gloo.exchange(parts) if nbytes and not stored else None
        return self._begun.retain(_SharedExchange(receive, rest, stored))


class _SharedExchange(MessageExchange):
    """An exchange through memory; what is too large for that comes by another one, which is waited for behind it."""

    def __init__(self, receive: Sequence[Callable[[], None]], rest: MessageExchange | None, nbytes: int) -> None:
        self._receive, self._rest = receive, rest
        self.nbytes = nbytes
        self.is_complete = False

    def wait(self) -> None:
        if self.is_complete:
            return
        for receive in self._receive:
            receive()
        if self._rest is not None:
            self._rest.wait()
        self.is_complete, self._receive = True, ()  # which frees the tensors


class NodeMemory:
    """The memory that ranks of one node share: of each its file, with a box for each of its communicators."""

    def __init__(
        self,
        keys: Sequence[str],
        groups: Mapping[str, Sequence[int]],
        rank: int,
        memories: Mapping[int, mmap.mmap],
        owners: Mapping[int, Owner],
    ) -> None:
        """keys, groups, rank: as for `share_memory`.  memories, owners: by the job's rank."""
        self._keys, self._groups, self._rank = list(keys), groups, rank
        self._memories, self._owners = memories, owners

    def join(self, key: str, communicator: Communicator) -> None:
        """Let the messages of the key's communicator go through its boxes, if there are any."""
        if key not in self._groups:
            return
        assert isinstance(communicator, ProcessGroupCommunicator)
        ranks, me, index, counters = self._groups[key], communicator.rank, self._keys.index(key), SharedCounters()
        boxes = [_Box(self._memories[rank], index, counters) for rank in ranks]
        limit = communicator.limit_seconds
        inboxes = {
            place: _Inbox(box, me, place, self._owners[rank], limit)
            for place, (rank, box) in enumerate(zip(ranks, boxes, strict=True))
            if place != me
        }
        communicator.messages = SharedMessages(communicator.messages, _Outbox(boxes[me], me, len(ranks)), inboxes)


NO_MEMORY = NodeMemory((), {}, 0, {}, {})


def share_memory(
    control: Communicator, keys: Sequence[str], groups: Mapping[str, Sequence[int]], rank: int
) -> tuple[NodeMemory, str]:
    """Let ranks map each other's memory; return it, and the reason if a rank of the job cannot: then none shares any.

    A collective call of all ranks of the job, which are those of `control`, with the same keys.
    groups: of the keys whose communicators have several ranks, all on this rank's node, the ranks.
    """
    me, file, problem, num_bytes = Owner.of_this_process(), -1, "", len(keys) * _BOX_BYTES
    memories: dict[int, mmap.mmap] = {}
    owners: dict[int, Owner] = {}
    try:
        if any(len(ranks) > _MOST_RANKS for ranks in groups.values()):
            raise OSError(errno.E2BIG, f"more than {_MOST_RANKS} ranks are on a node")
        counters, file = SharedCounters(), nameless_file(num_bytes)
        memories[rank] = mmap.mmap(file, num_bytes)
        for key, ranks in groups.items():
            _Box(memories[rank], keys.index(key), counters).reset(len(ranks))
    except OSError as error:
        problem = f"rank {rank}: {error.strerror}"
    others = gather_json(control, [me.tag, file])
    for other in sorted({other for ranks in groups.values() for other in ranks} - {rank}) if not problem else ():
        tag, number = others[other]
        try:
            owner = Owner.from_tag(tag)
            if owner is None or not owner.is_comparable(me):
                raise OSError(errno.ENOENT, "its processes are not seen here")
            memories[other], owners[other] = _mapped(owner, number, num_bytes), owner
        except (OSError, ValueError) as error:
            problem = f"rank {rank} cannot map the memory of rank {other}: {getattr(error, 'strerror', error)}"
            break
    problems = [each for each in gather_json(control, problem) if each]
    if file >= 0:
        os.close(file)
    if problems:
        return NO_MEMORY, problems[0]
    return NodeMemory(keys, groups, rank, memories, owners), ""


def _mapped(owner: Owner, number: int, num_bytes: int) -> mmap.mmap:
    """Map the file that a process has open under a number."""
    file = open_shared_file(owner.pid, number)
    try:
        return mmap.mmap(file, num_bytes)
    finally:
        os.close(file)
