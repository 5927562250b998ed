"""A rank's model states as fragments of parameters: what it saves, and what it must be given to go on."""

from collections.abc import Iterator, Mapping

from megazero.parallel.param_spec import StateFragment, StateKind
from megazero.zero.layout import Bucket, Fragment
from megazero.zero.shards import Shards

_SAVED_MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")


def owned_state(shards: Shards, coordinates: Mapping[str, int]) -> Iterator[StateFragment]:
    """Of the partitions of the rank at these coordinates, what no other rank counts."""
    for section in shards.layout.sections:
        for bucket in section.buckets:
            for fragment in section.fragments(shards.partition(bucket)):
                if fragment.spec.is_counted_on(coordinates):
                    yield from _state_of(shards, bucket, fragment)


def wanted_state(shards: Shards) -> Iterator[StateFragment]:
    """Everything that is kept here and isn't made from the rest."""
    for section in shards.layout.sections:
        for bucket in section.buckets:
            for fragment in section.fragments(shards.loaded(bucket)):
                yield from _state_of(shards, bucket, fragment)


def _state_of(shards: Shards, bucket: Bucket, fragment: Fragment) -> Iterator[StateFragment]:
    within, place = fragment.within, (fragment.start, fragment.stop)
    if not fragment.spec.trainable:
        yield StateFragment(fragment.spec, "weight", *place, shards.working(bucket, within))
        return
    yield StateFragment(fragment.spec, "weight", *place, shards.master(bucket, within))
    for kind in _SAVED_MOMENTS:
        if kind in shards.moment_kinds:
            yield StateFragment(fragment.spec, kind, *place, shards.moment(kind, bucket, within))
