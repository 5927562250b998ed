"""The links that messages take: inside a node, or across nodes, over links that are tens of times slower."""

from collections.abc import Sequence

from megazero.comm.interface import Collective


class Links:
    """The part of one rank's messages to a group that leaves its node."""

    def __init__(self, nodes: Sequence[int], rank: int, *, exchanges: bool) -> None:
        """Describe a group.

        nodes: the node of every rank of it.  rank: this one's place in it.  exchanges: gathers and scatters are made of
        messages to every other rank, as with gloo; else they are rings, as with NCCL, and as all-reduces are anyway.
        """
        self._is_elsewhere = [node != nodes[rank] for node in nodes]
        self._next_is_elsewhere = self._is_elsewhere[(rank + 1) % len(nodes)]
        self._num_elsewhere = sum(self._is_elsewhere)
        self._exchanges = {"all_to_all", "all_gather", "reduce_scatter"} if exchanges else {"all_to_all"}

    def across(self, collective: Collective, nbytes: int, to: int | None = None) -> int:
        """Return how many of the bytes that the rank sends for a collective go to another node; to: a send's rank."""
        if to is not None:
            return nbytes if self._is_elsewhere[to] else 0
        if collective in self._exchanges:
            return nbytes * self._num_elsewhere // (len(self._is_elsewhere) - 1)
        return nbytes if self._next_is_elsewhere else 0
