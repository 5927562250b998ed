"""Number flags of the tools are read by the grammar of all settings, and refused with the problems of a run."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from megazero.command_line.tools import Flags, Number
from megazero.console import run_program
from megazero.errors import ConfigError

ROOT = Path(__file__).parents[2]
COMMANDS = sorted((ROOT / "megazero/commands").glob("*.py"))
# {command with subcommands: the one that has a flag, or all}
ACTIONS = {"checkpoint": {"": "inspect"}, "convert": {"": "export", "--vocab-size": "import"}}
OF_A_MODEL = ["--step", "--tensor-model-parallel-size", "--pipeline-model-parallel-size"]
# {file of flags that commands share: the flags of each command}
SHARED = {
    "prepare": {"preprocess": ["--num-shards", "--shard-index", "--tiktoken-num-special-tokens"]},
    "generate": {"generate": OF_A_MODEL, "evaluate": OF_A_MODEL},
}


def number_flags(path: Path) -> list[tuple[str, str]]:
    """Return the number flags that a file declares, with their kinds."""
    return re.findall(r'"(--[a-z-]+)",\s*action=Number,\s*kind="(int|float)"', path.read_text())


NUMBERS = {
    path: [*number_flags(path), *((flag, "int") for flags in SHARED.values() for flag in flags.get(path.stem, ()))]
    for path in COMMANDS
    if number_flags(path)
}


def test_every_tool_reads_its_numbers_so() -> None:
    files = {package: ROOT / "megazero" / package / "arguments.py" for package in SHARED}
    for package, path in files.items():
        shared = {flag for flag, _ in number_flags(path)}
        assert shared == {flag for flags in SHARED[package].values() for flag in flags}
    assert len(NUMBERS) == 9 and sum(map(len, NUMBERS.values())) > 30
    for path in (*COMMANDS, *files.values()):
        assert not re.search(r"type=(int|float)\b|ArgumentParser\(", path.read_text()), path


@pytest.mark.parametrize("path", NUMBERS, ids=lambda path: path.stem)
def test_the_same_values_for_every_number(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One command line gives each number every value; an unknown flag keeps the tool from starting its work."""
    legal = {"int": ["1e1", "1_0", "10.0"], "float": ["1e1", "1_0", "0.5"]}
    wrong = {"int": ["x", "nan", "1e400", "2.5"], "float": ["x", "nan", "1e400"]}
    main = import_module(f"megazero.commands.{path.stem}").main
    actions = ACTIONS.get(path.stem, {})
    by_action: dict[str, list[tuple[str, str]]] = {}
    for flag, kind in NUMBERS[path]:
        by_action.setdefault(actions.get(flag, actions.get("", "")), []).append((flag, kind))
    for action, numbers in by_action.items():
        flags = [f"{flag}={value}" for flag, kind in numbers for value in (*wrong[kind], *legal[kind], "")]
        words = [*filter(None, [action]), *flags, "--nonsense"]
        status = run_program(partial(main, words))
        text = capsys.readouterr().err
        assert status == 2 and "usage" not in text and "invalid" not in text
        for flag, kind in numbers:
            noun = "a whole number" if kind == "int" else "a number"
            assert text.count(f"{flag} has an empty value") == 1
            assert text.count(f"rule:  {flag} is {noun}") == len(wrong[kind])
            for value in wrong[kind]:
                assert f"{flag} {value}\n    rule:  {flag} is {noun}" in text


def parser() -> Flags:
    made = Flags(allow_abbrev=False)
    made.add_argument("--count", action=Number, kind="int", ge=1, default=7)
    made.add_argument("--share", action=Number, kind="float", gt=0, le=1)
    made.add_argument("--name", required=True)
    return made


def test_numbers() -> None:
    read = parser().parse_args(["--count", "1e6", "--share=1_0e-2", "--name", "a"])
    assert (read.count, type(read.count), read.share) == (1_000_000, int, 0.1)
    assert vars(parser().parse_args(["--name", "a"])) == {"count": 7, "share": None, "name": "a"}


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(["--count", "0", "--share", "2", "--name", "a"])
    assert [(p.given, p.rule, p.legal) for p in caught.value.problems] == [
        ("--count 0", "--count is a whole number, at least 1", "--count 1"),
        ("--share 2", "--share is a number, greater than 0, at most 1", "--share 1"),
    ]
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(["--count", "0"])
    assert [p.given for p in caught.value.problems] == [
        "--count 0",
        "--name is missing",
    ]
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(["--count", "0", "--name", "a", "--counts"])
    assert [p.given for p in caught.value.problems] == ["--count 0", "--counts"]


def test_problems_of_argparse_have_the_form_of_all_others() -> None:
    tool = Flags(prog="megazero tool", allow_abbrev=False)
    tool.add_argument("prefix", metavar="PREFIX", help="the corpus")
    tool.add_argument("--kind", choices=("bpe", "unigram"), required=True, help="the kind of tokenizer")
    rows = {
        "": [
            ("PREFIX is missing", "megazero tool needs it: the corpus", "PREFIX"),
            ("--kind is missing", "megazero tool needs it: the kind of tokenizer", "--kind bpe, --kind unigram"),
        ],
        "p --kind unigramm": [("--kind unigramm", "--kind is one of bpe, unigram", "--kind unigram")],
        "p --kind bpe --knd 3": [
            ("--knd 3", "there is no flag of this name; --help lists those that there are", "--kind")
        ],
        "p --knd bpe": [
            ("--knd", "there is no flag of this name; --help lists those that there are", "--kind"),
            ("--kind is missing", "megazero tool needs it: the kind of tokenizer", "--kind bpe, --kind unigram"),
        ],
        "p --kind": [
            ("argument --kind: expected one argument", "flags and their values are those that --help lists", "")
        ],
    }
    for line, problems in rows.items():
        with pytest.raises(ConfigError) as caught:
            tool.parse_args(line.split())
        assert [(p.given, p.rule, p.legal) for p in caught.value.problems] == problems
    commands = Flags(prog="megazero tools")
    one = commands.add_subparsers(dest="command", required=True).add_parser("one")
    one.add_argument("--length")
    for line, (given, legal) in {
        "": ("command is missing", "one"),
        "one --lengths 3": ("--lengths 3", "--length"),
    }.items():
        with pytest.raises(ConfigError) as caught:
            commands.parse_args(line.split())
        assert [(problem.given, problem.legal) for problem in caught.value.problems] == [(given, legal)]


def test_flags_of_several_processes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        parser().parse_args(["--counts", "3", "--name", "a"])
    assert "--counts" in caught.value.problems[0].given and "--help" in caught.value.problems[0].rule
    for rank, prints in (("0", True), ("1", False)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            parser().parse_args(["--help"])
        assert ("--count" in capsys.readouterr().out) is prints
