"""Shuffles [0, n) without a table, by a keyed permutation that is evaluated one element at a time.

A *Feistel network* writes a number as two digits (left, right) of base a and mixes one digit into the other, round by
round; every round is invertible, so the whole is a bijection of [0, a * a) for any round function (Luby and Rackoff
1988).  With a the least integer with a * a >= n the domain is hardly larger than n.  *Cycle walking* passes results in
[n, a * a) through the network again until they are below n, which makes it a bijection of [0, n) (Black and Rogaway
2002, "Ciphers with Arbitrary Finite Domains"): one pass nearly always.

One formula serves integers and arrays of uint64, which wrap where integers are masked: it never subtracts from what may
be smaller, and no sum or product in it reaches 2**64 except those that are meant to wrap.
"""

import math
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

# An element, or an array of them; arrays are Any because numpy's types lose the element's in arithmetic.
Numbers = TypeVar("Numbers", int, NDArray[Any])

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1
# Odd multipliers with well spread bits; any pair that passes the test of uniformity is good.
_MULTIPLIER_A = 0x9E3779B97F4A7C15
_MULTIPLIER_B = 0xD6E8FEB86659FD93


@dataclass(frozen=True)
class Permutation:
    """The permutation of [0, size) that belongs to `key`; constant memory, a few microseconds an element.

    size: at least 1.  key: any integers; different keys give unrelated permutations.
    """

    size: int
    key: tuple[int, ...]
    _base: int = field(init=False, repr=False, compare=False)
    _rounds: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert self.size >= 1, f"a permutation needs at least one element, not {self.size}"
        root = math.isqrt(self.size - 1) + 1
        object.__setattr__(self, "_base", root)
        object.__setattr__(self, "_rounds", _round_keys(self.key))

    def __getitem__(self, index: int) -> int:
        """Return the image of `index`; both in [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in [0, {self.size})")
        while True:
            index = self._pass(index)
            if index < self.size:
                return index

    def images(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the images of an array of indices, in the same shape; all in [0, size)."""
        found = self._pass(_in_range(indices, self.size))
        while len(outside := np.flatnonzero(found >= self.size)):
            found[outside] = self._pass(found[outside])
        return found

    def _pass(self, index: Numbers) -> Numbers:
        left, right = divmod(index, self._base)
        for key in self._rounds:
            left, right = right, self._rest(left + self._rest(_mix(right ^ key)))
        whole: Numbers = left * self._base + right
        return whole

    def _rest(self, value: Numbers) -> Numbers:
        """Return value % base, in the way that numpy computes several times faster."""
        rest: Numbers = value - value // self._base * self._base
        return rest


class Epochs:
    """An endless sequence of *epochs*: [0, size) again and again, each in the order of permutation (*key, epoch)."""

    def __init__(self, size: int, key: tuple[int, ...]) -> None:
        self.size = size
        self._key = key
        # One attribute for both the last used epoch and its order, since several threads may read it.
        self._last = (0, Permutation(size, (*key, 0)))

    def __getitem__(self, k: int) -> int:
        """Return element k of the sequence."""
        epoch, index = divmod(k, self.size)
        known, order = self._last
        if known != epoch:
            order = Permutation(self.size, (*self._key, epoch))
            self._last = (epoch, order)
        return order[index]


def _in_range(numbers: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    found = np.asarray(numbers, np.uint64)
    if len(found) and found.max() >= size:
        raise IndexError(f"{found.max()} is not in [0, {size})")
    return found


def _mix(value: Numbers) -> Numbers:
    """Spread 64 bits so that every input bit affects every output bit."""
    value = ((value ^ (value >> 32)) * _MULTIPLIER_A) & _MASK
    value = ((value ^ (value >> 29)) * _MULTIPLIER_B) & _MASK
    spread: Numbers = value ^ (value >> 32)
    return spread


def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    text = ",".join(map(str, key)).encode()
    digest = blake2b(text, digest_size=8 * NUM_ROUNDS, person=b"megazero.order").digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))
