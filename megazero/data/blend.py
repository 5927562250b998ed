"""Mixes corpora by weight: the corpus of sample k is a pure function of k.

The corpora are the leaves of a binary tree.  Of the first m samples that reach a node, round(m * w) go left, w being
the left side's share of the node's weight.  This count grows by 0 or 1 with m,
so sample number m goes left exactly when the count grows, and the count is its number on that side.  Walking down from
the root takes a few divisions of exact integers: no table, no loop over earlier samples, and every corpus gives its
samples 0, 1, 2, ... without gap.

The tree is Huffman's, which puts the two lightest together first.  A node's count is off by half a sample at most, of
which a corpus of weight p below a side of weight s gets the part p / s; and from one node above it to the next, s grows
as the Fibonacci numbers do, or faster.  So after any number of samples a corpus is off its share by at most half of
1 / 1 + 1 / 1 + 1 / 2 + 1 / 3 + 1 / 5 + ..., less than 1.7 samples, however many corpora there are.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megazero.config.corpora import WeightedPrefix
from megazero.data.samples import Samples
from megazero.errors import DataError, Problem
from megazero.rules.files import DATA_PATH


class BlendedSample(NamedTuple):
    """The corpus that a sample of the mixture comes from, and its number there."""

    corpus: int
    sample: int  # its number within the corpus: the number of earlier samples from there


class _Node(NamedTuple):
    """A node of the tree.

    share: the part of its samples that goes left; a side is a corpus's number or another node.
    """

    share: Fraction
    left: "_Node | int"
    right: "_Node | int"


class Blend:
    """The order in which corpora with the given positive weights take turns."""

    def __init__(self, weights: Sequence[Fraction | int]) -> None:
        assert weights and all(weight > 0 for weight in weights), "weights are positive"
        self._tree = _huffman_tree([Fraction(weight) for weight in weights])

    def choose(self, k: int) -> BlendedSample:
        """Return the corpus of sample k and the sample's number within it."""
        side, index = self._tree, k
        while isinstance(side, _Node):
            left, left_after = _rounded(index, side.share), _rounded(index + 1, side.share)
            side, index = (side.left, left) if left_after > left else (side.right, index - left)
        return BlendedSample(side, index)

    def counts(self, m: int) -> list[int]:
        """Return how many of the first m samples come from each corpus."""
        found: dict[int, int] = {}
        sides: list[tuple[_Node | int, int]] = [(self._tree, m)]
        for side, count in sides:
            if isinstance(side, _Node):
                left = _rounded(count, side.share)
                sides += [(side.left, left), (side.right, count - left)]
            else:
                found[side] = count
        return [found[corpus] for corpus in sorted(found)]


class BlendedSamples:
    """Samples of several corpora, mixed by weight from sample `start` on."""

    def __init__(self, sources: Sequence[Samples], weights: Sequence[Fraction | int], *, start: int = 0) -> None:
        assert len({source.seq_length for source in sources}) == 1, "corpora of a mixture share one sequence length"
        self._sources = tuple(sources)
        self._blend = Blend(weights)
        self._start = start

    @property
    def seq_length(self) -> int:
        """The number of inputs in a sample."""
        return self._sources[0].seq_length

    def _choose(self, k: int) -> BlendedSample:
        return self._blend.choose(k - self._start)

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k of the mixture: int64 [seq_length + 1]."""
        corpus, number = self._choose(k)
        return self._sources[corpus].sample(number)

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        """Return which tokens of sample k are learnt: uint8 [seq_length + 1]; None: all of them."""
        corpus, number = self._choose(k)
        return self._sources[corpus].loss_mask(number)


def parse_data_path(items: Sequence[str], flag: str = DATA_PATH) -> tuple[WeightedPrefix, ...]:
    """Parse the values of `flag`: one prefix, several prefixes, or "weight prefix weight prefix ...".

    Several prefixes without weights are mixed in proportion to their sizes.  Raises DataError naming every bad item.
    """
    if not items:
        raise DataError(Problem(flag, "takes at least one prefix", "PREFIX, or WEIGHT PREFIX WEIGHT PREFIX"))
    weights = [_number(item) for item in items[0::2]]
    if len(items) == 1 or not any(weight is not None for weight in weights):
        return tuple(WeightedPrefix(item, None) for item in items)
    problems = [
        Problem(f"{flag} {' '.join(items)}: weight {item}", "weights are numbers above 0", "for instance 0.3")
        for item, weight in zip(items[0::2], weights, strict=True)
        if weight is None or weight <= 0
    ]
    if len(items) % 2:
        problems.append(Problem(f"{flag} {' '.join(items)}", "every weight is followed by a prefix"))
    if problems:
        raise DataError(*problems)
    return tuple(WeightedPrefix(prefix, weight) for prefix, weight in zip(items[1::2], weights, strict=True))


def _huffman_tree(weights: Sequence[Fraction]) -> _Node | int:
    """Build the tree; left is the side with the lowest corpus number, which also comes first of equal weights."""
    sides: list[tuple[Fraction, int, _Node | int]] = [(weight, number, number) for number, weight in enumerate(weights)]
    heapq.heapify(sides)
    while len(sides) > 1:
        pair = heapq.heappop(sides), heapq.heappop(sides)
        (left_weight, first, left), (right_weight, _, right) = sorted(pair, key=itemgetter(1))
        weight = left_weight + right_weight
        heapq.heappush(sides, (weight, first, _Node(left_weight / weight, left, right)))
    return sides[0][2]


def _rounded(count: int, share: Fraction) -> int:
    """Return count * share rounded to the nearest integer, halves up; exact."""
    return (2 * count * share.numerator + share.denominator) // (2 * share.denominator)


def _number(text: str) -> Fraction | None:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return None
