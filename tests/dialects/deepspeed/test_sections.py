"""Tests the translation of a DeepSpeed configuration, published ones among them, into the library's own sections."""

import json
from pathlib import Path
from typing import Any

from support.each import each

from megazero.config.choices import OptimizerChoice, SchedulerChoice
from megazero.config.engine_sections import ActivationConfig, PrecisionConfig, ZeroConfig
from megazero.config.origin import Origin
from megazero.config.values import RawValue
from megazero.dialects.deepspeed.reading import ParsedFile, read
from megazero.dialects.deepspeed.sections import EngineParts, engine_parts, translate
from megazero.errors import Problem

# Configurations in the shapes that tutorials and integrations publish.
ZERO_2_FP16 = """{
  "train_batch_size": 8, "gradient_accumulation_steps": 1, "steps_per_print": 2000,
  "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
  "gradient_clipping": 1.0, "prescale_gradients": false, "wall_clock_breakdown": false,
  "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
           "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
  "zero_optimization": {"stage": 2, "allgather_partitions": true, "reduce_scatter": true,
    "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000, "overlap_comm": true,
    "contiguous_gradients": true, "cpu_offload": false}
}"""
AUTO_ZERO_3 = """{
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupLR",
                "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": true},
    "offload_param": {"device": "none", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""
LAUNCH_SCRIPT_BF16 = """{
  "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2048, "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 0}, "bf16": {"enabled": true}, "steps_per_print": 2000,
  "wall_clock_breakdown": false, "data_types": {"grad_accum_dtype": "fp32"}
}"""
LAUNCH_SCRIPT_FP16 = """{
  "train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
  "zero_optimization": {"stage": 1, "elastic_checkpoint": true}, "gradient_clipping": 1.0,
  "prescale_gradients": true, "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2,
  "min_loss_scale": 1, "initial_scale_power": 11}, "curriculum_learning": {"enabled": false},
  "wall_clock_breakdown": true, "zero_allow_untested_optimizer": true, "sparse_gradients": false,
  "communication_data_type": "fp32", "activation_checkpointing": {"partition_activations": false, "profile": false},
  "flops_profiler": {"enabled": false, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": true}
}"""
PUBLISHED = {
    "zero 2, fp16": ZERO_2_FP16,
    "zero 3, auto": AUTO_ZERO_3,
    "launch script, bf16": LAUNCH_SCRIPT_BF16,
    "launch script, fp16": LAUNCH_SCRIPT_FP16,
}


def parts(content: dict[str, Any] | str) -> tuple[EngineParts, ParsedFile]:
    file = read(json.loads(content) if isinstance(content, str) else content, "ds.json")
    return engine_parts(file), file


def problems(content: dict[str, Any]) -> list[Problem]:
    return parts(content)[1].diagnostics.problems


@each("name", PUBLISHED)
def test_published_configurations_load(name: str) -> None:
    assert parts(PUBLISHED[name])[1].diagnostics.problems == []


def test_a_zero_2_configuration_with_a_schedule() -> None:
    made, file = parts(ZERO_2_FP16)
    assert made.precision == PrecisionConfig(precision="fp16", initial_loss_scale=2.0**15, loss_scale_window=500)
    assert made.optimizer == OptimizerChoice(
        type="AdamW",
        lr=0.001,
        params={"betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7, "amsgrad": False, "maximize": False},
    )
    assert made.scheduler == SchedulerChoice(
        type="WarmupLR",
        params={"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"},
    )
    assert (made.zero.zero_stage, made.zero.reduce_bucket_size, made.zero.overlap_comm) == (2, 50_000_000, True)
    assert made.zero.max_reuse_distance == 10**9
    assert [line.split(": ")[1] for line in file.diagnostics.notices] == ["steps_per_print"]


def test_auto_is_megazeros_default_and_absence_deepspeeds() -> None:
    made, own = parts(AUTO_ZERO_3)[0], ZeroConfig()
    assert made.zero.zero_stage == 3
    assert made.zero.reduce_bucket_size == own.reduce_bucket_size
    assert made.zero.prefetch_bucket_size is own.prefetch_bucket_size is None
    assert made.zero.param_persistence_threshold == own.param_persistence_threshold == 0
    assert made.zero.allgather_bucket_size == 500_000_000
    assert made.precision == PrecisionConfig()
    assert made.optimizer.lr == 1e-3 and made.optimizer.params["weight_decay"] == 0.01
    assert made.scheduler is not None and made.scheduler.params["warmup_max_lr"] == made.optimizer.lr
    absent = parts({"zero_optimization": {"stage": 3}})[0].zero
    assert (absent.param_persistence_threshold, absent.max_reuse_distance) == (100_000, 10**9)
    assert (absent.reduce_bucket_size, absent.prefetch_bucket_size) == (500_000_000, 50_000_000)


def test_launch_scripts() -> None:
    bf16 = parts(LAUNCH_SCRIPT_BF16)[0]
    assert bf16.zero.zero_stage == 0
    assert bf16.precision == PrecisionConfig(precision="bf16", accumulate_allreduce_grads_in_fp32=True)
    fp16 = parts(LAUNCH_SCRIPT_FP16)[0]
    assert fp16.precision.initial_loss_scale == 2048.0 and fp16.zero.prescale_gradients
    assert fp16.zero.communication_data_type == "fp32"


def test_nothing_said_is_stage_0_in_fp32() -> None:
    made = parts({})[0]
    assert (made.zero.zero_stage, made.precision.precision) == (0, "fp32")
    assert (made.optimizer, made.scheduler) == (None, None)
    assert made.zero.communication_data_type == "auto"


@each(("stage", "overlaps"), [(0, False), (1, False), (2, False), (3, True)])
def test_without_a_word_communication_overlaps_in_stage_3(stage: int, overlaps: bool) -> None:
    assert parts({"zero_optimization": {"stage": stage}})[0].zero.overlap_comm is overlaps
    assert parts({"zero_optimization": {"stage": stage, "overlap_comm": None}})[0].zero.overlap_comm is overlaps
    for said in (True, False):
        assert parts({"zero_optimization": {"stage": stage, "overlap_comm": said}})[0].zero.overlap_comm is said
    assert parts({"zero_optimization": {"stage": stage, "overlap_comm": "auto"}})[0].zero.overlap_comm is True


def test_how_checkpoints_are_kept() -> None:
    section = {
        "partition_activations": True,
        "cpu_checkpointing": "auto",
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
        "synchronize_checkpoint_boundary": True,
        "profile": True,
    }
    made, file = parts({"activation_checkpointing": section})
    assert made.activations == ActivationConfig(
        partition_activations=True,
        checkpoint_in_cpu="auto",
        contiguous_checkpointing=True,
        number_checkpoints=4,
        synchronize_each_layer=True,
        profile_backward=True,
    )
    assert file.diagnostics.problems == [] and file.diagnostics.notices == []
    assert parts({})[0].activations == ActivationConfig()
    automatic = parts({"activation_checkpointing": dict.fromkeys(section, "auto")})[0].activations
    assert automatic == ActivationConfig(partition_activations="auto", checkpoint_in_cpu="auto")


def test_the_loss_scale() -> None:
    fixed = parts({"fp16": {"enabled": True, "loss_scale": 128, "consecutive_hysteresis": True}})[0].precision
    assert (fixed.precision, fixed.loss_scale, fixed.consecutive_hysteresis) == ("fp16", 128.0, True)
    assert parts({"fp16": {"enabled": True, "min_loss_scale": 0}})[0].precision.min_loss_scale == 0
    moving = parts({"fp16": {"enabled": True, "min_loss_scale": 1e-5, "hysteresis": 4}})[0].precision
    assert (moving.loss_scale, moving.initial_loss_scale) == (None, 65536.0)
    assert (moving.min_loss_scale, moving.hysteresis) == (1e-5, 4)
    own = parts({"fp16": {"enabled": True, "initial_scale_power": "auto", "loss_scale": "auto"}})[0].precision
    assert own.initial_loss_scale == PrecisionConfig().initial_loss_scale and own.loss_scale is None
    # Without fp16 the section has no effect.
    assert parts({"fp16": {"enabled": False, "loss_scale": 128}})[0].precision == PrecisionConfig()


@each(
    ("params", "kind", "chosen"),
    [
        ({}, "Adam", "AdamW"),
        ({"adam_w_mode": True}, "adam", "AdamW"),
        ({"adam_w_mode": "auto"}, "Adam", "AdamW"),
        ({"adam_w_mode": False}, "Adam", "Adam"),
        ({"adam_w_mode": False}, "AdamW", "AdamW"),
        ({"torch_adam": True, "bias_correction": True}, "AdamW", "AdamW"),
        ({"momentum": 0.9}, "SGD", "SGD"),
        ({}, "Adagrad", "Adagrad"),
    ],
)
def test_adam_is_adamw_unless_told_otherwise(params: dict[str, Any], kind: str, chosen: str) -> None:
    made, file = parts({"optimizer": {"type": kind, "params": params}})
    assert made.optimizer.type == chosen and file.diagnostics.problems == []
    assert made.optimizer.params["weight_decay"] == 0.0


@each(
    ("content", "given", "legal"),
    [
        (
            {"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: 1.0",
            "gradient_clipping: 1.0",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"bias_correction": False}}},
            "optimizer.params.bias_correction: false",
            "bias_correction: true",
        ),
        (
            {"optimizer": {"type": "Adam", "params": {"adam_w_mode": 2}}},
            "optimizer.params.adam_w_mode: 2",
            "true, false",
        ),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type is missing", 'type: "AdamW"'),
        ({"scheduler": {"params": {"warmup_num_steps": 1}}}, "scheduler.type is missing", 'type: "WarmupLR"'),
        (
            {"optimizer": {"type": "Lamb", "params": {"amsgrad": True}}},
            "optimizer.params.amsgrad: true",
            "amsgrad: false",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"max_grad_norm": 1.0}}},
            "optimizer.params.max_grad_norm: 1.0",
            "gradient_clipping: 1.0",
        ),
        (
            {"optimizer": {"type": "Lamb", "params": {"min_coeff": 20}}},
            "optimizer.params.min_coeff: 20.0 with max_coeff: 10",
            "min_coeff: 0 to 10",
        ),
        ({"optimizer": {"type": "Muon"}}, 'optimizer.type: "Muon"', "AdamW"),
        ({"optimizer": {"type": "Adam", "adam_w_mode": True}}, "optimizer.adam_w_mode: true", "type"),
        ({"optimizer": {"type": "Adam", "eps": 1e-6}}, "optimizer.eps: 1e-06", "optimizer.params.eps: 1e-06"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
            'scheduler.params.total_num_steps: "auto"',
            "total_num_steps: 100000",
        ),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast: true", "cast them in the program"),
        ({"scheduler": {"type": "TwoCycles"}}, 'scheduler.type: "TwoCycles"', "OneCycle"),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 8},
            "prescale_gradients and gradient_predivide_factor 8",
            "gradient_predivide_factor 1",
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}},
            "2 to the fp16.initial_scale_power, 2 fp16.min_loss_scale 4",
            "2 to the fp16.initial_scale_power, 4, fp16.min_loss_scale 2",
        ),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 'data_types.grad_accum_dtype: "bf16"', '"fp32"'),
        (
            {"data_types": {"grad_accum_dtype": "fp16"}, "bf16": {"enabled": True}},
            'data_types.grad_accum_dtype: "fp16"',
            'grad_accum_dtype: "bf16", grad_accum_dtype: "fp32"',
        ),
    ],
)
def test_what_is_wrong_between_keys(content: dict[str, Any], given: str, legal: str) -> None:
    (problem,) = problems(content)
    assert problem.given == f"ds.json: {given}" and legal in problem.legal and problem.rule


def test_gradients_in_the_models_own_format_are_no_wider() -> None:
    content = {"data_types": {"grad_accum_dtype": "bf16"}, "bf16": {"enabled": True}}
    assert parts(content)[0].precision == PrecisionConfig(precision="bf16")
    assert parts({"data_types": {"grad_accum_dtype": "fp32"}})[0].precision == PrecisionConfig()


# --- offloading -------------------------------------------------------------------------------------------------------

CPU = {"device": "cpu"}
NVME = {"device": "nvme", "nvme_path": "/a"}
OLD_PARAM = {"cpu_offload_param": True}


def moved(stage: int, **zero: Any) -> tuple[ZeroConfig, ParsedFile]:
    made, file = parts({"zero_optimization": {"stage": stage, **zero}})
    return made.zero, file


@each(
    ("zero", "optimizer", "param"),
    [
        ({}, "none", "none"),
        ({"offload_optimizer": CPU}, "cpu", "none"),
        ({"offload_param": CPU}, "none", "cpu"),
        ({"offload_optimizer": CPU, "offload_param": CPU}, "cpu", "cpu"),
        ({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}, "none", "none"),
        ({"offload_optimizer": {"device": "auto"}, "offload_param": {"device": "auto"}}, "auto", "auto"),
        ({"cpu_offload": True}, "cpu", "none"),
        ({"cpu_offload": False, "cpu_offload_param": False}, "none", "none"),
        (OLD_PARAM, "none", "cpu"),
        ({"cpu_offload": True, **OLD_PARAM}, "cpu", "cpu"),
        ({"cpu_offload": True, "offload_optimizer": CPU}, "cpu", "none"),
        ({"cpu_offload": False, "offload_optimizer": {"device": "none"}}, "none", "none"),
        ({**OLD_PARAM, "offload_optimizer": CPU}, "cpu", "cpu"),
    ],
)
def test_old_and_new_keys_choose_homes(zero: dict[str, Any], optimizer: str, param: str) -> None:
    made, file = moved(3, **zero)
    assert (made.offload_optimizer, made.offload_param) == (optimizer, param)
    assert file.diagnostics.problems == [] and file.diagnostics.notices == []


def test_a_part_of_the_optimizer_is_moved() -> None:
    made, file = moved(2, offload_optimizer={"device": "cpu", "ratio": 0.25})
    assert (made.offload_optimizer, made.offload_optimizer_ratio) == ("cpu", 0.25)
    assert file.diagnostics.problems == [] and file.diagnostics.notices == []
    assert moved(2, offload_optimizer=CPU)[0].offload_optimizer_ratio == 1.0
    for section, key, because in (
        ({"ratio": 0.25}, "ratio: 0.25", "offload_optimizer none keeps all of it on the device"),
        ({"device": "cpu", "ratio": 0}, 'device: "cpu"', "offload_optimizer_ratio 0 keeps all of it on the device"),
    ):
        _, file = moved(2, offload_optimizer=section)
        assert file.diagnostics.problems == []
        assert file.diagnostics.notices == [
            f"ds.json: zero_optimization.offload_optimizer.{key}: moot here, because {because}"
        ]


@each(
    ("zero", "is_pinned", "moot"),
    [
        ({"offload_optimizer": CPU}, True, ""),
        ({"offload_optimizer": CPU, "cpu_offload_use_pin_memory": False}, False, ""),
        ({"offload_optimizer": {**CPU, "pin_memory": False}}, False, ""),
        ({"offload_param": {**CPU, "pin_memory": False}}, False, ""),
        ({"offload_optimizer": {**CPU, "pin_memory": False}, "offload_param": {**CPU, "pin_memory": False}}, False, ""),
        ({"offload_optimizer": {**CPU, "pin_memory": False}, "offload_param": CPU}, False, ""),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": False}, False, ""),
        ({**OLD_PARAM, "cpu_offload_use_pin_memory": False}, False, ""),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": True}, True, ""),
        ({"cpu_offload": True, "offload_optimizer": {"pin_memory": False}}, False, ""),
        # What is not offloaded has no part in it.
        (
            {"offload_optimizer": {**CPU, "pin_memory": True}, "offload_param": {"pin_memory": False}},
            True,
            "offload_param.pin_memory: false: moot here, because no param states",
        ),
        (
            {"offload_optimizer": {"device": "none", "pin_memory": False}, "offload_param": CPU},
            True,
            "offload_optimizer.pin_memory: false: moot here, because no optimizer states",
        ),
        (
            {"cpu_offload_use_pin_memory": False},
            True,
            "cpu_offload_use_pin_memory: false: moot here, because no optimizer or param states",
        ),
        ({"offload_optimizer": {"nvme_path": "/b"}}, True, 'nvme_path: "/b": moot here, because no optimizer states'),
    ],
)
def test_host_memory_is_pinned_for_all_or_for_none(zero: dict[str, Any], is_pinned: bool, moot: str) -> None:
    made, file = moved(3, **zero)
    assert made.offload_pin_memory is is_pinned
    assert file.diagnostics.problems == [] and len(file.diagnostics.notices) == bool(moot)
    assert moot in "".join(file.diagnostics.notices)


@each(
    "zero",
    [
        {"offload_optimizer": NVME, "offload_param": NVME},
        {"offload_optimizer": NVME, "offload_param": {"device": "nvme"}},
        {"offload_optimizer": {**CPU, "nvme_path": "/a"}, "offload_param": NVME},
        {"offload_optimizer": NVME, "offload_param": {"device": "none", "nvme_path": "/b"}},
    ],
)
def test_all_files_are_in_one_folder(zero: dict[str, Any]) -> None:
    made, file = moved(3, **zero)
    assert made.nvme_path == Path("/a") and file.diagnostics.problems == []


@each(
    ("stage", "zero", "given", "legal"),
    [
        (
            3,
            {"offload_optimizer": {**CPU, "pin_memory": True}, "offload_param": {**CPU, "pin_memory": False}},
            "zero_optimization.offload_optimizer.pin_memory: true and"
            " ds.json: zero_optimization.offload_param.pin_memory: false",
            "the same value in both sections",
        ),
        (
            3,
            {"cpu_offload": True, "cpu_offload_use_pin_memory": True, "offload_param": {**CPU, "pin_memory": False}},
            "zero_optimization.offload_param.pin_memory: false and"
            " ds.json: zero_optimization.cpu_offload_use_pin_memory: true",
            "the same value in both sections",
        ),
        (
            2,
            {"offload_optimizer": {**CPU, "pin_memory": False}, "cpu_offload_use_pin_memory": True},
            "zero_optimization.offload_optimizer.pin_memory: false and"
            " ds.json: zero_optimization.cpu_offload_use_pin_memory: true",
            "the same value",
        ),
        (
            3,
            {"offload_optimizer": NVME, "offload_param": {**NVME, "nvme_path": "/b"}},
            'zero_optimization.offload_optimizer.nvme_path: "/a" and'
            ' ds.json: zero_optimization.offload_param.nvme_path: "/b"',
            "the same value in both sections",
        ),
        (
            3,
            {"cpu_offload": True, "offload_optimizer": {"device": "none"}},
            'zero_optimization.cpu_offload: true and ds.json: zero_optimization.offload_optimizer.device: "none"',
            "one of the two",
        ),
        (
            3,
            {"cpu_offload_param": False, "offload_param": CPU},
            'zero_optimization.cpu_offload_param: false and ds.json: zero_optimization.offload_param.device: "cpu"',
            "one of the two",
        ),
        (
            2,
            {"cpu_offload_params": True},
            "zero_optimization.cpu_offload_params: true",
            "cpu_offload_param, offload_param",
        ),
        (
            0,
            {"offload_optimizer": CPU},
            "zero_optimization.offload_optimizer.device cpu with zero_optimization.stage 0",
            "zero_optimization.stage 1, or zero_optimization.offload_optimizer.device none",
        ),
        (
            0,
            {"cpu_offload": True},
            "zero_optimization.offload_optimizer.device cpu with zero_optimization.stage 0;"
            " zero_optimization.offload_optimizer.device comes from ds.json: zero_optimization.cpu_offload: true",
            "zero_optimization.stage 1",
        ),
    ],
)
def test_homes_that_contradict(stage: int, zero: dict[str, Any], given: str, legal: str) -> None:
    (problem,) = moved(stage, **zero)[1].diagnostics.problems
    assert problem.given == f"ds.json: {given}" and legal in problem.legal and problem.rule


@each("stage", [0, 1, 2])
@each(
    ("zero", "key"),
    [
        ({"offload_param": {**CPU, "pin_memory": True}}, 'offload_param.device: "cpu"'),
        (OLD_PARAM, "cpu_offload_param: true"),
        (
            {**OLD_PARAM, "cpu_offload_use_pin_memory": True, "offload_param": {"pin_memory": False}},
            "cpu_offload_param: true",
        ),
    ],
)
def test_parameters_below_stage_3_get_a_notice(stage: int, zero: dict[str, Any], key: str) -> None:
    made, file = moved(stage, **zero)
    assert made.offload_param == "none" and file.diagnostics.problems == []
    (notice,) = file.diagnostics.notices
    assert notice.startswith(f"ds.json: zero_optimization.{key}: moot here, because parameters are partitioned")


# --- the translation that runs and the library share ------------------------------------------------------------------


def test_a_translation_keeps_sources_and_tells_written_settings_from_defaults() -> None:
    content = {"zero_optimization": {"stage3_max_live_parameters": "5e8"}, "fp16": {"enabled": True, "loss_scale": 0}}
    found = translate(read(content, "ds.json"))
    assert found.written == [
        RawValue(
            "max_live_parameters",
            500_000_000,
            "ds.json: zero_optimization.stage3_max_live_parameters: 500000000",
            Origin.FOREIGN,
        ),
        RawValue("precision", "fp16", "ds.json: fp16.enabled: true", Origin.FOREIGN),
        RawValue("loss_scale", None, "ds.json: fp16.loss_scale: 0.0", Origin.FOREIGN),
    ]
    defaults = {item.name: item for item in found.defaults}
    assert defaults["zero_stage"].value == 0 and defaults["initial_loss_scale"].value == 65536.0
    assert {item.origin for item in found.defaults} == {Origin.DEFAULT}
    assert defaults["zero_stage"].source == "ds.json: zero_optimization.stage: 0 (DeepSpeed's default)"
    assert "prescale_gradients" not in defaults and "partition_activations" not in defaults
    whole = {item.name for item in translate(read(content, "ds.json"), whole=True).defaults}
    assert whole > set(defaults) and {"prescale_gradients", "partition_activations"} < whole


def test_a_key_with_an_illegal_value_leaves_its_setting_unknown() -> None:
    content = {"zero_optimization": {"stage": 7}, "bf16": {"enabled": "perhaps"}}
    found = translate(read(content, "ds.json"))
    assert found.unknown == {"zero_stage", "precision"} and "zero_stage" not in {item.name for item in found.defaults}


def test_automatic_keys_report_what_they_became() -> None:
    notices = parts(AUTO_ZERO_3)[1].diagnostics.notices
    assert [notice for notice in notices if "became" in notice] == [
        'ds.json: fp16: "auto" became enabled: false',
        'ds.json: bf16: "auto" became enabled: false',
        'ds.json: zero_optimization: "auto" became'
        " reduce_bucket_size: 524288 for each data-parallel process, but at least 16777216, and at most 268435456 or"
        " 131072 for each process, whichever is more,"
        " stage3_prefetch_bucket_size: as many as the largest unit has, with more than 32 data-parallel processes at"
        " least 262144 for each, stage3_param_persistence_threshold: 0",
        'ds.json: "auto" became gradient_clipping: 0.0',
        'ds.json: optimizer.params: "auto" became lr: 0.001, betas: [0.9, 0.999], eps: 1e-08, weight_decay: 0.01',
        'ds.json: scheduler.params: "auto" became warmup_min_lr: 0.0, warmup_max_lr: 0.001, warmup_num_steps: 1000',
    ]
