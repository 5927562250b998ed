"""The learning rate as a pure function of the step.

A *step* here is the number of optimizer steps already taken; a step that was skipped because of overflow does not
count, so the first step of a run is step 0 and uses `rate.at(0)`.  The *warm-up* rises from zero to the peak on a
straight line, the *decay* falls from the peak to the minimum, and from the end of the decay on the rate stays at the
minimum.  This is Megatron-LM's rule, which counts samples; with a constant global batch the ratios are the same.

    peak  |      /\\
          |    /    \\
          |  /         \\_______  minimum
        0 |/_____________________
          0  warm-up   decay_steps
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from megazero.config.engine_sections import OptimizerConfig
from megazero.errors import CheckpointError, ConfigError, Problem, raise_problems

STYLES = ("constant", "linear", "cosine")
_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "peak": "--lr",
        "minimum": "--min-lr",
        "style": "--lr-decay-style",
        "warmup_steps": "--lr-warmup-iters",
        "decay_steps": "--lr-decay-iters (--train-iters without it)",
    }
)
_UNUSED_BY_CONSTANT = ("minimum", "decay_steps")


@dataclass(frozen=True)
class LearningRate:
    """A schedule of the learning rate.

    peak, minimum: rates, both per step.
    style: how it falls after the warm-up, one of `STYLES`; constant never falls, not even to the minimum.
    warmup_steps: length of the warm-up; a fraction of the decay gives a number that need not be whole.
    decay_steps: the step at which the minimum is reached, the warm-up included.
    """

    peak: float
    minimum: float
    style: str
    warmup_steps: float
    decay_steps: int

    def __post_init__(self) -> None:
        raise_problems(ConfigError, self._problems())

    @classmethod
    def from_config(cls, config: OptimizerConfig, *, train_iters: int) -> "LearningRate":
        """The schedule a user asked for; without --lr-decay-iters the decay lasts the whole run of `train_iters`."""
        decay_steps = train_iters if config.lr_decay_iters is None else config.lr_decay_iters
        fraction = config.lr_warmup_fraction
        return cls(
            peak=config.lr,
            minimum=config.min_lr,
            style=config.lr_decay_style,
            warmup_steps=config.lr_warmup_iters if fraction is None else fraction * decay_steps,
            decay_steps=decay_steps,
        )

    def at(self, step: int) -> float:
        """The rate of the step that follows `step` finished ones."""
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step > self.decay_steps:
            return self.minimum
        done = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.minimum + self._remaining(done) * (self.peak - self.minimum)

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps of the schedule."""
        return asdict(self)

    def _remaining(self, done: float) -> float:
        """How much of the way from peak to minimum is left when the fraction `done` of the decay is over."""
        if self.style == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0 - done

    def _problems(self) -> list[Problem]:
        problems = []
        if self.style not in STYLES:
            rule = "the decay style is a known one"
            problems.append(Problem(f"--lr-decay-style {self.style}", rule, ", ".join(STYLES)))
        if not 0 <= self.minimum <= self.peak:
            given = f"--min-lr {self.minimum:g} with --lr {self.peak:g}"
            problems.append(Problem(given, "the minimum lies between 0 and the peak", f"0 to {self.peak:g}"))
        if self.decay_steps < 1:
            given = f"--lr-decay-iters {self.decay_steps}"
            problems.append(Problem(given, "the learning rate decays over at least one step", "1 and above"))
        elif not 0 <= self.warmup_steps < self.decay_steps:
            given = f"a warm-up of {self.warmup_steps:g} steps in a decay of {self.decay_steps}"
            legal = f"--lr-warmup-iters 0 to {self.decay_steps - 1}, or --lr-warmup-fraction below 1"
            problems.append(Problem(given, "the warm-up ends before the decay does", legal))
        return problems


def reconcile(given: LearningRate, saved: Mapping[str, Any], config: OptimizerConfig) -> LearningRate:
    """The schedule of a resumed run: `given` by this command line against `saved` in the checkpoint.

    They have to agree unless the user says which one counts: --override-opt-param-scheduler takes the command line's,
    --use-checkpoint-opt-param-scheduler the checkpoint's.  Raises `CheckpointError` with every field that differs.
    """
    if config.override_opt_param_scheduler:
        return given
    if config.use_checkpoint_opt_param_scheduler:
        return _from_json(saved)
    problems = [
        Problem(
            f"{_FLAGS[name]} {value}; the checkpoint was saved with {saved.get(name)}",
            "a resumed run keeps its learning-rate schedule",
            "the same, or --override-opt-param-scheduler, or --use-checkpoint-opt-param-scheduler",
        )
        for name, value in given.to_json().items()
        if value != saved.get(name) and not (given.style == "constant" and name in _UNUSED_BY_CONSTANT)
    ]
    raise_problems(CheckpointError, problems)
    return given


def _from_json(saved: Mapping[str, Any]) -> LearningRate:
    try:
        return LearningRate(**saved)
    except TypeError as error:
        rule = "the saved learning-rate schedule has the fields of this version"
        raise CheckpointError(Problem(f"the checkpoint's schedule: {error}", rule)) from error
