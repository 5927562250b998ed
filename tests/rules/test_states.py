"""Tests of the rules between the settings of ZeRO and of precision, named as the caller of a rule spells them."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from support.each import each

from megazero.config.choices import OptimizerChoice
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.config.optimizers import OPTIMIZERS
from megazero.errors import Problem
from megazero.optim.configured import saved_kinds
from megazero.rules.states import STATE_RULES, optimizer_fits

FILES = {"offload_optimizer": "nvme", "nvme_path": Path(tempfile.gettempdir())}


def found(zero: dict[str, Any], precision: dict[str, Any]) -> list[Problem]:
    sections = ZeroConfig(**zero), PrecisionConfig(**precision)
    return [problem for rule in STATE_RULES for problem in rule(*sections, lambda name: f"<{name}>")]


@each(
    ("zero", "precision"),
    [
        ({}, {}),
        ({"prescale_gradients": True}, {}),
        ({"gradient_predivide_factor": 0.5}, {}),
        ({"prescale_gradients": True, "gradient_predivide_factor": 1.0}, {}),
        ({"communication_data_type": "fp16"}, {"precision": "fp64"}),
        ({"communication_data_type": "fp64"}, {"precision": "fp16", "loss_scale": 8.0}),
        ({"communication_data_type": "bf16"}, {"precision": "bf16", "accumulate_allreduce_grads_in_fp32": True}),
        ({}, {"precision": "bf16", "bf16_master_weights": True}),
        ({"zero_stage": 0, "reduce_bucket_size": 0}, {}),
        ({"zero_stage": 1, "offload_optimizer": "cpu"}, {}),
        ({"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}, {}),
    ],
)
def test_legal(zero: dict[str, Any], precision: dict[str, Any]) -> None:
    assert found(zero, precision) == []


@each(
    ("zero", "precision", "given", "legal"),
    [
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
            {},
            "<prescale_gradients> and <gradient_predivide_factor> 2",
            "<gradient_predivide_factor> 1, or leave out <prescale_gradients>",
        ),
        (
            {},
            {"precision": "bf16", "bf16_master_weights": True, "accumulate_allreduce_grads_in_fp32": True},
            "<bf16_master_weights> with <accumulate_allreduce_grads_in_fp32>",
            "one of the two",
        ),
        (
            {"zero_stage": 0, "offload_optimizer": "cpu"},
            {},
            "<offload_optimizer> cpu with <zero_stage> 0",
            "<zero_stage> 1, or <offload_optimizer> none",
        ),
        *(
            (
                {"zero_stage": stage, "offload_param": "cpu"},
                {},
                f"<offload_param> cpu with <zero_stage> {stage}",
                "<zero_stage> 3, or <offload_param> none",
            )
            for stage in range(3)
        ),
        (
            {"zero_stage": 0, "offload_optimizer": "auto"},
            {},
            "<offload_optimizer> auto with <zero_stage> 0",
            "<zero_stage> 1, or <offload_optimizer> none",
        ),
        (
            {"zero_stage": 1, "offload_optimizer": "auto", "delayed_parameter_update": True},
            {},
            "<delayed_parameter_update> with <offload_optimizer> auto",
            "<offload_optimizer> cpu, or leave out <delayed_parameter_update>",
        ),
        (
            {},
            {"precision": "fp16", "initial_loss_scale": 1.0, "min_loss_scale": 2.0},
            "<initial_loss_scale> 1 <min_loss_scale> 2",
            "<initial_loss_scale> 2, <min_loss_scale> 1",
        ),
    ],
)
def test_illegal(zero: dict[str, Any], precision: dict[str, Any], given: str, legal: str) -> None:
    (problem,) = found(zero, precision)
    assert (problem.given, problem.legal) == (given, legal) and problem.rule


def test_each_home_has_a_problem_of_its_own() -> None:
    homes = found({"zero_stage": 0, "offload_optimizer": "cpu", "offload_param": "cpu"}, {})
    assert [problem.given.partition(" ")[0] for problem in homes] == ["<offload_optimizer>", "<offload_param>"]
    assert "stages 1 to 3" in homes[0].rule and "stage 3" in homes[1].rule


@each("kind", [kind for kind, each in OPTIMIZERS.items() if not each.package])
def test_there_are_buffers_for_the_kinds_of_state_of_an_optimizer(kind: str) -> None:
    """Their number is that of what torch's optimizer keeps, and of weights and gradients."""
    switches = [name for name in ("amsgrad", "centered", "momentum") if name in OPTIMIZERS[kind].params]
    for params in ({}, dict.fromkeys(switches, 0.5), *({name: 0.5} for name in switches)):
        needed = len(saved_kinds(OptimizerChoice(type=kind, lr=0.1, params=params)))
        for in_files, least in ((False, needed + 1), (True, needed + 2)):
            for count in (0, least - 1, least):
                given = {"offload_gradients_nvme": in_files, "offload_buffer_count": count}
                sections = ZeroConfig(zero_stage=1, **FILES, **given), PrecisionConfig()
                problems = list(optimizer_fits(kind, params, "--optimizer x", *sections, lambda name: f"<{name}>"))
                is_short = 0 < count < least
                assert [problem.given for problem in problems] == [f"<offload_buffer_count> {count}"] * is_short
                if is_short:
                    assert problems[0].legal.startswith(f"<offload_buffer_count> {least} or more, or 0")
                    assert problems[0].rule.startswith(f"{kind} has {least} kind")


@pytest.mark.parametrize("is_installed", [True, False])
@each("kind", OPTIMIZERS)
def test_moments_in_8_bits(kind: str, is_installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They need their kernels, which compute in fp32, and memory; of other optimizers nothing is asked."""
    monkeypatch.setattr("megazero.rules.states.find_spec", lambda name: object() if is_installed else None)
    package, in_numbers = OPTIMIZERS[kind].package, kind.removesuffix("8bit").replace("AdamW", "Adam")
    for precision, narrow in (("fp32", True), ("bf16", True), ("fp16", True), ("fp64", False)):
        for zero in ({}, {"zero_stage": 1, "offload_optimizer": "cpu"}, {"zero_stage": 1, **FILES}):
            sections = ZeroConfig(**zero), PrecisionConfig(precision=precision)
            problems = list(optimizer_fits(kind, {}, "--optimizer x", *sections, lambda name: f"<{name}>"))
            expected = ["--optimizer x"] * (not is_installed)
            expected += ["--optimizer x with <precision> fp64"] * (not narrow)
            expected += ["--optimizer x with <offload_optimizer> nvme"] * (zero.get("offload_optimizer") == "nvme")
            assert [problem.given for problem in problems] == (expected if package else [])
            if package and not is_installed:
                assert package in problems[0].rule and f"'megazero[{package}]', or {in_numbers}" in problems[0].legal
