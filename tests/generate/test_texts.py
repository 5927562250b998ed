"""Tests of the text behind a prompt, and of stop texts in it, with tokens that are bytes, pieces and words."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from support.each import each

from megazero.data.tokenizers import ByteTokenizer, SentencePieceTokenizer
from megazero.errors import DataError
from megazero.generate.texts import StopTexts, Text, continued, shown, write_texts

BYTES = ByteTokenizer()
PROMPT = BYTES.encode("Q: ")


class Words(NamedTuple):
    """A tokenizer of whole words."""

    words: tuple[str, ...] = ("one", " two", " three", ".\n", "Answer", ":")
    vocab_size: int = 7
    eod: int = 6

    def encode(self, text: str) -> list[int]:
        raise AssertionError("only decoded here")

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[number] for number in ids)

    def token_bytes(self) -> list[int]:
        raise AssertionError("only decoded here")


@each(
    ("text", "stops", "expected"),
    [
        ("one two", [], None),
        ("one two", ["three"], None),
        ("one two", [" two"], "one"),
        ("one two", ["o"], ""),
        ("one two", ["two", "e t"], "on"),
        ("one two", ["ne two", "two"], "o"),
        ("eins, zw\u00f6lf", ["w\u00f6"], "eins, z"),
        ("a\n\nb", ["\n\n"], "a"),
    ],
)
def test_a_text_is_cut_at_its_first_stop(text: str, stops: list[str], expected: str | None) -> None:
    """Tokens are single bytes, so that stops go across them."""
    rule, new = StopTexts(BYTES, stops), BYTES.encode(text)
    assert rule.cut(PROMPT, new) == (text if expected is None else expected)
    ends = [rule.are_in(PROMPT, new[:length]) for length in range(1, len(new) + 1)]
    last = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    first = None if last is None else len(text[:last].encode())
    assert ends == [first is not None and length >= first for length in range(1, len(new) + 1)]


def test_a_stop_inside_of_a_token_cuts_it() -> None:
    rule = StopTexts(Words(), ["hre"])
    assert [rule.are_in([0], [1, 2][:length]) for length in (1, 2)] == [False, True]
    assert rule.cut([0], [1, 2]) == " two t"
    assert StopTexts(Words(), ["e.\nA"]).cut([0], [1, 2, 3, 4, 5]) == " two thre"


def test_the_prompts_text_does_not_stop() -> None:
    rule = StopTexts(BYTES, ["Q:", ": a"])
    assert not rule.are_in(PROMPT, BYTES.encode("a")) and rule.cut(PROMPT, BYTES.encode("a")) == "a"


def test_ids_without_text_and_halves_of_a_letter() -> None:
    assert continued(BYTES, PROMPT, [97, 300, 98]) == "ab"
    assert continued(BYTES, [BYTES.eod], BYTES.encode("a")) == "a"
    assert continued(BYTES, BYTES.encode("\u00e4"), [0xC3]) == "\ufffd"
    assert not StopTexts(BYTES, ["\u00e4"]).are_in(PROMPT, [0xC3])


def test_a_word_behind_a_prompt_keeps_its_blank(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    words = "the cat sat on the mat and the dog sat on the cat " * 20
    prefix = tmp_path / "model"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(words)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(prefix), vocab_size=30, hard_vocab_limit=False, minloglevel=2
    )
    tokenizer = SentencePieceTokenizer(prefix.with_suffix(".model"))
    prompt, whole = tokenizer.encode("the cat"), tokenizer.encode("the cat sat")
    assert whole[: len(prompt)] == prompt
    assert continued(tokenizer, prompt, whole[len(prompt) :]) == " sat"
    assert continued(tokenizer, [tokenizer.eod], prompt) == "the cat"


TEXTS = [Text("a", 1, "b\nc", 3, "length"), Text("\u00e4", 1, "", 0, "eod")]


def test_headings_stand_where_there_are_several() -> None:
    assert list(shown(TEXTS[:1], 1)) == ["ab\nc"]
    assert list(shown(TEXTS, 1)) == ["--- prompt 1 of 2", "ab\nc", "--- prompt 2 of 2", "\u00e4"]
    assert list(shown([TEXTS[0], TEXTS[0]._replace(sample=2)], 2))[::2] == ["--- sample 1 of 2", "--- sample 2 of 2"]
    assert list(shown([each._replace(sample=n) for each in TEXTS for n in (1, 2)], 2))[2] == (
        "--- prompt 1 of 2, sample 2 of 2"
    )


def test_files_of_texts(tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", TEXTS, 1)
    assert (tmp_path / "a.txt").read_text("utf-8").splitlines() == "\n".join(shown(TEXTS, 1)).split("\n")
    write_texts(tmp_path / "a.jsonl", TEXTS, 1)
    first, second = map(json.loads, (tmp_path / "a.jsonl").read_text("utf-8").splitlines())
    assert first == {"prompt": "a", "sample": 1, "text": "b\nc", "tokens": 3, "end": "length"}
    assert (second["prompt"], second["end"]) == ("\u00e4", "eod")
    with pytest.raises(DataError, match=r"a\.txt/b\.txt"):
        write_texts(tmp_path / "a.txt" / "b.txt", TEXTS, 1)
