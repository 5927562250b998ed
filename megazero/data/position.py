"""Keeps a run's place in its corpora, so that another mixture or sequence length goes on where the one before stopped.

A run reads *stretches*: within one, mixture and sequence length stay the same, and sample k is a function of k alone.
A restart with another mixture or length begins a new stretch at the samples consumed so far.  Every part of a corpus
then goes on behind the samples that were taken of it, in the order in which it was begun; one that is new begins, and
one that is left out keeps its place until it comes back.  Parts are recognised by their content, wherever their files
lie.

An epoch that was begun with samples of another length is finished with what is left of it: the unread samples, laid end
to end in their order, are cut anew.  Fewer tokens than one sample remain unread at its end, as at every epoch's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from megazero.data.blend import Blend
from megazero.data.reading import Reading
from megazero.errors import CheckpointError, Problem


class Part(NamedTuple):
    """A part of a corpus in a mixture; key: the same for the same content; tokens: all of it."""

    key: str
    weight: Fraction
    tokens: int


@dataclass(frozen=True)
class Stretch:
    """Samples from number `start` on of one mixture of samples of one length.

    mixture: (key of a part, its weight).  readings: the places at `start` of all parts that were ever read, by key.
    """

    start: int
    seq_length: int
    mixture: tuple[tuple[str, Fraction], ...]
    readings: Mapping[str, Reading]

    def at(self, number: int) -> dict[str, Reading]:
        """Return the places of all parts at sample `number` of the run."""
        counts = Blend([weight for _, weight in self.mixture]).counts(number - self.start)
        places = dict(self.readings)
        for (key, _), count in zip(self.mixture, counts, strict=True):
            places[key] = places[key].after(count, self.seq_length)
        return places

    def to_json(self) -> dict[str, Any]:
        """Return the stretch as a checkpoint stores it."""
        return {
            "start": self.start,
            "seq_length": self.seq_length,
            "mixture": [[key, str(weight)] for key, weight in self.mixture],
            "readings": {key: list(reading) for key, reading in self.readings.items()},
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Stretch":
        """Return the stretch that a checkpoint has stored; raise CheckpointError for anything else."""
        try:
            return cls(
                int(saved["start"]),
                int(saved["seq_length"]),
                tuple((str(key), Fraction(weight)) for key, weight in saved["mixture"]),
                {str(key): Reading(*map(int, reading)) for key, reading in saved["readings"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            given = f"the checkpoint's place in its corpora: {str(saved)[:300]}"
            raise CheckpointError(Problem(given, f"it has the form of this version: {error}")) from error


def stretch_at(number: int, parts: Sequence[Part], seq_length: int, before: Stretch | None) -> Stretch:
    """Return the stretch that sample `number` of the run lies in.

    before: that of the checkpoint, which goes on if mixture and length are the same; None for the first of a run, in
    which the parts have streams 0, 1, 2, ...
    """
    mixture = tuple((part.key, part.weight) for part in parts)
    if before is not None and (before.mixture, before.seq_length) == (mixture, seq_length):
        return before
    readings = {} if before is None else before.at(number)
    fresh = 1 + max((reading.stream for reading in readings.values()), default=-1)
    for part in parts:
        if part.key not in readings:
            readings[part.key] = Reading(fresh, part.tokens, seq_length)
            fresh += 1
    return Stretch(0 if before is None else number, seq_length, mixture, readings)


def changes(saved: Mapping[str, Any] | None, now: Stretch) -> tuple[str, ...]:
    """Return a line on what another stretch than the saved one reads; none where it goes on."""
    if saved is None or (before := Stretch.from_json(saved)) == now:
        return ()
    parts = [key for key, _ in now.mixture]
    known = sum(key in before.readings for key in parts)
    dropped = sum(key not in parts for key, _ in before.mixture)
    length = f", of {now.seq_length} tokens in place of {before.seq_length}" * (now.seq_length != before.seq_length)
    return (
        f"another mixture from sample {now.start} on{length}: {known} of {len(parts)} corpora go on where they were"
        f" left, {len(parts) - known} begin; {dropped} are read no more",
    )
