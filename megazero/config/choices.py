"""Optimizers and learning-rate schedules that a configuration of the library may choose by name.

An optimizer is a class of torch.optim that updates every element by itself, so that it may run on flat slices of
parameters; its parameters have torch's names and defaults.  A schedule is one of DeepSpeed's warm-up schedules with its
documented parameters.  Here stand the names, what their values may be, and why others are refused; the update rules and
the schedules themselves are elsewhere (megazero/optim).
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, FieldInfo
from megazero.config.values import Diagnostics, InvalidValue, Location, coerce, unknown, violation
from megazero.errors import Problem


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerChoice:
    """A class of torch.optim by name, its learning rate, and its other arguments as torch names them."""

    type: str = "AdamW"
    lr: float = 1e-3
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SchedulerChoice:
    """A schedule by name; `params` are complete: everything that was not said has its default."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)


def _param(name: str, kind: str, default: Any, *, choices: tuple[str, ...] = (), **bounds: float) -> FieldInfo:
    return FieldInfo("", name, kind, choices, default, default is None, "", "", (), "", tuple(bounds.items()))


def _by_name(*params: FieldInfo) -> Mapping[str, FieldInfo]:
    return MappingProxyType({param.name: param for param in params})


# --- optimizers ------------------------------------------------------------------------------------------------------

_BETAS = _param("betas", "pair", (0.9, 0.999), ge=0, lt=1)
_EPS = _param("eps", "float", 1e-8, ge=0)
_NO_DECAY = _param("weight_decay", "float", 0.0, ge=0)
_MAXIMIZE = _param("maximize", "bool", False)
_DECOUPLED = _param("decoupled_weight_decay", "bool", False)
_AMSGRAD = _param("amsgrad", "bool", False)
_MOMENTUM = _param("momentum", "float", 0.0, ge=0)


@plain_dataclass(frozen=True)
class Optimizer:
    """One class of torch.optim: torch's default learning rate, and its arguments."""

    lr: float
    params: Mapping[str, FieldInfo]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        "AdamW": Optimizer(
            1e-3, _by_name(_BETAS, _EPS, _param("weight_decay", "float", 0.01, ge=0), _AMSGRAD, _MAXIMIZE)
        ),
        "Adam": Optimizer(1e-3, _by_name(_BETAS, _EPS, _NO_DECAY, _AMSGRAD, _MAXIMIZE, _DECOUPLED)),
        "SGD": Optimizer(
            1e-3,
            _by_name(
                _MOMENTUM, _param("dampening", "float", 0.0), _NO_DECAY, _param("nesterov", "bool", False), _MAXIMIZE
            ),
        ),
        "Adagrad": Optimizer(
            1e-2,
            _by_name(
                _param("lr_decay", "float", 0.0, ge=0),
                _NO_DECAY,
                _param("initial_accumulator_value", "float", 0.0, ge=0),
                _param("eps", "float", 1e-10, ge=0),
                _MAXIMIZE,
            ),
        ),
        "Adadelta": Optimizer(
            1.0,
            _by_name(_param("rho", "float", 0.9, ge=0, le=1), _param("eps", "float", 1e-6, ge=0), _NO_DECAY, _MAXIMIZE),
        ),
        "Adamax": Optimizer(2e-3, _by_name(_BETAS, _EPS, _NO_DECAY, _MAXIMIZE)),
        "NAdam": Optimizer(
            2e-3,
            _by_name(_BETAS, _EPS, _NO_DECAY, _param("momentum_decay", "float", 4e-3, ge=0), _DECOUPLED, _MAXIMIZE),
        ),
        "RAdam": Optimizer(1e-3, _by_name(_BETAS, _EPS, _NO_DECAY, _DECOUPLED, _MAXIMIZE)),
        "RMSprop": Optimizer(
            1e-2,
            _by_name(
                _param("alpha", "float", 0.99, ge=0),
                _EPS,
                _NO_DECAY,
                _MOMENTUM,
                _param("centered", "bool", False),
                _MAXIMIZE,
            ),
        ),
        "Rprop": Optimizer(
            1e-2,
            _by_name(
                _param("etas", "pair", (0.5, 1.2), gt=0), _param("step_sizes", "pair", (1e-6, 50.0), gt=0), _MAXIMIZE
            ),
        ),
        "ASGD": Optimizer(
            1e-2,
            _by_name(
                _param("lambd", "float", 1e-4),
                _param("alpha", "float", 0.75),
                _param("t0", "float", 1e6),
                _NO_DECAY,
                _MAXIMIZE,
            ),
        ),
    }
)

LR = _param("lr", "float", None, ge=0)

# Arguments that choose between implementations of one update rule, torch's or DeepSpeed's.
IMPLEMENTATION = ("foreach", "fused", "capturable", "torch_adam", "set_grad_none")

_COMPRESSED = "it compresses what the processes exchange, and here gradients are exchanged in full"
_WHOLE = "its update of one element depends on others, and an optimizer here sees flat slices of parameters"
_MUP = "it scales learning rates by shapes that only the mup package knows"

