"""Computes the tokens of sample k of the run, as a pure function of (seed, k).

A *split* cuts a corpus into three contiguous ranges of sequences (train, valid, test).  The tokens of a range, taken
as one long row, make n = (tokens - 1) // seq_length samples of seq_length + 1 tokens; neighbours share one token, the
label of the one and the first input of the other:

    tokens     t0 t1 t2 t3 t4 t5 t6 t7 t8 t9        seq_length 4, n = 2
    sample 0   [-------------]
    sample 1               [-------------]

An *epoch* is one pass over the n samples in an order of its own: sample k of the run is sample
permutation(seed, stream, k // n)[k mod n] of the range.  Nothing is stored, so nothing can be stale, and resuming at
any k costs nothing.  Sequences lie back to back, so a sample is one slice of the file.

Samples can be *skipped*: spans of their numbers are left out, for instance where a loss diverged.  The remaining ones
move up, so sample k of the run is then sample k + s of all, s being the number of skipped ones before it.  That is
again a function of k alone: it holds at any layout, and on resuming with the same spans.  A span that is new at a
restart, after c samples, and lies ahead of c removes only its own samples.  One that lies behind c has been read
already; it moves the rest up nevertheless, so after c as many samples as it is long are not read.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.permutation import Epochs
from megazero.data.reading import Reading
from megazero.errors import DataError, Problem
from megazero.rules.files import split_shares
from megazero.units import counted

SPLIT_NAMES = ("train", "valid", "test")


class SplitShares(NamedTuple):
    """The shares of train, valid and test, which add up to 1."""

    train: float
    valid: float
    test: float


class SplitRanges(NamedTuple):
    """The contiguous ranges of sequences of train, valid and test."""

    train: range
    valid: range
    test: range


class Samples(Protocol):
    """An endless sequence of samples; sample k is the same in every process of every run with this seed."""

    @property
    def seq_length(self) -> int:
        """Inputs in a sample."""
        ...

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k: int64 [seq_length + 1]."""
        ...

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        """Return which tokens of sample k are learnt, 1 or 0: uint8 [seq_length + 1]; None: all of them."""
        ...


def parse_split(text: str) -> SplitShares:
    """Parse "969,30,1": up to three weights, normalised to 1; missing ones are 0, so "1" makes all of it train.

    Raises DataError for anything else.
    """
    shares = split_shares(text)
    if shares is None:
        rule = "is one to three numbers >= 0 with commas between, not all of them 0"
        raise DataError(Problem(f"--split {text}", rule, "three weights such as 969,30,1 or 0.9,0.1,0"))
    return SplitShares(*shares)


def split_sequences(num_sequences: int, split: SplitShares) -> SplitRanges:
    """Cut [0, num_sequences) at the rounded cumulative shares, as Megatron-LM does (halves go to the even number).

    A part whose share is less than a sequence still has one, its neighbour's, if there are as many sequences as parts.
    """
    cuts = [0, *(round(min(share, 1.0) * num_sequences) for share in accumulate(split))]
    cuts[-1] = num_sequences
    least = [int(share > 0) for share in split]
    if sum(least) <= num_sequences:
        for part in range(len(split)):
            cuts[part + 1] = max(cuts[part + 1], cuts[part] + least[part])
        cuts[-1] = num_sequences
        for part in reversed(range(len(split))):
            cuts[part] = min(cuts[part], cuts[part + 1] - least[part])
    return SplitRanges(*(range(first, last) for first, last in pairwise(cuts)))


