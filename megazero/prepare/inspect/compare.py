"""Compares two corpora, which are read in blocks, side by side, and finds the first difference.

Equal corpora have the same documents of the same sequences of the same ids, in the same integer type: their files are
the same byte for byte.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset, Tokens
from megazero.data.tokenizers import Tokenizer
from megazero.prepare.inspect.lengths import document_lengths
from megazero.units import counted

# The number of tokens shown on either side of the first one that differs.
_AROUND = 8

Pair = tuple[IndexedDataset, IndexedDataset]


class CorpusDifference(NamedTuple):
    """The first difference of two corpora, in the order of documents; None stands for values that a corpus lacks.

    position: the token's in the document, or None when the documents have the same ids.
    tokens: the ids at the position.  what: the kind of difference, in words.
    """

    document: int | None
    position: int | None
    tokens: tuple[int | None, int | None]
    what: str


def find_difference(
    one: IndexedDataset, other: IndexedDataset, advance: Callable[[int], None]
) -> CorpusDifference | None:
    """Return the first difference, or None; call advance(tokens) after every block."""
    pair = (one, other)
    token = _first_token(pair, advance)
    return _in_documents(pair, token) or _in_sequences(pair) or _in_types(pair)


def _first_token(pair: Pair, advance: Callable[[int], None]) -> int | None:
    """Return the number of the first token that differs in the two rows of all tokens, as far as both go."""
    both = min(dataset.num_tokens for dataset in pair)
    for start in range(0, both, CHECK_BLOCK):
        stop = min(start + CHECK_BLOCK, both)
        mine, theirs = (dataset.tokens(start, stop) for dataset in pair)
        found = _first(mine, theirs)
        if found is not None:
            return start + found
        advance(stop - start)
    return None


def _in_documents(pair: Pair, token: int | None) -> CorpusDifference | None:
    """Return the first difference in ids, before or in the first document whose length differs, or None."""
    document = start = 0
    for blocks in zip(*map(document_lengths, pair), strict=False):
        count = min(map(len, blocks))
        mine, theirs = (block[:count] for block in blocks)
        found = _first(mine, theirs)
        if found is not None:
            start += int(mine[:found].sum())
            return _here(pair, document + found, start, token)
        start += int(mine.sum())
        document += count
    if token is not None and token < start:
        return _at(pair, token)
    if pair[0].num_documents == pair[1].num_documents:
        return None
    return CorpusDifference(document, None, (None, None), "one corpus ends here")


def _here(pair: Pair, document: int, start: int, token: int | None) -> CorpusDifference:
    """Return the difference in document number `document`, which starts at token `start` in both, or before it."""
    if token is not None and token < start:
        return _at(pair, token)
    mine, theirs = (dataset.document(document) for dataset in pair)
    position = min(len(mine), len(theirs))
    if token is not None:
        position = min(position, token - start)
    ids = tuple(int(tokens[position]) if position < len(tokens) else None for tokens in (mine, theirs))
    what = "one document ends here" if None in ids else "another id"
    return CorpusDifference(document, position, (ids[0], ids[1]), what)


def _at(pair: Pair, token: int) -> CorpusDifference:
    """Return the difference at a token in a document that starts at the same token in both."""
    document, position = pair[0].locate(token)
    mine, theirs = (int(dataset.tokens(token, token + 1)[0]) for dataset in pair)
    return CorpusDifference(document, position, (mine, theirs), "another id")


def _in_sequences(pair: Pair) -> CorpusDifference | None:
    """Return the first document that is cut into other sequences, given that all ids are the same."""
    for first in range(0, pair[0].num_documents, CHECK_BLOCK):
        stop = min(first + CHECK_BLOCK, pair[0].num_documents)
        found = _first(*(dataset.document_ends(first, stop) for dataset in pair))
        if found is not None:
            return CorpusDifference(first + found, None, (None, None), "another number of sequences")
    for first in range(0, pair[0].num_sequences, CHECK_BLOCK):
        stop = min(first + CHECK_BLOCK, pair[0].num_sequences)
        mine, theirs = (dataset.sequence_lengths(first, stop) for dataset in pair)
        found = _first(mine, theirs)
        if found is not None:
            document = pair[0].locate(pair[0].sequence_start(first + found)).document
            return CorpusDifference(document, None, (None, None), f"sequence {first + found} has another length")
    return None


def _in_types(pair: Pair) -> CorpusDifference | None:
    one, other = pair
    if one.dtype != other.dtype:
        return CorpusDifference(
            None, None, (None, None), f"the ids are {one.dtype.name} here and {other.dtype.name} there"
        )
    if one.has_modes != other.has_modes:
        return CorpusDifference(None, None, (None, None), "one corpus has modes")
    return None


def _first(mine: Tokens, theirs: Tokens) -> int | None:
    """Return the first index at which two arrays of one length differ."""
    differs = mine != theirs
    index = int(np.argmax(differs)) if len(differs) else 0
    return index if len(differs) and bool(differs[index]) else None


def difference_lines(
    one: IndexedDataset, other: IndexedDataset, difference: CorpusDifference | None, tokenizer: Tokenizer | None
) -> list[str]:
    """Format the result for the user: the verdict, the position in both, the counts."""
    if difference is None:
        return [f"equal          {one.name} and {other.name}: every document, sequence and id"]
    place = "" if difference.document is None else f"document {difference.document}"
    place += "" if difference.position is None else f", position {difference.position}"
    lines = [f"different      {place + ': ' if place else ''}{difference.what}"]
    for name, dataset, token in zip(("here", "there"), (one, other), difference.tokens, strict=True):
        documents = counted(dataset.num_documents, "document")
        counts = f"{documents}, {counted(dataset.num_sequences, 'sequence')}, {dataset.num_tokens} tokens"
        lines.append(f"{name:<15}{dataset.name}: {counts}")
        if difference.position is not None:
            lines.append(" " * 15 + _shown(dataset, difference, token, tokenizer))
    return lines


def _shown(
    dataset: IndexedDataset, difference: CorpusDifference, token: int | None, tokenizer: Tokenizer | None
) -> str:
    """Format the id that differs, with its neighbours: ids, or text before and after."""
    assert difference.document is not None and difference.position is not None
    tokens, position = dataset.document(difference.document), difference.position
    before = [int(each) for each in tokens[max(0, position - _AROUND) : position]]
    after = [int(each) for each in tokens[position + 1 : position + 1 + _AROUND]]
    if tokenizer is None:
        return f"{before} then {'the end' if token is None else token}, {after}"
    found = "the end" if token is None else f"{token} {tokenizer.decode([token])!r}"
    return f"{tokenizer.decode(before)!r} then {found}, {tokenizer.decode(after)!r}"
