"""Encoding a chunk gives the tokens that a plain loop over its texts gives, for every rule."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.data.tokenizers import ByteTokenizer, TokenizerSpec
from megazero.errors import DataError
from megazero.prepare.text.chunks import Chunk, DocumentRules, Records
from megazero.prepare.text.inputs import InputFile
from megazero.prepare.tokens.encode import Encoded, EncodeRules, chunk_encoder, encode_with
from megazero.prepare.tokens.encoders import Encoder, Ids

FILE = InputFile("some.jsonl", "jsonl")
BYTES = TokenizerSpec("ByteTokenizer")


def rows(*texts: Any, key: str = "text") -> Chunk:
    return Records(FILE, 1, tuple({key: text} for text in texts), 77, "row")


def plain(texts: list[str], limit: int, append_eod: bool) -> tuple[list[int], list[int], list[int]]:
    tokens, lengths, counts = [], [], []
    for text in texts:
        ids = list(text.encode())
        if ids and append_eod:
            ids.append(256)
        before = len(lengths)
        while ids:
            part, ids = (ids[:limit], ids[limit:]) if limit else (ids, [])
            tokens += part
            lengths.append(len(part))
        counts.append(len(lengths) - before)
    return tokens, lengths, counts


@given(texts=st.lists(st.text(max_size=9), max_size=9), limit=st.integers(0, 7), append_eod=st.booleans())
def test_against_a_plain_loop(texts: list[str], limit: int, append_eod: bool) -> None:
    encoded = chunk_encoder(BYTES, EncodeRules(DocumentRules(), append_eod, limit))(rows(*texts))
    ((tokens, lengths, counts, text_bytes),) = encoded.texts
    assert (tokens.tolist(), lengths.tolist(), counts.tolist()) == plain(texts, limit, append_eod)
    assert text_bytes == sum(len(text.encode()) for text in texts)
    assert tokens.dtype == np.uint16 and lengths.dtype == counts.dtype == np.int64
    assert encoded.input_bytes == 77 and encoded.bad_lines == []


@each("size", [257, 65_499, 65_500, 200_000])
def test_lists_and_arrays_of_any_type_become_the_corpus_type(size: int) -> None:
    class Many(ByteTokenizer):
        vocab_size = size
        eod = size - 1

    answers: Iterator[Ids] = iter([[size - 2, 0], np.array([size - 2], np.uint32), [], np.array([], np.uint32)])
    work = encode_with(Many(), Encoder(lambda _: next(answers), "mine"), EncodeRules(DocumentRules(), append_eod=True))
    ((tokens, lengths, counts, _),) = work(rows("a", "b", "c", "d")).texts
    assert tokens.tolist() == [size - 2, 0, size - 1, size - 2, size - 1]
    assert (lengths.tolist(), counts.tolist()) == ([3, 2], [1, 1, 0, 0])
    assert tokens.dtype == (np.uint16 if size < 65_500 else np.int32)


def test_every_key_has_its_row() -> None:
    chunk = Records(FILE, 1, ({"a": "xy", "b": "", "c": 1}, {"a": "", "b": "z"}), 5, "row")
    first, second = chunk_encoder(BYTES, EncodeRules(DocumentRules(("a", "b"))))(chunk).texts
    assert (first.tokens.tolist(), first.counts.tolist()) == ([120, 121], [1, 0])
    assert (second.tokens.tolist(), second.counts.tolist()) == ([122], [0, 1])


def test_bad_rows_are_refused_or_passed_over() -> None:
    chunk = rows("x", 5, "y", None)
    with pytest.raises(DataError, match=r"some\.jsonl: row 2"):
        chunk_encoder(BYTES, EncodeRules(DocumentRules()))(chunk)
    work = chunk_encoder(BYTES, EncodeRules(DocumentRules(), skip_bad_lines=True))
    for _ in range(2):  # the bad lines of one chunk are not reported again with the next
        encoded: Encoded = work(chunk)
        assert encoded.texts[0].tokens.tolist() == [120, 121]
        assert [line.split(": ")[1] for line in encoded.bad_lines] == ["row 2", "row 4"]


def test_a_bad_row_is_passed_over_under_all_keys() -> None:
    chunk = Records(FILE, 1, ({"a": "x", "b": 5}, {"a": "y", "b": "z"}), 5, "row")
    rules = EncodeRules(DocumentRules(("a", "b")), skip_bad_lines=True)
    first, second = chunk_encoder(BYTES, rules)(chunk).texts
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([121], [122])


def test_a_tokenizer_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    spec = TokenizerSpec("SentencePieceTokenizer", tokenizer_model=str(tmp_path / "none.model"))
    with pytest.raises(DataError, match=r"none\.model"):
        chunk_encoder(spec, EncodeRules(DocumentRules()))
