"""The lengths of a run and of the parts of its schedule, given in steps, samples or tokens."""

from dataclasses import dataclass, field
from typing import Literal

from megazero.config.curriculum import RowLengths
from megazero.config.step_sizes import StepSizes


@dataclass(frozen=True)
class RunLength:
    """The length of a run, in steps and in samples.

    samples: None where the length was given in steps.  seq_length: tokens of a sample.
    rows: the lengths to which steps cut their samples; None: they are whole.
    """

    steps: int
    sizes: StepSizes = field(default_factory=lambda: StepSizes.constant(1))
    samples: int | None = None
    seq_length: int = 1
    rows: RowLengths | None = None

    @property
    def total_samples(self) -> int:
        """The samples of the run, where it is given in steps those of all of them."""
        return self.sizes.samples_after(self.steps) if self.samples is None else self.samples

    def samples_of_tokens(self, tokens: int) -> float:
        """Return tokens in samples, which need not be whole."""
        return tokens / self.seq_length if tokens % self.seq_length else tokens // self.seq_length


@dataclass(frozen=True)
class RateLengths:
    """The lengths of the parts of a run's schedule, counted in `unit`; those in steps alone hold for every batch size.

    unit: "steps", "samples" or, where rows are cut, "tokens".
    warmup, decay: up to the peak and to the minimum, from the run's start.
    fall: the last part of the decay, in which WSD falls; 0 if none is given.  run: the whole run.
    """

    unit: Literal["steps", "samples", "tokens"]
    warmup: float
    decay: float
    fall: float = 0
    run: float = 0
