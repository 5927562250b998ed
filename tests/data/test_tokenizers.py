"""Tests tokenizers: ids against an independent BPE, round trips of texts, and damaged files."""

import io
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hugging_face_files import KINDS, LINES, write_hugging_face_files
from support.token_files import byte_symbols, write_gpt2_files

from megazero.data.tokenizers import ByteTokenizer, Tokenizer, TokenizerSpec, load_tokenizer
from megazero.errors import DataError

SentencePieceTrainer = pytest.importorskip("sentencepiece").SentencePieceTrainer

MERGES = [
    ("t", "h"),
    ("Ġ", "th"),
    ("Ġth", "e"),
    ("i", "n"),
    ("in", "g"),
    ("Ġ", "Ġ"),
    ("l", "l"),
    ("1", "2"),
    ("'", "ll"),
]
# GPT-2's rule for cutting text into words, for ASCII.
WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")


def plain_bpe(text: str) -> list[str]:
    """Return the tokens of a text after merging the pair that comes first in MERGES, everywhere, until none is left."""
    tokens = []
    for word in WORDS.findall(text):
        parts = [byte_symbols()[byte] for byte in word.encode()]
        while True:
            ranks = [MERGES.index(pair) for pair in pairwise(parts) if pair in MERGES]
            if not ranks:
                break
            first, second = MERGES[min(ranks)]
            merged, index = [], 0
            while index < len(parts):
                step = 2 if parts[index : index + 2] == [first, second] else 1
                merged.append("".join(parts[index : index + step]))
                index += step
            parts = merged
        tokens += parts
    return tokens


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSpec:
    vocab, merges = write_gpt2_files(tmp_path_factory.mktemp("gpt2"), MERGES)
    return TokenizerSpec("GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)


def sentence_piece(folder: Path, **options: Any) -> TokenizerSpec:
    model = io.BytesIO()
    lines = [f"the thing number {i} is in the bag of words\n" for i in range(200)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=300, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=False,
        hard_vocab_limit=False, minloglevel=2, **options,
    )  # fmt: skip
    (folder / "t.model").write_bytes(model.getvalue())
    return TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(folder / "t.model"))


@pytest.fixture(scope="module")
def tokenizers(gpt2: TokenizerSpec, tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    piece = sentence_piece(tmp_path_factory.mktemp("piece"))
    return [load_tokenizer(gpt2), load_tokenizer(piece), ByteTokenizer()]


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40)


@settings(max_examples=80, deadline=None)
@given(text=texts | st.text("the in g\n\t '12.", max_size=60))
def test_every_text_reads_back(tokenizers: list[Tokenizer], text: str) -> None:
    for tokenizer in tokenizers:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= token < tokenizer.vocab_size for token in ids)
        assert tokenizer.eod not in ids
        table = tokenizer.token_bytes()
        assert len(table) == tokenizer.vocab_size and table[tokenizer.eod] == 0
        assert sum(table[token] for token in ids) == len(text.encode())


def test_eod_reads_as_end_of_text(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        ids = [*tokenizer.encode("the one"), tokenizer.eod, *tokenizer.encode(" other")]
        assert tokenizer.decode(ids) == "the one<|endoftext|> other"


def test_ids_outside_the_vocabulary_read_as_a_replacement(tokenizers: list[Tokenizer]) -> None:
    for tokenizer in tokenizers:
        ids = [*tokenizer.encode("ab"), tokenizer.vocab_size, -1, *tokenizer.encode("c")]
        assert tokenizer.decode(ids) == "ab\ufffd\ufffdc"
        assert tokenizer.decode([]) == ""


@settings(max_examples=60, deadline=None)
@given(text=st.text("the in g\n\t 'l12.!?", max_size=60))
def test_gpt2_ids_are_those_of_a_plain_bpe(gpt2: TokenizerSpec, text: str) -> None:
    assert gpt2.vocab_file
    vocab = json.loads(Path(gpt2.vocab_file).read_text())
    assert load_tokenizer(gpt2).encode(text) == [vocab[token] for token in plain_bpe(text)]


def test_the_literal_end_token_becomes_its_id(gpt2: TokenizerSpec) -> None:
    tokenizer = load_tokenizer(gpt2)
    letters = byte_symbols()
    assert tokenizer.vocab_size == 256 + len(MERGES) + 1
    assert tokenizer.eod == tokenizer.vocab_size - 1
    order = list(letters.values())
    assert tokenizer.encode("a<|endoftext|>b") == [order.index("a"), tokenizer.eod, order.index("b")]


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_sentence_piece_eod_is_the_end_of_sentence_piece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path))
    assert tokenizer.eod == 2  # the library's default id of </s>


def test_sentence_piece_eod_may_be_a_named_piece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path, eos_id=-1, bos_id=-1, control_symbols=["<eod>"]))
    assert tokenizer.eod == 1


def test_sentence_piece_without_any_gets_one_id_more(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path, eos_id=-1, bos_id=-1))
    assert tokenizer.eod == tokenizer.vocab_size - 1
    assert tokenizer.decode([*tokenizer.encode("the bag"), tokenizer.eod]) == "the bag<|endoftext|>"


