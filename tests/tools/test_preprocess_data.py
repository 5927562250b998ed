"""The way from source files to an inspected corpus, through the programs a user starts."""

import json
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOLS / tool), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_sources_to_tokens(tmp_path: Path) -> None:
    source, corpus, model = tmp_path / "source", tmp_path / "c.jsonl", tmp_path / "t.model"
    source.mkdir()
    for number in range(30):
        (source / f"m{number}.py").write_text(f"def function_{number}(x):\n    return x + {number}\n" * 5)
    done = run("text_to_jsonl.py", "--input", source, "--glob", "*.py", "--exclude", "m7.py", "--output", corpus)
    assert done.returncode == 0, done.stderr
    assert "29 documents" in done.stdout
    done = run("train_tokenizer.py", "--input", corpus, "--vocab-size", 300, "--output", model)
    assert done.returncode == 0, done.stderr
    tokenizer = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model)
    prefix = tmp_path / "out" / "code"
    done = run("preprocess_data.py", "--input", corpus, "--output-prefix", prefix, *tokenizer, "--append-eod")
    assert done.returncode == 0, done.stderr
    assert "29 documents" in done.stdout and "vocabulary 300" in done.stdout
    done = run("inspect_dataset.py", f"{prefix}_text_document", *tokenizer, "--verify", "--documents", 1)
    assert done.returncode == 0, done.stderr
    first = json.loads(corpus.read_text().splitlines()[0])["text"]
    assert repr(first[:20])[:-1] in done.stdout
    assert "documents      29" in done.stdout and "ids " in done.stdout


def test_a_user_error_has_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    done = run(
        "preprocess_data.py", "--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "o",
        "--tokenizer-type", "ByteTokenizer",
    )  # fmt: skip
    assert done.returncode == 2
    assert f"{tmp_path}/a.jsonl:2" in done.stderr and "has the key 'text'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_is_told_and_leaves_no_trace(tmp_path: Path) -> None:
    """A limit on file sizes stands for the disk."""
    (tmp_path / "a.txt").write_text("hello world\n" * 20_000)
    command = [sys.executable, str(TOOLS / "preprocess_data.py"), "--input", str(tmp_path / "a.txt")]
    command += ["--output-prefix", str(tmp_path / "out"), "--tokenizer-type", "ByteTokenizer"]
    program = (
        "import os, resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    limited = [sys.executable, "-c", program, *command]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "out_text_document.bin" in done.stderr and "must be writable" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_flags_of_megatrons_tool_are_taken_or_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    flags = ["--input", tmp_path / "a.txt", "--output_prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    done = run("preprocess_data.py", *flags, "--dataset-impl", "mmap", "--partitions", 1, "--keep-sequential-samples")
    assert done.returncode == 0, done.stderr
    assert "--partitions: accepted, without effect" in done.stdout
    done = run("preprocess_data.py", *flags, "--split-sentences", "--dataset-impl", "lazy", "--keep-newlines")
    assert done.returncode == 2
    assert "2 configuration errors" in done.stderr and "--split-sentences\n" in done.stderr
    assert "--dataset-impl lazy\n" in done.stderr
