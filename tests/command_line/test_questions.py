"""Tests of the flags after which a run only prints something."""

from support.each import each

from megazero.command_line.questions import Questions, split_questions


@each(
    ("line", "expected"),
    [
        ("--lr 1", Questions(None, frozenset(), ["--lr", "1"])),
        ("--help", Questions((), frozenset(), [])),
        ("-h zero", Questions(("zero",), frozenset(), [])),
        ("--lr 1 --help --lr 2", Questions(("--lr", "2"), frozenset(), ["--lr", "1"])),
        ("--check --lr 1", Questions(None, frozenset({"check"}), ["--lr", "1"])),
        ("--print_config --check", Questions(None, frozenset({"check", "print-config"}), [])),
        ("--config check --check=no", Questions(None, frozenset(), ["--config", "check", "--check=no"])),
        ("-hidden-size 3", Questions(None, frozenset(), ["-hidden-size", "3"])),
    ],
)
def test_questions_are_separated(line: str, expected: Questions) -> None:
    assert split_questions(line.split()) == expected
