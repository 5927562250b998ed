"""Tests of --help: of all, of a section, and of what becomes of every known flag and key."""

import pytest
from support.each import each

from megazero.command_line.flags import FOR_DEEPSPEED, GROUPS
from megazero.command_line.help import help_of
from megazero.command_line.names import ALL_NAMES
from megazero.config.run import FIELDS
from megazero.dialects.deepspeed import keys
from megazero.dialects.megatron import ACCEPTED, FIXED, REFUSED, SHORTHANDS
from megazero.errors import ConfigError


def flat(*topics: str) -> str:
    return " ".join(help_of(topics).split())


def test_settings_that_only_deepspeed_needs_are_shown_on_demand() -> None:
    flags = {info.flag for info in FIELDS if info.name in FOR_DEEPSPEED}
    assert len(flags) == len(FOR_DEEPSPEED)
    assert not {flag for flag in flags if f" {flag} " in flat()}
    assert {flag for flag in flags if f" {flag} " in flat("all")} == flags
    assert "--leaf-module-names" in flat("zero") and "--help all" in flat() and "--help all" not in flat("all")


@each("group", GROUPS)
def test_a_section_has_its_own_flags_only(group: str) -> None:
    text = help_of([group.replace(" ", "-")])
    assert text.startswith(f"{group}:\n") and "usage" not in text
    shown = {info.flag for info in FIELDS if f"  {info.flag} " in text or f"  {info.flag}\n" in text}
    assert shown == {info.flag for info in FIELDS if info.section == group}


def test_every_known_flag_has_an_answer() -> None:
    """The flag's own table decides what its answer says, in one paragraph that names the flag."""
    for name in ALL_NAMES:
        answer = flat(f"--{name}")
        assert answer.startswith(f"--{name}"), name
        assert name not in ACCEPTED or "accepted, without effect" in answer, name
        assert name not in FIXED or "refused with other values" in answer, name
        assert name not in REFUSED or f"--{name}: refused: " in answer, name
        assert name not in SHORTHANDS or "short for --" in answer, name


def test_every_known_key_has_an_answer() -> None:
    for path in keys.KNOWN | keys.SECTIONS:
        answer = flat(path) if "." in path else flat(path, "fp16.enabled")
        assert answer, path
    assert flat("zero_optimization.stage3_prefetch_bucket_size").startswith(
        "zero_optimization.stage3_prefetch_bucket_size, a key of --deepspeed-config, another name of"
        " zero_optimization.prefetch_bucket_size: honoured; it sets --prefetch-bucket-size; a whole number, at least 0;"
    )
    offload = flat("zero_optimization.offload_param.device")
    assert offload.endswith(
        'honoured; it sets --offload-param; one of none, cpu, nvme, auto; DeepSpeed\'s default is "none".'
    )
    assert flat("bfloat16.enabled").endswith("honoured; true or false; DeepSpeed's default is false.")


@each(
    ("topic", "told"),
    [
        ("--mup", "--mup: refused: the model has what --normalization"),
        ("lr", "--lr X (section optimizer): learning rate after warm-up (required). Legal: a number, greater than 0."),
        ("--bf16", "--bf16: short for --precision bf16."),
        ("--use-distributed-optimizer", "short for --zero-stage 1; beside --zero-stage 2 or 3 it adds nothing."),
        ("--warmup", "another name of --lr-warmup-fraction. --lr-warmup-fraction X (section optimizer):"),
        ("--no-overlap-comm", "the same as --overlap-comm false."),
        ("--ds-sequence-parallel-size=2", "accepted, without effect, as --ds-sequence-parallel-size 1; refused with"),
        ("--ddp_bucket_size", "another name of --reduce-bucket-size. --reduce-bucket-size N (section zero):"),
        ("--virtual-pipeline-model-parallel-size", "with the value that follows from the settings; refused with other"),
        (
            "--data-args-path",
            "FILE: sets --data-path to what is in a file of the words of --data-path.",
        ),
        ("--optimizer", "--optimizer {adam,sgd,"),
        ("optimizer", "optimizer: The update rule"),
        ("--processes", "--processes N: start N processes"),
        ("stage", "zero_optimization.stage, a key of --deepspeed-config"),
    ],
)
def test_an_answer_says_what_becomes_of_the_flag(topic: str, told: str) -> None:
    assert told in flat(topic)


def test_a_whole_command_line_can_be_asked_about() -> None:
    text = help_of(["--lr", "1e-3", "--data-path", "a", "b", "--bf16", "--lr", "2"])
    assert [part.split()[0] for part in text.split("\n\n")] == ["--lr", "--data-path", "--bf16:"]


def test_unknown_topics_are_all_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        help_of(["zeroo", "zero_optimization.stag", "--glu-activatio"])
    assert [(problem.given, problem.legal) for problem in caught.value.problems[1:]] == [
        ("--help zero_optimization.stag", "zero_optimization.stage"),
        ("--help --glu-activatio", "--glu-activation (which is refused)"),
    ]
    assert len(caught.value.problems) == 3
