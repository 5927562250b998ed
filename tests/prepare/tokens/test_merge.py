"""Merging corpora gives, byte for byte, the corpus that preprocessing all their text at once gives."""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.sidecars import write_sidecar
from support.token_files import Documents, index_bytes, token_bytes, write_corpus

from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.data.tokenizers import BYTE, TokenizerSpec
from megazero.errors import DataError
from megazero.prepare.text import chunks
from megazero.prepare.text.chunks import WHOLE, DocumentRules, Shard
from megazero.prepare.tokens import merge as module
from megazero.prepare.tokens.array_shards import find_prefixes
from megazero.prepare.tokens.merge import MergedCorpus, merge, open_inputs
from megazero.prepare.tokens.preprocess import PreprocessRequest, preprocess

PARTS: Sequence[Documents] = (
    [[[1, 2, 3]], [], [[4], [5, 6]]],
    [],
    [[], []],
    [[[7, 8]], []],
    [[], [[9]]],
)
SIDECAR = Sidecar(
    3, 3, 6, 11, "ByteTokenizer", 257, 256, True, {"vocab_file": "ab"}, [1] * 257, {"bin": "0", "idx": "0"}
)


def merged(prefixes: Sequence[str], output: Path) -> MergedCorpus:
    return merge(open_inputs(prefixes, str(output)), str(output), lambda tokens: None)


def files(prefix: object) -> dict[str, bytes]:
    return {
        ending: Path(f"{prefix}.{ending}").read_bytes()
        for ending in ("bin", "idx", "json")
        if Path(f"{prefix}.{ending}").exists()
    }


def described(prefix: str, **changes: Any) -> str:
    """Write a sidecar that fits the first of the parts, with some changes, and return the prefix."""
    write_sidecar(prefix, replace(SIDECAR, **changes))
    return prefix


def problems(prefixes: Sequence[str], output: Path) -> list[str]:
    with pytest.raises(DataError) as caught:
        open_inputs(prefixes, str(output))
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("code", [1, 4, 8])
def test_it_is_the_corpus_of_all_documents(tmp_path: Path, code: int) -> None:
    prefixes = [write_corpus(tmp_path / str(number), part, code) for number, part in enumerate(PARTS)]
    done = merged(prefixes, tmp_path / "deep" / "all")
    everything = [document for part in PARTS for document in part]
    expected = {"bin": token_bytes(everything, code), "idx": index_bytes(everything, code)}
    assert files(tmp_path / "deep" / "all") == expected
    assert done == MergedCorpus(len(everything), 9, None, tuple(prefixes))
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["all.bin", "all.idx"]


