"""A shuffled order of [0, n) that needs no table: a keyed permutation, evaluated one element at a time.

A *Feistel network* writes a number as two digits (left, right) of base a and mixes one digit into the other, round by
round; every round can be undone, so the whole is a bijection of [0, a * a) for any round function (Luby and Rackoff
1988).  With a the least integer with a * a >= n the domain is hardly larger than n.  *Cycle walking* takes what lands
in [n, a * a) through the network again until it lands below n, which makes it a bijection of [0, n) (Black and Rogaway
2002, "Ciphers with Arbitrary Finite Domains"): one pass nearly always.
"""

import math
from dataclasses import dataclass, field
from hashlib import blake2b

NUM_ROUNDS = 8
_MASK = (1 << 64) - 1
# Odd multipliers with well spread bits; any such pair will do, the test of uniformity decides.
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
        """Where `index` goes; both in [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is not in [0, {self.size})")
        while True:
            index = self._pass(index)
            if index < self.size:
                return index

    def _pass(self, index: int) -> int:
        left, right = divmod(index, self._base)
        for key in self._rounds:
            left, right = right, (left + _mix(right ^ key)) % self._base
        return left * self._base + right


def _mix(value: int) -> int:
    """Spread 64 bits so that every input bit moves every output bit."""
    value = ((value ^ (value >> 32)) * _MULTIPLIER_A) & _MASK
    value = ((value ^ (value >> 29)) * _MULTIPLIER_B) & _MASK
    return value ^ (value >> 32)


def _round_keys(key: tuple[int, ...]) -> tuple[int, ...]:
    text = ",".join(map(str, key)).encode()
    digest = blake2b(text, digest_size=8 * NUM_ROUNDS, person=b"megazero.order").digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8))
