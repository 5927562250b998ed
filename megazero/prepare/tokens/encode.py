"""Encodes a chunk: its documents become one row of tokens for every key, ready to be written."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.data.indexed_dataset import token_dtype
from megazero.data.tokenizers import Tokenizer, TokenizerSpec, load_tokenizer
from megazero.prepare.text.bad_lines import BadLines
from megazero.prepare.text.chunks import Chunk, DocumentRules
from megazero.prepare.text.documents import Document, read_documents
from megazero.prepare.tokens.encoders import Encode, Encoder, Ids, fastest_encoder


@dataclass(frozen=True)
class EncodeRules:
    """The rules by which a document is encoded.

    append_eod: True to end it with the end-of-document id, unless it has no token.  split_documents: longest sequence
    in tokens, 0 for any; a longer document is several sequences.  skip_bad_lines: True to collect bad lines instead of
    raising them.
    """

    documents: DocumentRules
    append_eod: bool = False
    split_documents: int = 0
    skip_bad_lines: bool = False


class EncodedTexts(NamedTuple):
    """The documents of a chunk under one key.

    tokens [sum of lengths]: the ids of all sequences.  lengths int64 [sequences]: tokens of each, none of them 0.
    counts int64 [documents]: sequences of each.  text_bytes: UTF-8 bytes of all texts.

    A mask has the same form, 1 for every token that is learnt and 0 for the others; its text_bytes are of answers.
    """

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]
    text_bytes: int


class Encoded(NamedTuple):
    """One encoded chunk; `texts` has an entry for every key, `bad_lines` one for every line skipped.

    Of dialogues there are two entries, the tokens and their mask.

    library: the name of the encoder's library.  notice: the reason why it is not the fastest one, or not for all
    documents; "" if it is.
    """

    texts: tuple[EncodedTexts, ...]
    bad_lines: list[str]
    input_bytes: int
    library: str = ""
    notice: str = ""


def chunk_encoder(spec: TokenizerSpec, rules: EncodeRules) -> Callable[[Chunk], Encoded]:
    """Return a function that encodes chunks, with a newly loaded tokenizer."""
    tokenizer = load_tokenizer(spec)
    return encode_with(tokenizer, fastest_encoder(tokenizer), rules)


def encode_with(tokenizer: Tokenizer, encoder: Encoder, rules: EncodeRules) -> Callable[[Chunk], Encoded]:
    """Return a function that encodes chunks; `encoder` returns the same ids as `tokenizer`."""
    end = np.array([tokenizer.eod], np.uint32) if rules.append_eod else None
    # All chunks share one, since it stores the number of lines before the last one.
    bad = BadLines() if rules.skip_bad_lines else None
    return partial(_encode_chunk, encoder, token_dtype(tokenizer.vocab_size), end, rules, bad)


def _encode_chunk(
    encoder: Encoder,
    dtype: "np.dtype[Any]",
    end: NDArray[Any] | None,
    rules: EncodeRules,
    bad: BadLines | None,
    chunk: Chunk,
) -> Encoded:
    documents = read_documents(chunk, rules.documents, bad)
    if rules.documents.answers:
        texts = _dialogues(documents, encoder.encode, end, dtype, rules)
    else:
        texts = _texts(documents, encoder.encode, end, dtype, rules)
    bad_lines = bad.pop_lines() if bad else []
    return Encoded(texts, bad_lines, chunk.input_bytes, encoder.library, encoder.notice)


def _texts(
    documents: Iterable[Document], encode: Encode, end: NDArray[Any] | None, dtype: "np.dtype[Any]", rules: EncodeRules
) -> tuple[EncodedTexts, ...]:
    num_keys = len(rules.documents.json_keys)
    ids: list[list[Ids]] = [[] for _ in range(num_keys)]
    sizes = [0] * num_keys
    for document in documents:
        for index, content in enumerate(document.contents):
            ids[index].append(encode(content))
            sizes[index] += len(content)
    return tuple(_joined(texts, end, dtype, rules, size) for texts, size in zip(ids, sizes, strict=True))


def _dialogues(
    documents: Iterable[Document], encode: Encode, end: NDArray[Any] | None, dtype: "np.dtype[Any]", rules: EncodeRules
) -> tuple[EncodedTexts, ...]:
    """Return the tokens of dialogues, each part encoded by itself, and the mask of what is learnt.

    The end of a document is learnt where its last part is.
    """
    ids: list[Ids] = []
    masks: list[Ids] = []
    size = learnt_size = 0
    for document in documents:
        parts = [np.asarray(encode(content), dtype) for content in document.contents]
        mask = [np.full(len(part), is_learnt) for part, is_learnt in zip(parts, document.learnt, strict=True)]
        if end is not None and any(map(len, parts)):
            mask.append(np.full(1, document.learnt[-1]))
        ids.append(np.concatenate(parts) if parts else np.empty(0, dtype))
        masks.append(np.concatenate(mask).astype(np.uint8) if mask else np.empty(0, np.uint8))
        size += sum(map(len, document.contents))
        learnt_size += sum(map(len, compress(document.contents, document.learnt)))
    return _joined(ids, end, dtype, rules, size), _joined(masks, None, np.dtype(np.uint8), rules, learnt_size)


def _joined(
    texts: Sequence[Ids], end: NDArray[Any] | None, dtype: "np.dtype[Any]", rules: EncodeRules, text_bytes: int
) -> EncodedTexts:
    lengths = np.array([len(ids) for ids in texts], np.int64)
    if end is None:
        parts: list[Ids] = list(texts)
    else:
        parts = [part for ids in texts if len(ids) for part in (ids, end)]
        lengths[lengths > 0] += 1
    tokens = np.concatenate(parts, dtype=dtype, casting="unsafe") if parts else np.empty(0, dtype)
    counts = (lengths > 0).astype(np.int64)
    sequences = lengths[lengths > 0]
    if rules.split_documents:
        counts = -(-lengths // rules.split_documents)
        sequences = _cut(sequences, rules.split_documents)
    return EncodedTexts(tokens, sequences, counts, text_bytes)


def _cut(lengths: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Cut every length into lengths of at most `limit`; only the last of each is shorter."""
    counts = -(-lengths // limit)
    cut = np.full(int(counts.sum()), limit, np.int64)
    cut[np.cumsum(counts) - 1] = lengths - (counts - 1) * limit
    return cut
