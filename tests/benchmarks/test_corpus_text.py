"""Tests of the text for measurements: every document once, in the order of hashes, up to the given size."""

import json
from pathlib import Path

import pytest
import xxhash
from corpus_text import counted, front, gather, installed

ROW = "some words that are long enough for a document of their own, "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for number in range(20):
        path = root / f"p{number % 3}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{ROW}{number}\n" * 4)
    (root / "again.md").write_text(f"{ROW}7\n" * 4)
    (root / "copyright").write_text(ROW * 2 + "é\u2028")
    (root / "small.py").write_text("x = 1\n")
    (root / "large.txt").write_text("0 1 2 3\n" * 200_000)
    (root / "latin.txt").write_bytes(ROW.encode() + b"\xe9" * 70)
    (root / "zero.txt").write_text(ROW * 2 + "\0")
    (root / "blank.txt").write_text(" \n" * 100)
    (root / "data.bin").write_text(ROW * 3)
    (root / "p0" / "__pycache__").mkdir()
    (root / "p0" / "__pycache__" / "c.py").write_text(ROW * 5)
    (root / "dangling.py").symlink_to(root / "nowhere")
    return root


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_every_document_once_in_the_order_of_hashes(folder: Path, tmp_path: Path) -> None:
    text = gather([folder], 1 << 30, tmp_path / "t.jsonl")
    found = texts(text.path)
    assert len(found) == len(set(found)) == 21 == text.documents
    assert set(found) == {f"{ROW}{number}\n" * 4 for number in range(20)} | {ROW * 2 + "é\u2028"}
    digests = [xxhash.xxh3_128_digest(one.encode()) for one in found]
    assert digests == sorted(digests)
    assert text.nbytes == text.path.stat().st_size and counted(text.path) == text


def test_not_more_than_was_asked_for(folder: Path, tmp_path: Path) -> None:
    text = gather([folder], 1 << 30, tmp_path / "t.jsonl")
    less = gather([folder], 1000, tmp_path / "less.jsonl")
    assert 1000 <= less.nbytes < 1500 and texts(less.path) == texts(text.path)[: less.documents]
    assert front(text, 1000, tmp_path / "front.jsonl") == (tmp_path / "front.jsonl", less.documents, less.nbytes)
    assert (tmp_path / "front.jsonl").read_bytes() == less.path.read_bytes()
    assert front(text, 0, tmp_path / "one.jsonl").documents == 1


def test_folders_are_there_and_none_is_in_another() -> None:
    folders = installed()
    assert folders and all(folder.is_dir() for folder in folders)
    assert not any(one in other.parents for one in folders for other in folders)
