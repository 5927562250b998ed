"""The tables of learning-rate schedules: the parameters of each, and why others are refused.

`megazero/optim/schedules.py` computes the schedules, with one function for each.  DeepSpeed's five have its documented
names and defaults.  The five of Megatron-LM are called after their decay, and their parameters after its flags; their
peak is the optimizer's learning rate.

A run chooses one of `RUN_STYLES` by --lr-decay-style.  Two of these are DeepSpeed's, whose learning rates are --lr and
--min-lr (`RATE_SETTINGS`); their other parameters are given by --lr-decay-params.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from megazero.config.fields import FieldInfo, by_name, parameter

WARMUP_TYPES = ("log", "linear")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
_WARMUP_STEPS = parameter("warmup_num_steps", "int", 1000, ge=0)
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
        "LRRangeTest": by_name(
            parameter("lr_range_test_min_lr", "float", 0.001, ge=0),
            parameter("lr_range_test_step_size", "int", 2000, ge=1),
            parameter("lr_range_test_step_rate", "float", 1.0, ge=0),
            parameter("lr_range_test_staircase", "bool", False),
        ),
        "OneCycle": by_name(
            parameter("cycle_min_lr", "float", None, ge=0),
            parameter("cycle_max_lr", "float", None, ge=0),
            parameter("decay_lr_rate", "float", 0.0, ge=0),
            parameter("cycle_first_step_size", "int", 2000, ge=1),
            parameter("cycle_second_step_size", "int", None, optional=True, ge=0),
            parameter("cycle_first_stair_count", "int", 0, ge=0),
            parameter("cycle_second_stair_count", "int", None, optional=True, ge=0),
            parameter("decay_step_size", "int", 0, ge=0),
            parameter("cycle_momentum", "bool", True),
            parameter("cycle_min_mom", "float", 0.8, ge=0, lt=1),
            parameter("cycle_max_mom", "float", 0.9, ge=0, lt=1),
            parameter("decay_mom_rate", "float", 0.0, ge=0),
        ),
        "constant": by_name(*_RUN_WARMUP),
        "linear": by_name(*_RUN_WARMUP, *_RUN_DECAY),
        "cosine": by_name(*_RUN_WARMUP, *_RUN_DECAY),
        "inverse-square-root": by_name(*_RUN_WARMUP, *_RUN_DECAY),
        "WSD": by_name(
            *_RUN_WARMUP,
            *_RUN_DECAY,
            parameter("lr_wsd_decay_iters", "int", None, ge=1),
            parameter("lr_wsd_decay_style", "str", "exponential", choices=WSD_STYLES),
        ),
    }
)

# What the lengths of Megatron-LM's five may count in the library: their names end so.
Unit = Literal["iters", "samples", "tokens"]
UNITS: tuple[Unit, ...] = ("iters", "samples", "tokens")
# {parameter that these five have in the library besides, with lengths in iterations}: an increase of weight decay, and
# the least rate of parameters whose rate is decoupled.  A run has settings for all of them.
LIBRARY_PARAMS: Mapping[str, FieldInfo] = by_name(
    parameter("weight_decay_incr_style", "str", "constant", choices=("constant", "linear", "cosine")),
    parameter("start_weight_decay", "float", None, optional=True, ge=0),
    parameter("end_weight_decay", "float", None, optional=True, ge=0),
    parameter("weight_decay_incr_iters", "int", None, optional=True, ge=1),
    parameter("decoupled_min_lr", "float", None, optional=True, ge=0),
)
TOKENS_PER_SAMPLE = parameter("tokens_per_sample", "int", None, ge=1)

RUN_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD", "LRRangeTest", "OneCycle")
# {style of a run: {parameter of the schedule that is a learning rate: the setting that holds it}}
RATE_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "LRRangeTest": MappingProxyType({"lr_range_test_min_lr": "lr"}),
        "OneCycle": MappingProxyType({"cycle_max_lr": "lr", "cycle_min_lr": "min_lr"}),
    }
)
