"""Cleaning a corpus applies the chosen steps in order; these tests check what is kept, dropped, counted and refused."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megazero.console import Console
from megazero.errors import DataError
from megazero.prepare.clean.cleaning import CleaningRequest, StepChoice, StepCount, clean_corpus, summary_lines
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import DocumentRules

ENGLISH = "The committee has decided that the bridge over the river will be closed to traffic until the spring"
FRENCH = "Le comité a décidé que le pont sur la rivière sera fermé à la circulation jusqu'au printemps prochain"
# At least one document for each step to drop, in the order of the steps, and documents that are kept.
OBJECTS: list[dict[str, Any]] = [
    {"text": f"{ENGLISH}.", "id": 2**53 + 1, "meta": {"url": "a/é", "tags": [1, None]}},
    {"id": 1, "text": "too short"},
    {"text": "x" * 2000},
    {"text": ENGLISH[:50] + "\ufffd" * 50},
    {"text": FRENCH},
    {"text": f"{ENGLISH}.", "id": 5},
    {"text": f"{ENGLISH} indeed.", "id": 6},
    {"text": f"â€œ{ENGLISH[:60]}", "id": 7},
    {"text": f'"{ENGLISH[:60]}', "id": 8},
]
EVERYTHING = StepChoice(
    fix_text=True,
    min_characters=20,
    max_characters=1000,
    min_printable=0.9,
    languages=("en",),
    deduplicate=("near", "exact"),
    near_threshold=0.7,
)


def write(path: Path, objects: list[dict[str, Any]] = OBJECTS) -> str:
    path.write_text("".join(json.dumps(content) + "\n" for content in objects), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def request(folder: Path, choice: StepChoice, **changes: Any) -> CleaningRequest:
    given: dict[str, Any] = {"inputs": (write(folder / "in.jsonl"),), "output": folder / "out.jsonl", "choice": choice}
    return CleaningRequest(**{**given, **changes})


def clean(request: CleaningRequest, bad: BadLines | None = None) -> list[StepCount]:
    return clean_corpus(request, Console(rank=0), bad)


def test_steps_in_their_order(tmp_path: Path) -> None:
    counts = clean(request(tmp_path, EVERYTHING, dropped=tmp_path / "gone.jsonl"))
    kept, gone = read(tmp_path / "out.jsonl"), read(tmp_path / "gone.jsonl")
    assert kept == [OBJECTS[0], {"text": f'"{ENGLISH[:60]}', "id": 7}]
    assert [entry["document"] for entry in gone] == [OBJECTS[n] for n in (1, 2, 3, 4, 5, 6, 8)]
    assert [entry["reason"].partition(": ")[0] for entry in gone] == [
        "--min/max-characters", "--min/max-characters", "--min-printable", "--languages", "--deduplicate exact",
        "--deduplicate near", "--deduplicate exact",
    ]  # fmt: skip
    assert gone[5]["reason"].endswith("to document 1 of the output")
    assert [(count.name, count.documents, count.dropped, count.changed) for count in counts] == [
        ("read", 9, 0, 0), ("--fix-text", 9, 0, 1), ("--min/max-characters", 9, 2, 0), ("--min-printable", 7, 1, 0),
        ("--languages", 6, 1, 0), ("--deduplicate exact", 5, 2, 0), ("--deduplicate near", 3, 1, 0),
    ]  # fmt: skip
    assert counts[0].text_bytes == sum(len(content["text"].encode()) for content in OBJECTS)
    assert counts[-1].text_bytes == sum(len(content["text"].encode()) for content in kept)


def test_the_summary_is_a_table() -> None:
    lines = summary_lines([StepCount("read", 12, 0, 0, 4096), StepCount("--fix-text", 12, 0, 3, 4000)])
    assert [line.split() for line in lines] == [
        ["documents", "dropped", "kept", "bytes", "kept"],
        ["read", "12", "12", "4.0", "KiB"],
        ["--fix-text", "12", "0", "12", "3.9", "KiB", "(3", "mended)"],
    ]


def test_without_steps_everything_is_rewritten(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzip.compress(Path(write(tmp_path / "a.jsonl")).read_bytes()))
    (tmp_path / "in" / "b.txt").write_text("plain text\n")
    counts = clean(request(tmp_path, StepChoice(), inputs=(str(tmp_path / "in"),)))
    assert read(tmp_path / "out.jsonl") == [*OBJECTS, {"text": "plain text\n"}]
    assert [count.name for count in counts] == ["read"]


def test_tables_and_other_keys(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"body": ["a text", "b", "a text"], "n": [1, 2, 3], "text": ["", "", ""]})
    parquet.write_table(table, tmp_path / "t.parquet")
    choice = StepChoice(deduplicate=("exact",))
    clean(request(tmp_path, choice, inputs=(str(tmp_path / "t.parquet"),), rules=DocumentRules(("body",))))
    assert read(tmp_path / "out.jsonl") == [{"body": "a text", "n": 1, "text": ""}, {"body": "b", "n": 2, "text": ""}]


def test_bad_lines_are_refused_or_noted(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"txt": "b"}\n[1]\n{"text": "c"}\n')
    given = CleaningRequest((str(tmp_path / "in.jsonl"),), tmp_path / "out.jsonl")
    with pytest.raises(DataError, match=r"in.jsonl:2\n.*has the key 'text'"):
        clean(given)
    assert not (tmp_path / "out.jsonl").exists()
    bad = BadLines()
    clean(given, bad)
    assert read(tmp_path / "out.jsonl") == [{"text": "a"}, {"text": "c"}]
    assert bad.count == 2 and "in.jsonl:3" in bad.lines()[1]


def test_nothing_left_is_an_error_that_tells_where_it_went(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of 9 documents none is left") as caught:
        clean(request(tmp_path, StepChoice(min_characters=10_000), dropped=tmp_path / "gone.jsonl"))
    assert "--min/max-characters" in caught.value.problems[0].legal
    with pytest.raises(DataError, match="holds some document"):
        clean(request(tmp_path, StepChoice(), inputs=(write(tmp_path / "empty.jsonl", []),)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "in.jsonl"]


@pytest.mark.parametrize(
    ("choice", "complaint", "legal"),
    [
        ({"min_characters": 5, "max_characters": 4}, "--min-characters 5 --max-characters 4", ""),
        ({"max_characters": -1}, "--max-characters -1", "0 or more"),
        ({"min_printable": 1.5}, "--min-printable 1.5", "0 to 1"),
        ({"languages": ("en",), "min_language_probability": -0.1}, "--min-language-probability -0.1", "0 to 1"),
        ({"min_language_probability": 0.5}, "--min-language-probability 0.5", "--languages en"),
        ({"near_threshold": 0.8, "deduplicate": ("exact",)}, "--near-threshold 0.8", "--deduplicate near"),
        ({"near_threshold": 1.0, "deduplicate": ("near",)}, "--near-threshold 1.0", "0.3 to 0.99"),
        ({"languages": ("xx",)}, "--languages xx", "de"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(tmp_path: Path, choice: Any, complaint: str, legal: str) -> None:
    with pytest.raises(DataError) as caught:
        clean(request(tmp_path, StepChoice(**choice)))
    (problem,) = caught.value.problems
    assert problem.given == complaint and legal in problem.legal
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    given = request(
        tmp_path,
        StepChoice(min_printable=2.0),
        inputs=(str(tmp_path / "missing.jsonl"),),
        output=tmp_path / "out.txt",
        dropped=tmp_path / "out.txt",
        rules=DocumentRules(("text", "title")),
    )
    with pytest.raises(DataError) as caught:
        clean(given)
    flags = [problem.given.split()[0] for problem in caught.value.problems]
    assert flags == ["--min-printable", "--json-keys", "--output", "--dropped", "--dropped", "--input"]


def test_what_is_read_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is none of the files that are read"):
        clean(request(tmp_path, StepChoice(), output=tmp_path / "in.jsonl"))
    (tmp_path / "out.jsonl").write_text("earlier")
    with pytest.raises(DataError, match=r"--output .*out.jsonl"):
        clean(request(tmp_path, StepChoice(), inputs=(str(tmp_path),)))
    assert (tmp_path / "out.jsonl").read_text() == "earlier"


def test_missing_libraries_are_told_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("ftfy", "py3langid.langid", "datasketch"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError) as caught:
        clean(request(tmp_path, EVERYTHING))
    assert [problem.given.split()[-1] for problem in caught.value.problems] == ["ftfy", "py3langid", "datasketch"]
