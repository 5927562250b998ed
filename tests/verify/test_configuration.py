"""Tests of how a configuration is changed for verification, and of the verification's own command-line flags."""

import pytest
from support.configs import make_run
from support.each import each

from megazero.config import derived
from megazero.config.engine_sections import ZeroConfig
from megazero.config.run import RunConfig
from megazero.rules import run as rules
from megazero.verify.configuration import (
    DEFAULT_STEPS,
    describe_layout,
    describe_stage,
    exact,
    in_float64,
    in_stage,
    on_one_process,
    overridden,
    split_verify_steps,
    without_checkpoints,
)


def awkward() -> RunConfig:
    return make_run(
        num_layers=4,
        hidden_dropout=0.1,
        precision="fp16",
        loss_scale=8.0,
        communication_data_type="fp32",
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=1,
        sequence_parallel=True,
        zero_stage=3,
        prescale_gradients=True,
        recompute_granularity="full",
        micro_batch_size=1,
        global_batch_size=8,
        save="somewhere",
        eval_iters=7,
        device="cpu",
    )


def test_float64_keeps_the_layout() -> None:
    config = in_float64(awkward())
    assert (config.precision.precision, config.precision.loss_scale) == ("fp64", None)
    assert (config.model.hidden_dropout, config.model.attention_dropout) == (0.0, 0.0)
    assert (config.zero.communication_data_type, config.checkpoint.save, config.training.eval_iters) == (
        "auto",
        None,
        0,
    )
    assert config.parallel == awkward().parallel and config.activations == awkward().activations
    assert (config.zero.zero_stage, config.zero.prescale_gradients) == (3, True)
    assert rules.check(config, 8) == ()
    assert in_float64(config) == config


def test_one_process_takes_the_same_steps() -> None:
    config = on_one_process(in_float64(awkward()), 8)
    assert rules.check(config, 1) == ()
    assert (config.zero.zero_stage, derived.model_parallel_size(config), derived.data_parallel_size(config, 1)) == (
        0,
        1,
        1,
    )
    assert (derived.global_batch_size(config, 1), derived.num_micro_batches(config, 1)) == (8, 8)
    assert config.activations.recompute_granularity == "none" and config.parallel.device == "cpu"
    assert (config.model, config.optimizer, config.data) == (
        in_float64(awkward()).model,
        awkward().optimizer,
        awkward().data,
    )


def test_a_batch_that_is_left_open_is_the_layouts() -> None:
    config = make_run(micro_batch_size=2, tensor_model_parallel_size=2)
    assert derived.global_batch_size(on_one_process(config, 8), 1) == 8


def test_what_float64_overrides_is_told() -> None:
    config = make_run(
        precision="bf16", hidden_dropout=0.2, attention_dropout=0.0, finetune=True, load="x", eval_iters=3
    )
    assert overridden(config) == "--hidden-dropout 0.2 --precision bf16 --load x --finetune"
    assert overridden(in_float64(config)) == ""


@each("optimizer, same", [("adamw8bit", "adam"), ("adam8bit", "adam"), ("lion8bit", "lion"), ("sgd", "sgd")])
def test_moments_in_8_bits_are_numbers(optimizer: str, same: str) -> None:
    config = make_run(optimizer=optimizer)
    assert in_float64(config).optimizer.optimizer == same
    assert (f"--optimizer {optimizer}" in overridden(config)) == (optimizer != same)


def test_precision_is_still_checked_when_the_run_starts_anew() -> None:
    config = make_run(precision="fp16", initial_loss_scale=0.5, load="x")
    assert without_checkpoints(config).precision == config.precision
    assert len(rules.check(without_checkpoints(config), 1)) == 1


@pytest.mark.parametrize(
    ("words", "steps", "rest"),
    [
        (["--lr", "-1e-3"], DEFAULT_STEPS, ["--lr", "-1e-3"]),
        (["--lr", "1", "--verify-steps", "5", "--bf16"], 5, ["--lr", "1", "--bf16"]),
        (["--verify-steps=5", "--verify_steps", "7"], 7, []),
    ],
)
def test_the_number_of_steps_is_taken_from_the_words(words: list[str], steps: int, rest: list[str]) -> None:
    assert split_verify_steps(words) == (steps, rest, ())


@each("words", [["--verify-steps"], ["--verify-steps", "0"], ["--verify-steps=x"], ["--verify-steps", "-1"]])
def test_a_number_that_is_none_is_a_problem(words: list[str]) -> None:
    own = split_verify_steps([*words, "--bf16"])
    assert own.rest == ["--bf16"]
    (problem,) = own.problems
    assert problem.given == " ".join(words).replace("=", " ") and problem.legal == "--verify-steps 3"


def test_a_layout_in_words() -> None:
    assert describe_layout(awkward()) == "ZeRO stage 3, sequence parallel, interleaved schedule, full recomputation"
    assert describe_layout(make_run(sequence_parallel=True, zero_stage=0)) == "ZeRO stage 0"


def test_a_stage_in_place_of_the_configurations() -> None:
    zero = ZeroConfig(zero_stage=1, sub_group_size=7)
    assert in_stage(zero, None) == zero
    assert in_stage(zero, 3) == ZeroConfig(zero_stage=3, sub_group_size=7)
    assert describe_stage(in_stage(zero, 0)) == "ZeRO stage 0"


def test_wires_that_round_and_late_updates_are_left_out_and_named() -> None:
    zero = ZeroConfig(
        zero_stage=3,
        zero_hpz_partition_size=2,
        zero_quantized_weights=True,
        zero_quantized_gradients=True,
        zero_quantized_gradients_bits=8,
        zero_error_feedback=True,
        zero_error_feedback_reset=7,
    )
    assert exact(zero) == ZeroConfig(zero_stage=3, zero_hpz_partition_size=2)
    late = ZeroConfig(
        zero_stage=1, offload_optimizer="cpu", delayed_parameter_update=True, delayed_parameter_update_start=1
    )
    assert exact(late) == ZeroConfig(zero_stage=1, offload_optimizer="cpu")
    config = make_run(
        hidden_dropout=0.0,
        attention_dropout=0.0,
        precision="fp64",
        zero_stage=2,
        zero_quantized_gradients=True,
        zero_quantized_block_size=64,
    )
    assert overridden(config) == "--zero-quantized-gradients --zero-quantized-block-size 64"
