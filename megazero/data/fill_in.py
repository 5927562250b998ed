"""Rearranges samples so that a model learns to fill in the middle of a text (FIM, arXiv 2207.14255), as Megatron-LM.

A sample of s + 1 tokens is cut at its end-of-document tokens, which stay where they are; each *segment* between them
that is not empty is rearranged by itself:

1. With probability 1 - rate it stays as it is.
2. Else its text, without the special tokens named here, is cut at two places, drawn from all places between its
   characters (its ends included), into a prefix, a middle and a suffix, and these are made tokens again.  Text that
   begins with `no_prefix` stays as it is.
3. With probability spm_rate the segment becomes  PREFIX SUFFIX suffix MIDDLE prefix middle  (capitals are the special
   tokens), else  PREFIX prefix SUFFIX suffix MIDDLE middle.

With a `split` token, a segment in which it stands is rearranged in parts: with probability `rate`, each part between
these tokens that is not empty goes through the three steps with `fragment_rate` in place of `rate`; the tokens stay.

What is longer than s + 1 tokens then is cut off at its end, what is shorter is filled with padding.  The random numbers
of sample k are those of numpy's Philox generator with the seed sequence (seed, stream, k), drawn in the order above, so
a sample is a function of k at any layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megazero.data.samples import Samples
from megazero.data.tokenizers import Tokenizer

Row = NDArray[np.int64]


@dataclass(frozen=True)
class FillIn:
    """The rule: rates are probabilities, the last six are token ids; split: None cuts no segment into parts."""

    rate: float
    spm_rate: float
    fragment_rate: float
    no_prefix: str | None
    prefix: int
    middle: int
    suffix: int
    padding: int
    eod: int
    split: int | None = None


class FillInSamples:
    """The samples of `source`, rearranged; stream: a number for each set of samples of a run."""

    def __init__(self, source: Samples, rule: FillIn, tokenizer: Tokenizer, *, seed: int, stream: int) -> None:
        self._source = source
        self._rule = rule
        self._tokenizer = tokenizer
        signs = (rule.prefix, rule.middle, rule.suffix, rule.padding, rule.eod)
        self._signs = np.array([sign for sign in (*signs, rule.split) if sign is not None], np.int64)
        self._key = (seed, stream)

    @property
    def seq_length(self) -> int:
        """Inputs in a sample."""
        return self._source.seq_length

    def sample(self, k: int) -> Row:
        """Return sample k: int64 [seq_length + 1]."""
        row = self._source.sample(k)
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._key, k))))
        made = _by_parts(row, self._rule.eod, lambda segment: self._segment(segment, random))
        room = len(row) - len(made)
        return np.concatenate([made, np.full(room, self._rule.padding)]) if room > 0 else made[: len(row)]

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        """Return None: all tokens are learnt."""
        return None

    def _segment(self, segment: Row, random: np.random.Generator) -> Row:
        rule = self._rule
        if rule.split is None or not (segment == rule.split).any():
            return self._rearranged(segment, rule.rate, random)
        if random.random() >= rule.rate:
            return segment
        return _by_parts(segment, rule.split, lambda part: self._rearranged(part, rule.fragment_rate, random))

    def _rearranged(self, segment: Row, rate: float, random: np.random.Generator) -> Row:
        """Return a segment with its middle at its end, at a probability of `rate`."""
        rule = self._rule
        if random.random() >= rate:
            return segment
        text = self._tokenizer.decode(segment[~np.isin(segment, self._signs)].tolist())
        if rule.no_prefix is not None and text.startswith(rule.no_prefix):
            return segment
        first, second = sorted(random.integers(0, len(text) + 1, size=2).tolist())
        prefix, middle, suffix = map(self._tokenizer.encode, (text[:first], text[first:second], text[second:]))
        if random.random() < rule.spm_rate:
            return _row(rule.prefix, rule.suffix, *suffix, rule.middle, *prefix, *middle)
        return _row(rule.prefix, *prefix, rule.suffix, *suffix, rule.middle, *middle)


def _by_parts(row: Row, sign: int, change: Callable[[Row], Row]) -> Row:
    """Return the row with each part between the tokens `sign` changed, but for empty ones."""
    places = [-1, *np.flatnonzero(row == sign).tolist(), len(row)]
    made: list[Row] = []
    for before, after in pairwise(places):
        part = row[before + 1 : after]
        made.append(change(part) if len(part) else part)
        made.append(row[after : after + 1])
    return np.concatenate(made)


def _row(*tokens: int) -> Row:
    return np.array(tokens, np.int64)
