"""The fastest encoder gives the same tokens as each tokenizer's own library, for any text."""

import random
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.token_files import byte_symbols, write_gpt2_files, write_sentence_piece_model
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from megazero.data.tokenizers import Gpt2BpeTokenizer, SentencePieceTokenizer, Tokenizer, TokenizerSpec, load_tokenizer
from megazero.prepare.tokenizer.tokenizer_training import TokenizerRequest, train_tokenizer
from megazero.prepare.tokenizer.training_text import TrainingText
from megazero.prepare.tokens.encoders import Encoder, _KnownCharacters, fastest_encoder

gigatoken = pytest.importorskip("gigatoken")
pytest.importorskip("sentencepiece")

SURROGATES = range(0xD800, 0xE000)
ODD = (
    "\0\t\n\r\x0b\x0c\x1c\x7f\x85\xa0\xad\u0300\u0338\u1680\u180e\u200b\u200d\u2028\u2029\u2581\u3000\ufeff\ufffd\uffff"
)
SIGNS = ["<|endoftext|>", "<|endoftext", "|endoftext|>", "<unk>", "<s>", "</s>", "<0x41>", "\u2581", "\u2581the"]
PARTS = [
    "'s",
    "'S",
    "don't",
    "''ll",
    "\u2019s",
    " ",
    "   ",
    "\n\n",
    "\r\n",
    " \n ",
    "def f(x):\n\t",
    "the",
    "\u4f60\u597d",
]


