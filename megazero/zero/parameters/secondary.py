"""Secondary partitions: parameters that a forward has gathered, partitioned again over few ranks of a node (hpZ of
ZeRO++, arXiv 2306.10209, section 3.2).

Later gathers of a unit come from there, inside the node, until the weights change: those of the same micro-batch's
backward, and those of later micro-batches.  The price is 1/P of all partitioned parameters in each of P ranks' memory.
"""

from collections.abc import Collection, Iterable

from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.memory.copies import Arrival
from megazero.zero.layout import Bucket, Section
from megazero.zero.shards import Shards


class SecondaryPartitions:
    """This rank's secondary partitions, at home where its partitions are, or in host memory if those are in files."""

    def __init__(self, shards: Shards, communicator: Communicator) -> None:
        """communicator: the ranks of the secondary partitions; with one rank there are none."""
        self.communicator = communicator
        self._shards, self._home = shards, shards.parameter_home
        self._units: set[str] = set()  # whose parameters are here
        self._flats: dict[int, Tensor] = {}
        for section in shards.layout.sections if communicator.size > 1 else ():
            if section.partitioned and not shards.is_encoded(section):
                flat = self._flats[section.index] = self._home.zeros(section.numel // communicator.size, section.dtype)
                shards.ledger.tag(flat, "parameters")

    @property
    def nbytes(self) -> int:
        return sum(flat.untyped_storage().nbytes() for flat in self._flats.values())

    @property
    def flats(self) -> Collection[Tensor]:
        """The tensors that hold them, whose values count for nothing after `forget`."""
        return self._flats.values()

    def has(self, unit: str) -> bool:
        """Return True if the unit's present values are here, on all ranks."""
        return unit in self._units

    def keep(self, unit: str, sections: Iterable[Section]) -> None:
        """Copy this rank's part of a unit, which is gathered and which user code has not written to."""
        if not self._flats or unit in self._units:
            return
        for section in sections:
            for bucket in section.buckets if section.index in self._flats else ():
                mine = self._mine(bucket, self._shards.flat(section)[bucket.start : bucket.stop])
                self._home.store(self._place(bucket), mine).wait()  # the gathered memory may be freed next
        self._units.add(unit)

    def outgoing(self, bucket: Bucket, whole: Tensor) -> tuple[Tensor, Arrival]:
        """Return this rank's part of a bucket on the device, and its arrival there; whole: the bucket's memory."""
        return self._home.bring(self._place(bucket), self._mine(bucket, whole))

    def forget(self) -> None:
        """Take all values for out of date."""
        self._units.clear()

    def _place(self, bucket: Bucket) -> Tensor:
        start, numel = bucket.start // self.communicator.size, bucket.numel // self.communicator.size
        return self._flats[bucket.section][start : start + numel]

    def _mine(self, bucket: Bucket, whole: Tensor) -> Tensor:
        numel = bucket.numel // self.communicator.size
        return whole[self.communicator.rank * numel : (self.communicator.rank + 1) * numel]
