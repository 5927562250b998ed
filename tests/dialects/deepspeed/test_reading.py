"""Tests reading of a DeepSpeed configuration: how every key is treated, and which errors of a file are reported."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.each import each

from megazero.config.values import Diagnostics
from megazero.dialects.deepspeed.keys import ACCEPTED, ALIASES, HONOURED, PARAMS, REFUSED, SECTIONS, SWITCHED
from megazero.dialects.deepspeed.reading import ParsedFile, read, read_file
from megazero.errors import ConfigError, Problem


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the path a.b."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def of(path: str, value: Any) -> ParsedFile:
    """Read a file with one key; the section of it is turned on where it has a switch and other keys."""
    content, top = nested(path, value), path.partition(".")[0]
    if top in SECTIONS and top in SWITCHED and not path.endswith(".enabled") and path not in SWITCHED:
        content[top] = {"enabled": True, **content[top]}
    return read(content, "ds.json")


def clean(reading: ParsedFile) -> bool:
    return not reading.diagnostics.problems and not reading.diagnostics.notices


def only(reading: ParsedFile) -> Problem:
    assert len(reading.diagnostics.problems) == 1, reading.diagnostics.problems
    return reading.diagnostics.problems[0]


# --- treatment of every key -------------------------------------------------------------------------------------------

SAMPLES: dict[str, Any] = {
    "int": (3, "three"),
    "float": (0.5, True),
    "bool": (True, 2),
    "switch": (True, 2),
    "str": ("WarmupLR", [5]),
    "list": (["Experts"], [{}]),
}


SWITCHES = [path for path in HONOURED if path.endswith(".enabled") and path.partition(".")[0] in SWITCHED]


@each("path", [path for path in HONOURED if path not in SWITCHES])
def test_an_honoured_key_is_read_and_checked(path: str) -> None:
    info = HONOURED[path]
    good, bad = SAMPLES[info.kind]
    good = info.choices[0] if info.kind == "str" and info.choices else good
    good = {"zero_optimization.stage": 2, "aio.block_size": 4096}.get(path, good)
    reading = of(path, good)
    assert clean(reading) and reading.get(path, "own") == (tuple(good) if info.kind == "list" else good)
    assert reading.values[path].source == f"ds.json: {path}: {json.dumps(good)}"
    wrong = only(of(path, bad))
    assert wrong.given.startswith(f"ds.json: {path}: ") and path in wrong.rule and wrong.legal
    automatic = of(path, "auto")
    assert clean(automatic)
    if info.kind == "switch" or "auto" in info.choices:
        key = automatic.written(path)
        assert key is not None and key.value == "auto" == automatic.get(path, "own")
    else:
        assert automatic.get(path, "own") == "own" and automatic.written(path) is None
    assert read({}, "ds.json").get(path, "own") == info.default


@each("path", ACCEPTED)
@each("value", [True, 17, "text"])
def test_an_accepted_key_earns_one_line(path: str, value: Any) -> None:
    diagnostics = of(path, value).diagnostics
    assert diagnostics.problems == [] and len(diagnostics.notices) == 1
    assert diagnostics.notices[0] == f"ds.json: {path}: accepted, without effect: {ACCEPTED[path]}"


@each("path", REFUSED)
def test_a_refused_key_is_fine_when_it_is_off(path: str) -> None:
    for value in (*REFUSED[path].off, None, "auto"):
        assert clean(of(path, value)), value
    on = not REFUSED[path].off[0] if isinstance(REFUSED[path].off[0], bool) else 8
    problem = only(of(path, on))
    assert problem.given == f"ds.json: {path}: {json.dumps(on)}"
    assert problem.rule == f"refused: {REFUSED[path].reason}" and problem.legal


@each("path", SWITCHES)
def test_a_section_with_a_switch_is_read_when_it_is_on(path: str) -> None:
    assert clean(of(path, True)) and of(path, True).get(path, None) is True
    assert only(of(path, 2)).given == f"ds.json: {path}: 2"
    for value in (False, "auto"):
        diagnostics, top = of(path, value).diagnostics, path.partition(".")[0]
        assert diagnostics == Diagnostics([], [f"ds.json: {top}: accepted, without effect: it is turned off"])


@each("path", [path for path in SWITCHED if path not in SECTIONS])
def test_a_switched_section_is_refused_when_it_is_on(path: str) -> None:
    assert only(of(f"{path}.enabled", True)).given == f'ds.json: {path}: {{"enabled": true}}'
    diagnostics = of(f"{path}.enabled", False).diagnostics
    assert diagnostics.problems == [] and diagnostics.notices == [
        f"ds.json: {path.partition('.')[0]}: accepted, without effect: it is turned off"
    ]
    if SWITCHED[path].names:
        assert only(of(f"{path}.enable", False)).legal == "enabled"


@each("path", sorted(ALIASES))
def test_an_alias_is_its_key(path: str) -> None:
    target = ALIASES[path]
    if target in HONOURED:
        good = 7 if HONOURED[target].kind == "int" else True
        reading = of(path, good)
        assert (
            reading.get(target, None) == good
            and reading.values[target].source == f"ds.json: {path}: {json.dumps(good)}"
        )
    elif target in REFUSED:
        assert only(of(path, True)).given == f"ds.json: {path}: true"
    elif target in ACCEPTED:
        assert len(of(path, 1).diagnostics.notices) == 1
    else:
        assert of(f"{path}.enabled", True).get(f"{target}.enabled", None) is True


@pytest.mark.parametrize("path", PARAMS)
def test_parameters_are_kept_for_whoever_knows_the_type(path: str) -> None:
    assert of(path, {"anything": 1}).params == {path: {"anything": 1}}


@each(
    ("path", "value"),
    [
        ("zero_optimization.offload_optimizer", None),
        ("zero_optimization.offload_param", False),
        ("zero_optimization.offload_param", {}),
        ("zero_optimization.offload_param.device", None),
        ("zero_optimization", None),
        ("communication_data_type", "none"),
        ("train_batch_size", None),
        ("zero_optimization.overlap_comm", None),
        ("activation_checkpointing.number_checkpoints", None),
    ],
)
def test_nothing_is_nothing(path: str, value: Any) -> None:
    reading = of(path, value)
    assert clean(reading) and not reading.values


@each(
    ("path", "value", "given", "legal"),
    [
        (
            "zero_optimization.offload_optimizer.device",
            "disk",
            'zero_optimization.offload_optimizer.device: "disk"',
            "none, cpu, nvme",
        ),
        ("zero_optimization.offload_param.device", "disk", 'zero_optimization.offload_param.device: "disk"', "nvme"),
        ("zero_optimization.offload_param.device", "gpu", 'zero_optimization.offload_param.device: "gpu"', "cpu, none"),
        ("zero_optimization.offload_param.device", 3, "zero_optimization.offload_param.device: 3", "none, cpu"),
        (
            "zero_optimization.offload_optimizer.ratio",
            2.0,
            "zero_optimization.offload_optimizer.ratio: 2.0",
            "ratio: 1, ratio: 0",
        ),
        ("zero_optimization.zero_hpz_partition_size", 0, "zero_optimization.zero_hpz_partition_size: 0", "size: 1"),
        ("zero_optimization.stage", 4, "zero_optimization.stage: 4", "stage: 3"),
        ("zero_optimization.stage", None, "zero_optimization.stage: null", "a whole number, at least 0, at most 3"),
        ("zero_optimization.sub_group_size", -1, "zero_optimization.sub_group_size: -1", "sub_group_size: 0"),
        ("zero_optimization.reduce_bucket_size", 2.5, "zero_optimization.reduce_bucket_size: 2.5", "2, "),
        ("zero_optimization.stages", 3, "zero_optimization.stages: 3", "stage"),
        ("zero_optimisation.stage", 3, 'zero_optimisation: {"stage": 3}', "zero_optimization"),
        ("zero_optimization.offload_param.buffers", 3, "zero_optimization.offload_param.buffers: 3", "buffer_count"),
        ("zero_optimization", 3, "zero_optimization: 3", '{"stage": ...}'),
        (
            "zero_optimization.offload_param",
            "cpu",
            'zero_optimization.offload_param: "cpu"',
            '{"device": ...}',
        ),
        ("optimizer.params", 3, "optimizer.params: 3", "{...}"),
        ("fp16.initial_scale_power", 200, "fp16.initial_scale_power: 200", "initial_scale_power: 127"),
        ("communication_data_type", "int8", 'communication_data_type: "int8"', "fp64, fp32, bf16, fp16"),
        ("gradient_predivide_factor", 0, "gradient_predivide_factor: 0", "greater than 0"),
        (
            "compression_training.weight_quantization.shared_parameters.enabled",
            True,
            "compression_training: ",
            "leave out",
        ),
        ("compile.deepcompile", True, "compile: ", "leave out compile"),
        (
            "activation_checkpointing.cpu_checkpointing",
            "perhaps",
            'activation_checkpointing.cpu_checkpointing: "perhaps"',
            "true, auto",
        ),
        (
            "activation_checkpointing.number_checkpoints",
            0,
            "activation_checkpointing.number_checkpoints: 0",
            "number_checkpoints: 1",
        ),
        (
            "activation_checkpointing.partitioned_activations",
            True,
            "activation_checkpointing.partitioned_activations: true",
            "partition_activations",
        ),
        ("pipeline.activation_checkpoint_interval", 1, "pipeline.activation_checkpoint_interval: 1", "interval: 0"),
        ("pipeline.stages", 4, "pipeline.stages: 4", "stages: 1"),
        ("gradient_allreduce_op", "max", 'gradient_allreduce_op: "max"', "mean"),
        ("torch_autocast.dtype", "float8", 'torch_autocast.dtype: "float8"', "bf16"),
    ],
)
def test_messages(path: str, value: Any, given: str, legal: str) -> None:
    problem = only(of(path, value))
    assert problem.given.startswith(f"ds.json: {given}") and legal in problem.legal and problem.rule


@each("value", [1, "true", "on", "True"])
def test_a_switch_is_on_by_any_word_for_it(value: Any) -> None:
    assert only(of("comet.enabled", value)).rule.startswith("refused: ")
    assert only(of("zero_optimization.legacy_stage1", value)).rule.startswith("refused: ")
    assert of("bf16.enabled", value).get("bf16.enabled", None) is True


@pytest.mark.parametrize("value", [0, "false", "off"])
def test_a_switch_is_off_by_any_word_for_it(value: Any) -> None:
    assert of("comet.enabled", value).diagnostics.problems == []
    assert clean(of("zero_optimization.legacy_stage1", value))
    assert of("bf16.enabled", value).get("bf16.enabled", None) is False


def test_automatic_sections_and_refused_keys_are_remembered() -> None:
    content = {"zero_optimization": {"legacy_stage1": "auto"}, "activation_checkpointing": "auto"}
    assert [str(location) for location in read(content, "x").off] == [
        "x: zero_optimization.legacy_stage1",
        "x: activation_checkpointing",
    ]


def test_formats_have_several_names() -> None:
    names = {"float16": "fp16", "Half": "fp16", "bfloat16": "bf16", "FP32": "fp32", "fp64": "fp64"}
    assert {name: of("communication_data_type", name).get("communication_data_type", None) for name in names} == names


def test_a_comment_is_no_key() -> None:
    reading = of("_see", "the documentation")
    assert not reading.diagnostics.problems and "a comment" in reading.diagnostics.notices[0]


@pytest.mark.parametrize(("switch", "found"), [({"enabled": False}, 0), ({}, 0), ({"enabled": True}, 1)], ids=str)
def test_metrics_of_a_curriculum_that_is_off_may_be_of_any_kind(switch: dict[str, Any], found: int) -> None:
    """Templates of scripts keep them, under names such as dummy."""
    curriculum = {**switch, "curriculum_metrics": {"dummy": {"min_difficulty": 1}}}
    sampling = {"enabled": True, "curriculum_learning": curriculum}
    problems = read({"data_efficiency": {"enabled": True, "data_sampling": sampling}}, "ds").diagnostics.problems
    assert len(problems) == found and all("curriculum_metrics.dummy" in problem.given for problem in problems)


def test_a_key_in_another_place_is_told() -> None:
    problem = only(of("zero_optimization.zero_allow_untested_optimizer", True))
    assert problem.legal == "zero_allow_untested_optimizer: true"
    assert only(of("max_grad_norm", 0.5)).legal == "gradient_clipping: 0.5"


def test_an_old_form_of_the_section_is_stage_1() -> None:
    assert of("zero_optimization", True).get("zero_optimization.stage", None) == 1
    assert of("zero_optimization", False).get("zero_optimization.stage", None) == 0


def test_the_same_said_twice_has_to_agree() -> None:
    zero = {"stage3_max_live_parameters": 1e9, "max_live_parameters": 1_000_000_000}
    assert clean(read({"zero_optimization": zero}, "x"))
    zero["max_live_parameters"] = 5
    problem = only(read({"zero_optimization": zero}, "x"))
    assert problem.given == (
        "x: zero_optimization.stage3_max_live_parameters: 1000000000 and x: zero_optimization.max_live_parameters: 5"
    )
    assert "zero_optimization.max_live_parameters" in problem.rule
    both = {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}
    assert only(read(both, "x")).given == "x: bf16.enabled: true and x: bfloat16.enabled: false"


def test_one_format_only() -> None:
    both = {"bf16": {"enabled": True}, "fp16": {"enabled": True}}
    assert only(read(both, "x")).given == "x: fp16.enabled: true and x: bf16.enabled: true"
    assert clean(read({"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "x"))


def test_everything_wrong_is_found_at_once() -> None:
    content = {
        "zero_optimization": {"stage": "three", "legacy_stage1": True, "reduce_bucket": 1},
        "comet": {"enabled": True},
        "foo": 1,
    }
    assert [problem.given for problem in read(content, "x").diagnostics.problems] == [
        'x: zero_optimization.stage: "three"',
        "x: zero_optimization.legacy_stage1: true",
        "x: zero_optimization.reduce_bucket: 1",
        'x: comet: {"enabled": true}',
        "x: foo: 1",
    ]


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}')
    assert read_file(tmp_path / "ds.json") == {"zero_optimization": {"stage": 3, "sub_group_size": 1e9}}


@each(
    ("text", "message"),
    [
        ('{"a": 1,\n "b": }', "not valid JSON: Expecting value (line 2, column 7)"),
        ("", "not valid JSON"),
        ("[1]", "the file is an object of keys"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}, "a": 1, "a": 1}', "ds.json: stage"),
        ('{"a": 1, "a": 1}', "the key stands twice"),
        ('{"a": NaN}', "finite numbers"),
        ('{"a": -Infinity}', "finite numbers"),
        ("{'a': 1}", "not valid JSON"),
        ("[" * 100_000, "nested deeper"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested deeper"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json") as caught:
        read_file(tmp_path / "ds.json")
    assert message in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_file(tmp_path / "binary.json")
