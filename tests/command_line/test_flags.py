"""Tests of splitting a command line into flags and values, and of the help."""

from support.each import each

from megazero.command_line.flags import build_parser, split_words
from megazero.command_line.names import ALL_NAMES, spellings
from megazero.config.run import FIELDS


def words(line: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(item.flag_name, item.value) for item in split_words(line.split())[0]]


def test_words_stay_raw_and_in_order() -> None:
    assert words("--lr 1e-3 --fp16 --data-path a b --lr=2") == [
        ("lr", ("1e-3",)),
        ("fp16", ()),
        ("data-path", ("a", "b")),
        ("lr", ("2",)),
    ]


def test_underscores_are_dashes_in_names_and_stay_in_values() -> None:
    assert words("--override-opt_param-scheduler --data_path=a_b --train_iters 1_000") == [
        ("override-opt-param-scheduler", ()),
        ("data-path", ("a_b",)),
        ("train-iters", ("1_000",)),
    ]


@each("number", ["-1", "-1e-5", "-.5", "-1_000"])
def test_a_negative_number_is_a_value(number: str) -> None:
    assert words(f"--lr {number} --seed 1") == [("lr", (number,)), ("seed", ("1",))]


def test_a_flag_has_the_words_up_to_the_next_one() -> None:
    """One after "=" is a flag's only word; a word with a blank is a value, whatever it begins with."""
    line = ["loose", "--lr=1", "2", "--data-path", "-", "--a b", "-1.5e3", "--seed="]
    found, stray = split_words(line)
    assert [(item.source, item.value) for item in found] == [
        ("--lr 1", ("1",)),
        ("--data-path - --a b -1.5e3", ("-", "--a b", "-1.5e3")),
        ("--seed ", ("",)),
    ]
    assert stray == ["loose", "2"]


def test_what_follows_an_unknown_flag_is_no_flags() -> None:
    found, stray = split_words(["--lr", "1", "--no_such=2", "3", "-x", "y", "--processes", "4", "--seed", "5"])
    assert [item.source for item in found] == ["--lr 1", "--seed 5"]
    assert stray == ["--no-such=2", "3", "-x", "y", "--processes", "4"]


def test_no_name_stands_twice() -> None:
    assert len(ALL_NAMES) == len(set(ALL_NAMES))


def test_names_are_not_abbreviated() -> None:
    words, stray = split_words(["--num-lay", "3"])
    assert (words, stray) == ([], ["--num-lay", "3"])


def test_help_shows_every_flag_with_default_and_unit() -> None:
    text = " ".join(build_parser().format_help().split())
    for info in FIELDS:
        for flag in spellings(info):
            assert f" {flag} " in text, flag
        assert " ".join(info.help.split()) in text, info.name
    for shown in (
        "[steps] (default: 100)",
        "(default: fp32)",
        "(required)",
        "(default: on)",
        "(default: 1)",
        "probability",
        "--partition-activations [true|false|auto]",
        "--zero-config NAME",
        "C1, C2, C3, C4, C5",
    ):
        assert shown in text, shown


def test_help_is_grouped_by_section() -> None:
    text = build_parser().format_help()
    order = [
        "finding out:",
        "sources:",
        "model:",
        "training:",
        "optimizer:",
        "precision:",
        "parallel:",
        "zero:",
        "activations:",
        "data:",
        "logging:",
    ]
    places = [text.index(f"\n{head}\n") for head in order]
    assert places == sorted(places)
    assert text.index("--zero-stage") > text.index("\nzero:\n") and text.index("--lr ") > text.index("\noptimizer:\n")
