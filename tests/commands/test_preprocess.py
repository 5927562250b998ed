"""Tests of the way from source files to an inspected corpus through the programs that a user starts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import TOOLS, warm_python

FOLDER = Path(__file__).parents[2] / "tools"


def run(tool: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [warm_python(TOOLS), str(FOLDER / tool), *map(str, arguments)]
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
    found = re.search(r" (\d+) tokens.* (\S+) KiB of text, (\S+) bytes a token$", done.stdout, re.MULTILINE)
    assert found and abs(float(found[2]) * 1024 / int(found[1]) - float(found[3])) < 0.06
    assert done.stdout.splitlines()[-1].endswith("encoded by gigatoken")
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


def test_text_and_corpora_in_object_stores_are_refused_at_once() -> None:
    done = run(
        "preprocess_data.py", "--input", "s3://b/a.jsonl", "--output-prefix", "s3://b/c",
        "--tokenizer-type", "ByteTokenizer",
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("2 data errors:\n--input s3://b/a.jsonl\n")
    assert "--output-prefix s3://b/c\n" in done.stderr and not Path("s3:").exists()


def command(folder: Path, *flags: object, python: str | None = None) -> list[str]:
    """Return the command that preprocesses `folder`/a.txt in many partitions; python: None for one with its imports."""
    words: list[object] = [python or warm_python(TOOLS), FOLDER / "preprocess_data.py"]
    words += ["--input", folder / "a.txt", "--append-eod"]
    words += ["--output-prefix", folder / "out" / "c", "--tokenizer-type", "ByteTokenizer", "--partitions", 16]
    return [str(word) for word in (*words, *flags)]


def write_text(folder: Path, megabytes: int) -> None:
    lines = "".join(f"line number {number} of a long text\n" for number in range(10_000))
    (folder / "a.txt").write_text((lines + "\n") * (megabytes * 1_000_000 // len(lines)))


def contents(folder: Path) -> dict[str, Any]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def finished(folder: Path, number: int, process: "subprocess.Popen[str]") -> bool:
    """Wait until `number` partitions are in the journal and return True, or False if the process ends before."""
    journal = folder / "out" / ".c.partial" / "journal.jsonl"
    while process.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") > number:
            return True
        time.sleep(0.002)
    return False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a text and what a run that nothing interrupts makes of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_text(folder, 8)
    subprocess.run(command(folder), capture_output=True, check=True, timeout=120)
    return folder


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interruption_is_told_in_a_word_and_can_be_gone_on_from(
    tmp_path: Path, kind: signal.Signals, undisturbed: Path
) -> None:
    """Ctrl-C, which reaches the workers too, a signal to one process, and a kill end a run; it can be resumed.

    A process that has been started warm is in no group with the one that started it, which Ctrl-C would reach.
    """
    python = sys.executable if kind == signal.SIGINT else None
    (tmp_path / "a.txt").symlink_to(undisturbed / "a.txt")
    with subprocess.Popen(
        command(tmp_path, "--workers", 2, python=python),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert finished(tmp_path, 2, process)
        os.killpg(process.pid, kind) if kind == signal.SIGINT else process.send_signal(kind)
        try:
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    if kind == signal.SIGKILL:
        assert process.returncode == -kind
    else:
        assert (process.returncode, stderr) == (130, "interrupted\n")
        assert stdout.splitlines()[-1].startswith("finished partitions are in")
    assert contents(tmp_path / "out") == {}
    done = subprocess.run(command(tmp_path, "--resume"), capture_output=True, text=True, check=True, timeout=120)
    assert "resuming after" in done.stdout
    found = contents(tmp_path / "out")
    assert found == contents(undisturbed / "out") and len(found) == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(found)


@pytest.mark.parametrize("limit", [4096, 5_000_000])
def test_a_full_disk_is_told_and_leaves_no_trace(tmp_path: Path, limit: int) -> None:
    """A limit on file sizes simulates a disk that is full before the first partition, or after some."""
    write_text(tmp_path, 6)
    program = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        "sys.argv.pop(0)\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    python, *words = command(tmp_path)
    limited = [python, "-c", program, *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert "c_text_document.bin" in done.stderr and "must be writable: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_shards_by_slurm_have_their_own_names(tmp_path: Path) -> None:
    write_text(tmp_path, 3)
    told = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_MAX": "6"}
    told["SLURM_ARRAY_TASK_COUNT"] = "2"
    subprocess.run(
        command(tmp_path, "--shards-from-slurm"), env={**os.environ, **told}, check=True, capture_output=True
    )
    stem = "c_shard_00001_of_00002_text_document"
    assert sorted(contents(tmp_path / "out")) == [f"{stem}.{ending}" for ending in ("bin", "idx", "json")]
    done = subprocess.run(
        command(tmp_path, "--shard-index", 2, "--num-shards", 2), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--shard-index 0 to 1" in done.stderr


def test_flags_of_megatrons_tool_are_taken_or_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    flags = ["--input", tmp_path / "a.txt", "--output_prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    done = run("preprocess_data.py", *flags, "--dataset-impl", "mmap", "--partitions", 1, "--keep-sequential-samples")
    assert done.returncode == 0, done.stderr
    assert "--keep-sequential-samples: accepted, without effect" in done.stdout
    done = run("preprocess_data.py", *flags, "--split-sentences", "--dataset-impl", "lazy", "--keep-newlines")
    assert done.returncode == 2
    assert "2 configuration errors" in done.stderr and "--split-sentences\n" in done.stderr
    assert "--dataset-impl lazy\n" in done.stderr
