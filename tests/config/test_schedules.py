"""Tests of the table of schedules against DeepSpeed's documented defaults and the settings of a run."""

from megazero.config.engine_sections import OptimizerConfig
from megazero.config.fields import describe
from megazero.config.schedules import REFUSED_SCHEDULES, SCHEDULES


def test_schedules_have_their_documented_parameters() -> None:
    warmup = {"warmup_num_steps": 1000, "warmup_type": "log"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001}
    documented = {
        "WarmupLR": rates | warmup,
        "WarmupDecayLR": {"total_num_steps": None} | rates | warmup,
        "WarmupCosineLR": {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001} | warmup,
    }
    settings = {info.name: info.default for info in describe("optimizer", OptimizerConfig)}
    rise = {name: settings[name] for name in ("lr_warmup_iters", "lr_warmup_init", "lr_warmup_type")}
    fall = {name: settings[name] for name in ("lr_decay_iters", "min_lr")}
    documented |= {"constant": rise, "linear": rise | fall, "cosine": rise | fall}
    assert {name: {key: i.default for key, i in table.items()} for name, table in SCHEDULES.items()} == documented
    assert set(REFUSED_SCHEDULES) == {"LRRangeTest", "OneCycle"}
