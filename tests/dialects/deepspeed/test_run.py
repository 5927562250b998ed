"""Tests whole command lines in which `--deepspeed-config` stands beside flags."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.each import each

from megazero.command_line.parse import ParsedRun, parse
from megazero.config.engine_sections import ActivationConfig, ZeroConfig
from megazero.config.values import ParsedValue
from megazero.config.yaml_file import to_yaml
from megazero.dialects.deepspeed.reading import read
from megazero.dialects.deepspeed.run import complete, translate_for_run
from megazero.errors import ConfigError, Problem
from megazero.rules.run import check

BASE = "--preset gpt2-124m --train-iters 100 --mock-data"
SIZED = f"{BASE} --micro-batch-size 2 --lr 1e-3"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(content: dict[str, Any], line: str, *, world_size: int = 8) -> ParsedRun:
    Path("ds.json").write_text(json.dumps(content))
    return parse(f"--deepspeed --deepspeed_config ds.json {line}".split(), world_size=world_size)


def problems(content: dict[str, Any], line: str, *, world_size: int = 8) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        run(content, line, world_size=world_size)
    return caught.value.problems


def only(content: dict[str, Any], line: str, *, world_size: int = 8) -> Problem:
    found = problems(content, line, world_size=world_size)
    assert len(found) == 1, found
    return found[0]


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_launch_scripts_file_sets_the_run() -> None:
    content = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 64,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "prescale_gradients": True,
        "communication_data_type": "fp32",
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e7, "stage3_max_live_parameters": 7},
        "optimizer": {"type": "AdamW", "params": {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "steps_per_print": 2000,
    }
    parsed = run(content, BASE)
    config = parsed.config
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 64)
    assert (config.optimizer.clip_grad, config.optimizer.lr, config.optimizer.adam_beta2) == (0.5, 6e-4, 0.95)
    assert (config.optimizer.weight_decay, config.optimizer.adam_eps) == (0.1, 1e-8)
    assert config.precision.precision == "bf16" and config.precision.accumulate_allreduce_grads_in_fp32
    assert (config.zero.zero_stage, config.zero.reduce_bucket_size, config.zero.max_live_parameters) == (
        3,
        50_000_000,
        7,
    )
    assert config.zero.prescale_gradients and config.zero.communication_data_type == "fp32"
    unused = "ds.json: steps_per_print: 2000: accepted, without effect: a run reports every --log-interval steps"
    assert unused in parsed.notices


def test_what_the_section_leaves_out_has_deepspeeds_defaults() -> None:
    zero = run({"zero_optimization": {"stage": 2}}, SIZED).config.zero
    assert zero == ZeroConfig(
        zero_stage=2,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
        overlap_comm=False,
        prefetch_bucket_size=50_000_000,
        param_persistence_threshold=100_000,
        max_reuse_distance=10**9,
    )
    assert run({"zero_optimization": {"stage": 3}}, SIZED).config.zero.overlap_comm is True
    assert run({"zero_optimization": {}}, SIZED).config.zero.zero_stage == 0


def test_a_section_that_is_absent_leaves_megazeros_defaults() -> None:
    config = run({}, SIZED).config
    assert config == parse(SIZED.split()).config
    assert config.zero == ZeroConfig() and config.optimizer.clip_grad == 1.0


def test_auto_leaves_the_settings_alone() -> None:
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 12},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    }
    config = run(content, f"{SIZED} --clip-grad 3 --weight-decay 0.3").config
    assert (config.optimizer.clip_grad, config.optimizer.weight_decay, config.optimizer.lr) == (3.0, 0.3, 1e-3)
    assert config.zero.reduce_bucket_size == ZeroConfig().reduce_bucket_size and config.zero.overlap_comm
    assert config.precision.precision == "fp32"
    # A format set to "auto" is on if a flag selects it, and then the rest of its section applies.
    assert run(content, f"{SIZED} --fp16").config.precision.initial_loss_scale == 4096.0
    assert run(content, f"{SIZED} --precision fp16").config.precision.initial_loss_scale == 4096.0
    assert run(content, f"{SIZED} --bf16").config.precision.precision == "bf16"


def test_fp16_and_its_loss_scale() -> None:
    fixed = run({"fp16": {"enabled": True, "loss_scale": 128}}, SIZED).config.precision
    assert (fixed.precision, fixed.loss_scale) == ("fp16", 128.0)
    section = {"enabled": True, "initial_scale_power": 11, "hysteresis": 4, "consecutive_hysteresis": True}
    moving = run({"fp16": section}, f"{SIZED} --fp16 --hysteresis 4").config.precision
    assert (moving.loss_scale, moving.initial_loss_scale, moving.hysteresis) == (None, 2048.0, 4)
    assert moving.consecutive_hysteresis
    assert run({"fp16": {"enabled": True}}, SIZED).config.precision.initial_loss_scale == 65536.0
    unused = run({"fp16": {"enabled": False, "loss_scale": 128}}, SIZED).config.precision
    assert (unused.precision, unused.loss_scale) == ("fp32", None)


def test_a_schedule_with_a_straight_warm_up() -> None:
    warmup = {"warmup_type": "linear", "warmup_num_steps": 10}
    params = {**warmup, "total_num_steps": "auto", "cos_min_ratio": 0.1}
    cosine = {"type": "WarmupCosineLR", "params": params}
    optimizer = run({"scheduler": cosine}, f"{SIZED} --min-lr 1e-4").config.optimizer
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters, optimizer.lr_decay_iters) == ("cosine", 10, None)
    assert run({"scheduler": cosine}, SIZED).config.optimizer.min_lr == pytest.approx(1e-4)
    assert run({"scheduler": cosine}, SIZED).config.optimizer.lr == 1e-3
    found = only({"scheduler": cosine}, f"{SIZED} --min-lr 1e-5")
    assert found.given == "--min-lr 1e-5 and ds.json: scheduler.params.cos_min_ratio: 0.1 x --lr 1e-3"
    raised = {"type": "WarmupCosineLR", "params": {**params, "warmup_min_ratio": 0.25}}
    assert run({"scheduler": raised}, SIZED).config.optimizer.lr_warmup_init == pytest.approx(2.5e-4)
    assert run({"scheduler": raised}, f"{SIZED} --lr-warmup-init 25e-5").config.optimizer.lr_warmup_init == 25e-5
    found = only({"scheduler": raised}, f"{SIZED} --lr-warmup-init 1e-5")
    assert found.given == "--lr-warmup-init 1e-5 and ds.json: scheduler.params.warmup_min_ratio: 0.25 x --lr 1e-3"
    assert found.rule == "both set --lr-warmup-init, to different values"
    decay = {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": 50, "warmup_max_lr": 1e-3}}
    linear = run({"scheduler": decay}, SIZED).config.optimizer
    assert (linear.lr_decay_style, linear.lr_decay_iters, linear.lr, linear.min_lr) == ("linear", 50, 1e-3, 0.0)


KEPT = {"partition_activations": True, "contiguous_memory_optimization": True, "number_checkpoints": 4}


def test_how_checkpoints_are_kept() -> None:
    section = {**KEPT, "cpu_checkpointing": "auto", "synchronize_checkpoint_boundary": True, "profile": False}
    flags = f"{SIZED} --checkpoint-activations --number-checkpoints 4 --tensor-model-parallel-size 2"
    parsed = run({"activation_checkpointing": section}, flags)
    assert parsed.config.activations == ActivationConfig(
        recompute_granularity="full",
        partition_activations=True,
        checkpoint_in_cpu="auto",
        contiguous_checkpointing=True,
        number_checkpoints=4,
        synchronize_each_layer=True,
    )
    assert [notice.split(":")[0] for notice in parsed.notices] == ["--deepspeed"]
    off = dict.fromkeys(section, False) | {"number_checkpoints": None}
    assert run({"activation_checkpointing": off}, SIZED).config.activations == ActivationConfig()


def test_checkpoints_need_recomputation_which_flags_ask_for() -> None:
    notices = run({"activation_checkpointing": KEPT}, SIZED).notices
    assert [name for name in KEPT for notice in notices if f"{name}: " in notice] == list(KEPT)
    assert sum("moot here, because only layers that are recomputed whole" in notice for notice in notices) == len(KEPT)


def test_a_count_is_idle_unless_file_or_flags_ask_for_an_arena() -> None:
    content = {"activation_checkpointing": {"number_checkpoints": 4, "contiguous_memory_optimization": False}}
    parsed = run(content, f"{SIZED} --recompute-granularity full")
    assert any("number_checkpoints: 4: moot here, because" in notice for notice in parsed.notices)
    bare = {"activation_checkpointing": {"number_checkpoints": 4}}
    flags = f"{SIZED} --recompute-granularity full --contiguous-checkpointing"
    assert run(bare, flags).config.activations.number_checkpoints == 4
    assert run(bare, f"{SIZED} --zero-config C1").config.activations.number_checkpoints == 4
    found = only(bare, f"{flags} --number-checkpoints 5")
    assert found.given == "ds.json: activation_checkpointing.number_checkpoints: 4 and --number-checkpoints 5"


# --- file and flags --------------------------------------------------------------------------------------------------


@each(
    ("content", "flags"),
    [
        ({"zero_optimization": {"stage": 2}}, "--zero-stage 2"),
        ({"zero_optimization": {"stage": 2}}, "--use-distributed-optimizer"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, "--reduce-bucket-size 500_000_000"),
        ({"zero_optimization": {"stage": 3, "overlap_comm": False}}, "--no-overlap-comm --zero-stage=3"),
        ({"bf16": {"enabled": True}}, "--bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "--precision bf16"),
        ({"fp16": {"enabled": False}}, "--bf16"),
        ({"gradient_clipping": 1.0}, "--clip-grad 1"),
        ({"train_micro_batch_size_per_gpu": 2}, ""),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, "--global-batch-size 32"),
        ({"gradient_accumulation_steps": 2}, "--global-batch-size 32"),
        ({"communication_data_type": "bf16"}, "--communication-data-type bf16"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 0.001, "eps": 1e-8}}}, "--adam-eps 1e-8"),
    ],
)
def test_the_same_said_twice_is_fine(content: dict[str, Any], flags: str) -> None:
    run(content, f"{SIZED} {flags}")


@each(
    ("content", "flags", "given"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            "--zero-stage 3",
            "ds.json: zero_optimization.stage: 2 and --zero-stage 3",
        ),
        (
            {"zero_optimization": {"stage": 0}},
            "--use-distributed-optimizer",
            "ds.json: zero_optimization.stage: 0 and --use-distributed-optimizer",
        ),
        (
            {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 5}},
            "--stage3-prefetch-bucket-size 6",
            "ds.json: zero_optimization.stage3_prefetch_bucket_size: 5 and --stage3-prefetch-bucket-size 6",
        ),
        (
            {"zero_optimization": {"overlap_comm": False}},
            "--overlap-comm",
            "ds.json: zero_optimization.overlap_comm: false and --overlap-comm",
        ),
        ({"bf16": {"enabled": True}}, "--fp16", "ds.json: bf16.enabled: true and --fp16"),
        ({"bf16": {"enabled": False}}, "--bf16", "--bf16 and ds.json: bf16.enabled: false"),
        (
            {"activation_checkpointing": {"partition_activations": False}},
            "--checkpoint-activations --partition-activations auto",
            "ds.json: activation_checkpointing.partition_activations: false and --partition-activations auto",
        ),
        ({"gradient_clipping": 0.0}, "--clip-grad 1.0", "ds.json: gradient_clipping: 0.0 and --clip-grad 1.0"),
        (
            {"train_micro_batch_size_per_gpu": 4},
            "",
            "ds.json: train_micro_batch_size_per_gpu: 4 and --micro-batch-size 2",
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 2e-3}}},
            "",
            "ds.json: optimizer.params.lr: 0.002 and --lr 1e-3",
        ),
        (
            {"data_types": {"grad_accum_dtype": "bf16"}},
            "--fp16",
            'ds.json: data_types.grad_accum_dtype: "bf16"',
        ),
    ],
)
def test_another_value_is_an_error_that_names_both(content: dict[str, Any], flags: str, given: str) -> None:
    assert only(content, f"{SIZED} {flags}").given == given


def test_absent_keys_do_not_override_what_was_said() -> None:
    Path("run.yaml").write_text("reduce_bucket_size: 123\nadam_beta1: 0.7\nfp16: true\n")
    content = {
        "zero_optimization": {},
        "optimizer": {"type": "AdamW"},
        "fp16": {"enabled": "auto"},
    }
    config = run(content, f"{SIZED} --config run.yaml --zero-stage 3 --weight-decay 0.2 --max-reuse-distance 5").config
    assert (config.zero.zero_stage, config.zero.max_reuse_distance, config.zero.reduce_bucket_size) == (3, 5, 123)
    assert config.zero.overlap_comm is True and config.zero.allgather_bucket_size == 500_000_000
    assert (config.optimizer.weight_decay, config.optimizer.lr, config.optimizer.adam_beta1) == (0.2, 1e-3, 0.7)
    assert (config.precision.precision, config.precision.initial_loss_scale) == ("fp16", 65536.0)


def test_a_warm_up_given_as_a_fraction_wins_over_the_documented_length() -> None:
    content = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "warmup_max_lr": 1e-3}}}
    optimizer = run(content, f"{SIZED} --lr-warmup-fraction 0.1").config.optimizer
    assert (optimizer.lr_warmup_fraction, optimizer.lr_warmup_iters) == (0.1, 0)


def test_what_the_file_says_wins_over_yaml() -> None:
    Path("run.yaml").write_text("zero_stage: 1\nclip_grad: 7\n")
    config = run({"zero_optimization": {"stage": 3}, "gradient_clipping": 2}, f"{SIZED} --config run.yaml").config
    assert (config.zero.zero_stage, config.optimizer.clip_grad) == (3, 2.0)


def test_a_resolved_configuration_says_it_all() -> None:
    first = run({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 32}, SIZED).config
    Path("resolved.yaml").write_text(to_yaml(first))
    assert parse(["--config", "resolved.yaml"], world_size=8).config == first


# --- batch -----------------------------------------------------------------------------------------------------------


@each(
    ("content", "flags", "world_size", "micro", "train"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, "", 8, 2, 48),
        ({"train_batch_size": 48, "gradient_accumulation_steps": 3}, "", 8, 2, 48),
        ({"train_batch_size": 48}, "", 8, 6, 48),
        ({"train_batch_size": 48}, "--micro-batch-size 2", 8, 2, 48),
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 2", 8, 2, 48),
        ({"gradient_accumulation_steps": 3}, "--global-batch-size 48", 8, 2, 48),
        ({"gradient_accumulation_steps": 3}, "--micro-batch-size 2 --tensor-model-parallel-size 2", 8, 2, 24),
        ({"train_batch_size": 48, "gradient_accumulation_steps": "auto"}, "--micro-batch-size 3", 8, 3, 48),
        ({"train_micro_batch_size_per_gpu": 5}, "", 8, 5, None),
        ({"train_batch_size": 6, "gradient_accumulation_steps": 3}, "", 1, 2, 6),
    ],
)
def test_the_sizes_of_the_batch_follow(
    content: dict[str, Any], flags: str, world_size: int, micro: int, train: int | None
) -> None:
    training = run(content, f"{BASE} --lr 1e-3 {flags}", world_size=world_size).config.training
    assert (training.micro_batch_size, training.global_batch_size) == (micro, train)


def test_sizes_that_contradict_each_other_name_their_sources() -> None:
    content = {"train_batch_size": 64, "gradient_accumulation_steps": 3}
    found = only(content, SIZED)
    assert found.given == (
        "ds.json: train_batch_size 64, --micro-batch-size 2, ds.json: gradient_accumulation_steps 3"
        " on 8 data-parallel processes"
    )
    assert found.legal == "ds.json: train_batch_size 48, ds.json: gradient_accumulation_steps 4"
    alone = problems({"train_batch_size": 14}, f"{BASE} --lr 1e-3")
    assert alone[0].legal == "ds.json: train_batch_size 16, ds.json: train_batch_size 8"


def test_a_broken_size_is_reported_once() -> None:
    content = {"gradient_accumulation_steps": 3}
    assert only(content, f"{BASE} --lr 1e-3 --micro-batch-size two").given == "--micro-batch-size two"


# --- everything at once ----------------------------------------------------------------------------------------------


def test_all_findings_come_together() -> None:
    content = {
        "zero_optimization": {"stage": 5, "offload_optimizer": {"device": "tape"}},
        "optimizer": {"type": "Muon"},
        "bf16": {"enabled": True},
        "csv_monitor": {"enabled": True},
    }
    given = {
        item.given.split(": ")[1] if "ds.json" in item.given else item.given for item in problems(content, "--lr x")
    }
    assert {"zero_optimization.stage", "zero_optimization.offload_optimizer.device", "optimizer.type"} <= given
    assert {"csv_monitor", "--lr x", "--num-layers is missing"} <= given


@each(
    ("content", "flags", "given"),
    [
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}}}, "", "max_grad_norm: 1.0"),
        ({"optimizer": {"type": "Adam", "params": {"lr": "fast"}}}, "", 'optimizer.params.lr: "fast"'),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "", 'optimizer.type: "OneBitAdam"'),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "", "warmup_num_steps: -1"),
        (
            {"train_batch_size": 7, "gradient_accumulation_steps": 2},
            "--lr 1 --micro-batch-size 2",
            "train_batch_size 7",
        ),
        ({"train_micro_batch_size_per_gpu": 0}, "--lr 1", "train_micro_batch_size_per_gpu: 0"),
        ({"zero_optimization": {"stage": 7}}, "--lr 1 --fp8", "zero_optimization.stage: 7"),
    ],
)
def test_a_problem_of_the_file_makes_no_other_problem(content: dict[str, Any], flags: str, given: str) -> None:
    micro = "" if "micro" in flags or "train_micro_batch_size_per_gpu" in content else "--micro-batch-size 2"
    bf16 = "--bf16" if "fp8" in flags else ""
    found = only(content, f"{BASE} {micro} {bf16} {flags}", world_size=1)
    assert given in found.given


def test_a_weaker_value_does_not_stand_in_for_an_illegal_one() -> None:
    Path("run.yaml").write_text("zero_stage: 3\nrecompute_granularity: selective\nlr: 1\n")
    content = {"optimizer": {"type": "Muon", "params": {"lr": 0.5}}}
    # The weaker rate of 1 would be below the end of the decay.
    assert only(content, f"{BASE} --micro-batch-size 2 --config run.yaml --min-lr 2").given.startswith("ds.json")


def test_a_missing_rate_is_reported_where_the_file_leaves_it_to_the_run() -> None:
    content = {"optimizer": {"type": "Adam", "params": {"lr": "auto", "max_grad_norm": 1.0}}}
    given = [problem.given for problem in problems(content, f"{BASE} --micro-batch-size 2")]
    assert given == ["ds.json: optimizer.params.max_grad_norm: 1.0", "--lr is missing"]


@pytest.mark.parametrize(
    ("content", "given"),
    [
        ({"gradient_allreduce_op": "sum"}, 'ds.json: gradient_allreduce_op: "sum"'),
        ({"torch_autocast": {"enabled": True}}, "ds.json: torch_autocast.enabled: true"),
    ],
)
def test_what_only_the_library_offers_is_refused(content: dict[str, Any], given: str) -> None:
    problem = only(content, SIZED)
    assert problem.given == given and problem.rule and problem.legal
    assert run({"gradient_allreduce_op": "mean", "torch_autocast": {"enabled": False}}, SIZED).config


def test_parameters_are_offloaded_in_stage_3_alone() -> None:
    zero = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    two = run({"zero_optimization": {"stage": 2, **zero}}, SIZED)
    assert (two.config.zero.offload_optimizer, two.config.zero.offload_param) == ("cpu", "none")
    assert any('offload_param.device: "cpu": moot here, because' in notice for notice in two.notices)
    assert run({"zero_optimization": {"stage": 3, **zero}}, SIZED).config.zero.offload_param == "cpu"
    meant = run({"zero_optimization": {"stage": 2}}, f"{SIZED} --offload-param cpu").config
    assert ["ZeRO stage 3, where they are" in problem.rule for problem in check(meant, 8)] == [True]


def test_whole_numbers_are_not_cast() -> None:
    told = run({"fp16": {"enabled": True, "auto_cast": True}}, SIZED).notices
    assert any("fp16.auto_cast: accepted, without effect" in notice for notice in told)


def test_automatic_keys_report_what_they_became() -> None:
    content = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "loss_scale": "auto", "initial_scale_power": "auto"},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto", "legacy_stage1": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "torch_adam": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_type": "linear", "total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
        "activation_checkpointing": "auto",
    }
    parsed = run(content, f"{SIZED} --global-batch-size 48 --fp16 --clip-grad 3 --initial-loss-scale 4096")
    assert [notice for notice in parsed.notices if "became" in notice] == [
        'ds.json: "auto" became train_batch_size: 48, gradient_accumulation_steps: 3, gradient_clipping: 3.0,'
        " activation_checkpointing: left out",
        'ds.json: fp16: "auto" became enabled: true, loss_scale: 0, initial_scale_power: 12',
        'ds.json: zero_optimization: "auto" became stage3_prefetch_bucket_size: as many as the largest unit has, with'
        " more than 32 data-parallel processes at least 262144 for each, legacy_stage1: left out",
        'ds.json: optimizer.params: "auto" became lr: 0.001, betas: [0.9, 0.999], torch_adam: megazero\'s own',
        'ds.json: scheduler.params: "auto" became total_num_steps: 100, warmup_num_steps: 0',
    ]
    assert not any("became" in notice for notice in run({"zero_optimization": {"stage": 2}}, SIZED).notices)


def test_the_pieces_need_no_file() -> None:
    file = read({"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}, "ds")
    translation = translate_for_run(file, fp16_requested=False)
    settings = {item.name: ParsedValue(item.name, item.value, item.source) for item in translation.written}
    settings["micro_batch_size"] = ParsedValue("micro_batch_size", 4, "--micro-batch-size 4")
    assert complete(translation, settings, data_parallel_size=3) == []
    assert settings["global_batch_size"].value == 24 and settings["overlap_comm"].value is True
    assert settings["global_batch_size"].source == "ds: train_batch_size 24, which follows on 3 processes"


@each(
    ("fp16", "flags", "scale", "told"),
    [
        ({"initial_scale_power": 15}, "--loss-scale 15", None, "fp16.loss_scale: 0 (DeepSpeed's default), as in"),
        ({"loss_scale": 0, "initial_scale_power": 12}, "--loss-scale 12", None, "is dynamic, from 4096 on"),
        ({"loss_scale": 128}, "--loss-scale 12", 128.0, "the loss scale is constant, 128"),
        ({"loss_scale": 128}, "--loss-scale 128", 128.0, ""),
        ({"loss_scale": "auto"}, "--loss-scale 64", 64.0, ""),
    ],
)
def test_the_files_loss_scale_replaces_the_flags(
    fp16: dict[str, object], flags: str, scale: float | None, told: str
) -> None:
    """Scripts of Megatron-DeepSpeed give both; a constant scale of 15 in fp16 would lose every small gradient."""
    parsed = run({"fp16": {"enabled": True, **fp16}}, f"{SIZED} --fp16 {flags}")
    assert parsed.config.precision.loss_scale == scale
    replaced = [notice for notice in parsed.notices if notice.startswith(f"{flags}: replaced by ds.json: ")]
    assert len(replaced) == bool(told) and told in "".join(replaced)


def test_the_files_loss_scale_replaces_that_of_a_run_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("loss_scale: 15\n")
    parsed = run({"fp16": {"enabled": True}}, f"{SIZED} --config {tmp_path / 'run.yaml'}")
    assert parsed.config.precision.loss_scale is None and "run.yaml: loss_scale: 15: replaced by" in parsed.notices[0]


def test_timers_and_weights_and_biases_are_those_of_the_runs_own_flags() -> None:
    """The wandb section names a project even where it gives none, and one that is off is told."""
    reports = run(
        {"wall_clock_breakdown": True, "wandb": {"enabled": True, "team": "t", "group": "g"}}, SIZED
    ).config.reports
    assert reports.timing_log_level == 2
    assert (reports.wandb_project, reports.wandb_entity, reports.wandb_group) == ("deepspeed", "t", "g")
    named = run({"wandb": {"enabled": True, "project": "p"}}, f"{SIZED} --wandb-project p").config.reports
    assert named.wandb_project == "p"
    off = run({"wall_clock_breakdown": False, "wandb": {"enabled": False, "project": "p"}}, SIZED)
    assert off.config.reports.timing_log_level == 0 and off.config.reports.wandb_project is None
    assert "ds.json: wandb: accepted, without effect: it is turned off" in off.notices