def sources() -> str:
    """Return a quarter of a megabyte of source code from the standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join((folder / name).read_text() for name in ("argparse.py", "ast.py", "inspect.py"))[:250_000]


def characters(rng: random.Random, count: int) -> str:
    """Return random characters from all planes of Unicode, those of low codes more often."""
    limits = rng.choices([0x80, 0x250, 0x3000, 0x10000, 0x20000, 0x110000], k=count)
    codes = (rng.randrange(limit) for limit in limits)
    return "".join(chr(code) if code not in SURROGATES else rng.choice(ODD) for code in codes)


def documents(seed: int, count: int, pieces: Sequence[str] = ()) -> Iterator[str]:
    """Yield random texts of words, signs, runs, numbers and any characters; some are plain ASCII, some empty."""
    rng = random.Random(seed)
    words = sources()[:20_000].split(" ")
    make: list[Callable[[], str]] = [
        lambda: rng.choice(words),
        lambda: characters(rng, rng.randrange(1, 12)),
        lambda: rng.choice(ODD + characters(rng, 3)) * rng.choice([1, 2, 3, 10, 1000]),
        lambda: rng.choice([*PARTS, *SIGNS]) * rng.randrange(1, 4),
        lambda: str(rng.randrange(10 ** rng.randrange(1, 20))),
        lambda: rng.choice(pieces or SIGNS),
    ]
    for number in range(count):
        text = rng.choice(["", " "]).join(rng.choice(make)() for _ in range(rng.randrange(30)))
        yield text.encode("ascii", "ignore").decode() if number % 4 == 0 else text


LONG = ["a" * 50_000, " " * 25_000 + "x", "\n" * 12_500, "\u00e9" * 25_000, "ab1 " * 10_000, "\u2581" * 10_000]


def assert_equal(encoder: Encoder, tokenizer: Tokenizer, texts: Iterator[str] | Sequence[str]) -> None:
    """Check that the encoder gives the tokenizer's ids for each text, given as a string and as UTF-8."""
    for text in texts:
        expected = tokenizer.encode(text)
        for content in (text, text.encode()):
            assert np.asarray(encoder.encode(content), np.int64).tolist() == expected, repr(text[:300])


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a GPT-2 tokenizer of five hundred merges that the `tokenizers` library has learnt."""
    learner = LibraryTokenizer(BPE())
    learner.pre_tokenizer = ByteLevel(add_prefix_space=False)
    learner.train_from_iterator([sources(), "\u4f60\u597d caf\u00e9 " * 50], BpeTrainer(
        vocab_size=756, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    ))  # fmt: skip
    folder = tmp_path_factory.mktemp("gpt2")
    learner.model.save(str(folder), "learnt")
    merges = [line.split(" ") for line in (folder / "learnt-merges.txt").read_text().splitlines()[1:]]
    vocab, merge = write_gpt2_files(folder, [(first, second) for first, second in merges])
    return load_tokenizer(TokenizerSpec("GPT2BPETokenizer", vocab, merge))


def pieces(folder: Path, **options: Any) -> Tokenizer:
    model = write_sentence_piece_model(folder, sources()[:60_000], **options)
    return load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=model))


def all_pieces(tokenizer: Tokenizer) -> list[str]:
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return [tokenizer._model.id_to_piece(number) for number in range(tokenizer._model.get_piece_size())]


def test_byte_level_bpe(byte_level: Tokenizer) -> None:
    encoder = fastest_encoder(byte_level)
    assert (encoder.library, encoder.notice) == ("gigatoken", "")
    assert_equal(encoder, byte_level, ["", *LONG])
    assert_equal(encoder, byte_level, documents(1, 700))


def test_characters_in_byte_level_bpe(tmp_path: Path) -> None:
    """The library and gigatoken agree on characters that gigatoken is trusted with; it is given no others.

    A letter, a digit, a sign and a space each have a merge with the first byte of every character, so that the tokens
    show which of them the character forms a word with; from U+3400 on, only the letter and the sign are tried, and
    only the ends of ranges of one category and some characters between.
    """
    merges = [(before, byte_symbols()[lead]) for before in "b1!\u0120" for lead in range(0xC2, 0xF5)]
    tokenizer = load_tokenizer(TokenizerSpec("GPT2BPETokenizer", *write_gpt2_files(tmp_path, merges)))
    assert isinstance(tokenizer, Gpt2BpeTokenizer)
    fast = gigatoken.Tokenizer.from_json(tokenizer.description())
    known = _KnownCharacters()
    kinds = [unicodedata.category(chr(code)) for code in range(0x110000)]
    inside = [before == this == after for before, this, after in zip(kinds, kinds[1:], kinds[2:], strict=False)]
    edges = {code for code, is_inside in enumerate(inside, start=1) if not is_inside}
    codes = [code for code in range(0x80, 0x110000) if code < 0x3400 or code % 23 == 0 or code in edges]
    codes = [code for code in codes if code not in SURROGATES and known.contain_all_of(chr(code))]
    assert len(codes) > 20_000
    for start in range(0, len(codes), 20_000):
        group = map(chr, codes[start : start + 20_000])
        text = "".join(f"b{c}!{c} " if c >= "\u3400" else f"b{c}1{c}!{c} {c}\n" for c in group)
        assert fast.encode(text).tolist() == tokenizer.encode(text), hex(codes[start])
    assert not known.contain_all_of("some text \U0002b73a and more"), "letters of Unicode 17"
    assert not known.contain_all_of("\u4f60\u597d\u0378" * 3) and not known.contain_all_of("ascii" * 9 + "\u0378"), (
        "no character, so far"
    )
    assert known.contain_all_of("\U0001faef\U0001fadf"), "a new picture is a picture"


@pytest.fixture(scope="module")
def known_lines() -> list[str]:
    """Return texts whose characters are all known to gigatoken."""
    known = _KnownCharacters()
    return [text for text in documents(8, 300) if known.contain_all_of(text)]


@pytest.mark.parametrize("end", ["\n", "\n\n", " \n", "\n  ", "\r\n"])
def test_unknown_characters_take_no_other_lines_with_them(
    byte_level: Tokenizer, known_lines: list[str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Only the part between two cuts that holds an unknown character is encoded slowly; the ids stay the same."""
    rng = random.Random(9)
    texts = [
        end.join(rng.choice(known_lines) + rng.choice(["", " caf\u00e9 \U0002b73a x!", "\u0378"]) for _ in range(8))
        for _ in range(60)
    ]
    assert_equal(fastest_encoder(byte_level), byte_level, texts)
    asked = faked(monkeypatch, byte_level, lambda _: False)
    encoder = fastest_encoder(byte_level)
    asked.clear()
    assert_equal(encoder, byte_level, [f"one{end}two \u0378 three.{end}four caf\u00e9{end}five"])
    assert asked[:2] == (["one", f"{end}four caf\u00e9{end}five"] if end.startswith("\n") else [])


def test_every_character_in_a_sentence_piece_model(tmp_path: Path) -> None:
    tokenizer = pieces(tmp_path)
    encoder = fastest_encoder(tokenizer)
    codes = [code for code in range(0x110000) if code not in SURROGATES]
    for start in range(0, len(codes), 50_000):
        text = "e".join(map(chr, codes[start : start + 50_000]))
        assert list(map(int, encoder.encode(text))) == tokenizer.encode(text), hex(codes[start])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_models_of_the_training_tool(tmp_path: Path, kind: str) -> None:
    text = sources() if kind == "bpe" else sources()[:40_000]
    train_tokenizer(TokenizerRequest(tmp_path / "t.model", 500, kind), TrainingText([text], len(text)))
    tokenizer = load_tokenizer(TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "t.model")))
    encoder = fastest_encoder(tokenizer)
    if kind == "bpe":
        assert (encoder.library, encoder.notice) == ("gigatoken", "")
        assert_equal(encoder, tokenizer, LONG)
        assert_equal(encoder, tokenizer, documents(2, 700, all_pieces(tokenizer)))
    else:
        assert encoder.library == "sentencepiece" and "unigram" in encoder.notice
        assert_equal(encoder, tokenizer, documents(2, 50))


