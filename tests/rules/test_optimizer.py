"""Settings of a run become parameters of its optimizer; parameters that the optimizer does not take are an error."""

from typing import Any

import pytest
import torch
from support.configs import make_run
from support.each import each
from support.published_optimizers import reference_class

from megazero.config.choices import OptimizerChoice
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES
from megazero.config.values import Diagnostics
from megazero.errors import ConfigError
from megazero.rules.optimizer import choose_for_run, optimizer_choice
from megazero.rules.run import advice


def of_run(**settings: Any) -> OptimizerChoice:
    return optimizer_choice(OptimizerConfig(lr=0.125, **settings))


@each("name", RUN_NAMES)
def test_settings_of_a_run_are_parameters(name: str) -> None:
    choice = of_run(optimizer=name)
    assert (choice.type, choice.lr) == (RUN_NAMES[name], 0.125)
    assert choice.params.keys() == OPTIMIZERS[choice.type].params.keys()
    betas = (0.95, 0.98) if name in ("lion", "lion8bit") else (0.9, 0.999)
    assert choice.params.get("betas", betas) == betas and choice.params.get("weight_decay", 0.01) == 0.01
    reference_class(choice.type)([torch.zeros(2, requires_grad=True)], lr=choice.lr, **choice.params)


def test_parameters_that_are_no_settings() -> None:
    choice = of_run(optimizer="sgd", sgd_momentum=0.5, optimizer_params=("nesterov=true",), weight_decay=0.25)
    expected = {"momentum": 0.5, "dampening": 0.0, "weight_decay": 0.25, "nesterov": True, "maximize": False}
    assert (choice.type, dict(choice.params)) == ("SGD", expected)
    assert of_run(optimizer="rprop", optimizer_params=("etas=0.5,1.5",)).params["etas"] == (0.5, 1.5)
    coupled = of_run(optimizer_params=("decoupled_weight_decay=false", "amsgrad=true"), adam_beta2=0.95)
    assert coupled.type == "Adam" and coupled.params["betas"] == (0.9, 0.95) and coupled.params["amsgrad"] is True
    assert of_run(optimizer_params=("decoupled_weight_decay=true",)) == of_run()
    for word in ("no", "0", "OFF"):
        assert of_run(optimizer_params=(f"decoupled_weight_decay={word}",)).type == "Adam"


@each(
    ("settings", "given", "legal"),
    [
        (
            {"param_groups": ("*.bias lr=1",), "decoupled_lr": 0.5},
            "--decoupled-lr 0.5 with --param-groups",
            '--param-groups "embedding.word.* lr=0.5"',
        ),
        ({"param_groups": ("*.bias lr=fast",)}, '--param-groups: *.bias.lr: "fast"', "a number"),
        ({"optimizer_params": ("nesterov=true",)}, "--optimizer-params: nesterov: true", "amsgrad"),
        ({"optimizer": "sgd", "optimizer_params": ("nesterov",)}, "--optimizer-params nesterov", "nesterov=true"),
        ({"optimizer": "sgd", "optimizer_params": ("nesterov=1.5",)}, "--optimizer-params: nesterov: 1.5", "true"),
        ({"optimizer": "sgd", "optimizer_params": ("maximize=true",) * 2}, "--optimizer-params maximize=true", "="),
        (
            {"optimizer_params": ("decoupled_weight_decay=maybe",)},
            '--optimizer-params: decoupled_weight_decay: "maybe"',
            "true, false",
        ),
        (
            {"optimizer": "sgd", "sgd_momentum": 0.0, "optimizer_params": ("nesterov=true",)},
            "--optimizer-params: nesterov: true with momentum 0",
            "--sgd-momentum 0.9",
        ),
        (
            {"optimizer": "sgd", "optimizer_params": ("nesterov=true", "dampening=0.5")},
            "--optimizer-params: nesterov: true with dampening: 0.5",
            "dampening: 0",
        ),
        (
            {"optimizer": "sgd", "optimizer_params": ("momentum=0.5",)},
            "--optimizer-params: momentum: 0.5",
            "--sgd-momentum",
        ),
    ],
    ids=str,
)
def test_parameters_that_an_optimizer_does_not_take(settings: dict[str, Any], given: str, legal: str) -> None:
    findings = Diagnostics()
    choose_for_run(OptimizerConfig(lr=0.125, **settings), findings)
    (problem,) = findings.problems
    assert problem.given == given and legal in problem.legal
    with pytest.raises(ConfigError):
        of_run(**settings)


def test_a_word_that_chooses_an_implementation_earns_a_notice() -> None:
    (notice,) = advice(make_run(optimizer_params=("fused=true", "amsgrad=true")), 1)
    assert notice.startswith("--optimizer-params: fused: accepted, without effect: ")


def test_slices_of_matrices_have_other_blocks() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megazero.rules.states.find_spec", lambda name: object())
        sliced = {"tensor_model_parallel_size": 2, "optimizer": "lion8bit"}
        (notice,) = advice(make_run(**sliced), 2)
        assert notice.startswith("--optimizer lion8bit with --tensor-model-parallel-size 2: slices of matrices have")
        assert advice(make_run(optimizer="lion8bit"), 2) == advice(make_run(**{**sliced, "optimizer": "lion"}), 2) == ()
