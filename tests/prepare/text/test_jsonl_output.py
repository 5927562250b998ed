"""Lines that are written plain or compressed read back unchanged, and a failure leaves no partial file."""

import json
from pathlib import Path

import pytest
from support.input_files import objects_of

from megazero.errors import DataError
from megazero.prepare.text.jsonl_output import ending_problems, json_line, written_lines

OBJECTS = [{"text": f"é∀🎉 {number}\n", "meta": {"n": [number, None, 0.5]}} for number in range(2000)]


def write(path: Path) -> None:
    with written_lines(path) as stream:
        for content in OBJECTS:
            stream.write(json_line(content))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "A.JSONL.GZ"])
def test_what_is_written_reads_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write(path)
    assert list(objects_of(path)) == OBJECTS
    packed = path.read_bytes()
    assert (len(packed) < 30_000) is (name != "a.jsonl")
    write(path)
    assert path.read_bytes() == packed
    assert packed[4:8] == bytes(4) or not name.lower().endswith("gz")  # the modification time in a gzip header


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_failure_leaves_what_was_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("earlier")
    with pytest.raises(RuntimeError), written_lines(path) as stream:
        stream.write(b"x" * 100_000)
        raise RuntimeError
    assert path.read_text() == "earlier" and len(list(tmp_path.iterdir())) == 1


def test_other_endings_are_refused() -> None:
    for good in ("a.jsonl", "a.json", "b.jsonl.gz", "c.JSONL.zst"):
        assert ending_problems("--output", Path(good)) == []
    for wrong in ("a", "a.txt", "a.gz", "a.jsonl.bz2", "a.parquet"):
        (problem,) = ending_problems("--output", Path(wrong))
        assert problem.given == f"--output {wrong}" and ".jsonl.zst" in problem.legal


def test_lines_hold_all_that_json_can_say() -> None:
    for content in ({"a": 2**70}, {"a": "\ud800"}, {"a": "line\u2028\n", "b": [True, {}]}):
        line = json_line(content)
        assert json.loads(line) == content and line.count(b"\n") == 1 and line.endswith(b"\n")
    unbounded = {"text": "null", "none": None, "deep": [{"n": float("inf")}, -float("inf")], "n": float("nan")}
    assert repr(json.loads(json_line(unbounded))) == repr(unbounded)
    assert json_line({"text": "null", "none": None}) == b'{"text":"null","none":null}\n'
    with pytest.raises(DataError, match="keys text, raw"):
        json_line({"text": "x", "raw": b"\0"})