REFUSED_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "Lamb": _WHOLE,
        "OneBitLamb": _COMPRESSED,
        "OneBitAdam": _COMPRESSED,
        "ZeroOneAdam": _COMPRESSED,
        "Lion": "torch has no such optimizer",
        "Muon": _WHOLE,
        "Adafactor": _WHOLE,
        "LBFGS": "it evaluates the model several times a step",
        "SparseAdam": "gradients are dense",
        "MuAdam": _MUP,
        "MuAdamW": _MUP,
        "MuSGD": _MUP,
    }
)

# --- schedules -------------------------------------------------------------------------------------------------------

_WARMUP_STEPS = _param("warmup_num_steps", "int", 1000, ge=1)
_WARMUP_TYPE = _param("warmup_type", "str", "log", choices=("log", "linear"))
_TOTAL_STEPS = _param("total_num_steps", "int", None, ge=1)
_MIN_LR = _param("warmup_min_lr", "float", 0.0, ge=0)
_MAX_LR = _param("warmup_max_lr", "float", 0.001, ge=0)

SCHEDULERS: Mapping[str, Mapping[str, FieldInfo]] = MappingProxyType(
    {
        "WarmupLR": _by_name(_MIN_LR, _MAX_LR, _WARMUP_STEPS, _WARMUP_TYPE),
        "WarmupDecayLR": _by_name(_TOTAL_STEPS, _MIN_LR, _MAX_LR, _WARMUP_STEPS, _WARMUP_TYPE),
        "WarmupCosineLR": _by_name(
            _TOTAL_STEPS,
            _param("warmup_min_ratio", "float", 0.0, ge=0, le=1),
            _WARMUP_STEPS,
            _param("cos_min_ratio", "float", 0.0001, ge=0, le=1),
            _WARMUP_TYPE,
        ),
    }
)

_SWEEP = "it sweeps the learning rate to look for a good one, and is no schedule to train with here"
REFUSED_SCHEDULERS: Mapping[str, str] = MappingProxyType(
    {"LRRangeTest": _SWEEP, "OneCycle": "cycles of learning rate and momentum are not there"}
)


# What stands for "take the default" wherever a value may stand.
AUTO = "auto"


def known_type(place: Location, name: Any, known: Iterable[str], refused: Mapping[str, str]) -> str | Problem:
    """The name as the tables spell it (case doesn't matter), or why there is none."""
    spelt = {entry.lower(): entry for entry in (*known, *refused)}
    legal = ", ".join(known)
    if not isinstance(name, str) or not name:
        return Problem(place.quote(name), f"{place.path} is a name", legal)
    entry = spelt.get(name.lower())
    if entry is not None and entry in refused:
        return Problem(place.quote(name), f"refused: {refused[entry]}", legal)
    if entry is None:
        near = difflib.get_close_matches(name.lower(), [key.lower() for key in known], n=1, cutoff=0.6)
        first = [spelt[key] for key in near]
        legal = ", ".join([*first, *(key for key in known if key not in first)])
        return Problem(place.quote(name), "there is nothing of this name here", legal)
    return entry


def choose_optimizer(
    place: Location, name: Any, params: Mapping[str, Any], findings: Diagnostics, *, defaults: Mapping[str, Any]
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
    place: Location,
    name: Any,
    params: Mapping[str, Any],
    findings: Diagnostics,
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
        said = where.key("last_batch_iteration").quote(start)
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


def _warmup_outlasts(where: Location, values: Mapping[str, Any]) -> Problem:
    warmup, total = values["warmup_num_steps"], values["total_num_steps"]
    return Problem(
        f"{where.key('total_num_steps').quote(total)} with warmup_num_steps: {warmup}",
        "the schedule ends after its warm-up does",
        f"warmup_num_steps: {total}, total_num_steps: {warmup}",
    )


def _defaults(table: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {key: info.default for key, info in table.items() if not info.required}


def _read_params(
    place: Location, table: Mapping[str, FieldInfo], said: Mapping[str, Any], findings: Diagnostics
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
                values[name] = coerce(table[name], value)
            except InvalidValue:
                findings.problems.append(violation(where.quote(value), where.path, table[name], value))
    return values


def _conflicts(place: Location, values: Mapping[str, Any]) -> Iterator[Problem]:
    """What torch would refuse although every value by itself is legal."""
    if values.get("nesterov") and (values["momentum"] == 0 or values["dampening"] != 0):
        yield Problem(
            place.key("nesterov").quote(True), "Nesterov momentum has a momentum and no dampening", "momentum: 0.9"
        )
    if "etas" in values and not values["etas"][0] < 1 < values["etas"][1]:
        yield Problem(
            place.key("etas").quote(values["etas"]),
            "the first factor shrinks a step, the second grows it",
            "[0.5, 1.2]",
        )
    if "step_sizes" in values and values["step_sizes"][0] > values["step_sizes"][1]:
        yield Problem(
            place.key("step_sizes").quote(values["step_sizes"]), "the least step comes first", "[1e-06, 50.0]"
        )