class SampleSource:
    """The samples of a range of one corpus.

    stream: a number for each corpus (or split) of one run, so that their orders differ.
    mask: the corpus of the tokens' mask, of the same shape; None where every token is learnt.
    reading: where sample 0 is, in place of the beginning of this stream.
    Raises DataError when the range holds no whole sample, and, while reading, for a token outside the vocabulary.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        *,
        sequences: range,
        seq_length: int,
        seed: int,
        vocab_size: int,
        stream: int = 0,
        mask: IndexedDataset | None = None,
        reading: Reading | None = None,
    ) -> None:
        self._dataset = dataset
        self._mask = mask
        self._seq_length = seq_length
        self._vocab_size = vocab_size
        self._start = dataset.sequence_start(sequences.start)
        self.num_tokens = dataset.sequence_start(sequences.stop) - self._start
        self.samples_per_epoch = max(0, self.num_tokens - 1) // seq_length
        if self.samples_per_epoch == 0:
            raise _no_sample(self, dataset.name, len(sequences))
        at = self._at = reading or Reading(stream, self.num_tokens, seq_length)
        self._order = Epochs(self.samples_per_epoch, (seed, at.stream))
        self._rest, self._first = at.rest(seq_length), at.first(seq_length)
        # The order of the epoch that was cut into samples of another length.
        self._begun = Epochs(max(at.epoch_size(at.length), 1), (seed, at.stream))

    @property
    def seq_length(self) -> int:
        """Inputs in a sample."""
        return self._seq_length

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k of the run: int64 [seq_length + 1]."""
        found = [self._tokens(start, stop) for start, stop in self._pieces(k)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        """Return which tokens of sample k are learnt, 1 or 0: uint8 [seq_length + 1]; None without a mask."""
        if self._mask is None:
            return None
        found = []
        for start, stop in self._pieces(k):
            mask: NDArray[np.uint8] = self._mask.tokens(start, stop)
            if mask.max() > 1:
                document, position = self._mask.locate(start + int(np.argmax(mask > 1)))
                given = f"{self._mask.name}: document {document}, position {position}: {mask.max()}"
                raise DataError(Problem(given, "a mask holds 1 for a token that is learnt, and 0 for any other"))
            found.append(mask)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _pieces(self, k: int) -> list[tuple[int, int]]:
        """Return where in the corpus the tokens of a sample lie: (first, behind the last) of each piece."""
        if k >= self._rest:
            start = self._start + self._order[self._first + k - self._rest] * self._seq_length
            return [(start, start + self._seq_length + 1)]
        # What is left of an epoch, whose samples of another length lie end to end.
        at, found, wanted = self._at, [], self._seq_length
        block, inside = divmod(at.offset + k * self._seq_length, at.length)
        while wanted:
            start = self._start + self._begun[at.epoch * self._begun.size + at.taken + block] * at.length + inside
            count = min(wanted, at.length - inside)
            wanted, block, inside = wanted - count, block + 1, 0
            # The last label is the token behind the last input in the corpus.
            found.append((start, start + count + (not wanted)))
        return found

    def _tokens(self, start: int, stop: int) -> NDArray[np.int64]:
        tokens = self._dataset.tokens(start, stop).astype(np.int64)
        # As an unsigned number a negative one is larger than any vocabulary.
        if tokens.view(np.uint64).max() >= self._vocab_size:
            raise self._outside_vocabulary(start, tokens)
        return tokens

    def _outside_vocabulary(self, start: int, tokens: NDArray[np.int64]) -> DataError:
        offset = int(np.argmax((tokens < 0) | (tokens >= self._vocab_size)))
        document, position = self._dataset.locate(start + offset)
        return DataError(
            Problem(
                f"{self._dataset.name}: document {document}, position {position}: token {tokens[offset]}",
                f"token ids are at least 0 and below the vocabulary size {self._vocab_size}",
                "the vocabulary the corpus was preprocessed with, or a corpus preprocessed with this one",
            )
        )


class RemainingSamples:
    """The samples of `source` without skipped spans of numbers, which ascend and don't overlap."""

    def __init__(self, source: Samples, skipped: Sequence[range]) -> None:
        assert all(a.stop <= b.start for a, b in pairwise(skipped)), f"spans ascend: {skipped}"
        self._source = source
        self._skipped = tuple(skipped)

    @property
    def seq_length(self) -> int:
        """Inputs in a sample."""
        return self._source.seq_length

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k of the remaining ones: int64 [seq_length + 1]."""
        return self._source.sample(self.number(k))

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        """Return which tokens of the remaining sample k are learnt: uint8 [seq_length + 1]; None: all of them."""
        return self._source.loss_mask(self.number(k))

    def number(self, k: int) -> int:
        """Return the number in `source` of the remaining sample k."""
        return skipping_number(k, self._skipped)


def skipping_number(k: int, skipped: Sequence[range]) -> int:
    """Return the number, among all samples, of the k-th that no span skips; spans ascend and don't overlap."""
    lengths = accumulate(map(len, skipped), initial=0)
    # The number of skipped samples before each remaining span, and that span's first number in the run.
    behind = [*lengths]
    firsts = [span.start - before for span, before in zip(skipped, behind, strict=False)]
    return k + behind[bisect_right(firsts, k)]


def _no_sample(source: SampleSource, prefix: str, num_sequences: int) -> DataError:
    counts = f"{counted(num_sequences, 'sequence')} with {source.num_tokens} tokens"
    return DataError(
        Problem(
            f"{prefix}: {counts} in this part of the corpus",
            f"a sample takes {source.seq_length + 1} tokens (--seq-length {source.seq_length} and one label)",
            f"a --seq-length below {source.num_tokens}" if source.num_tokens > 1 else "a larger share, or more text",
        )
    )
