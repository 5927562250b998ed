"""Preprocessing writes the files of an independent writer, for any number of workers, shards and interruptions."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.token_files import index_bytes, token_bytes, write_gpt2_files
from support.warm_python import TOOLS, warm_python

from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import digest_of, read_sidecar
from megazero.data.tokenizers import TokenizerSpec
from megazero.errors import DataError
from megazero.files import cannot_write
from megazero.prepare.text import chunks
from megazero.prepare.text.chunks import DocumentRules, Shard, find_chunks
from megazero.prepare.text.inputs import find_inputs
from megazero.prepare.tokens import preprocess as module
from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter, Spool
from megazero.prepare.tokens.preprocess import Preprocessed, PreprocessRequest, WrittenCorpus, preprocess

BYTES = TokenizerSpec("ByteTokenizer")
TEXTS = ["hello", "", "\u00e9", "a\nb", "", "last one"]


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def make(folder: Path, *inputs: Path, **options: Any) -> Preprocessed:
    names = tuple(map(str, inputs))
    request = PreprocessRequest(names, str(folder / "out"), **{"tokenizer": BYTES, **options})
    return preprocess(request, Console(rank=0))


def run(tmp_path: Path, *inputs: Path, **options: Any) -> list[WrittenCorpus]:
    return make(tmp_path, *inputs, **options).corpora


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder by name; a folder has a name that ends in a slash, and no content."""
    return {path.name + "/" * path.is_dir(): b"" if path.is_dir() else path.read_bytes() for path in folder.iterdir()}


def written(tmp_path: Path, key: str = "text") -> tuple[bytes, bytes]:
    stem = tmp_path / f"out_{key}_document"
    return Path(f"{stem}.bin").read_bytes(), Path(f"{stem}.idx").read_bytes()


@pytest.fixture(scope="module", autouse=True)
def workers_start_warm() -> Iterator[None]:
    """Workers come from a process that has their imports; test_workers.py has some that start by themselves."""
    before = spawn.get_executable()
    spawn.set_executable(warm_python(TOOLS))
    yield
    spawn.set_executable(before)


@pytest.mark.parametrize("append_eod", [False, True])
def test_files_are_those_of_the_format(tmp_path: Path, append_eod: bool) -> None:
    """An empty document counts as a document, but writes no sequence and no end-of-document token."""
    ((prefix, sidecar),) = run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), append_eod=append_eod)
    end = [256] if append_eod else []
    expected = [[[*text.encode(), *end]] if text else [] for text in TEXTS]
    assert written(tmp_path) == (token_bytes(expected), index_bytes(expected))
    assert (sidecar.documents, sidecar.sequences, sidecar.text_bytes) == (6, 4, 18)
    assert sidecar.tokens == 18 + 4 * append_eod
    assert read_sidecar(IndexedDataset(prefix)) == sidecar