@pytest.mark.parametrize(("num_shards", "chunk_bytes"), [(3, 40), (11, 300)])
def test_shards_of_a_preprocessing_give_what_one_would_have_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, chunk_bytes: int
) -> None:
    """The merged shards equal one preprocessing in all three files of both keys, even if some shards are empty."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    source = tmp_path / "text.jsonl"
    lines = ['{"text": "' + "word " * (number % 7) + f'", "title": "{number}"' + "}" for number in range(25)]
    source.write_text("\n".join(lines) + "\n")
    keys = ("text", "title")

    def make(prefix: Path, shard: Shard) -> None:
        spec = TokenizerSpec(BYTE)
        request = PreprocessRequest(
            (str(source),), str(prefix), spec, DocumentRules(keys), append_eod=True, shard=shard
        )
        preprocess(request, Console(rank=1))

    make(tmp_path / "whole", WHOLE)
    for index in reversed(range(num_shards)):
        make(tmp_path / "part", Shard(index, num_shards))
    for key in keys:
        pattern = str(tmp_path / f"part_shard_*_{key}_document")
        done = merged(find_prefixes([pattern]), tmp_path / f"all_{key}")
        assert files(tmp_path / f"all_{key}") == files(tmp_path / f"whole_{key}_document")
        sizes = [IndexedDataset(part).num_documents for part in find_prefixes([pattern])]
        assert max(sizes) < 15 and (min(sizes) == 0) is (num_shards > 3)
        assert done.documents == 25 and done.without == () and done.sidecar is not None


def test_a_sidecar_adds_up(tmp_path: Path) -> None:
    prefixes = [described(write_corpus(tmp_path / name, PARTS[0])) for name in "ab"]
    done = merged(prefixes, tmp_path / "all")
    assert done.sidecar is not None and done.sidecar.text_bytes == 22
    assert (done.sidecar.documents, done.sidecar.sequences, done.sidecar.tokens) == (6, 6, 12)
    assert b'"text_bytes": 22' in files(tmp_path / "all")["json"]


def test_a_sidecar_that_is_missing_somewhere_is_missing_in_the_end(tmp_path: Path) -> None:
    a, b = (write_corpus(tmp_path / name, PARTS[0]) for name in "ab")
    described(a)
    write_corpus(tmp_path / "all", PARTS[0])
    described(str(tmp_path / "all"))
    done = merged([a, b], tmp_path / "all")
    assert done.without == (b,) and sorted(files(tmp_path / "all")) == ["bin", "idx"]


def test_progress_is_told_by_part(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / str(number), part) for number, part in enumerate(PARTS)]
    done: list[int] = []
    merge(open_inputs(prefixes, str(tmp_path / "all")), str(tmp_path / "all"), done.append)
    assert done == [6, 0, 0, 2, 1]


def test_everything_that_speaks_against_it_is_told_at_once(tmp_path: Path) -> None:
    a = described(write_corpus(tmp_path / "a", PARTS[0]))
    b = described(write_corpus(tmp_path / "b", PARTS[0]), tokenizer_files={"vocab_file": "cd"}, append_eod=False, eod=5)
    f = described(write_corpus(tmp_path / "f", PARTS[0]), split_documents=64)
    c = write_corpus(tmp_path / "c", PARTS[0], 4)
    d = described(write_corpus(tmp_path / "d", PARTS[0]), tokenizer_type="X", vocab_size=1, token_bytes=[1])
    e = write_corpus(tmp_path / "e", PARTS[0], modes=True)
    found = problems([a, b, c, d, str(tmp_path / "none"), e, f], tmp_path / "b")
    heads = [text.splitlines()[0] for text in found]
    assert heads[0] == f"--output-prefix {tmp_path / 'b'}: among the inputs"
    assert heads[1] == f"{tmp_path / 'none.idx'} and {tmp_path / 'none.bin'}"
    assert heads[2] == f"multimodal: {e}"
    assert heads[3] == f"token types: uint16 in {a}, {b}, {d}, {e}, {f}; int32 in {c}"
    assert heads[4] == f"tokenizer_type: ByteTokenizer in {a}, {b}, {f}; X in {d}"
    assert f'{{"vocab_file": "cd"}} in {b}' in heads[5]
    assert heads[6:] == [
        f"vocab_size: 257 in {a}, {b}, {f}; 1 in {d}",
        f"eod: 256 in {a}, {d}, {f}; 5 in {b}",
        f"append_eod: true in {a}, {d}, {f}; false in {b}",
        f"split_documents: 0 in {a}, {b}, {d}; 64 in {f}",
    ]


def test_a_store_is_no_output(tmp_path: Path) -> None:
    a = write_corpus(tmp_path / "a", PARTS[0])
    with pytest.raises(DataError, match=r"--output-prefix s3://b/c\n.*written to a disk"):
        open_inputs([a], "s3://b/c")


def test_the_output_is_none_of_the_inputs_by_any_name(tmp_path: Path) -> None:
    a = write_corpus(tmp_path / "a", PARTS[0])
    for ending in ("bin", "idx"):
        (tmp_path / f"link.{ending}").symlink_to(f"{a}.{ending}")
    assert len(problems([str(tmp_path / "link")], tmp_path / "a")) == 1
    assert len(problems([a], tmp_path / "." / "a")) == 1


class Stopped(Exception):
    """An error that stands for an interruption."""


def test_an_interruption_leaves_what_was_there(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / str(number), part) for number, part in enumerate(PARTS)]
    write_corpus(tmp_path / "all", [[[42]]])
    before = sorted(tmp_path.iterdir())

    def interrupt(tokens: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        merge(open_inputs(prefixes, str(tmp_path / "all")), str(tmp_path / "all"), interrupt)
    assert sorted(tmp_path.iterdir()) == before
    assert IndexedDataset(tmp_path / "all").document(0).tolist() == [42]


def test_parts_that_change_meanwhile_are_refused(tmp_path: Path) -> None:
    a, b = (write_corpus(tmp_path / name, PARTS[0]) for name in "ab")
    parts = open_inputs([a, b], str(tmp_path / "all"))
    write_corpus(tmp_path / "b", PARTS[3])
    with pytest.raises(DataError, match="has changed"):
        merge(parts, str(tmp_path / "all"), lambda tokens: None)
    assert files(tmp_path / "all") == {}


@pytest.mark.parametrize(
    ("place", "message"), [(34, "the lengths before it give"), (34 + 12 * 3 + 8 * 2, "the document index goes back")]
)
def test_all_of_every_index_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int, message: str
) -> None:
    """Merging checks every index as a whole, because opening a large corpus checks only part of it."""
    a = write_corpus(tmp_path / "a", PARTS[0])
    parts = open_inputs([a], str(tmp_path / "all"))
    index = bytearray(Path(f"{a}.idx").read_bytes())
    index[place] += 40
    Path(f"{a}.idx").write_bytes(index)
    with monkeypatch.context() as patch:
        patch.setattr(IndexedDataset, "check", lambda *_: None)
        dataset = IndexedDataset(a)
    monkeypatch.setattr(module, "IndexedDataset", lambda prefix, access: dataset)
    with pytest.raises(DataError, match=message):
        merge(parts, str(tmp_path / "all"), lambda tokens: None)
    assert files(tmp_path / "all") == {}


@contextmanager
def few_open_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_parts_are_open_one_at_a_time(tmp_path: Path) -> None:
    prefixes = [write_corpus(tmp_path / str(number), [[[number]]]) for number in range(60)]
    with few_open_files(20):
        merged(prefixes, tmp_path / "all")
    assert IndexedDataset(tmp_path / "all").tokens(0, 60).tolist() == list(range(60))
