"""Tests of the wrong invocations: the table, what counts as a good refusal, and some rows as real processes."""

import json
import subprocess
from pathlib import Path

import wrong_invocations
from support.warm_python import warm_python
from wrong_invocations import faults, page, read_records
from wrong_table import rows


def test_the_table() -> None:
    commands = [row.command for row in rows()]
    assert len(commands) == len(set(commands)) >= 190
    assert all(row.told and all(row.told) and "{" not in row.words().split("library")[0] for row in rows())


def test_what_is_no_good_refusal() -> None:
    good = {"told": ["--lr 0"], "status": 2, "seconds": 0.1, "message": "--lr 0\n rule", "changed": []}
    assert faults(good) == []
    for change, fault in (
        ({"message": "--lr 0 Traceback (most recent call last)"}, "a traceback"),
        ({"status": 0}, "status 0"),
        ({"status": -9}, "status -9"),
        ({"seconds": 10.5}, "10.5 s"),
        ({"message": "wrong"}, "without '--lr 0'"),
        ({"changed": ["text.bin"]}, "changed text.bin"),
    ):
        assert faults({**good, **change}) == [fault]


def test_some_rows(tmp_path: Path) -> None:
    """Rows of a tool and of the library are refused well, are in the page, and are not tried again."""
    records = tmp_path / "records.jsonl"
    program = Path(wrong_invocations.__file__)
    command = [warm_python(), str(program), "--records", str(records), "--only", "checkpoint verify"]
    for number in (3, 3):
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        assert len(records.read_text().splitlines()) == number
    found = read_records(records)
    assert all(json.loads(line)["status"] == 2 for line in records.read_text().splitlines())
    assert "3 commands, 3 refused with their message" in page(found)[0]
