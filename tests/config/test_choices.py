"""The tables of optimizers and schedules, against torch itself and DeepSpeed's documented defaults."""

import inspect

import pytest
import torch

from megazero.config.choices import (
    IMPLEMENTATION,
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    SCHEDULERS,
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_and_defaults_are_torchs(name: str) -> None:
    arguments = inspect.signature(getattr(torch.optim, name)).parameters
    ours = {"lr": OPTIMIZERS[name].lr} | {key: info.default for key, info in OPTIMIZERS[name].params.items()}
    theirs = {
        key: argument.default
        for key, argument in arguments.items()
        if key not in ("params", "differentiable", *IMPLEMENTATION)
    }
    assert ours == theirs


def test_every_optimizer_of_torch_is_there_or_refused() -> None:
    theirs = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    assert theirs <= set(OPTIMIZERS) | set(REFUSED_OPTIMIZERS)


def test_deepspeeds_optimizers_are_there_or_refused() -> None:
    theirs = {"adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam", "lion", "muon"}
    theirs |= {"muadam", "muadamw", "musgd"}
    known = {name.lower() for name in (*OPTIMIZERS, *REFUSED_OPTIMIZERS)}
    assert theirs <= known
    assert not set(OPTIMIZERS) & set(REFUSED_OPTIMIZERS) and all(REFUSED_OPTIMIZERS.values())


def test_schedules_have_their_documented_parameters() -> None:
    warmup = {"warmup_num_steps": 1000, "warmup_type": "log"}
    rates = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001}
    documented = {
        "WarmupLR": rates | warmup,
        "WarmupDecayLR": {"total_num_steps": None} | rates | warmup,
        "WarmupCosineLR": {"total_num_steps": None, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001} | warmup,
    }
    assert {name: {key: i.default for key, i in table.items()} for name, table in SCHEDULERS.items()} == documented
    assert set(REFUSED_SCHEDULERS) == {"LRRangeTest", "OneCycle"}
