"""Tests of the table of optimizers against torch's optimizers, DeepSpeed's names and the settings of a run."""

import inspect

import torch
from support.each import each
from support.published_optimizers import PublishedLamb, reference_class

from megazero.config.engine_sections import OptimizerConfig
from megazero.config.fields import describe
from megazero.config.optimizers import IMPLEMENTATION, OPTIMIZERS, REFUSED_OPTIMIZERS, RUN_NAMES, run_settings
from megazero.optim.lion import Lion

OWN = {"Lion": Lion}  # those that torch has not got


@each("name", [name for name in OPTIMIZERS if name != "Lamb" and not OPTIMIZERS[name].package])
def test_arguments_and_defaults_are_those_of_the_class(name: str) -> None:
    arguments = inspect.signature(OWN.get(name) or getattr(torch.optim, name)).parameters
    ours = {"lr": OPTIMIZERS[name].lr} | {key: info.default for key, info in OPTIMIZERS[name].params.items()}
    theirs = {
        key: argument.default
        for key, argument in arguments.items()
        if key not in ("params", "differentiable", *IMPLEMENTATION)
    }
    assert ours == theirs


def test_lambs_parameters_and_defaults_are_deepspeeds() -> None:
    ours = {"lr": OPTIMIZERS["Lamb"].lr} | {key: info.default for key, info in OPTIMIZERS["Lamb"].params.items()}
    assert ours == {key: value for key, value in PublishedLamb.DEFAULTS.items() if key != "maximize"}
    assert [name for name, optimizer in OPTIMIZERS.items() if optimizer.measures] == ["Lamb", "Adafactor"]


@each("name", [name for name in OPTIMIZERS if OPTIMIZERS[name].package])
def test_optimizers_in_8_bits_have_defaults_of_their_package(name: str) -> None:
    arguments = inspect.signature(reference_class(name)).parameters
    ours = {"lr": OPTIMIZERS[name].lr} | {key: info.default for key, info in OPTIMIZERS[name].params.items()}
    assert ours == {key: arguments[key].default for key in ours} and "weight_decay" in ours


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


def test_a_run_has_every_optimizer() -> None:
    (names,) = (info.choices for info in describe("optimizer", OptimizerConfig) if info.name == "optimizer")
    assert tuple(RUN_NAMES) == names and {*RUN_NAMES.values(), "Adam"} == set(OPTIMIZERS)


def test_settings_of_a_run_are_parameters_of_its_optimizers() -> None:
    settings = {info.name: info for info in describe("optimizer", OptimizerConfig)}
    for kind, optimizer in OPTIMIZERS.items():
        own = run_settings(kind)
        assert set(own) <= set(optimizer.params) and {n for names in own.values() for n in names} <= set(settings)
    assert run_settings("SGD") == {"momentum": ("sgd_momentum",), "weight_decay": ("weight_decay",)}
    assert run_settings("Lion")["betas"] == ("lion_beta1", "lion_beta2")
    assert "momentum" not in run_settings("RMSprop") and not run_settings("Rprop")
