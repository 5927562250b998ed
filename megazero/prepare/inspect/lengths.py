"""Counts the lengths of a corpus's documents exactly, reading block by block.

*Ranges* of lengths double: 1, 2-3, 4-7, ... tokens; documents without a token have a range of their own.  The q-th
percentile is the shortest length that q percent of the documents do not exceed, the median the 50th.
"""

import io
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.errors import DataError, Problem
from megazero.files import written_aside
from megazero.svg import LETTER_WIDTH, legend, picture, text
from megazero.units import format_count

# Lengths below this are counted one by one in a table; a longer document, at most one in a million tokens, is listed.
TABLE_SIZE = 1 << 20


class LengthRange(NamedTuple):
    """A range of lengths, `shortest` to `longest` tokens, with its number of documents and the tokens in them."""

    shortest: int
    longest: int
    documents: int
    tokens: int

    @property
    def name(self) -> str:
        """The range as text: `0`, `1`, `2-3`, ..."""
        return str(self.shortest) if self.shortest == self.longest else f"{self.shortest}-{self.longest}"


class Lengths(NamedTuple):
    """Figures of the lengths of a corpus's documents, in tokens; each is 0 if there is no document."""

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
        """The mean number of tokens in a document."""
        return self.tokens / max(1, self.documents)


def num_blocks(dataset: IndexedDataset) -> int:
    """Return the number of blocks that `document_lengths` yields."""
    return math.ceil(dataset.num_documents / CHECK_BLOCK)


def document_lengths(dataset: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Yield the length of every document in tokens, up to CHECK_BLOCK documents at a time.

    Raises DataError at the end if the index lists more or fewer tokens than the .bin has.
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
        raise DataError(Problem(given, "the .idx lists the tokens of the .bin", "--verify, to find the defect"))


def count_lengths(blocks: Iterable[NDArray[np.int64]]) -> Lengths:
    """Return the figures of all blocks that `document_lengths` yields."""
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
    # A share of the documents is computed in whole numbers: floats would be inexact from 2**53 / 20 documents on.
    median, percentile_95 = (int(values[np.searchsorted(seen, -(-documents * q // 100))]) for q in (50, 95))
    shortest, longest = int(values[0]), int(values[-1])
    empty = int(table[0])
    return Lengths(documents, empty, tokens, shortest, median, percentile_95, longest, _ranges(values, counts))


def _ranges(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[LengthRange, ...]:
    """Return the ranges from the shortest document to the longest, without gap."""
    first, last = int(values[0]).bit_length(), int(values[-1]).bit_length()
    tokens = values * counts
    found = []
    for bits in range(first, last + 1):
        shortest, longest = (1 << bits) >> 1, (1 << bits) - 1
        low, high = np.searchsorted(values, [shortest, longest + 1]).tolist()
        found.append(LengthRange(shortest, longest, int(counts[low:high].sum()), int(tokens[low:high].sum())))
    return tuple(found)


_BAR_WIDTH = 40
_SIZE = (1000, 420)
_LEFT, _TOP, _HEIGHT = 24, 88, 270
_WIDEST = 160  # pixels of a column where there are few
_DOCUMENTS, _TOKENS = "#3d8bd4", "#e0702f"


def length_lines(lengths: Lengths) -> list[str]:
    """Return lines with the figures, then a line with a bar for every range."""
    lines = [
        f"lengths        shortest {lengths.shortest}, median {lengths.median}, mean {lengths.mean:.1f}, "
        f"95th percentile {lengths.percentile_95}, longest {lengths.longest} tokens",
        f"empty          {lengths.empty} of {lengths.documents} documents",
    ]
    table = Table.grid(padding=(0, 2))
    heads = ("tokens", "documents", "share", "of tokens")
    for _ in heads:
        table.add_column(justify="right", no_wrap=True)
    table.add_row(*heads)
    most = max((found.documents for found in lengths.ranges), default=0)
    for found in lengths.ranges:
        share = f"{100 * found.documents / lengths.documents:.1f} %"
        of_tokens = f"{100 * found.tokens / max(lengths.tokens, 1):.1f} %"
        bar = Bar(most, 0, found.documents, width=_BAR_WIDTH)
        table.add_row(found.name, str(found.documents), share, of_tokens, bar)
    printed = io.StringIO()
    Console(file=printed, width=10_000, color_system=None).print(table)
    return [*lines, *(line.rstrip() for line in printed.getvalue().splitlines())]


def write_length_picture(path: Path, lengths: Lengths, *, title: str) -> None:
    """Write the histogram as SVG; it appears whole or not at all.  Raises DataError when it can't be written."""
    with written_aside(path) as stream:
        stream.write(length_picture(lengths, title=title).encode())


def length_picture(lengths: Lengths, *, title: str) -> str:
    """Return the SVG file: for every range a column of documents and one of tokens, each as a share of all."""
    figures = (
        f"{format_count(lengths.documents)} documents, {format_count(lengths.tokens)} tokens; "
        f"median {lengths.median}, mean {lengths.mean:.1f}, 95th percentile {lengths.percentile_95}, "
        f"longest {lengths.longest}"
    )
    parts = [
        text(_LEFT, 24, f"Documents by length: {title}", "title"),
        text(_LEFT, 44, figures),
        *legend(_LEFT, 68, [("share of the documents, %", _DOCUMENTS), ("share of the tokens, %", _TOKENS)]),
        *_columns(lengths),
        text(_LEFT, _SIZE[1] - 14, "tokens in a document, from each figure up to the next"),
    ]
    return picture(*_SIZE, parts, label=f"documents of {title} by length")


def _columns(lengths: Lengths) -> Iterator[str]:
    """Draw the columns of every range side by side over the whole width, to one scale."""
    shares = [(found.documents / lengths.documents, found.tokens / max(lengths.tokens, 1)) for found in lengths.ranges]
    most = max((share for pair in shares for share in pair), default=1.0)
    foot, room = _TOP + _HEIGHT, (_SIZE[0] - 2 * _LEFT) / max(len(shares), 1)
    width = min(room * 0.42, _WIDEST)
    for number, (found, pair) in enumerate(zip(lengths.ranges, shares, strict=True)):
        middle = _LEFT + room * (number + 0.5)
        for share, count, noun, colour, x in (
            (pair[0], found.documents, "documents", _DOCUMENTS, middle - width),
            (pair[1], found.tokens, "tokens", _TOKENS, middle),
        ):
            tall = (_HEIGHT - 20) * share / most
            hint = f"<title>{found.name} tokens: {count} {noun}</title>"
            place = f'x="{x:.1f}" y="{foot - tall:.2f}" width="{width:.1f}" height="{tall:.2f}"'
            yield f'<rect class="bar {noun}" {place} fill="{colour}">{hint}</rect>'
            if share and width > LETTER_WIDTH * 3:
                yield text(x + width / 2, foot - tall - 5, _percent(share), "middle")
        yield text(middle, foot + 16, _binary(found.shortest), "middle")
    yield f'<path class="line" d="M{_LEFT} {foot}H{_SIZE[0] - _LEFT}"/>'


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.095 else f"{100 * share:.1f}"


def _binary(length: int) -> str:
    """Format a length: 1024 as 1Ki; smaller ones, all of them powers of two, unchanged."""
    for shift, unit in ((30, "Gi"), (20, "Mi"), (10, "Ki")):
        if length >> shift:
            return f"{length >> shift}{unit}"
    return str(length)
