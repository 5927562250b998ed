"""How long the documents of a corpus are: read block by block, counted exactly.

*Ranges* of lengths double: 1, 2-3, 4-7, ... tokens; documents without a token have a range of their own.  The q-th
percentile is the shortest length that q percent of the documents do not exceed, the median the 50th.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.errors import DataError, Problem

# Lengths below are counted one by one in a table; a longer document, at most one in a million tokens, is listed.
TABLE_SIZE = 1 << 20


class LengthRange(NamedTuple):
    """Documents of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int

    @property
    def name(self) -> str:
        """`0`, `1`, `2-3`, ..."""
        return str(self.shortest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"


class Lengths(NamedTuple):
    """Lengths of a corpus's documents in tokens; every figure is 0 where there is no document."""

    documents: int
    empty: int
    tokens: int
    shortest: int
    median: int
    percentile_95: int
    longest: int
    ranges: tuple[LengthRange, ...]

    @property
    def mean(self) -> float:
        """Tokens a document."""
        return self.tokens / max(1, self.documents)


def num_blocks(dataset: IndexedDataset) -> int:
    """Blocks that `document_lengths` gives."""
    return math.ceil(dataset.num_documents / CHECK_BLOCK)


def document_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """The length of every document in tokens, up to CHECK_BLOCK documents at a time.

    Raises DataError at the end if the index tells of more or fewer tokens than there are.
    """
    sequences = tokens = 0
    for first in range(0, dataset.num_documents, CHECK_BLOCK):
        ends = dataset.document_ends(first, min(first + CHECK_BLOCK, dataset.num_documents))
        last = min(int(ends[-1]), dataset.num_sequences)
        token_ends = np.full(len(ends), tokens, np.int64)
        before = tokens
        for start in range(sequences, last, CHECK_BLOCK):
            lengths = dataset.sequence_lengths(start, min(start + CHECK_BLOCK, last))
            sums = tokens + np.cumsum(lengths, dtype=np.int64)
            ending = slice(*np.searchsorted(ends, [start, start + len(lengths)], side="right").tolist())
            token_ends[ending] = sums[ends[ending] - start - 1]
            tokens = int(sums[-1])
        sequences = last
        yield np.diff(token_ends, prepend=before)
    if tokens != dataset.num_tokens:
        given = f"{dataset.name}: the lengths in the index add up to {tokens} tokens of {dataset.num_tokens}"
        raise DataError(Problem(given, "the .idx lists what the .bin holds", "--verify, to find the place"))


def count_lengths(blocks: Iterable[NDArray[np.int64]]) -> Lengths:
    """Sum up what `document_lengths` gives."""
    table = np.zeros(TABLE_SIZE, np.int64)
    long = [np.empty(0, np.int64)]
    tokens = 0
    for lengths in blocks:
        table += np.bincount(lengths[lengths < TABLE_SIZE], minlength=TABLE_SIZE)
        long.append(lengths[lengths >= TABLE_SIZE])
        tokens += int(lengths.sum())
    longer, times = np.unique(np.concatenate(long), return_counts=True)
    short = np.flatnonzero(table)
    values, counts = np.concatenate([short, longer]), np.concatenate([table[short], times])
    if not len(values):
        return Lengths(0, 0, 0, 0, 0, 0, 0, ())
    seen = counts.cumsum()
    documents = int(seen[-1])
    # The number of documents that a share of all makes, in whole numbers: floats would be off from 2**53 / 20 on.
    median, percentile_95 = (int(values[np.searchsorted(seen, -(-documents * q // 100))]) for q in (50, 95))
    shortest, longest = int(values[0]), int(values[-1])
    empty = int(table[0])
    return Lengths(documents, empty, tokens, shortest, median, percentile_95, longest, _ranges(values, counts))


def _ranges(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[LengthRange, ...]:
    """From the shortest document to the longest, without gap."""
    first, last = int(values[0]).bit_length(), int(values[-1]).bit_length()
    found = []
    for bits in range(first, last + 1):
        shortest, longest = (1 << bits) >> 1, (1 << bits) - 1
        low, high = np.searchsorted(values, [shortest, longest + 1]).tolist()
        found.append(LengthRange(shortest, longest, int(counts[low:high].sum())))
    return tuple(found)
