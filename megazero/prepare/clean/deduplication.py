"""Drops duplicates: documents whose text is the same as an earlier one's, or nearly the same.

*Exact*: texts are compared by 128 bits of xxh3; among 1e12 documents two different ones collide with a chance of 1e-15.

*Near*: a text is the set of its *shingles*, runs of five words; the similarity of two texts is the share of shingles
they have in common among those that either has (Jaccard).  128 numbers (MinHash) stand for a set: the share of equal
ones estimates the similarity with a standard error of at most 0.044.  The numbers are cut into bands, and only
documents with an equal band are compared (locality-sensitive hashing): at the threshold itself four pairs of five meet,
well above it nearly all.  A document is remembered by its bands' hashes and the low bytes of its numbers (its
*signature*).  Everything follows from the texts and their order alone.

Both keep the first document and drop those that come later.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest, xxh32_intdigest

from megazero.errors import DataError
from megazero.prepare.clean.cleaning_steps import Dropped, missing_package

# The bytes of memory that a kept document takes, measured on a million (near: on 100,000, at the threshold of 0.8).
EXACT_BYTES = 30
NEAR_BYTES = 550

EXACT, NEAR = DUPLICATES = ("exact", "near")
DEFAULT_NEAR_THRESHOLD = 0.8
NEAR_THRESHOLDS = (0.3, 0.99)
SHINGLE_WORDS = 5
SIGNATURE_NUMBERS = 128
# The costs of a false pair and a missed pair, by which bands are cut: false pairs are found by their signatures.
_BAND_WEIGHTS = (0.1, 0.9)
_SEED = 1
# The latest pairs are merged once they are at least _LEAST_LATEST, and one for every _LATEST_SHARE merged ones.
_LEAST_LATEST = 4096
_LATEST_SHARE = 32
# The number of shingles that are hashed at a time: 128 numbers for each are 512 KiB.
_BATCH = 1024
# An odd number without pattern in its bits; multiplication by it makes hashes depend on the order of words.
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
# Scripts without spaces between words (Thai to Khmer, kana, ideographs): every letter counts as a word.
_WORD = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]|\w+"
)
# Every character that is not part of a word becomes a space.
_ASCII_WORDS = bytes(code if _WORD.fullmatch(chr(code)) else ord(" ") for code in range(128)) + b" " * 128


class PairTable:
    """A table of pairs of a 64-bit key and a number, found by key, in little more memory than the two take.

    It has two arrays, sorted by key, and a dictionary of the latest pairs, which are merged into the arrays when the
    dictionary has a share of their size.
    """

    def __init__(self, dtype: type[np.uint32] | type[np.uint64]) -> None:
        self._keys: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._numbers: NDArray[Any] = np.empty(0, dtype)
        self._latest: dict[int, list[int]] = {}
        self._num_latest = 0

    def __len__(self) -> int:
        return len(self._keys) + self._num_latest

    def find(self, keys: Sequence[int]) -> list[int]:
        """Return the numbers that were added with one of the keys."""
        found = [number for key in keys for number in self._latest.get(key, ())]
        wanted = np.array(keys, np.uint64)
        starts = np.searchsorted(self._keys, wanted)
        stops = np.searchsorted(self._keys, wanted, side="right")
        return found + [
            number
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
            for number in self._numbers[start:stop].tolist()
        ]

    def add(self, key: int, number: int) -> None:
        """Add a pair."""
        self._latest.setdefault(key, []).append(number)
        self._num_latest += 1
        if self._num_latest >= max(_LEAST_LATEST, len(self._keys) // _LATEST_SHARE):
            self._merge()

    def _merge(self) -> None:
        pairs = [(key, number) for key in sorted(self._latest) for number in self._latest[key]]
        self._latest, self._num_latest = {}, 0
        keys = np.fromiter((key for key, _ in pairs), np.uint64, len(pairs))
        numbers = np.fromiter((number for _, number in pairs), self._numbers.dtype, len(pairs))
        positions = np.searchsorted(self._keys, keys)
        self._keys = np.insert(self._keys, positions, keys)
        self._numbers = np.insert(self._numbers, positions, numbers)


class ExactDuplicates:
    """A step that drops a text that is the same as an earlier one."""

    name = "--deduplicate exact"

    def __init__(self) -> None:
        self._seen = PairTable(np.uint64)

    def apply(self, text: str) -> str | Dropped:
        """Return the text, or the reason to drop it."""
        high, low = divmod(xxh3_128_intdigest(text.encode()), 1 << 64)
        if low in self._seen.find((high,)):
            return Dropped("an earlier document is the same")
        self._seen.add(high, low)
        return text


class NearDuplicates:
    """A step that drops a text whose similarity to a kept one reaches the threshold.

    Raises DataError if the library is missing.
    """

    name = "--deduplicate near"

    def __init__(self, threshold: float) -> None:
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError as error:
            raise DataError(missing_package(self.name, "datasketch")) from error
        self._threshold = threshold
        # The library computes the best cut; its own tables take sixteen times the memory.
        cut = MinHashLSH(threshold, SIGNATURE_NUMBERS, weights=_BAND_WEIGHTS)
        self._bands = [slice(band * cut.r, (band + 1) * cut.r) for band in range(cut.b)]
        # The sketch's input is hashed already.
        self._empty = MinHash(SIGNATURE_NUMBERS, seed=_SEED, hashfunc=int, scheme="affine32")
        self._kept_by_band = PairTable(np.uint32)
        self._signatures = bytearray()

    def apply(self, text: str) -> str | Dropped:
        """Return the text, or the most similar kept document, counted from 1, and the similarity as the reason."""
        numbers = self._sketch(text)
        keys = [xxh3_64_intdigest(numbers[band].tobytes(), band.start) for band in self._bands]
        signature = numbers.astype(np.uint8)
        found = [(self._similarity(kept, signature), -kept) for kept in set(self._kept_by_band.find(keys))]
        similarity, kept = max(found, default=(-1.0, 0))
        if similarity >= self._threshold:
            return Dropped(f"similarity {similarity:.2f} to document {1 - kept} of the output")
        number = len(self._signatures) // SIGNATURE_NUMBERS
        self._signatures += signature.tobytes()
        for key in keys:
            self._kept_by_band.add(key, number)
        return text

    def _sketch(self, text: str) -> NDArray[np.uint32]:
        """Return the MinHash numbers of a text."""
        sketch, hashes = self._empty.copy(), shingles(text)
        for start in range(0, len(hashes), _BATCH):
            sketch.update_batch(hashes[start : start + _BATCH].tolist())
        return np.asarray(sketch.hashvalues, np.uint32)

    def _similarity(self, number: int, signature: NDArray[np.uint8]) -> float:
        """Estimate a similarity from the low bytes of the numbers, of which one in 256 is equal by chance."""
        kept = np.frombuffer(self._signatures, np.uint8, SIGNATURE_NUMBERS, number * SIGNATURE_NUMBERS)
        equal = np.count_nonzero(kept == signature) / SIGNATURE_NUMBERS
        return float(equal - 1 / 256) / (1 - 1 / 256)


def shingles(text: str) -> NDArray[np.uint32]:
    """Return sorted 32-bit hashes of a text's different runs of five words; case and punctuation don't count.

    A text of fewer words is one run of those it has; one without any is a run of its own, punctuation and all.
    """
    words = _words(text.lower()) or [text.encode()]
    hashes = np.fromiter(map(xxh32_intdigest, words), np.uint64, len(words))
    length = min(SHINGLE_WORDS, len(words))
    runs = np.zeros(len(words) - length + 1, np.uint64)
    for index in range(length):
        runs *= _MULTIPLIER  # wraps around at 64 bits
        runs += hashes[index : len(words) - length + 1 + index]
    runs *= _MULTIPLIER
    return np.unique((runs >> np.uint64(32)).astype(np.uint32))


def _words(text: str) -> list[bytes]:
    """Return the matches of _WORD; those of ASCII text are found in a way that is four times as fast."""
    if text.isascii():
        return text.encode().translate(_ASCII_WORDS).split()
    return [word.encode() for word in _WORD.findall(text)]
