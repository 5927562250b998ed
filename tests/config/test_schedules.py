"""Tests of the table of schedules against DeepSpeed's documented defaults and the settings of a run."""

from megazero.config.engine_sections import OptimizerConfig
from megazero.config.fields import describe
from megazero.config.schedules import RATE_SETTINGS, RUN_STYLES, SCHEDULES


def test_schedules_have_their_documented_parameters() -> None:
    warmup = {"warmup_num_steps": 1000, "warmup_type": "log"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001}
    documented = {
        "WarmupLR": rates | warmup,
        "WarmupDecayLR": {"total_num_steps": None} | rates | warmup,
        "WarmupCosineLR": {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001} | warmup,
    }
    documented["LRRangeTest"] = {
        "lr_range_test_min_lr": 0.001,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    }
    documented["OneCycle"] = {
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    }
    settings = {info.name: info.default for info in describe("optimizer", OptimizerConfig)}
    rise = {name: settings[name] for name in ("lr_warmup_iters", "lr_warmup_init", "lr_warmup_type")}
    fall = {name: settings[name] for name in ("lr_decay_iters", "min_lr")}
    documented |= dict.fromkeys(("linear", "cosine", "inverse-square-root"), rise | fall) | {"constant": rise}
    last = {name: settings[name] for name in ("lr_wsd_decay_iters", "lr_wsd_decay_style")}
    documented["WSD"] = rise | fall | last
    assert {name: {key: i.default for key, i in table.items()} for name, table in SCHEDULES.items()} == documented
    required = {name for name, info in SCHEDULES["OneCycle"].items() if info.required}
    assert required == {"cycle_min_lr", "cycle_max_lr"}


def test_every_style_of_a_run_is_a_schedule() -> None:
    (styles,) = (info.choices for info in describe("optimizer", OptimizerConfig) if info.name == "lr_decay_style")
    assert styles == RUN_STYLES and {*RUN_STYLES, *RATE_SETTINGS} <= SCHEDULES.keys()
    assert all(rates.keys() <= SCHEDULES[style].keys() for style, rates in RATE_SETTINGS.items())
