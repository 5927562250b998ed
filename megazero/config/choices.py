"""Optimizers and learning-rate schedules that a configuration of the library may choose by name.

An optimizer is a class of torch.optim that updates every element by itself, so that it may run on flat slices of
parameters; its parameters have torch's names and defaults.  A schedule is one of DeepSpeed's warm-up schedules with its
documented parameters.  Here stand the names, what their values may be, and why others are refused; the update rules and
the schedules themselves are elsewhere (megazero/optim).
"""

from collections.abc import Mapping
from dataclasses import dataclass as plain_dataclass
from dataclasses import field
from types import MappingProxyType
from typing import Any

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, FieldInfo


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
