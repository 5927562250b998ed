"""Preprocessing: the files against an independent writer, the same for any number of workers."""

import json
from multiprocessing import Pipe
from pathlib import Path

import pytest
from support.token_files import index_bytes, token_bytes, write_gpt2_files

from megazero.console import Console
from megazero.data import documents
from megazero.data.documents import DocumentRules
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.preprocess import Corpus, PreprocessRequest, _receive, preprocess
from megazero.data.sidecar import read_sidecar
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError

BYTES = TokenizerSpec("ByteTokenizer")
TEXTS = ["hello", "", "é", "a\nb", "", "last one"]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run(tmp_path: Path, *inputs: Path, **options: object) -> list[Corpus]:
    request = PreprocessRequest(inputs, str(tmp_path / "out"), **{"tokenizer": BYTES, **options})  # type: ignore[arg-type]
    return preprocess(request, Console(rank=0))


def written(tmp_path: Path, key: str = "text") -> tuple[bytes, bytes]:
    stem = tmp_path / f"out_{key}_document"
    return Path(f"{stem}.bin").read_bytes(), Path(f"{stem}.idx").read_bytes()


@pytest.mark.parametrize("append_eod", [False, True])
def test_files_are_those_of_the_format(tmp_path: Path, append_eod: bool) -> None:
    """An empty document writes no sequence, counts as a document, and gets no end."""
    ((prefix, sidecar),) = run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), append_eod=append_eod)
    end = [256] if append_eod else []
    expected = [[[*text.encode(), *end]] if text else [] for text in TEXTS]
    assert written(tmp_path) == (token_bytes(expected), index_bytes(expected))
    assert (sidecar.documents, sidecar.sequences, sidecar.text_bytes) == (6, 4, 18)
    assert sidecar.tokens == 18 + 4 * append_eod
    assert read_sidecar(IndexedDataset(prefix)) == sidecar


def test_workers_do_not_change_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks over two files of two kinds, two processes, a tokenizer read from files."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 10_000)  # chunks are found here; workers are sent them
    texts = [f"document {number} " * (number % 50) for number in range(400)]
    inputs = [write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "b.txt"]
    inputs[1].write_text("some plain text\n\n" * 1000)
    vocab, merges = write_gpt2_files(tmp_path, [("d", "o"), ("Ġ", "do"), ("e", "n")])
    tokenizer = TokenizerSpec("GPT2BPETokenizer", vocab, merges)
    results = []
    for workers in (1, 2):
        corpora = run(tmp_path, *inputs, tokenizer=tokenizer, workers=workers, append_eod=True)
        results.append((written(tmp_path), corpora))
    assert len(documents.find_chunks(inputs, DocumentRules())) > 12
    assert results[0] == results[1]
    assert len(results[0][0][0]) > 50_000


def test_every_key_gets_a_corpus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"q": "why", "a": "so", "x": 1}\n{"q": "who", "a": ""}\n')
    corpora = run(tmp_path, path, rules=DocumentRules(("q", "a")))
    assert [corpus.prefix for corpus in corpora] == [str(tmp_path / "out_q_document"), str(tmp_path / "out_a_document")]
    questions, answers = [[list(b"why")], [list(b"who")]], [[list(b"so")], []]
    assert written(tmp_path, "q") == (token_bytes(questions), index_bytes(questions))
    assert written(tmp_path, "a") == (token_bytes(answers), index_bytes(answers))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_leaves_earlier_files_as_they_were(tmp_path: Path, workers: int) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    run(tmp_path, good)
    bad = tmp_path / "b.jsonl"
    bad.write_text('{"text": "x"}\n{"text": \n')
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(DataError) as caught:
        run(tmp_path, good, bad, workers=workers)
    assert caught.value.problems[0].given == f"{bad}:2"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_many_failing_workers_give_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first in the input's order, however many follow; the workers themselves print nothing."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 20)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS * 20, key="other")
    with pytest.raises(DataError, match=r"a\.jsonl:1\b"):
        run(tmp_path, path, workers=2)
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == [path]


def test_wrong_inputs_and_tokenizer_files_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        run(tmp_path, tmp_path / "none.jsonl", tokenizer=TokenizerSpec("GPT2BPETokenizer"))
    assert len(caught.value.problems) == 3


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match="--json-keys text text"):
        run(tmp_path, path, rules=DocumentRules(("text", "text")))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("ending", ["bin", "idx", "json"])
def test_a_folder_in_the_way_is_told_and_no_trace_is_left(tmp_path: Path, ending: str) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    folder = tmp_path / f"out_text_document.{ending}"
    folder.mkdir()
    with pytest.raises(DataError, match="must be writable"):
        run(tmp_path, path)
    assert sorted(tmp_path.iterdir()) == [path, folder]


def test_a_worker_that_died_is_told() -> None:
    receiving, sending = Pipe(duplex=False)
    sending.close()
    with pytest.raises(DataError, match="worker died"):
        _receive(receiving)


def test_input_without_any_text_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(DataError, match="2 documents without any token under 'text'"):
        run(tmp_path, path)
    assert list(tmp_path.iterdir()) == [path]


def test_progress_tells_counts_rates_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "CHUNK_BYTES", 20)
    run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), log_interval=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4", "6"]
    assert all("documents/s" in line and "MB/s" in line and "ETA" in line for line in lines)
    assert lines[-1].endswith("ETA 0.0s")
