"""Tests of the page that benchmarks print, of the record they write beside it, and of the description of a model."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from report import (
    Column,
    argument_parser,
    command,
    described,
    heading,
    machine,
    mib,
    new_record,
    paragraph,
    publish,
    quartiles,
    table,
    table_of,
)
from support.each import each

from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.errors import DataError


def test_a_table() -> None:
    assert table(["a", "b"], [[1, "x"], [2, "y"]]) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"


def test_a_table_of_systems() -> None:
    columns = [Column("ms", "seconds", ".1f", 1e3), Column("bytes", "bytes"), Column("verdict", "verdict")]
    systems = {"a": {"seconds": 0.0123, "bytes": 0, "verdict": "same"}, "b": {"bytes": None, "verdict": ""}}
    refused = {"refused": "not installed"}
    assert table_of({**systems, "c": refused}, columns).splitlines()[2:] == [
        "| a | 12.3 | 0.0 | same |",
        "| b | - | - | - |",
        "| c | not installed | - | - |",
    ]


@each(
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


def test_records_lie_beside_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/y.py", "--output", "z", "--", "--bf16"])
    systems = {"ddp": {"losses": [1.0, math.nan, math.inf], "settings": ("a", {"b": -math.inf})}}
    publish(["c"], tmp_path / "gpt2-1.5b.md", new_record("compare", "cpu", world_size=2, systems=systems))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2-1.5b.json", "gpt2-1.5b.md"]
    record = json.loads((tmp_path / "gpt2-1.5b.json").read_text(), parse_constant=pytest.fail)
    version = torch.__version__.partition("+")[0]
    assert (record["program"], record["device"], record["torch"].partition("+")[0]) == ("compare", "CPU", version)
    assert record["command"] == "python benchmarks/y.py -- --bf16" and len(record["date"]) == len("2026-01-02")
    assert record["systems"]["ddp"] == {"losses": [1.0, None, None], "settings": ["a", {"b": None}]}
    with pytest.raises(DataError, match="writable"):
        publish(["c"], tmp_path / "gpt2-1.5b.md" / "a.md")


def test_models_have_names() -> None:
    small = ModelConfig(num_layers=3, hidden_size=8, num_attention_heads=2, seq_length=16, vocab_size=10)
    found = described(small)
    assert found["name"] == "3 x 8" and found["ffn_hidden_size"] == 32
    assert found["matmul_parameters"] == 3 * 12 * 8 * 8 + 10 * 8
    for name, row in PRESETS.items():
        assert PRESETS[described(ModelConfig(**row))["name"]] == row, name
    shorter = ModelConfig(**{**PRESETS["gpt2-124m"], "seq_length": 128})
    assert described(shorter)["name"] == "12 x 768"


def test_quartiles() -> None:
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)


def test_the_heading_says_when_where_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/x/y.py", "--limit", "3"])
    title, made, ran = heading("A title", "cpu").split("\n\n")
    assert title == "# A title" and ran == "`python benchmarks/y.py --limit 3`"
    assert made.startswith("20") and " torch 2." in made and machine("cpu") in made


def test_a_machine_is_its_processor_and_the_number_of_its_cores() -> None:
    word, *model, cores = machine("cpu").split(", ")
    assert (word, cores) == ("CPU", f"{os.cpu_count()} cores")
    assert "".join(model) and new_record("x", "cpu")["machine"] == machine("cpu")


def test_figures_and_words() -> None:
    assert mib(3 * 2**19) == "1.50"
    assert max(map(len, paragraph("word " * 100).splitlines())) <= 120


def test_help_shows_defaults_and_text() -> None:
    text = argument_parser("first\n    second").format_help()
    assert "first\n    second" in text and "(default: auto)" in text
