"""The bytes that a step of one rank moves between its device, host memory and files, from what the rank has allocated.

They are those that the meter counts on the axes "host" and "file" in a step that follows others and is not skipped:

    trained bucket away from the device   a gradient's sum leaves for each reduction and comes back before all but the
                                          first; new weights come back once, unless their partition is away too
    trained bucket on the device          new weights leave once for a partition that is away
    sums over other ranks                 what they add up comes back and leaves once more (`sums.py`)
    partition of a unit                   comes for each gather, trained or frozen; with secondary partitions for the
                                          first one, which stores its part of the secondary one, from where others come
    states in files                       are read for the update and for each pass before it; weights are written once,
                                          moments in every pass; sums of gradients and partitions as above, and the sums
                                          once more for the norm

Copies are exact but for the number of gathers, which only running shows: what a use leaves for the next one is not
gathered again, and a unit that a pass uses several times (a module that is called twice, a checkpoint over several
units) may be gathered for each.  What is read from files is a bound: a block that is still in a buffer is not read
again, nor written where a sum over other ranks changed it.  All other writes are exact.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megazero.zero.gradients.sums import SummedRun
from megazero.zero.layout import Bucket, Section
from megazero.zero.plan import Home, Lifetime
from megazero.zero.shards import Shards


class HomeTraffic(NamedTuple):
    """The bytes that a rank copies from its device to host memory and back, writes to files, and reads."""

    stored: int = 0
    loaded: int = 0
    written: int = 0
    read: int = 0

    @property
    def copied(self) -> int:
        """The bytes between the device and host memory, both ways."""
        return self.stored + self.loaded

    @property
    def in_files(self) -> int:
        """The bytes between host memory and files, both ways."""
        return self.written + self.read


def home_traffic(
    shards: Shards,
    summed: Iterable[Sequence[SummedRun]],
    num_micro_batches: int,
    *,
    num_passes: int = 0,
    secondary: int = 1,
    num_gathers: int | None = None,
) -> HomeTraffic:
    """Return what a rank moves in a step.

    summed: the gradients that are summed over other ranks too, by message.  num_passes: those of the optimizer over
    what a rank owns before the update.  secondary: the ranks of a secondary partition; 1: there is none.
    num_gathers: those of each unit.  None: one for every forward and every backward, for forwards alone where nothing
    is trained: as if none stayed gathered in between, and each unit had one use in either.
    """
    layout, leased = shards.layout, shards.plan.gradient.lifetime is Lifetime.LEASED
    buckets = layout.trainable_buckets
    num_reductions = num_micro_batches if leased else 1
    if num_gathers is None:
        num_gathers = num_micro_batches * (2 if buckets else 1)
    parts = [
        *(_of_bucket(shards, bucket, num_reductions, num_passes) for bucket in buckets),
        *(_of_sum(shards, message) for message in summed),
        *(
            _of_gathers(shards, section, num_gathers, secondary, changes=bool(buckets))
            for section in layout.sections
            if section.partitioned
        ),
    ]
    return HomeTraffic(*map(sum, zip(*parts, strict=True)))


def _of_bucket(shards: Shards, bucket: Bucket, num_reductions: int, num_passes: int) -> HomeTraffic:
    """Return what a trained bucket's reductions and its update move, with the norm that is taken in between."""
    plan, section = shards.plan, shards.layout.sections[bucket.section]
    numel = shards.owned(bucket).numel
    gradient, weights = numel * plan.gradient.itemsize, numel * section.dtype.itemsize
    is_partition_away = section.partitioned and not shards.parameter_home.is_device
    partition_written = weights if shards.has_partitions_in_file(section) else 0
    if shards.home(bucket).is_device:
        return HomeTraffic(stored=weights if is_partition_away else 0, written=partition_written)
    stored, loaded = num_reductions * gradient, (num_reductions - 1) * gradient
    loaded += 0 if is_partition_away else weights
    if not shards.is_in_files(bucket):
        return HomeTraffic(stored, loaded, written=partition_written)
    state, visits = numel * plan.optimizer.itemsize, 1 + num_passes
    moments = state * len(shards.kinds_of(bucket))
    gradient = gradient if plan.gradient.home is Home.FILE else 0
    return HomeTraffic(
        stored,
        loaded,
        written=state + visits * moments + num_reductions * gradient + partition_written,
        read=visits * (state + moments) + (num_reductions + visits) * gradient,
    )


def _of_sum(shards: Shards, message: Sequence[SummedRun]) -> HomeTraffic:
    """Return what a message of gradients that are summed over other ranks moves: a block in a file may come twice."""
    itemsize = shards.plan.gradient.itemsize
    away = [run for run in message if not shards.home(run.bucket).is_device]
    copied = sum(run.within.numel for run in away) * itemsize
    in_files = sum(_block_numels(shards, away)) * itemsize if shards.plan.gradient.home is Home.FILE else 0
    return HomeTraffic(copied, copied, in_files, 2 * in_files)


def _block_numels(shards: Shards, runs: Iterable[SummedRun]) -> Iterator[int]:
    """Yield the elements of each block in a file that has some of these."""
    last = None
    for bucket, within in runs:
        for group in shards.sub_groups(bucket) if shards.is_in_files(bucket) else ():
            start, stop = group.within
            if start < within.stop and within.start < stop and group is not last:
                yield group.within.numel
                last = group


def _of_gathers(shards: Shards, section: Section, num_gathers: int, secondary: int, *, changes: bool) -> HomeTraffic:
    """Return what gathers of a partitioned section move; changes: whether secondary partitions are renewed."""
    if shards.parameter_home.is_device:
        return HomeTraffic()
    partition, part = shards.partition_bytes(section), section.numel // secondary * section.dtype.itemsize
    has_secondary = secondary > 1 and not shards.is_encoded(section)
    num_first = min(num_gathers, int(changes)) if has_secondary else num_gathers
    return HomeTraffic(
        stored=num_first * part if has_secondary else 0,
        loaded=num_first * partition + (num_gathers - num_first) * part,
        read=num_first * partition if shards.has_partitions_in_file(section) else 0,
    )
