"""Learning-rate schedules as pure functions of the number of updates already made, or of the samples in them.

`RATES[name](k, base_lr, **params)` is the rate of update number k, counted from 0; a step that was skipped because of
an overflow makes no update.  `base_lr` is the optimizer's learning rate; the parameters are those of
`megazero/config/schedules.py`.  Every schedule rises in a *warm-up* of w updates from a start to the peak, and then
falls, or stays where it is:

    peak  |      /\\               linear warm-up   share k / w                  reaches the peak at k = w
          |    /    \\             log warm-up      share log(k + 1) / log(w)    reaches the peak at k = w - 1
    start |  /         \\_______   end
          +---------------------
          0  w             end

`constant`, `linear`, `cosine`, `inverse-square-root` and `WSD` are Megatron-LM's rules, which count samples; with a
constant global batch the ratios are the same, and for these k may count samples as well, if the lengths do.
`WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR` are DeepSpeed's.  DeepSpeed's engine updates first and calls its
scheduler afterwards, so update k has the rate of call number k - 1: the first two updates have the start's.  Its
warm-up has at least two steps, and its cosine has taken its first step when the warm-up ends.

DeepSpeed's other two count from 1, so that update k has the rate of k steps.  `LRRangeTest` rises without an end, to
show from which rate on a loss grows.  `OneCycle` rises and falls once, and then decays; the momentum, an Adam's first
beta, moves against the rate: `MOMENTA[name](k, **params)` is that of update k.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from megazero.config.choices import SchedulerChoice, choose_sweep
from megazero.config.derived import rate_lengths
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.lengths import RunLength
from megazero.config.schedules import RUN_STYLES, SCHEDULES, WARMUP_TYPES
from megazero.config.values import Diagnostics
from megazero.errors import CheckpointError, ConfigError, Problem, raise_problems


def constant(
    updates: int, base_lr: float, *, lr_warmup_iters: float, lr_warmup_init: float, lr_warmup_type: str
) -> float:
    """Return a rate that rises from lr_warmup_init to base_lr, and stays there."""
    return _warmed(updates, lr_warmup_init, base_lr, num_steps=lr_warmup_iters, shape=lr_warmup_type)


def linear(updates: int, base_lr: float, *, lr_decay_iters: int, min_lr: float, **warmup: Any) -> float:
    """Return a rate that rises as `constant`, then falls straight to min_lr, reached at update lr_decay_iters."""
    return _decayed(updates, base_lr, lambda done: 1.0 - done, end=lr_decay_iters, min_lr=min_lr, warmup=warmup)


def cosine(updates: int, base_lr: float, *, lr_decay_iters: int, min_lr: float, **warmup: Any) -> float:
    """Return a rate that rises as `constant`, then falls along half a cosine to min_lr, at update lr_decay_iters."""
    return _decayed(updates, base_lr, _half_cosine, end=lr_decay_iters, min_lr=min_lr, warmup=warmup)


def inverse_square_root(updates: int, base_lr: float, *, lr_decay_iters: float, min_lr: float, **warmup: Any) -> float:
    """Return a rate that rises as `constant`, then falls with 1 / sqrt(updates), but not below min_lr."""
    start = warmup["lr_warmup_iters"]
    if start > 0 and updates <= start:
        return constant(updates, base_lr, **warmup)
    return min_lr if updates > lr_decay_iters else max(min_lr, base_lr * math.sqrt(max(start, 1) / max(updates, 1)))


def wsd(
    updates: int,
    base_lr: float,
    *,
    lr_decay_iters: float,
    min_lr: float,
    lr_wsd_decay_iters: float,
    lr_wsd_decay_style: str,
    **warmup: Any,
) -> float:
    """Return a rate that rises as `constant` and stays there, but falls to min_lr in the decay's last part (WSD)."""
    fallen = max(updates - (lr_decay_iters - lr_wsd_decay_iters), 0) / lr_wsd_decay_iters
    shape = _FALLS[lr_wsd_decay_style]
    return _decayed(updates, base_lr, lambda _: shape(fallen), end=lr_decay_iters, min_lr=min_lr, warmup=warmup)