def test_missing_flags_and_files_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_tokenizer(TokenizerSpec("GPT2BPETokenizer", merge_file=str(tmp_path / "nowhere")))
    assert [problem.given for problem in caught.value.problems] == [
        "--vocab-file is missing",
        f"--merge-file {tmp_path / 'nowhere'}",
    ]


def test_an_unknown_type_is_told_the_known_ones() -> None:
    with pytest.raises(DataError, match="GPT2BPETokenizer, SentencePieceTokenizer, ByteTokenizer"):
        load_tokenizer(TokenizerSpec("WordTokenizer"))


def without(token: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        kept = [name for name in json.loads(text) if name != token]
        return json.dumps({name: number for number, name in enumerate(kept)})

    return change


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("vocab_file", lambda text: text[:-5], "is a JSON object"),
        ("vocab_file", lambda text: "[1, 2]", "is a JSON object from token to id"),
        ("vocab_file", lambda text: '{"a":' * 50_000, "nested deeper"),
        ("vocab_file", lambda text: '{"a": ' + "9" * 5000 + "}", "is a JSON object from token to id"),
        ("vocab_file", lambda text: text.replace(": 7,", ": 8,"), "without gap or repetition"),
        ("vocab_file", lambda text: text.replace(": 7,", ": true,"), "from token to id"),
        ("vocab_file", without("<|endoftext|>"), "no entry for <.endoftext"),
        ("vocab_file", without("Ā"), "text would be lost"),
        ("merge_file", lambda text: text.replace("i n\n", "i n g\n"), r"merges.txt:5: i n g"),
        ("merge_file", lambda text: text + "x y\n", r"merges.txt:11: x y"),
    ],
)
def test_damaged_gpt2_files(
    gpt2: TokenizerSpec, tmp_path: Path, file: str, change: Callable[[str], str], message: str
) -> None:
    vocab, merges = write_gpt2_files(tmp_path, MERGES)
    path = Path(vocab if file == "vocab_file" else merges)
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(DataError, match=message):
        load_tokenizer(TokenizerSpec("GPT2BPETokenizer", vocab, merges))


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x00" * 100])
def test_a_damaged_model_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.model").write_bytes(content)
    with pytest.raises(DataError, match="--tokenizer-model"):
        load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model")))


def test_a_truncated_model_is_refused(tmp_path: Path) -> None:
    spec = sentence_piece(tmp_path)
    path = tmp_path / "t.model"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match="--tokenizer-model"):
        load_tokenizer(spec)


def test_digests_follow_the_files(gpt2: TokenizerSpec, tmp_path: Path) -> None:
    digests = gpt2.digests()
    assert set(digests) == {"vocab_file", "merge_file"}
    other = TokenizerSpec("GPT2BPETokenizer", *write_gpt2_files(tmp_path, MERGES[:-1]))
    assert other.digests() != digests == gpt2.digests()
    assert TokenizerSpec("ByteTokenizer").digests() == {}


TEXTS = [*LINES[:3], "", " ", "caf\u00e9 \u4f60\u597d \U0001f642", "a <extra> b </s>c", "x" * 300, "tab\tline\r\n"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_of_the_hub_has_its_librarys_ids(kind: str, tmp_path: Path) -> None:
    """Signs of the file's template, padding and truncation are left out; bytes add up where every text reads back."""
    library = write_hugging_face_files(tmp_path, kind)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(path)))
        assert tokenizer.vocab_size == library.get_vocab_size(with_added_tokens=True)
        assert tokenizer.eod == library.token_to_id("</s>") == 2
        table = tokenizer.token_bytes()
        assert len(table) == tokenizer.vocab_size and table[:3] == [0, 0, 0]
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert ids == library.encode(text, add_special_tokens=False).ids
            if kind != "words" and "</s>" not in text:
                assert tokenizer.decode(ids) == text
                assert sum(table[token] for token in ids) == len(text.encode())
        assert tokenizer.decode([*tokenizer.encode("the"), 2, 10**6]) == "the<|endoftext|>\ufffd"


@pytest.mark.parametrize(("configured", "eod"), [("<s>", 1), ({"content": "<extra>"}, -1), (None, 2)])
def test_the_end_of_a_text_is_the_configured_one(configured: object, eod: int, tmp_path: Path) -> None:
    write_hugging_face_files(tmp_path, "byte-level", configured=configured)
    tokenizer = load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert tokenizer.eod == (tokenizer.vocab_size - 1 if eod < 0 else eod)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", "{", "the file is a tokenizer.json"),
        ("tokenizer.json", "[]", "the file is a tokenizer.json"),
        ("tokenizer.json", '{"version": "1.0"}', "the file is a tokenizer.json"),
        ("tokenizer_config.json", "[", "is a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<end>"}', "no token <end>"),
    ],
)
def test_damaged_files_of_the_hub(name: str, content: str, told: str, tmp_path: Path) -> None:
    write_hugging_face_files(tmp_path, "words")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(told)):
        load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"must be a file, or a folder with tokenizer\.json"):
        load_tokenizer(TokenizerSpec("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
