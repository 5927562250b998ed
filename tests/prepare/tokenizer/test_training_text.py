"""The sample of text that a tokenizer learns from is spread over the whole input, compressed or not."""

import gzip
import io
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from megazero.console import Console
from megazero.errors import DataError
from megazero.prepare.text import chunks
from megazero.prepare.text.chunks import DocumentRules
from megazero.prepare.tokenizer.training_text import TrainingText, sample_text

LINES = [f"{number:04d} line\n" for number in range(2000)]


def sample(source: object, max_bytes: int = 10**9, keys: tuple[str, ...] = ("text",)) -> TrainingText:
    return sample_text([str(source)], DocumentRules(keys), max_bytes, Console(rank=0))


def from_pipe(monkeypatch: pytest.MonkeyPatch, content: bytes, max_bytes: int) -> TrainingText:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: False))
    return sample("-", max_bytes=max_bytes)


def test_the_sample_is_taken_from_all_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    path = tmp_path / "a.txt"
    path.write_text("".join(LINES))
    whole = sample(path)
    assert "".join(whole.texts) == path.read_text() and whole.num_bytes == 20_000
    tenth = sample(path, max_bytes=2000)
    assert 2000 <= tenth.num_bytes <= 2100 and len(tenth.texts) == 20
    assert {text[:2] for text in tenth.texts} == {f"{number:02d}" for number in range(20)}


def test_packed_files_give_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1000)
    content = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    assert "".join(sample(tmp_path / "a.jsonl.gz").texts) == "".join(LINES)
    tenth = sample(tmp_path / "a.jsonl.gz", max_bytes=2000)
    assert 1900 <= tenth.num_bytes <= 2100


def test_texts_are_those_of_all_keys(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "one", "b": "two", "c": "three"}\n')
    assert sample(tmp_path / "a.jsonl", keys=("a", "b")).texts == ["one", "two"]


@pytest.mark.parametrize("max_bytes", [100, 2000, 19_000, 20_000, 10**9])
def test_a_pipe_is_thinned_out_evenly(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> None:
    content = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()
    found = from_pipe(monkeypatch, content, max_bytes)
    assert min(20_000, max_bytes) * 0.8 <= found.num_bytes <= max_bytes * 1.1
    if max_bytes < 10_000:
        numbers = [int(text[:4]) for text in found.texts]
        gaps = {second - first for first, second in pairwise(numbers)}
        assert len(gaps) == 1 and numbers[0] == 0 and 2000 - numbers[-1] <= gaps.pop()
    else:
        assert len(found.texts) == 2000


def test_one_huge_document_of_a_pipe_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    found = from_pipe(monkeypatch, json.dumps({"text": "word " * 10_000}).encode(), 1000)
    assert found.texts == ["word " * 200]


def test_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n')
    for name in ("a.txt", "b.jsonl"):
        with pytest.raises(DataError, match=f"--input .*{name}\n.*has some text"):
            sample(tmp_path / name)
    with pytest.raises(DataError, match=r"b.jsonl:1"):
        sample(tmp_path / "b.jsonl", keys=("no",))
