"""The curriculum by sequence length: its settings, and the length of every step's rows as a pure function of the step.

DeepSpeed's engine asks for the length of step s, counted from 1, skipped ones included.  With T steps of the
curriculum, least and largest length m and M, the length's step d and the root's degree r, its documented schedules are

    fixed_linear     floor(s / T x (M - m) + m), down to a multiple of d, at least m up to a multiple of d, at most M
    fixed_root       the same with (s / T)^(1 / r) in place of s / T
    fixed_discrete   the first of the given lengths whose last step is at least s; the last one has none

The first L tokens of a row are its cut to length L.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass as plain_dataclass
from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting
from megazero.config.step_sizes import StepSizes
from megazero.config.values import as_quantity
from megazero.errors import Problem

DISCRETE = "fixed_discrete"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CurriculumConfig:
    """A curriculum: the rows of training steps are cut to a length that grows (Li et al., arXiv 2108.06084)."""

    curriculum_learning: bool = setting(
        False,
        help="cut the rows of training steps to their first tokens, whose number grows from step to step; evaluations"
        " have whole rows",
    )
    curriculum_schedule: Literal["fixed_linear", "fixed_root", "fixed_discrete"] = setting(
        "fixed_linear",
        help="how the length grows with the steps: evenly, along a root, or as curriculum_seqlens lists",
    )
    curriculum_min_seqlen: int = setting(8, help="the length at the start", unit="tokens", ge=1)
    curriculum_max_seqlen: int | None = setting(
        None, help="the length at the end; without it, seq_length", unit="tokens", ge=1
    )
    curriculum_steps: int | None = setting(
        None, help="the step at which the length has grown to the largest", unit="steps", ge=1
    )
    curriculum_seqlen_step: int = setting(8, help="every length is a multiple of this", unit="tokens", ge=1)
    curriculum_root_degree: int = setting(
        2, help="fixed_root: the degree of the root; 1 grows evenly", unit="roots", ge=1, le=16
    )
    curriculum_seqlens: tuple[str, ...] = setting(
        (), help="fixed_discrete: the lengths, one after the other", unit="tokens"
    )
    curriculum_last_steps: tuple[str, ...] = setting(
        (), help="fixed_discrete: the last step of every length but the last one", unit="steps"
    )


@plain_dataclass(frozen=True)
class RowLengths:
    """The length of the rows of every step, in tokens.

    starts: the finished steps from which on each length applies, in rising order; the first is 0.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def constant(cls, length: int) -> "RowLengths":
        """Return the lengths of a run whose steps all have rows of `length` tokens."""
        return cls((0,), (length,))

    @property
    def varies(self) -> bool:
        """True if steps have rows of different lengths."""
        return len(self.lengths) > 1

    def at(self, steps: int) -> int:
        """Return the length of the rows of the step that follows `steps` finished ones."""
        return self.lengths[bisect_right(self.starts, steps) - 1]

    def tokens_after(self, steps: int, sizes: StepSizes) -> int:
        """Return the tokens of the first `steps` steps."""
        tokens = samples = 0
        for start, end, length in self._spans(0):
            after = sizes.samples_after(min(end, steps) - start, consumed=samples)
            tokens, samples = tokens + (after - samples) * length, after
            if end >= steps:
                break
        return tokens

    def steps_until(self, limit: int, sizes: StepSizes, *, steps: int = 0, samples: int = 0, tokens: int = 0) -> int:
        """Return how many steps, of the whole run, end before it has taken more than `limit` tokens.

        steps, samples, tokens: the progress so far.
        """
        for start, end, length in self._spans(steps):
            fitting = sizes.steps_until(samples + max(limit - tokens, 0) // length, consumed=samples)
            if fitting < end - start:
                return start + fitting
            after = sizes.samples_after(end - start, consumed=samples)
            tokens, samples = tokens + (after - samples) * length, after
        raise AssertionError("the last length has no end")

    def __str__(self) -> str:
        rows = [f"{length} from step {start + 1} on" for start, length in zip(self.starts, self.lengths, strict=True)]
        return ", ".join(rows if len(rows) < 5 else [*rows[:2], "...", rows[-1]])

    def _spans(self, steps: int) -> Iterator[tuple[int, int, int]]:
        """Yield (first, end, length) of the steps of each length after `steps` finished ones; the last has no end."""
        for start, end, length in zip(self.starts, (*self.starts[1:], sys.maxsize), self.lengths, strict=True):
            if end > steps:
                yield max(start, steps), end, length


@plain_dataclass(frozen=True)
class Curriculum:
    """A schedule of lengths, in DeepSpeed's terms: difficulties.

    least, largest: the first length and the last one.  steps, multiple, degree: T, d and r of fixed_linear (whose
    degree is 1) and fixed_root.  seqlens, last_steps: those of fixed_discrete, empty for the others.
    """

    least: int
    largest: int
    steps: int = 1
    multiple: int = 1
    degree: int = 1
    seqlens: tuple[int, ...] = ()
    last_steps: tuple[int, ...] = ()

    def length(self, step: int) -> int:
        """Return the length of the rows of a step, counted from 1."""
        if self.seqlens:
            return next(
                (seqlen for seqlen, last in zip(self.seqlens, self.last_steps, strict=False) if step <= last),
                self.seqlens[-1],
            )
        part = math.pow(step / self.steps, 1.0 / self.degree)
        length = math.floor(part * (self.largest - self.least) + self.least)
        length -= length % self.multiple
        return min(max(length, -(-self.least // self.multiple) * self.multiple), self.largest)

    def row_lengths(self) -> RowLengths:
        """Return the lengths of all steps; the length never falls, so each begins where a search finds it."""
        last = self.seqlens[-1] if self.seqlens else self.largest
        starts, lengths = [0], [self.length(1)]
        while lengths[-1] < last:
            starts.append(_first(lambda steps: self.length(steps + 1) > lengths[-1], after=starts[-1]))
            lengths.append(self.length(starts[-1] + 1))
        return RowLengths(tuple(starts), tuple(lengths))


def _first(holds: Callable[[int], bool], *, after: int) -> int:
    """Return the first number above `after` for which a condition holds that goes on to hold from there."""
    low, high = after, after + 1
    while not holds(high):
        low, high = high, high + 2 * (high - after)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_curriculum(
    config: CurriculumConfig, seq_length: int | None, spell: Callable[[str], str] = _flag
) -> Curriculum | Problem:
    """Return the schedule of a configuration that has one, or what is wrong with it.

    seq_length: the tokens of whole rows, None where only the program has them.  spell: a function that returns a
    setting's name as the user writes it.
    """
    least, largest = config.curriculum_min_seqlen, config.curriculum_max_seqlen or seq_length
    if largest is None:
        return Problem(
            f"{spell('curriculum_learning')} without {spell('curriculum_max_seqlen')}",
            "a curriculum has a largest length",
            f"{spell('curriculum_max_seqlen')} TOKENS",
        )
    if seq_length is not None and largest > seq_length:
        given = f"{spell('curriculum_max_seqlen')} {largest}"
        rule = f"rows are cut, and a whole one has {seq_length} tokens"
        return Problem(given, rule, f"{spell('curriculum_max_seqlen')} {seq_length}")
    if least > largest:
        given = f"{spell('curriculum_min_seqlen')} {least} with a largest length of {largest}"
        return Problem(given, "the length grows", f"{spell('curriculum_min_seqlen')} {largest}")
    if config.curriculum_schedule == DISCRETE:
        return _read_discrete(config, least, largest, spell)
    if config.curriculum_steps is None:
        name = spell("curriculum_steps")
        given = f"{spell('curriculum_schedule')} {config.curriculum_schedule} without {name}"
        return Problem(given, "a length that grows step by step has a step at which it is the largest", f"{name} STEPS")
    degree = 1 if config.curriculum_schedule == "fixed_linear" else config.curriculum_root_degree
    return Curriculum(least, largest, config.curriculum_steps, config.curriculum_seqlen_step, degree)


def row_lengths_of(config: CurriculumConfig, seq_length: int | None = None) -> RowLengths | None:
    """Return the lengths of the rows of all steps; None without a curriculum that keeps its rules."""
    found = read_curriculum(config, seq_length) if config.curriculum_learning else None
    return found.row_lengths() if isinstance(found, Curriculum) else None


def _read_discrete(
    config: CurriculumConfig, least: int, largest: int, spell: Callable[[str], str]
) -> Curriculum | Problem:
    names = [spell(name) for name in ("curriculum_seqlens", "curriculum_last_steps")]
    words = (config.curriculum_seqlens, config.curriculum_last_steps)
    given = " and ".join(
        f"{name} {' '.join(each)}" if each else f"no {name}" for name, each in zip(names, words, strict=True)
    )
    seqlens, last_steps = (tuple(as_quantity(word) or 0 for word in each) for each in words)
    legal = f"such as {names[0]} {least} {largest} and {names[1]} 1000"
    if not seqlens or len(seqlens) != len(last_steps) + 1 or min(*seqlens, *last_steps, 1) < 1:
        return Problem(given, "there are lengths, whole numbers, and a last step for each of them but the last", legal)
    if list(seqlens) != sorted(set(seqlens)) or list(last_steps) != sorted(set(last_steps)):
        return Problem(given, "lengths grow, and so do their last steps", legal)
    if seqlens[0] < least or seqlens[-1] > largest:
        return Problem(given, f"lengths lie between the least and the largest, {least} and {largest}", legal)
    return Curriculum(least, largest, seqlens=seqlens, last_steps=last_steps)
