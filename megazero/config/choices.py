"""Checks the choice of an optimizer or a learning-rate schedule, a name and parameters, against tables of both.

The tables are `optimizers.py` and `schedules.py`; a choice is one of their rows with a value for every parameter.
`choose_optimizer` and `choose_scheduler` read a section of a file; a run's settings are read by
`megazero/rules/optimizer.py`.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, FieldInfo, parameter
from megazero.config.optimizers import IMPLEMENTATION, LR, OPTIMIZERS, REFUSED_OPTIMIZERS
from megazero.config.param_groups import ParamGroup
from megazero.config.schedules import LIBRARY_PARAMS, RATE_SETTINGS, SCHEDULES, TOKENS_PER_SAMPLE, UNITS, Unit
from megazero.config.values import Diagnostics, InvalidValue, Location, as_number, coerce, unknown, violation
from megazero.errors import Problem


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerChoice:
    """A class of torch.optim by name, its learning rate, and its other arguments as torch names them.

    decoupled_lr: the learning rate of `decoupled_parameters`, names as those of `keep_in_fp32`; None: there are none.
    param_groups: those of parameters by patterns of their names.
    """

    type: str = "AdamW"
    lr: float = 1e-3
    params: Mapping[str, Any] = field(default_factory=dict)
    decoupled_lr: float | None = None
    decoupled_parameters: tuple[str, ...] = ()
    param_groups: tuple[ParamGroup, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SchedulerChoice:
    """A learning-rate schedule by name; `params` hold a value for every parameter, by default the table's.

    unit: what all lengths count, "iters", "samples" or "tokens".  tokens_per_sample: where they count tokens.
    weight_decay: "start", "end", "style" and "length" of an increase; empty if weight decay is constant.
    decoupled_min_lr: the least rate of parameters whose rate is decoupled; None: that of the others.
    """

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)
    unit: Unit = "iters"
    tokens_per_sample: int = 1
    weight_decay: Mapping[str, Any] = field(default_factory=dict)
    decoupled_min_lr: float | None = None


# The value that means "take the default", wherever a value may stand.
AUTO = "auto"


def known_type(location: Location, name: Any, known: Iterable[str], refused: Mapping[str, str]) -> str | Problem:
    """Return the name as the tables spell it (case doesn't matter), or the problem if no entry may be chosen by it."""
    spelt = {entry.lower(): entry for entry in (*known, *refused)}
    legal = ", ".join(known)
    if not isinstance(name, str) or not name:
        return Problem(location.quote(name), f"{location.path} is a name", legal)
    entry = spelt.get(name.lower())
    if entry is not None and entry in refused:
        return Problem(location.quote(name), f"refused: {refused[entry]}", legal)
    if entry is None:
        near = difflib.get_close_matches(name.lower(), [key.lower() for key in known], n=1, cutoff=0.6)
        first = [spelt[key] for key in near]
        legal = ", ".join([*first, *(key for key in known if key not in first)])
        return Problem(location.quote(name), "there is nothing of this name here", legal)
    return entry


def choose_optimizer(
    location: Location, name: Any, params: Mapping[str, Any], diagnostics: Diagnostics, *, defaults: Mapping[str, Any]
) -> OptimizerChoice:
    """Return the optimizer `name` with `params`, among them the learning rate; problems go to `diagnostics`.

    location: the section that `name` (its `type`) and `params` come from.
    defaults: values that replace torch's defaults.
    """
    entry = known_type(location.key("type"), name, OPTIMIZERS, REFUSED_OPTIMIZERS)
    if isinstance(entry, Problem):
        diagnostics.problems.append(entry)
        return OptimizerChoice()
    optimizer = OPTIMIZERS[entry]
    table = {"lr": LR, **optimizer.params}
    complete = {"lr": optimizer.lr} | defaults_of(optimizer.params) | dict(defaults)
    given = read_params(location.key("params"), table, params, diagnostics)
    values = complete | given
    diagnostics.problems.extend(optimizer_conflicts(location.key("params"), values))
    lr = values.pop("lr")
    return OptimizerChoice(type=entry, lr=lr, params=values)


def choose_scheduler(
    location: Location,
    name: Any,
    params: Mapping[str, Any],
    diagnostics: Diagnostics,
    *,
    lr: float | None,
    may_be_auto: tuple[str, ...] = (),
    in_library: bool = False,
) -> SchedulerChoice | None:
    """Return the schedule `name` with `params`, or None if there is no such schedule; problems go to `diagnostics`.

    lr: the optimizer's learning rate, which an automatic peak takes; None if it is not determined yet.
    may_be_auto: parameters without a default that the caller computes itself; where they are "auto" they are left out.
    in_library: True if the schedules of a run also take lengths in samples or tokens, and `LIBRARY_PARAMS`.
    """
    entry = known_type(location.key("type"), name, SCHEDULES, {})
    if isinstance(entry, Problem):
        diagnostics.problems.append(entry)
        return None
    table, where = SCHEDULES[entry], location.key("params")
    params = dict(params)
    unit = UNITS[0]
    if in_library and "lr_warmup_iters" in table:
        unit = next((unit for unit in UNITS[1:] if any(str(name).endswith(f"_{unit}") for name in params)), unit)
        table = {**table, **LIBRARY_PARAMS, **({TOKENS_PER_SAMPLE.name: TOKENS_PER_SAMPLE} if unit == "tokens" else {})}
        table = {spelt: replace(info, name=spelt) for info in table.values() for spelt in (_in_unit(info.name, unit),)}
    start = params.pop("last_batch_iteration", -1)
    if start not in (-1, AUTO):
        given = where.key("last_batch_iteration").quote(start)
        diagnostics.problems.append(Problem(given, "a schedule goes on from a checkpoint", "last_batch_iteration: -1"))
    values = defaults_of(table)
    if params.get("warmup_max_lr") == AUTO:
        values["warmup_max_lr"] = lr
    diagnostics.problems.extend(
        Problem(
            where.key(key).quote(AUTO) if key in params else f"{where.key(key)} is missing",
            f"{entry} needs a number that is in no other setting",
            f"{key}: {100000 if info.kind == 'int' else 0.001}",
        )
        for key, info in table.items()
        if info.required and (key not in params or (params[key] == AUTO and key not in may_be_auto))
    )
    values |= read_params(where, table, params, diagnostics)
    values = {name.replace(f"_{unit}", "_iters"): value for name, value in values.items()}
    conflicts = [*_schedule_conflicts(where, values), *_increase_conflicts(where, values)]
    diagnostics.problems.extend(
        Problem(*(_in_unit(part, unit) for part in (each.given, each.rule, each.legal))) for each in conflicts
    )
    increase = {
        "style": values.pop("weight_decay_incr_style", "constant"),
        "start": values.pop("start_weight_decay", None),
        "end": values.pop("end_weight_decay", None),
        "length": values.pop("weight_decay_incr_iters", None),
    }
    return SchedulerChoice(
        type=entry,
        unit=unit,
        tokens_per_sample=values.pop(TOKENS_PER_SAMPLE.name, 1),
        decoupled_min_lr=values.pop("decoupled_min_lr", None),
        weight_decay={} if increase["style"] == "constant" else increase,
        params=values,
    )


def _in_unit(text: str, unit: str) -> str:
    """Return a text in which the names of lengths end as those of a unit do."""
    return text.replace("_iters", f"_{unit}")


def _increase_conflicts(location: Location, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each part that an increase of weight decay lacks, or has without one; or for a fall."""
    parts = {name: values.get(name) for name in ("start_weight_decay", "end_weight_decay", "weight_decay_incr_iters")}
    if values.get("weight_decay_incr_style", "constant") == "constant":
        for name, value in parts.items():
            if value is not None:
                rule = "weight decay is constant without a style of its increase"
                yield Problem(location.key(name).quote(value), rule, 'weight_decay_incr_style: "linear"')
        return
    for name, value in parts.items():
        if value is None:
            rule = "an increase of weight decay has two ends and a length"
            yield Problem(f"{location.key(name)} is missing", rule, f"{name}: {100000 if 'iters' in name else 0.1}")
    start, end = parts["start_weight_decay"], parts["end_weight_decay"]
    if start is not None and end is not None and start > end:
        given = f"{location.key('start_weight_decay').quote(start)} with end_weight_decay: {end:g}"
        yield Problem(given, "weight decay increases", f"start_weight_decay: 0 to {end:g}")


def _schedule_conflicts(location: Location, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for every combination of parameters that is illegal although each of them is legal alone."""
    end = values.get("total_num_steps")
    if end is not None and end < values["warmup_num_steps"]:
        warmup = values["warmup_num_steps"]
        yield Problem(
            f"{location.key('total_num_steps').quote(end)} with warmup_num_steps: {warmup}",
            "the schedule ends after its warm-up does",
            f"warmup_num_steps: {end}, total_num_steps: {warmup}",
        )
    end = values.get("lr_decay_iters")
    if end is not None and end <= values["lr_warmup_iters"]:
        yield Problem(
            f"{location.key('lr_warmup_iters').quote(values['lr_warmup_iters'])} with lr_decay_iters: {end}",
            "the warm-up ends before the decay does",
            f"lr_warmup_iters: {end - 1}, lr_decay_iters: {values['lr_warmup_iters'] + 1}",
        )
    fall = values.get("lr_wsd_decay_iters")
    if fall is not None and end is not None and 0 < end - values["lr_warmup_iters"] < fall:
        room = end - values["lr_warmup_iters"]
        given = f"{location.key('lr_wsd_decay_iters').quote(fall)} with lr_decay_iters: {end}"
        yield Problem(given, "the fall at the end begins after the warm-up", f"lr_wsd_decay_iters: {room}")
    peak = values.get("warmup_max_lr")
    if peak is not None and values["warmup_min_lr"] > peak:
        given = f"{location.key('warmup_min_lr').quote(values['warmup_min_lr'])} with warmup_max_lr: {peak:g}"
        yield Problem(given, "a warm-up does not fall", f"warmup_min_lr: 0 to {peak:g}")
    yield from _cycle_conflicts(location, values)


def _cycle_conflicts(location: Location, values: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each pair of ends of OneCycle, two rates or two momenta, of which the lower is above."""
    for low, high in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
        if low in values and high in values and values[low] > values[high]:
            given = f"{location.key(low).quote(values[low])} with {high}: {values[high]:g}"
            yield Problem(given, "a cycle's minimum is at most its maximum", f"{low}: 0 to {values[high]:g}")


def choose_sweep(
    style: str, words: Iterable[str], rates: Mapping[str, float], diagnostics: Diagnostics
) -> dict[str, Any]:
    """Return all parameters of a run's LRRangeTest or OneCycle by name; problems are added to `diagnostics`.

    style, words: --lr-decay-style and --lr-decay-params.  rates: the settings that hold learning rates, by name.
    Other styles have settings for all of their parameters: for these the result is empty.
    """
    own = RATE_SETTINGS.get(style)
    if own is None:
        return {}
    location, table = Location("--lr-decay-params"), SCHEDULES[style]
    given = key_values(location, words, "cycle_first_step_size=1000", diagnostics)
    for name in own.keys() & given.keys():
        quoted, flag = location.key(name).quote(given.pop(name)), own[name].replace("_", "-")
        diagnostics.problems.append(Problem(quoted, f"{name} has a setting of its own", f"--{flag}"))
    others = {name: info for name, info in table.items() if name not in own}
    values = defaults_of(others) | read_params(location, others, given, diagnostics)
    values |= {name: rates[setting] for name, setting in own.items()}
    # --lr and --min-lr have a rule of their own.
    momenta = {name: value for name, value in values.items() if name not in own}
    diagnostics.problems.extend(_cycle_conflicts(location, momenta))
    return values


def key_values(location: Location, words: Iterable[str], example: str, diagnostics: Diagnostics) -> dict[str, Any]:
    """Return the values of a flag's words by name: one value, `nesterov=true`, or a list, `etas=0.5,1.2`.

    location: the flag.  example: what messages show as legal.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = word.partition("=")
        if not name or not text or name in values:
            rule = "a parameter is given once" if name in values else "a parameter is a name and its value"
            diagnostics.problems.append(Problem(f"{location} {word}", rule, example))
            continue
        items = [_typed(item) for item in text.split(",")]
        values[name] = items[0] if len(items) == 1 else items
    return values


def _typed(word: str) -> Any:
    """Return the word in the type that a file would give it, so that messages quote numbers and truth values so."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    number = as_number(word)
    return word if number is None else number


def changed_params(optimizer: OptimizerChoice | None, scheduler: SchedulerChoice | None) -> dict[str, Any]:
    """Return the parameters whose values are not their defaults, by dotted names such as "optimizer.params.betas"."""
    tables, changed = {}, {}
    if optimizer is not None:
        known = OPTIMIZERS[optimizer.type]
        tables["optimizer.params"] = known.params, optimizer.params
        changed = {"optimizer.lr": optimizer.lr} if optimizer.lr != known.lr else {}
    if scheduler is not None:
        tables["scheduler.params"] = SCHEDULES[scheduler.type], scheduler.params
    for path, (table, params) in tables.items():
        changed |= {f"{path}.{name}": value for name, value in params.items() if value != table[name].default}
    return changed


def defaults_of(table: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {key: info.default for key, info in table.items() if not info.required}


def read_params(
    location: Location, table: Mapping[str, FieldInfo], given: Mapping[str, Any], diagnostics: Diagnostics
) -> dict[str, Any]:
    """Return the given values of parameters, each in its parameter's type, without those that are "auto".

    given: the values as the user wrote them, by name.  Problems and notices are added to `diagnostics`.
    """
    values = {}
    for name, value in given.items():
        where = location.key(str(name))
        if name in IMPLEMENTATION:
            diagnostics.notices.append(
                f"{where}: accepted, without effect: there is one implementation of each optimizer"
            )
        elif name not in table:
            diagnostics.problems.append(unknown(where, value, table))
        elif value != AUTO:
            try:
                values[name] = coerce(table[name], value)
            except InvalidValue:
                diagnostics.problems.append(violation(where.quote(value), where.path, table[name], value))
    return values


def choose_param_groups(
    location: Location, texts: Iterable[str], optimizer: str, diagnostics: Diagnostics
) -> tuple[ParamGroup, ...]:
    """Return the param groups of texts such as "*.bias lr=0.001 weight_decay=0"; problems go to `diagnostics`.

    optimizer: by its name in the table.
    """
    decays = "weight_decay" in OPTIMIZERS[optimizer].params
    own = {"lr": parameter("lr", "float", None, optional=True, gt=0)}
    if decays:
        own["weight_decay"] = parameter("weight_decay", "float", None, optional=True, ge=0)
    example = f"*.bias lr=0.001{' weight_decay=0' if decays else ''}"
    found = []
    for text in texts:
        pattern, *words = text.split() or [""]
        if not words or "=" in pattern:
            rule = "a param group is a pattern of names and, behind it, what is its own"
            diagnostics.problems.append(Problem(location.quote(text), rule, example))
            continue
        values = key_values(location, words, example, diagnostics)
        found.append(ParamGroup(pattern, **read_params(location.key(pattern), own, values, diagnostics)))
    return tuple(found)


def optimizer_conflicts(
    location: Location, values: Mapping[str, Any], *, momentum: str = "momentum: 0.9"
) -> Iterator[Problem]:
    """Yield a problem for every combination of values that torch would refuse although each value is legal alone.

    momentum: a legal momentum, written as the user gives it.
    """
    if values.get("nesterov"):
        nesterov = location.key("nesterov").quote(True)
        if values["momentum"] == 0:
            yield Problem(f"{nesterov} with momentum 0", "Nesterov's method has a momentum", momentum)
        if values["dampening"] != 0:
            given = f"{nesterov} with dampening: {values['dampening']:g}"
            yield Problem(given, "Nesterov's method has no dampening", "dampening: 0")
    if "etas" in values and not values["etas"][0] < 1 < values["etas"][1]:
        yield Problem(
            location.key("etas").quote(values["etas"]),
            "the first factor shrinks a step, the second grows it",
            "[0.5, 1.2]",
        )
    if "min_coeff" in values and values["min_coeff"] > values["max_coeff"]:
        given = f"{location.key('min_coeff').quote(values['min_coeff'])} with max_coeff: {values['max_coeff']:g}"
        yield Problem(given, "the least trust ratio is at most the largest", f"min_coeff: 0 to {values['max_coeff']:g}")
    if "step_sizes" in values and values["step_sizes"][0] > values["step_sizes"][1]:
        yield Problem(
            location.key("step_sizes").quote(values["step_sizes"]), "the least step comes first", "[1e-06, 50.0]"
        )