def warmup_lr(
    updates: int,
    base_lr: float,
    *,
    warmup_min_lr: float,
    warmup_max_lr: float | None,
    warmup_num_steps: int,
    warmup_type: str,
) -> float:
    """Return a rate that rises from warmup_min_lr to warmup_max_lr (None: base_lr), and stays there."""
    peak = base_lr if warmup_max_lr is None else warmup_max_lr
    return _warmed(max(updates - 1, 0), warmup_min_lr, peak, num_steps=max(2, warmup_num_steps), shape=warmup_type)


def warmup_decay_lr(updates: int, base_lr: float, *, total_num_steps: int, **warmup: Any) -> float:
    """Return a rate that rises as `warmup_lr`, then falls straight to warmup_min_lr, at call total_num_steps."""
    call, length = updates - 1, max(2, warmup["warmup_num_steps"])
    if call < length:
        return warmup_lr(updates, base_lr, **warmup)
    low, peak = warmup["warmup_min_lr"], warmup_lr(length + 1, base_lr, **warmup)
    left = max(0.0, (total_num_steps - call) / max(1, total_num_steps - length))
    return float(low + left * (peak - low))


def warmup_cosine_lr(
    updates: int, base_lr: float, *, total_num_steps: int, cos_min_ratio: float, **warmup: Any
) -> float:
    """Return a rate whose ratio to base_lr rises from warmup_min_ratio to 1, then falls along half a cosine.

    The cosine ends at cos_min_ratio.  Before the first call, at update 0, the rate is 0, whatever warmup_min_ratio is.
    """
    call, length = updates - 1, max(2, warmup["warmup_num_steps"])
    if call < 0:
        return 0.0
    if call < length:
        start, shape = warmup["warmup_min_ratio"], warmup["warmup_type"]
        return base_lr * _warmed(call, start, 1.0, num_steps=length, shape=shape)
    done = min(1.0, (call - length + 1) / max(1, total_num_steps - length))
    return base_lr * (cos_min_ratio + _half_cosine(done) * (1.0 - cos_min_ratio))


def lr_range_test(
    updates: int,
    base_lr: float,
    *,
    lr_range_test_min_lr: float,
    lr_range_test_step_size: int,
    lr_range_test_step_rate: float,
    lr_range_test_staircase: bool,
) -> float:
    """Return a rate that rises by step_rate times its start in every step_size updates, in stairs or straight."""
    whole, part = divmod(updates, lr_range_test_step_size)
    intervals = whole if lr_range_test_staircase else whole + part / lr_range_test_step_size
    return lr_range_test_min_lr * (1.0 + lr_range_test_step_rate * intervals)


def one_cycle(
    updates: int,
    base_lr: float,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float,
    decay_step_size: int,
    **cycle: Any,
) -> float:
    """Return a rate that goes from cycle_min_lr to cycle_max_lr and back, and then falls as 1 / (1 + rate * time)."""
    after = updates - _cycle_length(cycle)
    if after <= 0:
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * _cycle_height(updates, cycle)
    return cycle_min_lr / (1.0 + (decay_lr_rate * after / decay_step_size if decay_step_size else 0.0))


def one_cycle_momentum(
    updates: int,
    *,
    cycle_momentum: bool,
    cycle_min_mom: float,
    cycle_max_mom: float,
    decay_mom_rate: float,
    decay_step_size: int,
    **cycle: Any,
) -> float | None:
    """Return a momentum that falls from cycle_max_mom to cycle_min_mom and rises again, then on without an end.

    None: it is not cycled.  The first update comes before DeepSpeed's first call, and has cycle_min_mom.
    """
    if not cycle_momentum:
        return None
    if updates == 0:
        return cycle_min_mom
    after = updates - _cycle_length(cycle)
    if after <= 0:
        return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * _cycle_height(updates, cycle)
    return cycle_max_mom * (1.0 + (decay_mom_rate * after / decay_step_size if decay_step_size else 0.0))


