"""Tests of the benchmark of preprocessing: figures, the record, the page, and the program at a small size."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import corpora
import pytest
from contestants import Contestant, Files, Measured
from corpora import body_of, command, figures, main, parse_arguments, record, take_turns
from corpus_text import Text
from readme import generated
from report import publish
from support.each import each
from support.warm_python import TOOLS, warm_python
from usage import CommandFailed, Usage

FILES = Files(
    Path("/"),
    Text(Path("/t"), 10, 80_000_000),
    Text(Path("/p"), 2, 8_000_000),
    Text(Path("/o"), 1, 30),
    Path("/v"),
    Path("/m"),
    {},
    None,
)


def contestant(name: str, *cpu: float, first: float | None = None, **others: Any) -> Contestant:
    made = Contestant(name, "text", [], FILES.text, FILES, **others)
    made.turns = [Measured(seconds, 2 * seconds, 3 << 20, 100, 10, ("b", "i")) for seconds in cpu]
    made.first = None if first is None else Usage(first, 2 * first, 1 << 20, "")
    return made


def test_figures_are_medians() -> None:
    base = contestant("ours", 1.0, 8.0, 2.0, first=0.4, is_base=True)
    found = figures(base, base)
    assert found["cpu_seconds"] == 2.0 and found["bytes_per_cpu_second"] == 40e6 and found["bytes_per_second"] == 20e6
    assert found["startup_seconds"] == 0.8 and found["bytes_per_cpu_second_beyond_startup"] == pytest.approx(50e6)
    assert found["peak_bytes"] == 3 << 20 and found["verdict"] == "same" and "ratio" not in found
    other = figures(contestant("theirs", 10.0, writes=False), base)
    assert other["ratio"] == 5.0 and "startup_seconds" not in other
    assert figures(contestant("quick", 0.3, first=0.4), base)["bytes_per_cpu_second_beyond_startup"] is None
    assert figures(contestant("none"), base) == {"refused": "no turn"}


def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("sys.argv", ["corpora.py"])
    failed = contestant("failed")
    failed.refused = "failed: exit status 1: x"
    field = [contestant("ours", 2.0, first=0.4, is_base=True), contestant("theirs", 5.0, first=1.0), failed]
    return record(field, FILES, Namespace(vocab_file=None, vocab_size=400, megabytes=100.0, remark="A remark."))


def test_the_record_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    assert found["systems"]["theirs"]["ratio"] == 2.5
    rows = {
        row[0]: row[1:]
        for row in (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in body_of(found).splitlines() if "|" in line
        )
    }
    assert rows["ours"] == ["80", "40", "-", "50", "20", "0.80", "3", "0.00", "same"]
    assert rows["theirs"][1:3] == ["16", "2.50"] and rows["failed"][0] == "failed: exit status 1: x"
    text = body_of(found)
    assert "10 documents in 80.0 MB of jsonl (100 MB were asked for)" in " ".join(text.split())
    assert "a BPE of 400" in text and "A remark." in text


def test_the_page_of_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = made(monkeypatch)
    publish([], tmp_path / "results" / "r.md", found)
    page = generated(tmp_path)
    assert "## Preprocessing" in page and body_of(found) in page and "\n    python benchmarks/corpora.py\n" in page


def test_commands_name_no_folders() -> None:
    words = "corpora.py --vocab-file /a/v.json --megatron=/x/Megatron-LM --rounds 2 --scratch /s --remark r --output o"
    told = "python benchmarks/corpora.py --vocab-file v.json --megatron Megatron-LM --rounds 2"
    assert command(words.split()) == told


def test_one_that_fails_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Fake:
        refused = ""

        def __init__(self, name: str) -> None:
            self.name = name

        def start(self) -> None:
            calls.append(f"{self.name} starts")

        def turn(self) -> None:
            calls.append(self.name)
            if self.name == "b":
                raise CommandFailed("exit status 1: no words")

    field: Any = [Fake("a"), Fake("b")]
    take_turns(field, Namespace(rounds=2, time_limit=None))
    assert calls == ["a starts", "b starts", "a", "b", "a"] and field[1].refused == "failed: exit status 1: no words"
    calls.clear()
    take_turns([Fake("a")], Namespace(rounds=9, time_limit=0.0))
    assert calls == ["a starts", "a"]


@each("words", ["--vocab-file x", "--rounds 0", "--workers 0", "--input /no/such/file"])
def test_what_cannot_be_is_refused(words: str) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words.split())


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs on given text, with tokenizers trained on it."""
    monkeypatch.setattr("sys.argv", ["corpora.py"])
    monkeypatch.setattr("sys.executable", warm_python(TOOLS))
    text = tmp_path / "t.jsonl"
    rows = [f"def function_{number}(x):\n    return x + {number} * 'word{number % 7}'\n" * 3 for number in range(300)]
    text.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    words = f"--input {text} --slow-megabytes 0.02 --vocab-size 400 --pieces 300 --rounds 1 --scratch {tmp_path}"
    names = ["--systems", "megazero, 1", "gigatoken alone, r", "megazero, front", "megazero, SentencePiece BPE"]
    assert main([*words.split(), *names, "--output", str(tmp_path / "out.md")]) == 0
    kept = json.loads((tmp_path / "out.json").read_text())
    assert capsys.readouterr().out == (tmp_path / "out.md").read_text()
    systems = kept["systems"]
    assert list(systems) == [
        "megazero, 1 worker",
        "gigatoken alone, read",
        "megazero, front",
        "megazero, SentencePiece BPE",
    ]
    assert {system["verdict"] for system in systems.values()} == {"same"}
    assert kept["text"]["documents"] == 300 and 20_000 <= kept["part_bytes"] < kept["text"]["bytes"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.md", "t.jsonl"]
    assert corpora.command(["corpora.py"]) == kept["command"]
