"""The journal is only appended to, survives torn lines, and never ends a run."""

import json
from pathlib import Path

from megazero.checkpoint.journal import JOURNAL, Journal, describe, read_journal


def test_entries_are_lines_of_json_with_time_and_event(tmp_path: Path) -> None:
    said: list[str] = []
    journal = Journal(tmp_path / "run", said.append)
    journal.write("start", world_size=2, folder=tmp_path)
    Journal(tmp_path / "run", said.append).write("fault", loss=float("nan"), text="ü\n2")
    first, second = (json.loads(line) for line in (tmp_path / "run" / JOURNAL).read_text().splitlines())
    assert list(first) == ["time", "event", "world_size", "folder"] and first["time"].endswith("+00:00")
    assert (first["event"], first["world_size"], first["folder"]) == ("start", 2, str(tmp_path))
    assert (second["event"], second["loss"], second["text"]) == ("fault", "NaN", "ü\n2")
    assert [entry["event"] for entry in read_journal(tmp_path / "run")] == ["start", "fault"] and said == []
    assert describe(second).endswith("fault   loss NaN | text ü 2")
    assert describe({"event": "start", "time": 3, "job": "", "checkpoint": None}) == "3  start   checkpoint null"
    assert describe({"event": "change", "from": "x" * 999, "to": [1]}).endswith("... | to [1]")


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path, print)
    journal.write("start")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"time": "20')
    journal.write("stop", reason="x")
    with (tmp_path / JOURNAL).open("a") as file:
        file.write("[1]\n" + "[" * 100_000 + "\n")
    journal.write("start")
    assert [entry["event"] for entry in read_journal(tmp_path)] == ["start", "stop", "start"]


def test_a_journal_that_cannot_be_written_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    journal = Journal(tmp_path / "file", said.append)
    journal.write("start")
    journal.write("stop")
    assert len(said) == 1 and "file/journal.jsonl cannot be written: " in said[0] and "training goes on" in said[0]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    Journal(None, print).write("start")
    assert list(read_journal(tmp_path)) == []