def test_workers_do_not_change_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker and two write the same files for many chunks of jsonl and plain text and a tokenizer from files."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 10_000)  # chunks are found in this process and sent to the workers
    texts = [f"document {number} " * (number % 50) for number in range(400)]
    inputs = [write_jsonl(tmp_path / "a.jsonl", texts), tmp_path / "b.txt"]
    inputs[1].write_text("some plain text\n\n" * 1000)
    vocab, merges = write_gpt2_files(tmp_path, [("d", "o"), ("Ġ", "do"), ("e", "n")])
    tokenizer = TokenizerSpec("GPT2BPETokenizer", vocab, merges)
    results = []
    for workers in (1, 2):
        corpora = run(tmp_path, *inputs, tokenizer=tokenizer, workers=workers, append_eod=True)
        results.append((written(tmp_path), corpora))
    assert len(list(find_chunks(find_inputs([str(path) for path in inputs]), DocumentRules()))) > 12
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
    """Only the failure that is first in the order of the input is raised; the workers themselves print nothing."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20)
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
def test_a_folder_in_the_way_is_told_and_the_work_is_kept(
    tmp_path: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    folder = tmp_path / f"out_text_document.{ending}"
    folder.mkdir()
    with pytest.raises(DataError, match="must be writable"):
        run(tmp_path, path)
    assert f"finished partitions are in {tmp_path / '.out.partial'}" in capsys.readouterr().out
    folder.rmdir()
    run(tmp_path, path, resume=True)
    assert written(tmp_path)[0] == token_bytes([[list("".join(TEXTS).encode())]])
    assert sorted(contents(tmp_path)) == ["a.jsonl", *(f"out_text_document.{name}" for name in ("bin", "idx", "json"))]


def test_input_without_any_text_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(DataError, match="2 documents without any token under 'text'"):
        run(tmp_path, path)
    assert list(tmp_path.iterdir()) == [path]


def test_progress_tells_counts_rates_and_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 20)
    run(tmp_path, write_jsonl(tmp_path / "a.jsonl", TEXTS), log_interval=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4", "6"]
    assert all("documents/s" in line and "MB/s" in line and "ETA" in line for line in lines)
    assert lines[-1].endswith("ETA 0.0s")


def test_an_empty_end_of_the_prefix_is_a_folder(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    preprocess(PreprocessRequest((str(path),), f"{tmp_path}/deep/", BYTES), Console(rank=0))
    assert sorted(contents(tmp_path / "deep")) == [f"_text_document.{name}" for name in ("bin", "idx", "json")]


def reference_sequences(tokens: list[int], limit: int) -> list[list[int]]:
    """Cut a document into sequences of at most `limit` tokens."""
    return [tokens[start : start + limit] for start in range(0, len(tokens), limit)]


@pytest.mark.parametrize("append_eod", [False, True])
@pytest.mark.parametrize("limit", [1, 3, 7, 1000])
def test_long_documents_are_split(tmp_path: Path, limit: int, append_eod: bool) -> None:
    texts = ["", "abc", "abcd", "x" * 21, "", "y" * 20, "z"]
    ((prefix, sidecar),) = run(
        tmp_path, write_jsonl(tmp_path / "a.jsonl", texts), split_documents=limit, append_eod=append_eod
    )
    ids = [[*text.encode(), *[256] * (append_eod and bool(text))] for text in texts]
    expected = [reference_sequences(tokens, limit) for tokens in ids]
    assert written(tmp_path) == (token_bytes(expected), index_bytes(expected))
    assert (sidecar.documents, sidecar.sequences, sidecar.split_documents) == (7, sum(map(len, expected)), limit)
    dataset = IndexedDataset(prefix)
    assert [dataset.num_documents, dataset.num_tokens] == [7, sum(map(len, ids))]


def many(folder: Path) -> list[Path]:
    """Write three jsonl files of twelve kilobytes in all, with two unusable lines; return their paths."""
    rng = random.Random(1)
    lines = [json.dumps({"text": "t" * rng.randrange(90), "title": f"title {n}" * (n % 3)}) for n in range(150)]
    lines[30] = "{"
    lines[90] = '{"text": 5, "title": "x"}'
    paths = [folder / "a.jsonl", folder / "b.jsonl", folder / "c.jsonl"]
    for number, path in enumerate(paths):
        path.write_text("\n".join(lines[number * 50 : number * 50 + 50]) + "\n")
    return paths


MANY: dict[str, Any] = {
    "rules": DocumentRules(("text", "title")), "append_eod": True, "skip_bad_lines": True, "partitions": 4,
    "split_documents": 30,
}  # fmt: skip


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the input about seven chunks."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 3_000)


@pytest.mark.parametrize("count", [2, 5])
def test_shards_put_together_are_the_whole(tmp_path: Path, small_chunks: None, count: int) -> None:
    paths = many(tmp_path)
    whole = tmp_path / "whole"
    make(whole, *paths, **MANY)
    for index in range(count):
        make(tmp_path / "shards", *paths, **MANY, shard=Shard(index, count))
    for key in ("text", "title"):
        with IndexedDatasetWriter(whole / "joined", np.dtype(np.uint16)) as writer:
            for index in range(count):
                name = f"out_shard_{index:05d}_of_{count:05d}_{key}_document"
                writer.append(IndexedDataset(str(tmp_path / "shards" / name)))
        for ending in ("bin", "idx"):
            joined = (whole / f"joined.{ending}").read_bytes()
            assert joined == (whole / f"out_{key}_document.{ending}").read_bytes()
            assert len(joined) > 1000
    bad = b"".join(path.read_bytes() for path in sorted((tmp_path / "shards").glob("*bad_lines.txt")))
    assert bad == (whole / "out_bad_lines.txt").read_bytes()


def test_a_shard_that_has_no_text_is_a_corpus(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["one", "two"])
    ((prefix, sidecar),) = run(tmp_path, path, shard=Shard(3, 4))
    assert sidecar.documents == 0 and IndexedDataset(prefix).num_documents == 0


def test_bad_lines_are_listed_alike_for_any_number_of_workers(tmp_path: Path, small_chunks: None) -> None:
    paths = many(tmp_path)
    results = []
    for workers in (1, 3):
        done = make(tmp_path / str(workers), *paths, **MANY, workers=workers)
        assert done.bad_lines == 2
        assert done.bad_lines_file.read_text().splitlines() == [
            next(line for line in done.bad_lines_file.read_text().splitlines() if line.startswith(f"{place}: "))
            for place in (f"{tmp_path / 'a.jsonl'}:31", f"{tmp_path / 'b.jsonl'}:41")
        ]
        results.append(contents(tmp_path / str(workers)))
    assert results[0] == results[1]
    write_jsonl(tmp_path / "good.jsonl", TEXTS)
    make(tmp_path / "1", tmp_path / "good.jsonl", skip_bad_lines=True)
    assert "out_bad_lines.txt" not in contents(tmp_path / "1"), "it told of an earlier corpus"


class Death(BaseException):
    """The sudden end of a process: nothing that it would do afterwards happens."""


class Steps:
    """Counts the operations that change the disk, and raises `error` in place of operation number `last`.

    After a Death every later operation fails too; any other error is raised once.
    """

    def __init__(self, patch: pytest.MonkeyPatch, last: int = -1, error: BaseException | None = None) -> None:
        self.count = 0
        self.names: list[str] = []
        self._last, self._error = last, error or Death()
        for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, self._counted(name, getattr(os, name)))
        for name in ("__init__", "write"):
            patch.setattr(Spool, name, self._counted(name, getattr(Spool, name)))

    def forget(self) -> None:
        """Drop the frames that the error passed through: a dead process holds no file open and no lock."""
        self._error = self._error.with_traceback(None)
        self._error.__context__ = None

    def _counted(self, name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            number, self.count = self.count, self.count + 1
            self.names.append(name)
            if number == self._last or (0 <= self._last < number and isinstance(self._error, Death)):
                if name in ("__init__", "write") and isinstance(self._error, OSError):  # as a Spool would raise it
                    raise cannot_write(Path(name), self._error) from self._error
                raise self._error
            return do(*arguments, **options)

        return counted


@contextmanager
def stopped_at(step: int, error: BaseException | None = None) -> Iterator[Steps]:
    """Make the block fail at the given step (-1: at none), and catch the error that comes of it."""
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, step, error)
        try:
            yield steps
        except (Death, DataError) as caught:
            assert step >= 0, caught
        finally:
            steps.forget()


def prepared(tmp_path: Path) -> tuple[list[Path], dict[str, bytes], dict[str, bytes], int]:
    """Return the inputs, a folder's content before a run (an earlier corpus) and after it, and the run's steps."""
    paths = many(tmp_path)
    earlier, whole = tmp_path / "earlier", tmp_path / "whole"
    make(earlier, write_jsonl(tmp_path / "e.jsonl", ["an earlier corpus"] * 5, "text"))
    shutil.copy(earlier / "out_text_document.bin", earlier / "out_title_document.bin")
    shutil.copy(earlier / "out_text_document.idx", earlier / "out_title_document.idx")
    shutil.copy(earlier / "out_text_document.json", earlier / "out_title_document.json")
    shutil.copytree(earlier, whole)
    with stopped_at(-1) as steps:
        make(whole, *paths, **MANY)
    return paths, contents(earlier), contents(whole), steps.count


def assert_unharmed(folder: Path, earlier: dict[str, bytes], whole: dict[str, bytes]) -> None:
    """Check that each corpus is the earlier one, the new one or absent: its three files always fit together."""
    now = contents(folder)
    for key in ("text", "title"):
        names = [f"out_{key}_document.{ending}" for ending in ("bin", "idx", "json")]
        if names[1] in now:
            of = whole if now[names[1]] == whole[names[1]] else earlier
            assert all(now[name] == of[name] for name in names if name in now)
            assert names[0] in now


def test_a_death_at_any_step_can_be_gone_on_from(tmp_path: Path, small_chunks: None) -> None:
    """Resuming after a death at any step gives the files of a whole run; an earlier corpus is never harmed."""
    paths, earlier, whole, count = prepared(tmp_path)
    assert count > 60
    rng = random.Random(2)
    for step in range(count):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        for name, content in earlier.items():
            (folder / name).write_bytes(content)
        with stopped_at(step):
            make(folder, *paths, **MANY)
        assert_unharmed(folder, earlier, whole)
        if step % 3 == 0:  # a second death, while resuming
            with stopped_at(rng.randrange(count)):
                make(folder, *paths, **MANY, resume=True)
            assert_unharmed(folder, earlier, whole)
        make(folder, *paths, **MANY, resume=True)
        assert contents(folder) == whole, step


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_any_step_is_told(tmp_path: Path, small_chunks: None, number: int) -> None:
    """A full disk is left without a trace of the work; after any other error of the disk a later run can resume."""
    paths, earlier, whole, count = prepared(tmp_path)
    kept = 0
    for step in range(number == errno.EIO, count, 2):
        folder = tmp_path / f"{step}"
        folder.mkdir()
        for name, content in earlier.items():
            (folder / name).write_bytes(content)
        with stopped_at(step, OSError(number, os.strerror(number))) as steps:
            make(folder, *paths, **MANY)
        assert_unharmed(folder, earlier, whole)
        scratch = folder / ".out.partial"
        kept += scratch.exists()
        if number == errno.ENOSPC:
            assert not scratch.exists() or steps.names[step] in ("unlink", "rmdir"), (step, steps.names[step])
        if number != errno.ENOSPC:
            make(folder, *paths, **MANY, resume=True)
            assert contents(folder) == whole, step
    assert kept > 10 or number == errno.ENOSPC


@pytest.mark.parametrize(
    "change",
    [
        {"append_eod": False}, {"split_documents": 31}, {"shard": Shard(0, 2)}, {"rules": DocumentRules(("text",))},
        {"rules": DocumentRules(("text", "title"), invalid_utf8="replace")},
    ],
)  # fmt: skip
def test_other_work_is_not_gone_on_with(tmp_path: Path, small_chunks: None, change: dict[str, Any]) -> None:
    paths, folder = many(tmp_path), tmp_path / "f"
    with stopped_at(40):
        make(folder, *paths, **MANY)
    scratch = contents(folder / ".out.partial")
    name = next(iter(change))
    if name == "shard":
        (folder / ".out.partial").rename(folder / ".out_shard_00000_of_00002.partial")
        scratch = contents(folder / ".out_shard_00000_of_00002.partial")
    with pytest.raises(DataError, match=f"--resume: {name} was"):
        make(folder, *paths, **{**MANY, **change}, resume=True)
    assert contents(next(folder.iterdir())) == scratch


def test_changed_inputs_and_tokenizers_are_not_gone_on_with(tmp_path: Path, small_chunks: None) -> None:
    paths, folder = many(tmp_path), tmp_path / "f"
    vocab, merges = write_gpt2_files(tmp_path, [("t", "t")])
    tokenizer = TokenizerSpec("GPT2BPETokenizer", vocab, merges)
    with stopped_at(40):
        make(folder, *paths, **MANY, tokenizer=tokenizer)
    write_gpt2_files(tmp_path, [("t", "t"), ("i", "t")])
    with pytest.raises(DataError, match="--resume: tokenizer was"):
        make(folder, *paths, **MANY, tokenizer=tokenizer, resume=True)
    write_gpt2_files(tmp_path, [("t", "t")])
    os.utime(paths[1], ns=(0, 1))
    with pytest.raises(DataError, match=f"--resume: input was .*{paths[1]}"):
        make(folder, *paths, **MANY, tokenizer=tokenizer, resume=True)
    make(folder, *paths, **MANY, tokenizer=tokenizer)  # without --resume the run starts from the beginning
    assert not any(name.startswith(".") for name in contents(folder))


def test_workers_and_partitions_may_change_on_the_way(
    tmp_path: Path, small_chunks: None, capsys: pytest.CaptureFixture[str]
) -> None:
    paths, _, whole, count = prepared(tmp_path)
    folder = tmp_path / "f"
    with stopped_at(count // 2):
        make(folder, *paths, **{**MANY, "workers": 3})
    make(folder, *paths, **{**MANY, "workers": 2, "partitions": 9}, resume=True)
    assert contents(folder) == whole
    assert "resuming after" in capsys.readouterr().out


def test_a_second_run_at_the_same_prefix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    real, caught = module._publish, []

    def at_once(*arguments: Any) -> Any:
        for resume in (False, True):
            with pytest.raises(DataError, match="another one is running") as error:
                run(tmp_path, path, resume=resume)
            caught.append(error)
        return real(*arguments)

    monkeypatch.setattr(module, "_publish", at_once)
    ((prefix, sidecar),) = run(tmp_path, path)
    assert len(caught) == 2
    assert read_sidecar(IndexedDataset(prefix)) == sidecar
    assert sidecar.digests == {ending: digest_of(Path(f"{prefix}.{ending}")) for ending in ("bin", "idx")}
