"""Tests of the merging tool as a user starts it; tests/prepare/tokens/test_merge.py tests the files it makes."""

import subprocess
from pathlib import Path

from support.token_files import index_bytes, token_bytes, write_corpus
from support.warm_python import TOOLS, warm_python

TOOL = Path(__file__).parents[2] / "tools" / "merge_datasets.py"


def run(*words: object, limit: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the tool; `limit` is the largest size of a file in bytes, which simulates a full disk."""
    program = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    program += "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    start = [warm_python(TOOLS), *(["-c", program] if limit else [])]
    command = [*start, str(TOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_folder_becomes_one_corpus(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_corpus(folder / "b", [[[3]]])
    write_corpus(folder / "a", [[[1, 2]], []])
    done = run("--input", folder, "--output_prefix", tmp_path / "all")
    assert done.returncode == 0, done.stderr
    everything = [[[1, 2]], [], [[3]]]
    assert (tmp_path / "all.bin").read_bytes() == token_bytes(everything)
    assert (tmp_path / "all.idx").read_bytes() == index_bytes(everything)
    order, a, b, made, without = done.stdout.splitlines()
    assert order == "2 corpora with 3 tokens, 6 B, in this order:"
    assert a == f"  {folder}/a: 2 documents, 2 tokens" and b.startswith(f"  {folder}/b: 1 ")
    assert made.startswith(f"{tmp_path}/all: 3 documents, 3 tokens in ")
    assert without == f"no .json is written, since {folder}/a has none (2 without in all)"


def test_a_full_disk_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    parts = [write_corpus(tmp_path / name, [[[1] * 3000]]) for name in "ab"]
    write_corpus(tmp_path / "all", [[[42]]])
    before = sorted(tmp_path.iterdir())
    done = run("--input", *parts, "--output-prefix", tmp_path / "all", limit=8192)
    assert done.returncode == 2, done.stderr
    assert "must be writable: File too large" in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "all.bin").read_bytes() == token_bytes([[[42]]])


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    done = run("--input", tmp_path, "--output-prefix", tmp_path / "all", "--multimodal")
    assert done.returncode == 2 and "leave out --multimodal" in done.stderr
    write_corpus(tmp_path / "out_shard_00001_of_00002_text_document", [[[1]]])
    done = run("--input", tmp_path, tmp_path / "none", "--output-prefix", tmp_path / "all")
    assert done.returncode == 2 and "2 data errors" in done.stderr
    assert f"{tmp_path}/out_shard_00000_of_00002_text_document" in done.stderr and f"{tmp_path}/none" in done.stderr
