"""From words in a configuration to a choice of optimizer and schedule, checked against the tables of choices.py."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megazero.config.choices import (
    IMPLEMENTATION,
    LR,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    SCHEDULERS,
    OptimizerChoice,
    SchedulerChoice,
)
from megazero.config.conform import Findings, Place, Unfit, conform, unknown, violation
from megazero.config.fields import FieldInfo
from megazero.errors import Problem

# What stands for "take the default" wherever a value may stand.
AUTO = "auto"


def known_type(place: Place, name: Any, known: Iterable[str], refused: Mapping[str, str]) -> str | Problem:
    """The name as the tables spell it (case doesn't matter), or why there is none."""
    spelt = {entry.lower(): entry for entry in (*known, *refused)}
    legal = ", ".join(known)
    if not isinstance(name, str) or not name:
        return Problem(place.said(name), f"{place.path} is a name", legal)
    entry = spelt.get(name.lower())
    if entry is not None and entry in refused:
        return Problem(place.said(name), f"refused: {refused[entry]}", legal)
    if entry is None:
        near = difflib.get_close_matches(name.lower(), [key.lower() for key in known], n=1, cutoff=0.6)
        first = [spelt[key] for key in near]
        legal = ", ".join([*first, *(key for key in known if key not in first)])
        return Problem(place.said(name), "there is nothing of this name here", legal)
    return entry


def choose_optimizer(
    place: Place, name: Any, params: Mapping[str, Any], findings: Findings, *, defaults: Mapping[str, Any]
) -> OptimizerChoice:
    """The optimizer `name` with `params`, the learning rate among them; what is wrong goes to `findings`.

    place: the section, whose `type` and `params` the arguments are.  defaults: values that win over torch's defaults.
    """
    entry = known_type(place.key("type"), name, OPTIMIZERS, REFUSED_OPTIMIZERS)
    if isinstance(entry, Problem):
        findings.problems.append(entry)
        return OptimizerChoice()
    optimizer = OPTIMIZERS[entry]
    table = {"lr": LR, **optimizer.params}
    complete = {"lr": optimizer.lr} | _defaults(optimizer.params) | dict(defaults)
    given = _read_params(place.key("params"), table, params, findings)
    values = complete | given
    findings.problems.extend(_conflicts(place.key("params"), values))
    lr = values.pop("lr")
    return OptimizerChoice(type=entry, lr=lr, params=values)


def choose_scheduler(
    place: Place,
    name: Any,
    params: Mapping[str, Any],
    findings: Findings,
    *,
    lr: float,
    may_be_auto: tuple[str, ...] = (),
) -> SchedulerChoice | None:
    """The schedule `name` with `params`; `lr` is the optimizer's, which an automatic peak takes.

    may_be_auto: parameters without a default that the caller knows by itself; they are left out where they say "auto".
    """
    entry = known_type(place.key("type"), name, SCHEDULERS, REFUSED_SCHEDULERS)
    if isinstance(entry, Problem):
        findings.problems.append(entry)
        return None
    table, where = SCHEDULERS[entry], place.key("params")
    params = dict(params)
    start = params.pop("last_batch_iteration", -1)
    if start not in (-1, AUTO):
        said = where.key("last_batch_iteration").said(start)
        findings.problems.append(Problem(said, "a schedule goes on from a checkpoint", "last_batch_iteration: -1"))
    values = _defaults(table)
    if params.get("warmup_max_lr") == AUTO:
        values["warmup_max_lr"] = lr
    findings.problems.extend(
        Problem(f"{where.key(key)} is missing", f"{entry} needs a number that nobody else knows", f"{key}: 100000")
        for key, info in table.items()
        if info.required and (key not in params or (params[key] == AUTO and key not in may_be_auto))
    )
    values |= _read_params(where, table, params, findings)
    if values.get("total_num_steps", values["warmup_num_steps"]) < values["warmup_num_steps"]:
        findings.problems.append(_warmup_outlasts(where, values))
    return SchedulerChoice(type=entry, params=values)


def _warmup_outlasts(where: Place, values: Mapping[str, Any]) -> Problem:
    warmup, total = values["warmup_num_steps"], values["total_num_steps"]
    return Problem(
        f"{where.key('total_num_steps').said(total)} with warmup_num_steps: {warmup}",
        "the schedule ends after its warm-up does",
        f"warmup_num_steps: {total}, total_num_steps: {warmup}",
    )


def _defaults(table: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {key: info.default for key, info in table.items() if not info.required}


def _read_params(
    place: Place, table: Mapping[str, FieldInfo], said: Mapping[str, Any], findings: Findings
) -> dict[str, Any]:
    """What was said, in its type; what is automatic is left out."""
    values = {}
    for name, value in said.items():
        where = place.key(str(name))
        if name in IMPLEMENTATION:
            findings.notices.append(f"{where}: accepted, without effect: there is one implementation of each optimizer")
        elif name not in table:
            findings.problems.append(unknown(where, value, table))
        elif value != AUTO:
            try:
                values[name] = conform(table[name], value)
            except Unfit:
                findings.problems.append(violation(where, table[name], value))
    return values


def _conflicts(place: Place, values: Mapping[str, Any]) -> Iterator[Problem]:
    """What torch would refuse although every value by itself is legal."""
    if values.get("nesterov") and (values["momentum"] == 0 or values["dampening"] != 0):
        yield Problem(
            place.key("nesterov").said(True), "Nesterov momentum has a momentum and no dampening", "momentum: 0.9"
        )
    if "etas" in values and not values["etas"][0] < 1 < values["etas"][1]:
        yield Problem(
            place.key("etas").said(values["etas"]), "the first factor shrinks a step, the second grows it", "[0.5, 1.2]"
        )
    if "step_sizes" in values and values["step_sizes"][0] > values["step_sizes"][1]:
        yield Problem(place.key("step_sizes").said(values["step_sizes"]), "the least step comes first", "[1e-06, 50.0]")
