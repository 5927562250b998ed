"""Messages between the ranks of a gloo group, of which its gathers, sums and all-to-alls are made.

An *exchange* sends a part to every other rank of the group, and receives one from each.  All ranks begin the exchanges
of a communicator in the same order; they may wait for them in any.

*Directions*: gloo locks a connection while it writes to it, and its thread that reads from the same connection looks
for the lock without a pause until then.  So of an axis with two groups every connection carries messages in one
direction, which takes half the processor's time.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megazero.comm.interface import LabelMismatch, Work

_MAX_IN_FLIGHT = 64  # exchanges of one communicator
# Tags of messages: those between two ranks of a group that have the same tag keep their order.  Two communicators of
# one axis share its groups, so each adds its lane, 0 or 1.
TAG, _LABEL, _EXCHANGE = 0, 2, 4
# Tags of an exchange follow from the sizes of its messages: where ranks exchange different things by mistake, messages
# of different sizes never meet, for which gloo would end the process.
_EXCHANGE_TAGS = 2**30 - _EXCHANGE


class ExchangePart(NamedTuple):
    """The part of an exchange with one other rank.

    sent: what goes to that rank; tensors that all ranks get are the same object in every part.  places: where what
    comes from it may be put.  take: called with what has come, which it may not retain; None: that is wanted in
    `places`.
    """

    peer: int
    sent: Sequence[Tensor]
    places: Sequence[Tensor]
    take: Callable[[Sequence[Tensor]], None] | None = None


class Messages(Protocol):
    """A way for messages between the ranks of one axis."""

    def exchange(self, parts: Sequence[ExchangePart], label: int | None = None) -> "MessageExchange":
        """Begin to send and receive the parts of one exchange; label: see `Communicator.all_gather_into`."""


class MessageExchange:
    """The works of one exchange, which are waited for in their order."""

    nbytes = 0
    """The bytes that are stored for other ranks until they have received them."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self.is_complete = False

    def wait(self) -> None:
        if not self.is_complete:
            for work in self._works:
                work.wait()
            self.is_complete, self._works = True, ()  # which frees the tensors


class BegunExchanges:
    """The exchanges of one communicator that have begun.

    A message whose Work is freed is never delivered, and the rank that receives it would wait for ever; so every
    exchange is retained until it completes.  One that is not waited for when many more have begun, or much is stored
    for other ranks, is waited for here: by then it is complete, or it completes without this rank.
    """

    def __init__(self, most_stored: int = 0) -> None:
        """most_stored: bytes, but for those of the last exchange."""
        self._exchanges: deque[MessageExchange] = deque()
        self._most_stored = most_stored
        self._stored = 0

    def retain(self, exchange: MessageExchange) -> MessageExchange:
        """Retain an exchange until it completes."""
        begun = self._exchanges
        begun.append(exchange)
        self._stored += exchange.nbytes
        while begun and (
            begun[0].is_complete
            or len(begun) > _MAX_IN_FLIGHT
            or (len(begun) > 1 and self._stored > self._most_stored)  # the last one goes on beside what follows
        ):
            oldest = begun.popleft()
            self._stored -= oldest.nbytes
            if not oldest.is_complete:
                oldest.wait()
        return exchange


class GlooMessages:
    """Messages over gloo's connections."""

    def __init__(self, group: dist.ProcessGroup, beside: dist.ProcessGroup | None = None, lane: int = 0) -> None:
        """beside, lane: as for `ProcessGroupCommunicator`."""
        self._rank, self._size = group.rank(), group.size()
        self._lane = lane
        groups = (group, group if beside is None else beside)
        # The group over which messages go up to higher ranks, and the one over which they come down.
        self._up, self._down = groups[lane], groups[1 - lane]
        self._begun = BegunExchanges()

    def exchange(self, parts: Sequence[ExchangePart], label: int | None = None) -> MessageExchange:
        works: list[Work] = [] if label is None or not parts else [self._compare(label)]
        works += map(self._swap, parts)
        return self._begun.retain(MessageExchange(works))

    def _compare(self, label: int) -> "_Comparison":
        """Send the label to the next rank; return a work that waits for that of the rank before, and compares."""
        before = (self._rank - 1) % self._size
        # Of Python's memory, which no ledger counts: where ranks share memory, labels take none of a tensor's either.
        sent, received = array("q", [label]), array("q", [label])  # a dry group, which receives nothing, leaves it so
        receiving = self._receive(torch.frombuffer(received, dtype=torch.int64), before, _LABEL)
        sending = self._send(torch.frombuffer(sent, dtype=torch.int64), (self._rank + 1) % self._size, _LABEL)
        return _Comparison((receiving, sending), before, received, label)

    def _swap(self, part: ExchangePart) -> "_Swap":
        """Begin to send and to receive the messages of a part."""
        peer, works = part.peer, list[Any]()
        for mine, theirs in zip(part.sent, part.places, strict=True):
            tag = _EXCHANGE + 2 * (mine.nbytes % _EXCHANGE_TAGS)
            works += self._receive(theirs, peer, tag), self._send(mine, peer, tag)
        return _Swap(works, part)

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return (self._up if peer > self._rank else self._down).send([tensor], peer, tag + self._lane)

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Any:
        return (self._down if peer > self._rank else self._up).recv([tensor], peer, tag + self._lane)


class _Comparison(NamedTuple):
    """The messages by which the label of the rank before is compared with this rank's."""

    works: Sequence[Any]
    before: int
    received: Sequence[int]
    label: int

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if (theirs := self.received[0]) != self.label:
            raise LabelMismatch(self.before, theirs, self.label)


class _Swap(NamedTuple):
    """The messages of a part that are under way."""

    works: Sequence[Any]
    part: ExchangePart

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        if self.part.take is not None:
            self.part.take(self.part.places)
