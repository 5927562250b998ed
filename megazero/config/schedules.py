"""The tables of learning-rate schedules: the parameters of each, and why others are refused.

`megazero/optim/schedules.py` computes the schedules, with one function for each.  DeepSpeed's three have its documented
names and defaults.  The three of Megatron-LM are called after their decay, and their parameters after its flags; their
peak is the optimizer's learning rate.
"""

from collections.abc import Mapping
from types import MappingProxyType

from megazero.config.fields import FieldInfo, by_name, parameter

WARMUP_TYPES = ("log", "linear")
_WARMUP_STEPS = parameter("warmup_num_steps", "int", 1000, ge=1)
_WARMUP_TYPE = parameter("warmup_type", "str", "log", choices=WARMUP_TYPES)
_TOTAL_STEPS = parameter("total_num_steps", "int", None, ge=1)
_MIN_LR = parameter("warmup_min_lr", "float", 0.0, ge=0)
_MAX_LR = parameter("warmup_max_lr", "float", 0.001, ge=0)

_RUN_WARMUP = (
    parameter("lr_warmup_iters", "int", 0, ge=0),
    parameter("lr_warmup_init", "float", 0.0, ge=0),
    parameter("lr_warmup_type", "str", "linear", choices=WARMUP_TYPES),
)
_RUN_DECAY = (parameter("lr_decay_iters", "int", None, ge=1), parameter("min_lr", "float", 0.0, ge=0))

SCHEDULES: Mapping[str, Mapping[str, FieldInfo]] = MappingProxyType(
    {
        "WarmupLR": by_name(_MIN_LR, _MAX_LR, _WARMUP_STEPS, _WARMUP_TYPE),
        "WarmupDecayLR": by_name(_TOTAL_STEPS, _MIN_LR, _MAX_LR, _WARMUP_STEPS, _WARMUP_TYPE),
        "WarmupCosineLR": by_name(
            _TOTAL_STEPS,
            parameter("warmup_min_ratio", "float", 0.0, ge=0, le=1),
            _WARMUP_STEPS,
            parameter("cos_min_ratio", "float", 0.0001, ge=0, le=1),
            _WARMUP_TYPE,
        ),
        "constant": by_name(*_RUN_WARMUP),
        "linear": by_name(*_RUN_WARMUP, *_RUN_DECAY),
        "cosine": by_name(*_RUN_WARMUP, *_RUN_DECAY),
    }
)

_SWEEP = "it sweeps the learning rate to look for a good one, and is no schedule to train with here"
REFUSED_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {"LRRangeTest": _SWEEP, "OneCycle": "cycles of learning rate and momentum are not there"}
)