def _cycle_length(cycle: Mapping[str, Any]) -> int:
    """Return the number of updates of a cycle; without a size of its own its second half is as long as the first."""
    first, second = cycle["cycle_first_step_size"], cycle["cycle_second_step_size"]
    return int(first + (first if second is None else second))


def _cycle_height(updates: int, cycle: Mapping[str, Any]) -> float:
    """Return the height in the cycle, from 0 to 1 and back: straight, or in stairs where their number is given."""
    first, length = cycle["cycle_first_step_size"], _cycle_length(cycle)
    first_stairs, second_stairs = cycle["cycle_first_stair_count"], cycle["cycle_second_stair_count"]
    position = updates % length
    if position <= first:
        done, whole, stairs = position, first, first_stairs
    else:
        done, whole = length - position, length - first
        stairs = first_stairs if second_stairs is None else second_stairs
    return float(done * stairs // whole / stairs if stairs else done / whole)


RATES: Mapping[str, Callable[..., float]] = MappingProxyType(
    {
        "LRRangeTest": lr_range_test,
        "OneCycle": one_cycle,
        "WarmupLR": warmup_lr,
        "WarmupDecayLR": warmup_decay_lr,
        "WarmupCosineLR": warmup_cosine_lr,
        "constant": constant,
        "linear": linear,
        "cosine": cosine,
        "inverse-square-root": inverse_square_root,
        "WSD": wsd,
    }
)


def rate_of(choice: SchedulerChoice, updates: int, base_lr: float, *, min_lr: float | None = None) -> float:
    """Return the rate of update number `updates` under a chosen schedule.

    updates: the progress that the schedule counts, which may be in samples or tokens.  min_lr: None: the schedule's.
    """
    least = {} if min_lr is None or "min_lr" not in choice.params else {"min_lr": min_lr}
    return RATES[choice.type](updates, base_lr, **{**choice.params, **least})


def progress_of(choice: SchedulerChoice, updates: int, samples: int) -> int:
    """Return what the schedule counts after so many updates, of so many samples."""
    return updates if choice.unit == "iters" else samples * choice.tokens_per_sample


def increased_weight_decay(increase: Mapping[str, Any], progress: float) -> float | None:
    """Return the weight decay after some progress; None if it is constant.

    increase: "start" and "end", the "length" in the unit of the progress, and the "style": linear, or along a cosine.
    """
    if not increase:
        return None
    start, end, length = (increase[name] for name in ("start", "end", "length"))
    done = min(progress / length, 1.0)
    part = done if increase["style"] == "linear" else 1.0 - _half_cosine(done)
    return float(start + part * (end - start))


MOMENTA: Mapping[str, Callable[..., float | None]] = MappingProxyType({"OneCycle": one_cycle_momentum})


def momentum_of(choice: SchedulerChoice, updates: int) -> float | None:
    """Return the momentum of update number `updates`; None if the schedule leaves it alone.

    Raises ConfigError where the schedule has raised it to 1 or above, with which no average converges.
    """
    momentum = MOMENTA[choice.type](updates, **choice.params) if choice.type in MOMENTA else None
    if momentum is not None and momentum >= 1:
        given = (
            f"a momentum of {momentum:g} at update {updates} with decay_mom_rate {choice.params['decay_mom_rate']:g}"
        )
        rule = "OneCycle raises the momentum after the cycle, which stays below 1"
        raise ConfigError(Problem(given, rule, "decay_mom_rate 0, a smaller one, a larger decay_step_size"))
    return momentum


def write_momentum(groups: Iterable[dict[str, Any]], momentum: float | None) -> None:
    """Set the first beta of each param group that has betas; the second stays as it is.  None: change nothing."""
    for group in groups:
        if momentum is not None and "betas" in group:
            group["betas"] = (momentum, group["betas"][1])


def write_rate(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set the learning rate of param groups."""
    for group in groups:
        group["lr"] = lr


def write_weight_decay(groups: Iterable[dict[str, Any]], weight_decay: float | None) -> None:
    """Set the weight decay of param groups; None: change nothing."""
    for group in groups:
        if weight_decay is not None:
            group["weight_decay"] = weight_decay


def unmoved_momentum(choice: SchedulerChoice, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return one line if the schedule cycles a momentum and no param group has betas, as in DeepSpeed."""
    if momentum_of(choice, 0) is None or any("betas" in group for group in groups):
        return []
    return [f"{choice.type}: the momentum is not cycled, because the optimizer has no betas (cycle_momentum: false)"]


def _decayed(
    updates: int,
    peak: float,
    remaining: Callable[[float], float],
    *,
    end: float,
    min_lr: float,
    warmup: Mapping[str, Any],
) -> float:
    """Return the rate of a warm-up and a decay; `remaining` maps the decay's finished part to the height left."""
    start = warmup["lr_warmup_iters"]
    if start > 0 and updates <= start:
        return constant(updates, peak, **warmup)
    if updates > end:
        return min_lr
    return min_lr + remaining((updates - start) / (end - start)) * (peak - min_lr)


def _warmed(step: int, start: float, peak: float, *, num_steps: float, shape: str) -> float:
    """Return the rate at a step of a warm-up over num_steps; the peak after it."""
    part, whole = (math.log(step + 1), math.log(max(2, num_steps))) if shape == "log" else (step, num_steps)
    return peak if num_steps == 0 or part > whole else start + (peak - start) * part / whole


def _half_cosine(done: float) -> float:
    """Return half a cosine, which falls from 1 to 0 as `done` rises from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * done))


_FALLS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "exponential": lambda done: 2.0 * 0.5**done - 1.0,
        "linear": lambda done: 1.0 - done,
        "cosine": _half_cosine,
        "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
    }
)


# --- the schedule of a run -------------------------------------------------------------------------------------------

_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "peak": "--lr",
        "minimum": "--min-lr",
        "style": "--lr-decay-style",
        "warmup_steps": "--lr-warmup-iters",
        "decay_steps": "--lr-decay-iters (--train-iters without it)",
        "unit": "lengths in",
        "fall_steps": "--lr-wsd-decay-iters",
        "fall_style": "--lr-wsd-decay-style",
        "weight_decay": "weight decay",
        "decoupled": "--decoupled-lr, --decoupled-min-lr",
        "warmup_init": "--lr-warmup-init",
        "warmup_type": "--lr-warmup-type",
        "params": "--lr-decay-params",
    }
)
# {style: fields of a schedule that change none of its rates}
_UNUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "constant": ("minimum", "decay_steps"),
        "LRRangeTest": ("minimum", "decay_steps", "warmup_steps", "warmup_init", "warmup_type"),
        "OneCycle": ("decay_steps", "warmup_steps", "warmup_init", "warmup_type"),
    }
)


@dataclass(frozen=True)
class LearningRate:
    """The schedule of a run, as its checkpoints store it.

    peak, minimum, warmup_init: rates, all per step.
    style: the decay after the warm-up, one of `RUN_STYLES`; constant never falls, not even to the minimum.
    warmup_steps: length of the warm-up; a fraction of the decay gives a number that need not be whole.
    decay_steps: the step at which the minimum is reached, the warm-up included.
    params: all parameters of LRRangeTest or OneCycle, peak and minimum among them; their shapes need no other field.
    unit: "steps"; or "samples" or "tokens" if all lengths are these, and rates depend on those of the updates so far.
    fall_steps, fall_style: the length and the shape of WSD's fall, which ends with the decay.
    weight_decay: "start", "end", "style" and "length" of an increase; empty if weight decay is constant.
    decoupled: "peak" and "minimum" of the word embedding's and the head's rate; empty if it is that of the others.
    """

    peak: float
    minimum: float
    style: str
    warmup_steps: float
    decay_steps: float
    warmup_init: float = 0.0
    warmup_type: str = "linear"
    params: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "steps"
    fall_steps: float = 0
    fall_style: str = "exponential"
    weight_decay: Mapping[str, Any] = field(default_factory=dict)
    decoupled: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        raise_problems(ConfigError, self._problems())

    @classmethod
    def from_config(cls, config: OptimizerConfig, run: RunLength) -> "LearningRate":
        """Make the configured schedule; without a length of its own the decay lasts the whole run."""
        lengths = rate_lengths(config, run)
        diagnostics = Diagnostics()
        rates = {"lr": config.lr, "min_lr": config.min_lr}
        params = choose_sweep(config.lr_decay_style, config.lr_decay_params, rates, diagnostics)
        raise_problems(ConfigError, diagnostics.problems)
        return cls(
            peak=config.lr,
            minimum=config.min_lr,
            style=config.lr_decay_style,
            warmup_steps=lengths.warmup,
            decay_steps=lengths.decay,
            warmup_init=config.lr_warmup_init,
            warmup_type=config.lr_warmup_type,
            params=params,
            unit=lengths.unit,
            fall_steps=lengths.fall if config.lr_decay_style == "WSD" else 0,
            fall_style=config.lr_wsd_decay_style if config.lr_decay_style == "WSD" else "exponential",
            weight_decay=_increase(config, lengths.run),
            decoupled=_decoupled(config),
        )

    def progress(self, updates: int, samples: int, tokens: int = 0) -> int:
        """Return the progress of which rates are functions: updates made so far, or the samples or tokens in them."""
        return {"steps": updates, "samples": samples, "tokens": tokens}[self.unit]

    def at(self, updates: int) -> float:
        """Return the rate of the step that follows `updates` finished ones; of samples, if the unit is that."""
        if self.params:
            return rate_of(SchedulerChoice(type=self.style, params=self.params), updates, self.peak)
        return self._decaying(updates, self.peak, self.minimum)

    def decoupled_at(self, updates: int) -> float | None:
        """Return the word embedding's and the head's rate of the step that `at` is about; None if it is the same."""
        own = self.decoupled
        return self._decaying(updates, own["peak"], own["minimum"]) if own else None

    def _decaying(self, updates: int, peak: float, minimum: float) -> float:
        values = {
            "lr_warmup_iters": self.warmup_steps,
            "lr_warmup_init": self.warmup_init,
            "lr_warmup_type": self.warmup_type,
            "lr_decay_iters": self.decay_steps,
            "min_lr": minimum,
            "lr_wsd_decay_iters": self.fall_steps,
            "lr_wsd_decay_style": self.fall_style,
        }
        return RATES[self.style](updates, peak, **{name: values[name] for name in SCHEDULES[self.style]})

    def weight_decay_at(self, updates: int) -> float | None:
        """Return the weight decay of the step that follows `updates` finished ones; None if it is constant."""
        return increased_weight_decay(self.weight_decay, updates)

    def momentum(self, updates: int) -> float | None:
        """Return the momentum of the step that follows `updates` finished ones; None if it is the optimizer's own."""
        return momentum_of(SchedulerChoice(type=self.style, params=self.params), updates) if self.params else None

    def check_momentum(self, train_iters: int) -> None:
        """Raise ConfigError if the momentum would grow to 1 in a run of so many steps; it is highest in the last."""
        self.momentum(max(train_iters - 1, 0))

    def notices(self, groups: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return one line if the schedule cycles a momentum that the optimizer, of these groups, does not have."""
        choice = SchedulerChoice(type=self.style, params=self.params)
        return unmoved_momentum(choice, groups) if self.params else []

    def to_json(self) -> dict[str, Any]:
        """Return the schedule as a checkpoint stores it."""
        return asdict(self)

    def _problems(self) -> list[Problem]:
        problems = []
        if self.style not in RUN_STYLES:
            rule = "the decay style is a known one"
            problems.append(Problem(f"--lr-decay-style {self.style}", rule, ", ".join(RUN_STYLES)))
        if self.warmup_type not in WARMUP_TYPES:
            rule = "the warm-up has a known shape"
            problems.append(Problem(f"--lr-warmup-type {self.warmup_type}", rule, ", ".join(WARMUP_TYPES)))
        if not 0 <= self.minimum <= self.peak:
            given = f"--min-lr {self.minimum:g} with --lr {self.peak:g}"
            problems.append(Problem(given, "the minimum lies between 0 and the peak", f"0 to {self.peak:g}"))
        if not 0 <= self.warmup_init <= self.peak:
            given = f"--lr-warmup-init {self.warmup_init:g} with --lr {self.peak:g}"
            problems.append(Problem(given, "a warm-up does not fall", f"0 to {self.peak:g}"))
        if self.decoupled and not max(self.decoupled["minimum"], self.warmup_init) <= self.decoupled["peak"]:
            given = f"--decoupled-lr {self.decoupled['peak']:g} with a minimum of {self.decoupled['minimum']:g}"
            rule = f"it lies above its minimum and the warm-up's start, {self.warmup_init:g}"
            problems.append(Problem(given, rule, "a larger --decoupled-lr"))
        unit = self.unit
        flag = "iters" if unit == "steps" else unit
        if self.decay_steps < 1:
            given = f"--lr-decay-{flag} {self.decay_steps}"
            problems.append(Problem(given, f"the learning rate decays over at least one {unit[:-1]}", "1 and above"))
        elif not 0 <= self.warmup_steps < self.decay_steps:
            given = f"a warm-up of {self.warmup_steps:.12g} {unit} in a decay of {self.decay_steps:.12g}"
            legal = f"--lr-warmup-{flag} 0 to {math.ceil(self.decay_steps) - 1}, or --lr-warmup-fraction below 1"
            problems.append(Problem(given, "the warm-up ends before the decay does", legal))
        elif self.style == "WSD" and not 0 < self.fall_steps <= self.decay_steps - self.warmup_steps:
            given = f"a fall of {self.fall_steps:.12g} {unit} in a decay of {self.decay_steps:.12g}"
            rule = f"WSD falls within the decay, after the warm-up of {self.warmup_steps:.12g} {unit}"
            legal = f"--lr-wsd-decay-{flag} 1 to {math.floor(self.decay_steps - self.warmup_steps)}"
            problems.append(Problem(given, rule, legal))
        return problems


def reconcile(
    given: LearningRate, saved: Mapping[str, Any], config: OptimizerConfig, *, step_size: int | None = None
) -> LearningRate:
    """Return the schedule of a resumed run: `given` by this command line against `saved` in the checkpoint.

    step_size: the samples of every step of the run, those before the checkpoint included; None if steps differ.  Then
    lengths in steps and in samples can be compared.

    They have to agree unless the user chooses one: --override-opt-param-scheduler takes the command line's,
    --use-checkpoint-opt-param-scheduler the checkpoint's.  A checkpoint without one leaves it to the command line.
    Raises `CheckpointError` with every field that differs.
    """
    if config.override_opt_param_scheduler:
        return given
    if not saved:  # as in an imported checkpoint
        if config.use_checkpoint_opt_param_scheduler:
            given_flag, rule = "--use-checkpoint-opt-param-scheduler", "this checkpoint has no learning-rate schedule"
            raise CheckpointError(Problem(given_flag, rule, "the flags of a schedule"))
        return given
    if config.use_checkpoint_opt_param_scheduler:
        taken = _from_json(saved)
        if bool(taken.decoupled) != bool(given.decoupled):
            text = f"--decoupled-lr {given.decoupled.get('peak')}; the checkpoint: {taken.decoupled.get('peak')}"
            rule = "--use-checkpoint-opt-param-scheduler takes a decoupled rate only in place of another one"
            raise CheckpointError(Problem(text, rule, "the same, or --override-opt-param-scheduler"))
        # The optimizer has been made for the weight decay of this command line.
        if bool(taken.weight_decay) != bool(given.weight_decay):
            styles = (rate.weight_decay.get("style", "constant") for rate in (given, taken))
            text = f"--weight-decay-incr-style {next(styles)}; the checkpoint was saved with {next(styles)}"
            rule = "--use-checkpoint-opt-param-scheduler takes an increase of weight decay only in place of another one"
            raise CheckpointError(Problem(text, rule, "the same, or --override-opt-param-scheduler"))
        return taken
    saved = {
        "warmup_init": 0.0,
        "warmup_type": "linear",
        "params": {},
        "unit": "steps",
        "fall_steps": 0,
        "fall_style": "exponential",
        "weight_decay": {},
        "decoupled": {},
        **saved,
    }  # fields that older checkpoints do not have
    if _in_samples(given.to_json(), step_size) == _in_samples(saved, step_size):
        return given
    problems = [
        Problem(
            f"{_flag(given, name)} {value}; the checkpoint was saved with {saved.get(name)}",
            "a resumed run keeps its learning-rate schedule",
            "the same, or --override-opt-param-scheduler, or --use-checkpoint-opt-param-scheduler",
        )
        for name, value in given.to_json().items()
        if value != saved.get(name) and name not in _UNUSED.get(given.style, ())
    ]
    raise_problems(CheckpointError, problems)
    return given


def _in_samples(rate: Mapping[str, Any], step_size: int | None) -> dict[str, Any]:
    """Return the fields of a schedule in steps as those of the same schedule in samples; others as they are.

    Two shapes are not the same in both: a logarithmic warm-up, and an inverse square root without a warm-up.
    """
    is_other = rate["warmup_type"] == "log" or (rate["style"] == "inverse-square-root" and not rate["warmup_steps"])
    if step_size is None or rate["unit"] != "steps" or rate["params"] or is_other:
        return dict(rate)
    lengths = {name: rate[name] * step_size for name in ("warmup_steps", "decay_steps", "fall_steps")}
    grows = {"length": rate["weight_decay"]["length"] * step_size} if rate["weight_decay"] else {}
    return {**rate, **lengths, "unit": "samples", "weight_decay": {**rate["weight_decay"], **grows}}


def _increase(config: OptimizerConfig, length: float) -> dict[str, Any]:
    """Return the increase of weight decay over the run, in the form of `LearningRate.weight_decay`."""
    style, start, end = config.weight_decay_incr_style, config.start_weight_decay, config.end_weight_decay
    return {} if style == "constant" else {"start": start, "end": end, "style": style, "length": length}


def _decoupled(config: OptimizerConfig) -> dict[str, float]:
    """Return the rates of the word embedding and the head in the form of `LearningRate.decoupled`."""
    peak, minimum = config.decoupled_lr, config.decoupled_min_lr
    return {} if peak is None else {"peak": peak, "minimum": config.min_lr if minimum is None else minimum}


def _flag(rate: LearningRate, name: str) -> str:
    """Return the flag of a field, as it is spelled for the unit of the lengths."""
    return _FLAGS[name] if rate.unit == "steps" else _FLAGS[name].replace("-iters", f"-{rate.unit}")


def _from_json(saved: Mapping[str, Any]) -> LearningRate:
    try:
        return LearningRate(**saved)
    except TypeError as error:
        rule = "the saved learning-rate schedule has the fields of this version"
        raise CheckpointError(Problem(f"the checkpoint's schedule: {error}", rule)) from error
