"""Expects how far a layout's time and memory are above their bounds, from the layouts that have been run dry.

What bounds leave out is a factor: a part of it that all layouts have, and one for each trait of theirs, fitted by least
squares to the logarithms of the factors found so far, with a weight on the traits (ridge regression), so that those of
which little has been seen make no difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

_WEIGHT = 0.3  # of the traits, in layouts run dry


@dataclass
class Expectation:
    """The factors found so far: rows of traits, and the logarithms of the factors of seconds and of bytes."""

    rows: list[tuple[float, ...]] = field(default_factory=list)
    found: list[tuple[float, float]] = field(default_factory=list)

    def add(self, row: tuple[float, ...], seconds: float, nbytes: float) -> None:
        """Take in the factors of a layout that was run dry."""
        self.rows.append(row)
        self.found.append((log(seconds), log(nbytes)))

    def factors(self, rows: Sequence[tuple[float, ...]]) -> Iterator[tuple[float, float]]:
        """Yield the factors of seconds and of bytes that layouts of these traits are expected to have."""
        if not self.found:
            return iter([(1.0, 1.0)] * len(rows))
        known, logs = np.array(self.rows), np.array(self.found)
        middle, mean = known.mean(axis=0), logs.mean(axis=0)
        centred = known - middle
        square = centred.T @ centred + _WEIGHT * np.eye(known.shape[1])
        effects = np.linalg.solve(square, centred.T @ (logs - mean))
        return map(tuple, np.exp(mean + (np.array(rows) - middle) @ effects))
