"""Tests the configuration of the library, in both forms and from all sources."""

import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from support.each import each

from megazero.config.engine_sections import ActivationConfig, LimitConfig, PrecisionConfig, ZeroConfig
from megazero.errors import ConfigError, Problem
from megazero.library.config import (
    BatchSizes,
    EngineConfig,
    OptimizerChoice,
    SchedulerChoice,
    automatic_sizes,
    load_engine_config,
    resolve_batch,
)

OWN: dict[str, Any] = {
    "zero": {"zero_stage": 3, "stage3_prefetch_bucket_size": 1e6, "max_live_parameters": 5},
    "precision": {"precision": "bf16", "loss_scale": None},
    "activations": {"partition_activations": True, "contigious_checkpointing": True, "number_checkpoints": 8},
    "optimizer": {"type": "AdamW", "lr": 3e-4, "params": {"betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 20}},
    "gradient_clipping": 1,
    "train_micro_batch_size_per_gpu": 4,
}
DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "stage3_max_live_parameters": 5, "sub_group_size": 1e9},
    "bf16": {"enabled": True},
    "activation_checkpointing": {"cpu_checkpointing": True, "contiguous_memory_optimization": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "gradient_clipping": 1.0,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 4,
}


def problems(content: Any) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(content)
    return caught.value.problems


def test_limits_are_a_section_of_megazeros_own_form() -> None:
    config = load_engine_config({"limits": {"distributed_timeout_minutes": 3}})
    assert config.limits == LimitConfig(distributed_timeout_minutes=3) and load_engine_config(config) == config
    (problem,) = problems({"limits": {"distributed_timeout_minutes": 0}})
    assert "distributed_timeout_minutes" in problem.given
    (mixed,) = problems({"limits": {}, "zero_optimization": {"stage": 1}})
    assert "one form" in mixed.rule


# --- forms and sources -----------------------------------------------------------------------------------------------


def test_megazeros_own_form() -> None:
    config = load_engine_config(OWN)
    assert config.zero == ZeroConfig(zero_stage=3, prefetch_bucket_size=1_000_000, max_live_parameters=5)
    assert config.precision == PrecisionConfig(precision="bf16")
    assert config.activations == ActivationConfig(
        partition_activations=True, contiguous_checkpointing=True, number_checkpoints=8
    )
    assert (config.optimizer.type, config.optimizer.lr) == ("AdamW", 3e-4)
    assert config.optimizer.params["betas"] == (0.9, 0.95) and config.optimizer.params["weight_decay"] == 0.01
    assert config.scheduler is not None and config.scheduler.params["warmup_max_lr"] == 3e-4
    assert (config.gradient_clipping, config.train_micro_batch_size_per_gpu) == (1.0, 4)
    assert config.train_batch_size is None and config.gradient_accumulation_steps is None


def test_deepspeeds_form() -> None:
    config = load_engine_config(DEEPSPEED)
    assert (config.zero.zero_stage, config.zero.max_live_parameters) == (3, 5)
    assert config.zero.param_persistence_threshold == 100_000
    assert config.activations == ActivationConfig(checkpoint_in_cpu=True, contiguous_checkpointing=True)
    assert config.precision.precision == "bf16" and config.optimizer.params["weight_decay"] == 0.0
    assert (config.train_batch_size, config.gradient_clipping) == (64, 1.0)


@pytest.mark.parametrize("content", [OWN, DEEPSPEED])
def test_a_mapping_and_files_say_the_same(content: dict[str, Any], tmp_path: Path) -> None:
    expected = load_engine_config(content)
    for suffix, dump in (("json", json.dumps), ("yaml", yaml.safe_dump), ("yml", yaml.safe_dump)):
        path = tmp_path / f"engine.{suffix}"
        path.write_text(dump(content))
        assert load_engine_config(path) == load_engine_config(str(path)) == expected
    assert load_engine_config(expected) == expected


def test_defaults_without_a_word() -> None:
    config = load_engine_config({})
    assert config == load_engine_config(EngineConfig())
    assert (config.zero, config.precision, config.scheduler) == (ZeroConfig(), PrecisionConfig(), None)
    assert (config.optimizer, config.gradient_clipping) == (None, 0.0)
    adamw = load_engine_config({"optimizer": {"type": "AdamW"}, "zero": {}}).optimizer
    assert adamw is not None and (adamw.type, adamw.lr) == ("AdamW", 1e-3)
    assert config.notices == ()


def test_what_a_deepspeed_file_leaves_out_is_told_where_our_own_default_differs() -> None:
    config = load_engine_config({"zero_optimization": {"stage": 1}})
    (notice,) = config.notices
    assert config.gradient_clipping == 1.0 and "gradient_clipping: left out" in notice and "of 1 holds" in notice
    automatic = load_engine_config({"zero_optimization": {"stage": 1}, "gradient_clipping": "auto"})
    assert (automatic.gradient_clipping, automatic.notices) == (0.0, ('config: "auto" became gradient_clipping: 0.0',))


def test_autocast_and_sums_in_both_forms() -> None:
    own = load_engine_config({"zero": {}, "autocast": "bf16", "gradient_allreduce_op": "sum"})
    section = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    file = load_engine_config({"zero_optimization": {}, "torch_autocast": section, "gradient_allreduce_op": "sum"})
    assert (own.autocast, own.gradient_allreduce_op) == (file.autocast, file.gradient_allreduce_op) == ("bf16", "sum")
    assert load_engine_config({"torch_autocast": {"enabled": True}}).autocast == "bf16"
    assert load_engine_config({"torch_autocast": {"dtype": "bfloat16"}}).autocast is None
    narrow = load_engine_config(
        {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}
    )
    assert (narrow.precision.precision, narrow.autocast) == ("bf16", "bf16")
    scaled = load_engine_config({"torch_autocast": {"enabled": True, "dtype": "float16"}, "gradient_clipping": 0})
    precision = scaled.precision
    assert (scaled.autocast, precision.precision, scaled.notices) == ("fp16", "fp32", ())
    torchs = (precision.initial_loss_scale, precision.loss_scale_window, precision.hysteresis)
    assert torchs == (65536.0, 2000, 1)  # the defaults of torch.amp.GradScaler, which DeepSpeed takes
    constant = load_engine_config({"autocast": "fp16", "precision": {"loss_scale": 8.0}})
    assert (constant.precision.loss_scale, constant.scales_loss) == (8.0, True)
    plain = load_engine_config({"zero": {}})
    assert (plain.autocast, plain.gradient_allreduce_op) == (None, "mean")


def test_what_both_forms_know_is_deepspeeds_unless_the_rate_stands_beside_the_type() -> None:
    shared = load_engine_config({"optimizer": {"type": "Adam", "params": {"lr": 0.5}}, "train_batch_size": 8})
    assert (shared.zero.zero_stage, shared.optimizer.type, shared.optimizer.lr) == (0, "AdamW", 0.5)
    own = load_engine_config({"optimizer": {"type": "Adam", "lr": 0.5}, "train_batch_size": 8})
    assert (own.zero.zero_stage, own.optimizer.type, own.optimizer.lr) == (1, "Adam", 0.5)


def test_parameters_are_torchs() -> None:
    config = load_engine_config(DEEPSPEED)
    made = getattr(torch.optim, config.optimizer.type)(
        [torch.zeros(1, requires_grad=True)], lr=config.optimizer.lr, **config.optimizer.params
    )
    assert made.defaults["betas"] == (0.9, 0.95) and made.defaults["weight_decay"] == 0.0


def test_a_section_may_be_the_dataclass_itself() -> None:
    config = load_engine_config({"zero": ZeroConfig(zero_stage=2), "precision": {"precision": "fp16"}})
    assert (config.zero, config.precision.precision) == (ZeroConfig(zero_stage=2), "fp16")


def test_notices_are_one_line_each(tmp_path: Path) -> None:
    content = {**DEEPSPEED, "steps_per_print": 10, "flops_profiler": {"enabled": False}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    notices = load_engine_config(tmp_path / "ds.json").notices
    assert [line.removeprefix(f"{tmp_path}/ds.json: ").split(":")[0] for line in notices] == [
        "flops_profiler",
        "steps_per_print",
    ]
    assert not any("\n" in line for line in notices)


def test_a_configuration_made_in_python_is_checked_and_completed() -> None:
    made = EngineConfig(
        optimizer=OptimizerChoice(type="sgd", lr=0.5, params={"momentum": 0.9}),
        scheduler=SchedulerChoice(type="WarmupLR", params={"warmup_type": "linear", "warmup_max_lr": 0.5}),
    )
    config = load_engine_config(made)
    assert (config.optimizer.type, config.optimizer.lr) == ("SGD", 0.5)
    assert config.optimizer.params["momentum"] == 0.9 and config.optimizer.params["dampening"] == 0.0
    assert config.scheduler is not None and config.scheduler.params["warmup_num_steps"] == 1000
    activations = ActivationConfig(recompute_granularity="full", number_checkpoints=2)
    bad = replace(made, optimizer=OptimizerChoice(type="Muon"), zero=_divided_twice(), activations=activations)
    assert [item.given for item in problems(bad)] == [
        'config: optimizer.type: "Muon"',
        "config: zero.prescale_gradients and zero.gradient_predivide_factor 2",
        'config: activations.recompute_granularity: "full"',
        "config: activations.number_checkpoints: 2",
    ]


def _divided_twice() -> ZeroConfig:
    return ZeroConfig(prescale_gradients=True, gradient_predivide_factor=2)


def test_it_is_frozen_and_strict() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().gradient_clipping = 1.0
    for wrong in ({"gradient_clipping": -1}, {"train_batch_size": 0}, {"stage": 3}):
        with pytest.raises(ValidationError):
            EngineConfig(**wrong)


# --- errors ----------------------------------------------------------------------------------------------------------


@each(
    ("content", "given", "rule", "legal"),
    [
        ({"zero": {}, "zero_optimization": {}}, "config: zero beside zero_optimization", "one form", "DeepSpeed"),
        ({"precision": {}, "fp16": {}, "wandb": {}}, "config: precision beside fp16, wandb", "one form", "megazero"),
        ({"zero": {"stage": 3}}, "config: zero.stage: 3", "no key of this name", "zero_stage"),
        ({"zero": {"zero_stage": 4}}, "config: zero.zero_stage: 4", "at most 3", "zero_stage: 3"),
        ({"zero": {"zero_stage": "three"}}, 'config: zero.zero_stage: "three"', "a whole number", ""),
        ({"zero": {"zero_stage": True}}, "config: zero.zero_stage: true", "a whole number", ""),
        ({"zero": 3}, "config: zero: 3", "zero is a mapping", "{...}"),
        ({"zero": {"max_reuse_distance": 1, "stage3_max_reuse_distance": 1}}, "config: zero.stage3", "already", "once"),
        ({"precision": {"precision": "fp8"}}, 'config: precision.precision: "fp8"', "one of fp64", "fp64"),
        ({"precision": {"loss_scale": 8}}, "config: precision.loss_scale: 8", "fp16", 'precision.precision: "fp16"'),
        (
            {"activations": {}, "activation_checkpointing": {}},
            "config: activations beside activation_checkpointing",
            "one form",
            "megazero",
        ),
        (
            {"activations": {"recompute_granularity": "selective"}},
            'config: activations.recompute_granularity: "selective"',
            "megazero.recompute(function, *args)",
            "leave it out",
        ),
        (
            {"activations": {"checkpoint_num_layers": 2}},
            "config: activations.recompute_num_layers: 2",
            "the model's choice",
            "leave it out",
        ),
        (
            {"activations": {"logits_chunk_bytes": 9}},
            "config: activations.logits_chunk_bytes: 9",
            "choice",
            "leave it out",
        ),
        (
            {"activations": {"checkpoint_in_cpu": "perhaps"}},
            'config: activations.checkpoint_in_cpu: "perhaps"',
            "one of true, false, auto",
            "true, auto",
        ),
        (
            {"activations": {"number_checkpoints": 2}},
            "config: activations.number_checkpoints: 2",
            "the size of the arena",
            "activations.contiguous_checkpointing: true",
        ),
        (
            {"zero": {"zero3_reshard_after": "window"}},
            'config: zero.zero3_reshard_after: "window"',
            "there is no schedule",
            "leave it out",
        ),
        ({"zero": {}, "parallel": {}}, "config: parallel: {}", "no key of this name", "optimizer"),
        ({"zero": {}, "optimiser": {}}, "config: optimiser: {}", "no key of this name", "optimizer"),
        (
            {"zero": {}, "optimizer": {"kind": "SGD"}},
            'config: optimizer.kind: "SGD"',
            "no key",
            "lr, param_groups, params, type",
        ),
        (
            {"zero": {"offload_optimizer": "cpu", "delayed_parameter_update": True}, "optimizer": {"type": "Lamb"}},
            "config: zero.delayed_parameter_update with optimizer.type Lamb",
            "figures of whole parameters",
            "leave out zero.delayed_parameter_update, or another optimizer",
        ),
        ({"zero": {}, "optimizer": {"type": "Muon"}}, 'config: optimizer.type: "Muon"', "refused", "AdamW"),
        (
            {"optimizer": {"type": "SGD", "lr": 0.1, "param_groups": ["*.bias"]}},
            'config: optimizer.param_groups: "*.bias"',
            "a pattern of names and, behind it",
            "*.bias lr=0.001 weight_decay=0",
        ),
        (
            {"optimizer": {"type": "SGD", "lr": 0.0, "param_groups": ["*.bias lr=1"]}},
            'config: optimizer.param_groups: ["*.bias"] with lr: 0',
            "a multiple",
            "lr: 0.001",
        ),
        (
            {
                "optimizer": {
                    "type": "SGD",
                    "lr": 0.1,
                    "param_groups": ["*.bias lr=1"],
                    "decoupled_lr": 0.5,
                    "decoupled_parameters": ["head"],
                }
            },
            'config: optimizer.param_groups: ["*.bias"] with decoupled_lr',
            "rates of their own",
            "lr=0.5",
        ),
        ({"zero": {}, "optimizer": {"params": {"lr": 1}}}, "config: optimizer.params.lr: 1", "beside", "optimizer.lr"),
        ({"optimizer": {"type": "SGD", "lr": None}}, "config: optimizer.lr: null", "a number, at least 0", "number"),
        (
            {"zero": {}, "scheduler": {"type": "CosineAnnealing"}},
            'config: scheduler.type: "CosineAnnealing"',
            "nothing",
            "WarmupCosineLR",
        ),
        ({"zero": {}, "scheduler": {"types": 1, "type": "WarmupLR"}}, "config: scheduler.types: 1", "no key", "type"),
        ({"zero": {}, "gradient_clipping": -1}, "config: gradient_clipping: -1", "at least 0", "gradient_clipping: 0"),
        ({"zero": {}, "autocast": "fp8"}, 'config: autocast: "fp8"', "bf16, fp16", "bf16"),
        (
            {"precision": {"precision": "fp16"}, "autocast": "bf16"},
            "config: autocast: bf16 with parameters in fp16",
            "a model in fp32",
            "no autocast",
        ),
        (
            {"bf16": {"enabled": True}, "torch_autocast": {"enabled": True, "dtype": "torch.float16"}},
            "config: torch_autocast: fp16 with parameters in bf16",
            "a model in fp32",
            "no autocast",
        ),
        ({"zero": {}, "gradient_allreduce_op": "max"}, 'config: gradient_allreduce_op: "max"', "mean", "sum"),
        ({"zero": {}, "train_batch_size": 2.5}, "config: train_batch_size: 2.5", "whole", "train_batch_size: 2"),
        ({"zero_stage": 3}, "config: zero_stage: 3", "no key of this name", ""),
    ],
)
def test_messages(content: dict[str, Any], given: str, rule: str, legal: str) -> None:
    (problem,) = problems(content)
    assert problem.given.startswith(given) and rule in problem.rule and legal in problem.legal


def test_a_choice_that_only_a_run_has_is_not_offered() -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config({"zero": {"offload_optimizer": "disk"}})
    assert [problem.legal for problem in caught.value.problems] == ["none, cpu, nvme"]


def test_all_problems_come_at_once() -> None:
    content = {
        "zero": {"zero_stage": 9, "colour": "red"},
        "precision": {"precision": "fp8"},
        "optimizer": {"type": "Muon"},
        "scheduler": {"type": "TwoCycles"},
        "train_batch_size": "many",
    }
    assert len(problems(content)) == 6
    foreign = {
        "zero_optimization": {"stage": 9, "colour": "red"},
        "optimizer": {"type": "Muon"},
        "amp": {"enabled": True},
    }
    assert len(problems(foreign)) == 4


@pytest.mark.parametrize("name", ["engine.toml", "engine", ""])
def test_other_files_are_refused(name: str) -> None:
    if not name:
        name = "engine.txt"
    (problem,) = problems(name)
    assert problem.given == name and problem.legal.startswith("engine.json")


def test_a_file_that_is_not_there() -> None:
    for name in ("/nonexistent/ds.json", "/nonexistent/ds.yaml"):
        assert "can't be read" in problems(name)[0].rule


# --- batch -----------------------------------------------------------------------------------------------------------


def test_the_batch_is_resolved_for_a_number_of_processes() -> None:
    config = load_engine_config(DEEPSPEED)
    assert resolve_batch(config, 8) == BatchSizes(train=64, micro=4, accumulation=2)
    assert resolve_batch(config, 16) == BatchSizes(train=64, micro=4, accumulation=1)
    assert resolve_batch(EngineConfig(), 3) == BatchSizes(train=None, micro=None, accumulation=1)
    assert resolve_batch(EngineConfig(gradient_accumulation_steps=5), 3).accumulation == 5


def test_a_batch_that_contradicts_itself() -> None:
    with pytest.raises(ConfigError, match="4 x 3 divides train_batch_size"):
        resolve_batch(load_engine_config(DEEPSPEED), 3)
    with pytest.raises(ConfigError, match="4 x 1 x 8 is not 64"):
        resolve_batch(load_engine_config({**DEEPSPEED, "gradient_accumulation_steps": 1}), 8)


def test_automatic_sizes_report_what_they_became() -> None:
    content = {**DEEPSPEED, "train_batch_size": "auto", "gradient_accumulation_steps": "auto"}
    config = load_engine_config(content)
    assert automatic_sizes(config, resolve_batch(config, 8)) == (
        'config: train_batch_size: "auto" became 32',
        'config: gradient_accumulation_steps: "auto" became 1',
    )
    free = load_engine_config({**content, "train_micro_batch_size_per_gpu": "auto"})
    assert automatic_sizes(free, resolve_batch(free, 8))[1] == (
        'config: train_micro_batch_size_per_gpu: "auto" became the size of what the program passes'
    )
    assert automatic_sizes(load_engine_config(DEEPSPEED), resolve_batch(load_engine_config(DEEPSPEED), 8)) == ()


def test_a_sub_group_of_0_is_a_whole_bucket() -> None:
    assert load_engine_config({"zero_optimization": {"stage": 3, "sub_group_size": 0}}).zero.sub_group_size == 0
