"""Source files in folders are written to one jsonl file."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard

from megazero.errors import DataError
from megazero.prepare.text.source_text import find_sources, find_stdlib, write_jsonl


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for number in range(20):
        path = root / f"p{number % 3}" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# module {number}\nx = 'é'\n", encoding="utf-8")
    (root / "notes.md").write_text("notes")
    (root / "p0" / "empty.py").write_text(" \n")
    (root / "p0" / "latin.py").write_bytes(b"\xe9")
    return root


def names(root: Path, *excluded: str) -> list[str]:
    return [source.name for source in find_sources([root], ["*.py"], excluded)]


def test_files_match_globs_and_exclusions(tree: Path) -> None:
    assert len(names(tree)) == 22
    assert not any(name.startswith("p1/") for name in names(tree, "p1"))
    assert "p0/m0.py" not in names(tree, "m0.py") and "p0/m0.py" in names(tree, "0.py")
    assert len(names(tree, "p0/*")) == 13
    assert len(find_sources([tree], ["*.md", "m1.py"], [])) == 2


def test_the_order_is_shuffled_and_depends_on_names_only(tree: Path, tmp_path: Path) -> None:
    order = names(tree)
    assert order != sorted(order)
    os.rename(tree, tmp_path / "elsewhere")
    assert names(tmp_path / "elsewhere") == order


def test_lines_hold_text_and_name(tree: Path, tmp_path: Path) -> None:
    sources = find_sources([tree], ["*.py"], [])
    summary = write_jsonl(sources, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (summary.documents, summary.skipped) == (20, 2)
    assert summary.text_bytes == sum(len(line["text"].encode()) for line in lines)
    assert [line["name"] for line in lines] == [
        source.name for source in sources if source.path.name not in ("empty.py", "latin.py")
    ]
    assert all(line["text"] == (tree / line["name"]).read_text(encoding="utf-8") for line in lines)


def test_missing_roots_and_no_match_are_told(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        find_sources([tmp_path / "a", tree, tmp_path / "b"], ["*"], [])
    assert len(caught.value.problems) == 2
    with pytest.raises(DataError, match="some file matches"):
        find_sources([tree], ["*.rs"], [])
    with pytest.raises(DataError, match="none of them text"):
        write_jsonl(find_sources([tree], ["latin.py"], []), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_standard_library_is_found() -> None:
    found = {source.name for source in find_stdlib()}
    assert {"json/decoder.py", "argparse.py", "os.py"} <= found
    assert not any("site-packages" in name or name.startswith("test/") for name in found)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_dangling_links_and_pipes_are_no_sources(tree: Path) -> None:
    before = names(tree)
    (tree / "p0" / "lock.py").symlink_to("nowhere")
    os.mkfifo(tree / "p0" / "pipe.py")
    assert names(tree) == before


def test_a_file_has_a_limit(tmp_path: Path) -> None:
    with (tmp_path / "a.py").open("wb") as stream:
        stream.truncate(1 << 40)  # a hole
    with pytest.raises(DataError, match=r"a\.py\n.*larger than 256"):
        write_jsonl(find_sources([tmp_path], ["*.py"], []), tmp_path / "c.jsonl")


def test_a_name_that_is_not_unicode_stops_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    try:
        Path(os.fsdecode(os.fsencode(root) + b"/\xff.py")).write_text("x = 1\n")
    except OSError:
        pytest.skip("this file system's names are Unicode")
    write_jsonl(find_sources([root], ["*.py"], []), tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text(encoding="utf-8")) == {"text": "x = 1\n", "name": "?.py"}


def test_separators_make_documents(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes("one\n---\n\n---\nzwei é\n---\nthree\n".encode())
    (tmp_path / "in" / "b.json").write_bytes(b"not JSON\n---\n\xff\n---\nlast")
    (tmp_path / "in" / "c.txt.gz").write_bytes(gzip.compress(b"packed\n---\ntoo"))
    sources = find_sources([tmp_path / "in"], ["*"], [])
    summary = write_jsonl(sources, tmp_path / "out.jsonl.gz", "\n---\n")
    lines = [json.loads(line) for line in gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()).splitlines()]
    assert {line["name"]: line["text"] for line in lines} == {
        "a.txt#1": "one", "a.txt#2": "zwei é", "a.txt#3": "three\n", "b.json#1": "not JSON", "b.json#2": "last",
        "c.txt.gz#1": "packed", "c.txt.gz#2": "too",
    }  # fmt: skip
    assert (summary.documents, summary.skipped) == (7, 1)
    assert summary.text_bytes == sum(len(line["text"].encode()) for line in lines)


def test_the_output_is_packed_by_its_ending(tree: Path, tmp_path: Path) -> None:
    sources = find_sources([tree], ["*.py"], [])
    for name in ("out.jsonl", "out.jsonl.gz", "out.jsonl.zst"):
        write_jsonl(sources, tmp_path / name)
    plain = (tmp_path / "out.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "out.jsonl.gz").read_bytes()) == plain
    assert zstandard.ZstdDecompressor().decompressobj().decompress((tmp_path / "out.jsonl.zst").read_bytes()) == plain
    with pytest.raises(DataError, match="must have one of these endings"):
        write_jsonl(sources, tmp_path / "out.csv")
