"""DeepSpeed's warm-up schedules as pure functions of the step.

`rate(step, base_lr)` is the rate that DeepSpeed's scheduler of the same name sets in its call number `step`, the first
one being number 0; `base_lr` is the learning rate that the optimizer was made with.  Step -1 stands for the time before
the first call.  DeepSpeed's engine updates first and calls its scheduler afterwards, so update number k (from 0) of a
DeepSpeed run takes `rate(k - 1)`: one update at the start rate, then another, for `rate(0)` is the start rate too.

With n = max(2, warmup_num_steps) a *warm-up* rises from 0 to 1 by

    log     log(step + 1) / log(n)      reaches 1 at step n - 1
    linear  step / n                    reaches 1 at step n

and from step n on the decay takes over: none in `WarmupLR`, a straight line that ends at `total_num_steps` in
`WarmupDecayLR`, half a cosine in `WarmupCosineLR`.  The cosine has taken its first step at step n already and ends one
step early, at total_num_steps - 1.  After its end each schedule stays where it is.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, Protocol

from megazero.errors import ConfigError, Problem, raise_problems

WARMUP_TYPES = ("log", "linear")
_STEPS, _RATE, _RATIO = "a whole number, 1 and above", "a number, 0 and above", "0 to 1"
_LEGAL: Mapping[str, str] = MappingProxyType(
    {
        "total_num_steps": _STEPS,
        "warmup_num_steps": _STEPS,
        "warmup_min_lr": _RATE,
        "warmup_max_lr": _RATE,
        "warmup_min_ratio": _RATIO,
        "cos_min_ratio": _RATIO,
        "warmup_type": ", ".join(WARMUP_TYPES),
    }
)


class Schedule(Protocol):
    """A learning rate as a function of the step."""

    def rate(self, step: int, base_lr: float) -> float:
        """The rate of call number `step` for a parameter group that was made with the rate `base_lr`."""


@dataclass(frozen=True)
class WarmupLR:
    """From warmup_min_lr up to warmup_max_lr, where it stays; None there is the optimizer's own rate."""

    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        raise_problems(ConfigError, _problems(vars(self)))

    def rate(self, step: int, base_lr: float) -> float:
        risen = _risen(step, self.warmup_num_steps, self.warmup_type)
        return _between(self.warmup_min_lr, base_lr if self.warmup_max_lr is None else self.warmup_max_lr, risen)


@dataclass(frozen=True)
class WarmupDecayLR:
    """Up to warmup_max_lr, then in a straight line back to warmup_min_lr, which it reaches at total_num_steps."""

    total_num_steps: int
    warmup_min_lr: float = 0.0
    warmup_max_lr: float | None = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        raise_problems(ConfigError, _problems(vars(self)))

    def rate(self, step: int, base_lr: float) -> float:
        peak = base_lr if self.warmup_max_lr is None else self.warmup_max_lr
        warmup = _length(self.warmup_num_steps)
        if step < warmup:
            return _between(self.warmup_min_lr, peak, _risen(step, warmup, self.warmup_type))
        left = (self.total_num_steps - step) / max(1, self.total_num_steps - warmup)
        return _between(self.warmup_min_lr, peak, max(0.0, left))


@dataclass(frozen=True)
class WarmupCosineLR:
    """Parts of the optimizer's own rate: from warmup_min_ratio up to 1, then half a cosine down to cos_min_ratio.

    Before the first call the rate is 0, whatever warmup_min_ratio says.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def __post_init__(self) -> None:
        raise_problems(ConfigError, _problems(vars(self)))

    def rate(self, step: int, base_lr: float) -> float:
        if step < 0:
            return 0.0
        warmup = _length(self.warmup_num_steps)
        if step < warmup:
            return base_lr * _between(self.warmup_min_ratio, 1.0, _risen(step, warmup, self.warmup_type))
        gone = min(1.0, (step - warmup + 1) / max(1, self.total_num_steps - warmup))
        return base_lr * _between(self.cos_min_ratio, 1.0, (1.0 + math.cos(math.pi * gone)) / 2)


SCHEDULES: Mapping[str, type[WarmupLR | WarmupDecayLR | WarmupCosineLR]] = MappingProxyType(
    {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR)}
)


def make_schedule(kind: str, params: Mapping[str, Any]) -> Schedule:
    """The schedule `kind` with its parameters; raises `ConfigError` with everything that is wrong in them."""
    if kind not in SCHEDULES:
        rule = "the learning-rate schedule is a known one"
        raise ConfigError(Problem(f"scheduler.type {kind}", rule, ", ".join(SCHEDULES)))
    known = {field.name: field for field in fields(SCHEDULES[kind])}
    problems = [
        Problem(f"scheduler.params.{name}", f"{kind} takes parameters that it knows", ", ".join(known))
        for name in params
        if name not in known
    ]
    problems += [
        Problem(f"scheduler.params without {name}", f"{kind} needs {name}", f"{name}: {_LEGAL[name]}")
        for name, field in known.items()
        if name not in params and field.default is MISSING
    ]
    given = {name: value for name, value in params.items() if name in known}
    raise_problems(ConfigError, problems + _problems(given))
    return SCHEDULES[kind](**given)


def _risen(step: int, num_steps: int, warmup_type: str) -> float:
    """How much of the warm-up is over, 0 to 1."""
    warmup = _length(num_steps)
    if step < 0 or step >= warmup:
        return float(step >= warmup)
    return step / warmup if warmup_type == "linear" else math.log(step + 1) / math.log(warmup)


def _length(num_steps: int) -> int:
    """Steps of the warm-up; the logarithm needs two."""
    return max(2, num_steps)


def _between(low: float, high: float, part: float) -> float:
    return low + (high - low) * part


def _problems(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with these parameters, each for itself and the two rates together."""
    problems = [
        Problem(f"scheduler.params.{name} {value!r}", "every parameter of a schedule lies in its range", _LEGAL[name])
        for name, value in values.items()
        if not _is_legal(name, value)
    ]
    low, high = values.get("warmup_min_lr"), values.get("warmup_max_lr")
    if not problems and low is not None and high is not None and low > high:
        given = f"scheduler.params.warmup_min_lr {low:g} with warmup_max_lr {high:g}"
        problems.append(Problem(given, "a warm-up does not fall", f"warmup_min_lr up to {high:g}"))
    return problems


def _is_legal(name: str, value: Any) -> bool:
    if name == "warmup_type":
        return value in WARMUP_TYPES
    if value is None:
        return name == "warmup_max_lr"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return False
    if _LEGAL[name] == _STEPS:
        return value >= 1 and float(value).is_integer()
    return 0 <= value <= (1 if _LEGAL[name] == _RATIO else math.inf)
