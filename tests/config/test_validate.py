"""Tests of the step from raw values to a configuration, which reports every problem at once."""

import pytest
from support.configs import SMALL
from support.each import each

from megazero.config.validate import INFO, Outcome, Unknown, build, parse_value, validate
from megazero.config.values import ParsedValue, RawValue
from megazero.errors import Problem


def outcome(**settings: object) -> Outcome:
    merged = {**SMALL, **settings}
    return validate(
        {name: RawValue(name, value, f"--{name.replace('_', '-')} {value}") for name, value in merged.items()}
    )


def problem(**settings: object) -> Problem:
    found = outcome(**settings)
    assert found.config is None and len(found.problems) == 1, found.problems
    return found.problems[0]


def test_words_become_values() -> None:
    config = outcome(train_iters="220_000_000", lr="1e-4", zero_stage="2", mock_data="true", loss_scale="64").config
    assert config is not None
    assert (config.training.train_iters, config.optimizer.lr, config.zero.zero_stage) == (220_000_000, 1e-4, 2)
    assert config.data.mock_data is True and config.precision.loss_scale == 64.0


def test_all_findings_come_together_in_the_order_of_help() -> None:
    found = outcome(lr="fast", num_layers="0", zero_stage="4", precision="fp8").problems
    assert [item.given.split()[0] for item in found] == ["--num-layers", "--lr", "--precision", "--zero-stage"]


@each(
    ("settings", "rule", "legal"),
    [
        ({"num_layers": "0"}, "a whole number, at least 1", "--num-layers 1"),
        ({"hidden_size": "12.5"}, "a whole number", "--hidden-size 12, --hidden-size 13"),
        ({"zero_stage": "4"}, "there is nothing left to partition after stage 3", "--zero-stage 3"),
        ({"sub_group_size": "-1"}, "a whole number, at least 0", "--sub-group-size 0"),
        ({"communication_data_type": "bf8"}, "one of auto, fp64", "bf16, auto"),
        ({"pipeline_model_parallel_size": 0}, "at least 1", "--pipeline-model-parallel-size 1"),
        ({"pipeline_schedule": "1b1f"}, "one of auto, gpipe, 1f1b", "1f1b, auto"),
        ({"seed": "99999999999"}, "less than 4294967296", "--seed 4294967295"),
        ({"lr": "-1e-5"}, "greater than 0", "greater than 0"),
        ({"lr": "nan"}, "a number", "greater than 0"),
        ({"weight_decay": "-1"}, "at least 0", "--weight-decay 0"),
        ({"lr_decay_style": "cosin"}, "one of constant, linear, cosine", "cosine, constant, linear"),
        ({"mock_data": "perhaps"}, "true or false", "true, false"),
        ({"num_layers": True}, "a whole number", "at least 1"),
        ({"save": ""}, "empty value", "a path"),
        ({"data_path": ["a", ""]}, "empty value", "one or more texts"),
        ({"save": "a\0b"}, "has a NUL character", "a path"),
        ({"data_path": ["a", "b\0"]}, "has a NUL character", "one or more texts"),
    ],
)
def test_a_finding_has_the_rule_and_the_nearest_legal_values(
    settings: dict[str, object], rule: str, legal: str
) -> None:
    found = problem(**settings)
    assert rule in found.rule and legal in found.legal
    assert found.given.startswith("--" + next(iter(settings)).replace("_", "-"))


def test_a_missing_setting_says_what_it_is() -> None:
    found = validate({}).problems
    assert [item.given for item in found] == [
        "--num-layers is missing",
        "--hidden-size is missing",
        "--num-attention-heads is missing",
        "--seq-length is missing",
        "--micro-batch-size is missing",
        "--lr is missing",
    ]
    assert "transformer blocks" in found[0].rule and "--preset" in found[0].legal


def parsed(*without: str) -> dict[str, ParsedValue]:
    return {name: ParsedValue(name, value, name) for name, value in SMALL.items() if name not in without}


def test_broken_settings_are_reported_in_their_place_and_not_as_missing() -> None:
    found = build(parsed("hidden_size"), broken={"hidden_size": Problem("--hidden-size", "needs a value")})
    assert [item.given for item in found.problems] == ["--hidden-size"]


def test_unknown_settings_are_not_missing_and_not_read() -> None:
    found = build(parsed("lr"), broken={}, unknown={"lr", "zero_stage"})
    assert found.problems == () and found.config is None
    for section, name in (("optimizer", "lr"), ("zero", "zero_stage")):
        with pytest.raises(Unknown, match=name):
            getattr(getattr(found.partial, section), name)


@each(
    ("name", "words", "expected"),
    [
        ("seed", ("5",), 5),
        ("seed", (), "--seed needs a value"),
        ("seed", ("1", "2"), "--seed needs one value, not 2"),
        ("mock-data", (), True),
        ("no-mmap-bin-files", (), False),
        ("no_mmap_bin_files", False, True),
        ("data-path", ("a", "b"), ("a", "b")),
        ("data-path", (), "--data-path needs a value"),
    ],
)
def test_the_words_after_a_flag(name: str, words: object, expected: object) -> None:
    info = INFO[name.replace("-", "_").removeprefix("no_")]
    found = parse_value(info, RawValue(name, words, f"--{name}"))
    assert expected == (found.rule if isinstance(found, Problem) else found.value)


def test_the_partial_configuration_knows_what_is_valid_only() -> None:
    partial = outcome(num_layers="0", num_attention_heads="8").partial
    assert partial.model.num_attention_heads == 8 and partial.zero.zero_stage == 1
    with pytest.raises(Unknown, match="num_layers"):
        _ = partial.model.num_layers
