"""Tests of the inspection tool as a user starts it."""

import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import write_corpus
from support.warm_python import TOOLS, warm_python

from megazero.commands.inspect import main
from megazero.config.run import TrainingConfig
from megazero.data.corpora import Corpora

TOOL = Path(__file__).parents[2] / "tools" / "inspect_dataset.py"
TEXT = "one\ttwo\r\nthree\x0c \u00fc " + "x" * 300


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    command = [warm_python(TOOLS), str(TOOL), *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, text=True)


def texts(prefix: Path, *documents: str) -> str:
    return write_corpus(prefix, [[[*text.encode(), 256]] for text in documents])


def test_verify_refuses_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "c", [[[1, 300]]])
    done = run(prefix, "--verify", "--tokenizer-type", "ByteTokenizer")
    assert done.returncode == 2
    assert "ids from 1 to 300" in done.stderr and "Traceback" not in done.stderr


def test_by_itself_it_shows_counts_and_beginnings(tmp_path: Path) -> None:
    done = run(texts(tmp_path / "c", "a", "b", "c", "d"), "--tokens", 1)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "corpus", "documents", "sequences", "tokens", "tokenizer", "shown", "document", "document", "document",
    ]  # fmt: skip
    assert "shown          as ids; as text with --tokenizer-type and its files\n" in done.stdout
    assert done.stdout.endswith("document 2     [99] ... (2 tokens)\n")


def test_text_is_shown_where_the_corpus_names_a_tokenizer_without_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = texts(tmp_path / "c", "a text")
    counts = {"documents": 1, "tokens": 7, "text_bytes": 6}
    write_sidecar(prefix, byte_sidecar(**counts))
    assert main([prefix]) == 0
    assert "document 0     'a text<|endoftext|>' (7 tokens)" in capsys.readouterr().out
    write_sidecar(prefix, byte_sidecar(**counts, tokenizer_type="GPT2BPETokenizer"))
    assert main([prefix]) == 0
    told = "shown          as ids; as text with --tokenizer-type GPT2BPETokenizer --vocab-file FILE --merge-file FILE\n"
    assert told in capsys.readouterr().out


def test_everything_at_once(tmp_path: Path) -> None:
    prefix, picture = texts(tmp_path / "c", "first", TEXT, "last"), tmp_path / "lengths.svg"
    sample = ("--sample", 2, "--seq-length", 8, "--split", "1", "--seed", 5)
    views = ("--lengths", "--picture", picture, "--verify", "--document", 1, "--compare", prefix)
    command = [warm_python(TOOLS), str(TOOL), prefix, "--tokenizer-type", "ByteTokenizer", *map(str, (*sample, *views))]
    done = subprocess.run(command, capture_output=True, timeout=60, check=True)
    told = done.stdout.decode()
    size = len(TEXT.encode()) + 1
    assert f"longest {size} tokens" in told and "256-511" in told and "document 0 " not in told
    assert picture.read_text().startswith("<svg ")
    assert f"document 1     {size} tokens\n{TEXT}<|endoftext|>\n" in told  # with its tabs and line ends
    expected = bytes(
        Corpora([prefix], split="1").samples("train", seq_length=8, seed=5, vocab_size=257).sample(2).tolist()
    )
    assert f"sample 2       9 tokens of train, seed 5\n{expected.decode()}\n" in told
    assert "ids            9 to 256" in told and "index          consistent" in told and "\nequal " in told


def test_another_corpus_is_told_by_the_exit_status(tmp_path: Path) -> None:
    one, other = texts(tmp_path / "one", "same", "here it is"), texts(tmp_path / "other", "same", "here it was")
    done = run(one, "--compare", other, "--tokenizer-type", "ByteTokenizer")
    assert (done.returncode, done.stderr) == (1, "")
    assert "different      document 1, position 8: another id" in done.stdout
    assert "'here it ' then 105 'i', 's<|endoftext|>'" in done.stdout


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    prefix = texts(tmp_path / "c", "a")
    done = run(prefix, "--picture", tmp_path / "p.png")
    assert done.returncode == 2 and f"legal: --picture {tmp_path}/p.svg" in done.stderr
    done = run(prefix, "--document", 7)
    assert done.returncode == 2 and "legal: 0 to 0" in done.stderr


def test_its_seed_is_that_of_a_run() -> None:
    (default,) = (field.default.default for field in fields(TrainingConfig) if field.name == "seed")
    assert f"the run's --seed (default: {default})" in " ".join(run("--help").stdout.split())
