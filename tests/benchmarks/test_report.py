"""Tests of the page that benchmarks print and write."""

from pathlib import Path

import pytest
from report import argument_parser, command, heading, mib, paragraph, publish, table


def test_a_table() -> None:
    assert table(["a", "b"], [[1, "x"], [2, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/somewhere/else/x.py"], "python benchmarks/x.py"),
        (
            ["x.py", "--limit", "3", "--output", "/a b/c.md", "--steps", "2"],
            "python benchmarks/x.py --limit 3 --steps 2",
        ),
        (["x.py", "--output=/a", "--name", "two words"], "python benchmarks/x.py --name 'two words'"),
        (["x.py", "--output"], "python benchmarks/x.py"),
    ],
)
def test_the_command_names_no_folder_of_this_machine(argv: list[str], expected: str) -> None:
    assert command(argv) == expected


def test_the_page_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    publish(["# A", "b"], tmp_path / "page.md")
    assert capsys.readouterr().out == (tmp_path / "page.md").read_text() == "# A\n\nb\n"
    publish(["c"], None)
    assert capsys.readouterr().out == "c\n"


def test_the_heading_says_when_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/y.py", "--limit", "3"])
    title, made, ran = heading("A title", "cpu").split("\n\n")
    assert title == "# A title" and ran == "`python benchmarks/y.py --limit 3`"
    assert made.startswith("20") and " torch 2." in made and "CPU, " in made


def test_figures_and_words() -> None:
    assert mib(3 * 2**19) == "1.50"
    assert max(map(len, paragraph("word " * 100).splitlines())) <= 120


def test_help_shows_defaults_and_text() -> None:
    text = argument_parser("first\n    second").format_help()
    assert "first\n    second" in text and "(default: auto)" in text
