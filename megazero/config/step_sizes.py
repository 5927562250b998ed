"""The samples of every step of a run, its global batch sizes, which --rampup-batch-size may change on the way."""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megazero.config.values import as_quantity
from megazero.errors import Problem

RAMPUP, SCHEDULE = "--rampup-batch-size", "--step-batch-size-schedule"
_RAMPUP_LEGAL = f"{RAMPUP} START INCREMENT SAMPLES, such as 32 32 2_000_000"
_SCHEDULE_LEGAL = f'{SCHEDULE} "TOKENS:SIZE TOKENS:SIZE ...", such as "0:768 250B:1536"'


@dataclass(frozen=True)
class StepSizes:
    """The samples of a step, which depend on the samples that all steps before it have consumed.

    starts: the consumed samples from which on each size applies, in rising order; the first is 0.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def constant(cls, size: int) -> "StepSizes":
        """Return the sizes of a run whose steps all have `size` samples."""
        return cls((0,), (size,))

    @property
    def largest(self) -> int:
        """The samples of the largest step."""
        return max(self.sizes)

    def at(self, consumed: int) -> int:
        """Return the samples of the step that begins after `consumed` samples."""
        return self.sizes[bisect_right(self.starts, consumed) - 1]

    def samples_after(self, steps: int, *, consumed: int = 0) -> int:
        """Return the samples that are consumed after `steps` more steps."""
        for size, count in self._spans(consumed):
            taken = min(steps, count)
            consumed, steps = consumed + taken * size, steps - taken
            if not steps:
                break
        return consumed

    def steps_until(self, samples: int, *, consumed: int = 0) -> int:
        """Return how many steps begin after `consumed` samples and end before more than `samples` are consumed."""
        steps = 0
        for size, count in self._spans(consumed):
            taken = min(max(samples - consumed, 0) // size, count)
            consumed, steps = consumed + taken * size, steps + taken
            if taken < count:
                break
        return steps

    def __str__(self) -> str:
        rows = [f"{size} from sample {start} on" for size, start in zip(self.sizes, self.starts, strict=True)]
        return ", ".join(rows if len(rows) < 5 else [*rows[:3], "...", rows[-1]])

    def _spans(self, consumed: int) -> Iterator[tuple[int, int]]:
        """Yield the sizes of the steps after `consumed` samples, each with the number of consecutive steps of it."""
        for size, end in zip(self.sizes[:-1], self.starts[1:], strict=True):
            count = max(-(-(end - consumed) // size), 0)
            yield size, count
            consumed += count * size
        yield self.sizes[-1], sys.maxsize


def read_rampup(words: Sequence[str], global_batch_size: int) -> StepSizes | Problem:
    """Return the step sizes of --rampup-batch-size START INCREMENT SAMPLES, as Megatron-LM counts them.

    The batch grows from START to `global_batch_size` by INCREMENT; every size but the last applies to an equal share
    of SAMPLES, and a step has the size that belongs to the samples consumed before it.
    """
    given = f"{RAMPUP} {' '.join(words)}"
    numbers = [as_quantity(word) for word in words]
    start, increment, samples = (number or 0 for number in numbers) if len(numbers) == 3 else (0, 0, 0)
    if min(start, increment, samples) < 1:
        return Problem(given, "a ramp has three whole numbers, each at least 1", _RAMPUP_LEGAL)
    span = global_batch_size - start
    if span <= 0:
        rule = f"the batch grows from START, here {start}, to --global-batch-size, here {global_batch_size}"
        return Problem(given, rule, f"a START below {global_batch_size}, --global-batch-size {start + increment}")
    if span % increment:
        rule = f"INCREMENT divides the {global_batch_size} - {start} = {span} samples by which the batch grows"
        larger = start + -(-span // increment) * increment
        legal = f"an INCREMENT such as {math.gcd(span, increment)}, --global-batch-size {larger}"
        return Problem(given, rule, legal)
    count = span // increment
    starts = tuple(_first_sample(index, samples, count) for index in range(count + 1))
    return StepSizes(starts, tuple(range(start, global_batch_size + 1, increment)))


def _first_sample(index: int, samples: int, count: int) -> int:
    """Return the fewest consumed samples with `index` of `count` increments, which share `samples` equally.

    The share is a float, as in Megatron-LM, so that a quotient that falls just short of a whole number counts alike.
    """
    share, first = samples / count, max(samples * index // count - 1, 0)
    while int(first / share) < index and first <= samples:
        first += 1
    return first


def read_schedule(words: Sequence[str], seq_length: int) -> StepSizes | Problem:
    """Return the step sizes of --step-batch-size-schedule, whose thresholds are tokens, as Megatron-LM reads them."""
    given = f"{SCHEDULE} {' '.join(words)}"
    rows = []
    for entry in " ".join(words).replace(",", " ").split():
        tokens, size = (as_quantity(part) for part in (entry.partition(":")[0], entry.partition(":")[2]))
        if tokens is None or size is None or tokens < 0 or size < 1:
            return Problem(f"{given}: {entry}", "an entry is a number of tokens, a colon, and samples", _SCHEDULE_LEGAL)
        rows.append((tokens // seq_length, size))
    rows.sort()
    starts, sizes = tuple(start for start, _ in rows), tuple(size for _, size in rows)
    if not rows or starts[0] != 0:
        return Problem(given, "the first size applies from 0 tokens on", _SCHEDULE_LEGAL)
    if len({*starts}) < len(starts):
        rule = f"thresholds differ by at least one sample, which is {seq_length} tokens"
        return Problem(given, rule, _SCHEDULE_LEGAL)
    return StepSizes(starts, sizes)
