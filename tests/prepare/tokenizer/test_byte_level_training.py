"""Training byte-level BPE writes GPT-2's files, which encode every text without loss."""

import inspect
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError
from megazero.files import AsideFile
from megazero.prepare.text import documents
from megazero.prepare.tokenizer.byte_level_training import MIN_VOCAB_SIZE, learn_byte_level, write_byte_level
from megazero.prepare.tokenizer.training_text import TrainingText

SOURCES = [inspect.getsource(module) for module in (documents, inspect, json)]
ODD = [
    "",
    " ",
    "  a",
    "a\n\n\tb\r\n",
    "\0\x7f\ufeff",
    "é∀🎉\u00a0\u2028\u2581",
    "👩‍👩‍👧",
    "e\u0301\u0302",
    "\U0010ffff",
    "ﷺ १२३",
]


def text_of(*texts: str) -> TrainingText:
    return TrainingText(list(texts), sum(len(text.encode()) for text in texts))


def load(folder: Path) -> Tokenizer:
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return load_tokenizer(TokenizerSpec("GPT2BPETokenizer", **files))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "tokenizer"
    write_byte_level(folder, learn_byte_level(text_of(*SOURCES), 700))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load(folder)


def test_the_files_are_gpt2s(folder: Path) -> None:
    vocab = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    assert sorted(vocab.values()) == list(range(700)) and vocab["<|endoftext|>"] == 699
    # GPT-2 puts the printable bytes first; in its vocabulary, too, `!` is 0 and a space 220.
    assert [vocab[symbol] for symbol in ("!", "~", "¡", "ÿ", "Ā", "Ġ", "Ń")] == [0, 93, 94, 187, 188, 220, 255]
    assert lines[0] == "#version: 0.2" and lines[-1] == "" and len(lines) == 1 + 700 - 257 + 1
    assert [vocab[line.replace(" ", "")] for line in lines[1:-1]] == list(range(256, 699))
    assert sorted(path.name for path in folder.iterdir()) == ["merges.txt", "vocab.json"]


def test_the_first_merge_is_the_most_frequent_pair(folder: Path) -> None:
    splitter = ByteLevel(add_prefix_space=False)
    words = Counter(word for text in SOURCES for word, _ in splitter.pre_tokenize_str(text))
    pairs: Counter[tuple[str, str]] = Counter()
    for word, count in words.items():
        for pair in pairwise(word):
            pairs[pair] += count
    first = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")[1]
    assert pairs[tuple(first.split(" "))] == max(pairs.values())


def test_odd_texts_read_back(tokenizer: Tokenizer) -> None:
    for text in (*ODD, *SOURCES):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == 699 and tokenizer.encode("a<|endoftext|>b")[1] == 699
    assert len(tokenizer.encode(SOURCES[0])) < len(SOURCES[0].encode()) / 2


@settings(max_examples=80, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_reads_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_library_reads_the_files_and_encodes_the_same(folder: Path, tokenizer: Tokenizer) -> None:
    library = Library(BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    library.pre_tokenizer, library.decoder = ByteLevel(add_prefix_space=False), Decoder()
    for text in (*ODD, *SOURCES):
        ids = library.encode(text).ids
        assert ids == tokenizer.encode(text) and library.decode(ids) == text


def test_training_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    once = learn_byte_level(text_of(*SOURCES[:2]), 400)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert learn_byte_level(text_of(*SOURCES[:2]), 400) == once


def test_the_end_sign_is_not_learnt_from() -> None:
    plain, signed = (text_of(*[f"{sign}abc abc abd {sign}" for _ in range(50)]) for sign in ("", "<|endoftext|>"))
    assert learn_byte_level(signed, 260) == learn_byte_level(plain, 260)


def test_no_space_is_put_in_front() -> None:
    """Text of two letters has one pair to learn; a space put in front would make two."""
    text = text_of(*["ab"] * 9)
    assert learn_byte_level(text, 258).tokens[256:] == ["ab", "<|endoftext|>"]
    with pytest.raises(DataError, match="there are 258"):
        learn_byte_level(text, 259)


def test_a_vocabulary_that_the_text_cannot_fill_is_refused() -> None:
    with pytest.raises(DataError, match="--vocab-size 300 from 14 bytes of text") as caught:
        learn_byte_level(text_of("aaa bbb aaa bb"), 300)
    size = int(caught.value.problems[0].legal.removeprefix("--vocab-size "))
    assert MIN_VOCAB_SIZE <= size < 265
    assert len(learn_byte_level(text_of("aaa bbb aaa bb"), size).tokens) == size


def test_files_of_two_vocabularies_never_stand_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = (learn_byte_level(text_of(*SOURCES), size) for size in (300, 320))
    write_byte_level(tmp_path, old)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    publish, seal = AsideFile.publish, AsideFile.seal

    def fail(self: AsideFile) -> None:
        if self.path.name == "merges.txt":
            raise RuntimeError
        (publish if monkeypatched == "publish" else seal)(self)

    for monkeypatched in ("seal", "publish"):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(AsideFile, monkeypatched, fail)
            write_byte_level(tmp_path, new)
        there = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert there == before if monkeypatched == "seal" else list(there) == ["vocab.json"]
    write_byte_level(tmp_path, new)
    assert load(tmp_path).vocab_size == 320