@pytest.mark.parametrize("normaliser", ["nfkc", "nfkc_cf"])
def test_a_model_that_normalises_is_trusted_with_ascii_alone(tmp_path: Path, normaliser: str) -> None:
    tokenizer = pieces(tmp_path, normalization_rule_name=normaliser)
    encoder = fastest_encoder(tokenizer)
    assert encoder.library == "gigatoken"
    assert encoder.notice == (
        f"the model normalises text ({normaliser}): sentencepiece encodes documents that are not ASCII"
    )
    assert_equal(encoder, tokenizer, documents(3, 400, all_pieces(tokenizer)))


def test_a_model_with_the_librarys_defaults(tmp_path: Path) -> None:
    """A model that drops some control characters and double spaces and puts a space in front gets the library's ids."""
    tokenizer = pieces(
        tmp_path, normalization_rule_name="nmt_nfkc", add_dummy_prefix=True, remove_extra_whitespaces=True
    )
    encoder = fastest_encoder(tokenizer)
    assert encoder.notice
    assert_equal(encoder, tokenizer, ["", *documents(3, 400, all_pieces(tokenizer))])


def test_rules_of_normalisation_of_somebodys_own_are_left_to_sentencepiece(tmp_path: Path) -> None:
    (tmp_path / "rules.tsv").write_text("28 63 29\tA9\n")
    tokenizer = pieces(tmp_path, normalization_rule_tsv=str(tmp_path / "rules.tsv"))
    encoder = fastest_encoder(tokenizer)
    assert encoder.library == "sentencepiece" and "rules of its own" in encoder.notice


@pytest.mark.parametrize("symbols", [["<sep>", "zq", "zqzq", "\n"], ["\u00e9\u00df", "<|endoftext"], ["12"]])
def test_user_defined_symbols(tmp_path: Path, symbols: list[str]) -> None:
    tokenizer = pieces(tmp_path, user_defined_symbols=symbols, control_symbols=["<mask>", "[INST]"])
    encoder = fastest_encoder(tokenizer)
    assert encoder.library == "gigatoken"
    assert_equal(encoder, tokenizer, documents(4, 600, [*symbols, "<mask>", "[INST]", *all_pieces(tokenizer)[:8]]))


@pytest.mark.parametrize("symbol", ["a b", "\u2581the", "\u2581\u2581"])
def test_user_defined_symbols_with_a_space_are_left_to_sentencepiece(tmp_path: Path, symbol: str) -> None:
    tokenizer = pieces(tmp_path, user_defined_symbols=["<x>", symbol])
    encoder = fastest_encoder(tokenizer)
    assert encoder.library == "sentencepiece" and "user-defined symbol" in encoder.notice
    assert_equal(encoder, tokenizer, ["a b a  the the   x"])


def test_bytes_are_themselves() -> None:
    tokenizer = load_tokenizer(TokenizerSpec("ByteTokenizer"))
    encoder = fastest_encoder(tokenizer)
    assert encoder.notice == ""
    assert_equal(encoder, tokenizer, documents(5, 200))


def faked(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, is_wrong: Callable[[str], bool]) -> list[str]:
    """Install a gigatoken that returns nothing where `is_wrong` is true; return the list of texts that it is given."""
    asked: list[str] = []

    def encode(content: str | bytes) -> list[int]:
        text = content if isinstance(content, str) else content.decode()
        asked.append(text)
        return [] if is_wrong(text) else tokenizer.encode(text)

    fake = SimpleNamespace(from_json=lambda _: SimpleNamespace(backend=SimpleNamespace(encode=encode)))
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=fake))
    return asked


def test_a_gigatoken_that_is_wrong_on_ascii_is_not_used(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = faked(monkeypatch, byte_level, lambda text: "SHOUT" in text)
    encoder = fastest_encoder(byte_level)
    assert encoder.library == "tokenizers" and "It's what" in encoder.notice
    asked.clear()
    assert_equal(encoder, byte_level, documents(6, 20))
    assert asked == []


def test_a_gigatoken_that_is_wrong_on_other_text_is_used_for_ascii(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = faked(monkeypatch, byte_level, lambda text: "\u4f60" in text)
    encoder = fastest_encoder(byte_level)
    assert encoder.library == "gigatoken" and "tokenizers encodes documents that are not ASCII" in encoder.notice
    asked.clear()
    assert_equal(encoder, byte_level, ["caf\u00e9", "\u4f60", "plain", "plain\n\u4f60"])
    assert asked == ["plain"] * 4


def test_without_gigatoken_the_library_encodes(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    encoder = fastest_encoder(byte_level)
    assert encoder.library == "tokenizers" and "gigatoken is not installed" in encoder.notice
    assert_equal(encoder, byte_level, ["text"])


def test_another_interface_of_gigatoken_is_not_used(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken", SimpleNamespace(Tokenizer=SimpleNamespace()))
    encoder = fastest_encoder(byte_level)
    assert encoder.library == "tokenizers" and "from_json" in encoder.notice
