"""Counts the samples of a run that is started again with other mixtures, lengths and batches: none twice, none lost.

    python benchmarks/restarts.py --samples 1e9

A run of three corpora is restarted after random numbers of samples, each time with other weights, corpora or another
sequence length, until it has read so many.  Its samples are made in blocks by array arithmetic (the permutation is
evaluated on arrays, the mixture by a count of every corpus), and every sample of every epoch is marked in a table of
bits.  An epoch that is over must have every mark once; one that is finished with pieces of another length is marked by
the tokens of these pieces, in units of the greatest common divisor of all lengths.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from report import HelpFormat, add_output, publish, table, today  # noqa: E402

from megazero.data.permutation import Permutation  # noqa: E402
from megazero.data.position import Part, Stretch, stretch_at  # noqa: E402
from megazero.data.reading import Reading  # noqa: E402

LENGTHS = (1024, 2048, 4096)
UNIT = 1024
SEED = 1234
BLOCK = 1 << 22
# Samples of 1024 tokens in an epoch of each corpus; not all divide by the lengths.
SIZES = {"a": 70_000_003, "b": 31_000_001, "c": 2_500_007}


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--samples", type=float, default=1e6, metavar="N", help="samples of the run (default: 1e6)")
    parser.add_argument("--restarts", type=int, default=20, metavar="N", help="starts of it (default: 20)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="X", help="size of the corpora (default: 1)")
    add_output(parser)
    return parser.parse_args(words)


class Marks:
    """The units of tokens of a corpus that were read in its present epoch; counts of what was read twice and not."""

    def __init__(self, tokens: int) -> None:
        self.units = (tokens - 1) // UNIT
        self.read = np.zeros(self.units, bool)
        self.epoch = 0
        self.twice = 0
        self.unread: list[int] = []

    def add(self, epoch: int, units: NDArray[np.int64]) -> None:
        """Mark units [n] of an epoch; epochs come in order."""
        while self.epoch < epoch:
            self.unread.append(int(self.units - np.count_nonzero(self.read)))
            self.read[:] = False
            self.epoch += 1
        before = int(np.count_nonzero(self.read))
        self.read[units] = True
        self.twice += before + len(units) - int(np.count_nonzero(self.read))


def mark(marks: Marks, reading: Reading, count: int, length: int) -> None:
    """Mark the next `count` samples from a place on, a block at a time."""
    rest = min(reading.rest(length), count)
    old = reading.length // UNIT
    for first in range(0, rest * (length // UNIT), BLOCK):
        row = np.arange(first, min(first + BLOCK, rest * (length // UNIT))) + reading.offset // UNIT
        block, inside = row // old + reading.taken, row % old
        order = Permutation(reading.epoch_size(reading.length), (SEED, reading.stream, reading.epoch))
        marks.add(reading.epoch, order.images(block.astype(np.uint64)).astype(np.int64) * old + inside)
    size, number, end = reading.epoch_size(length), reading.first(length), reading.first(length) + count - rest
    while number < end:
        epoch, index = divmod(number, size)
        stop = min(end, number + BLOCK, (epoch + 1) * size)
        order = Permutation(size, (SEED, reading.stream, epoch))
        places = order.images(np.arange(index, index + stop - number, dtype=np.uint64)).astype(np.int64)
        per = length // UNIT
        marks.add(epoch, (places[:, None] * per + np.arange(per)).ravel())
        number = stop


def count(options: argparse.Namespace) -> list[list[str]]:
    """Return rows of every corpus: epochs that are over, units read twice, and the most that one left unread."""
    random = np.random.default_rng(SEED)
    tokens = {name: int(size * options.scale) * UNIT + 1 for name, size in SIZES.items()}
    marks = {name: Marks(size) for name, size in tokens.items()}
    total = int(options.samples)
    cuts = np.sort(random.integers(0, total, options.restarts)).tolist()
    stretch: Stretch | None = None
    number = 0
    for cut in (*cuts, total):
        names = random.permutation(list(tokens))[: random.integers(1, 4)].tolist()
        parts = [Part(name, Fraction(int(random.integers(1, 20)), 7), tokens[name]) for name in names]
        length = int(random.choice(LENGTHS))
        stretch = stretch_at(number, parts, length, stretch)
        places, after = stretch.at(number), stretch.at(cut)
        for name in names:
            taken = _taken(places[name], after[name], length)
            mark(marks[name], places[name], taken, length)
        number = cut
    largest = max(LENGTHS) // UNIT
    rows = []
    for name, found in marks.items():
        most = max(found.unread, default=0)
        assert found.twice == 0, f"{name}: {found.twice} units were read twice"
        assert most < 2 * largest * (options.restarts + 1), f"{name}: {most} units were left unread in an epoch"
        rows.append([name, f"{found.units:,}", str(len(found.unread)), str(found.twice), str(most)])
    return rows


def _taken(before: Reading, after: Reading, length: int) -> int:
    """Return how many samples lie between two places of one stretch."""
    if (before.epoch, before.taken) == (after.epoch, after.taken) and after.offset >= before.offset:
        return (after.offset - before.offset) // length
    return after.first(length) - before.first(length) + before.rest(length)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    start = time.monotonic()
    rows = count(options)
    head = ["corpus", "pieces of 1024 tokens", "epochs that are over", "pieces read twice", "most left unread in one"]
    line = f"{int(options.samples):,} samples in {options.restarts + 1} stretches, {time.monotonic() - start:.0f} s"
    publish(
        [f"# Restarts with other corpora, lengths and weights\n\n{today()}", line, table(head, rows)], options.output
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
