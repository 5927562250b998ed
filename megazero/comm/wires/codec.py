"""Symmetric quantization by blocks: what communicators send in place of floating-point numbers.

A row of n numbers is divided into blocks, the last of which may be short.  Each has one scale, from its largest
magnitude, and each number becomes a whole number q of `bits` bits:

    scale = max(largest / limit, 2^-126),  limit = 127 or 7        q = x / scale, rounded, in [-limit, limit]

and q * scale is what a decoder returns.  Encoded, a row is

    its q's, one to a byte or two (the first in the low half, as q + 8), up to 3 bytes that are not used,
    one float32 scale for each block

*Error*: at most scale / 2 when rounding to nearest (ties to even), and less than one scale when rounding at random,
which rounds up with the probability of the fraction, so that errors are zero on average.  To that come 2^-15 scale for
the arithmetic, and the rounding to the dtype that is decoded into.  Magnitudes lie below 2^127, at more a block may
become infinite.  A block of zeros stays one.

*Again*: what has been decoded, encoded once more by rounding to nearest, decodes to the same numbers, in any dtype that
is not narrower than what was encoded.  The largest magnitude m of a block is 127 (or 7) scales, and comes back from the
scale so that its scale is the same again.

*Not finite*: a block with inf or nan has such a scale, so every number of the block is inf or nan once decoded (0 times
inf is nan), and an overflow is found as if nothing had been encoded.

Quantization is that of ZeRO++ (Wang et al., 2023, section 3.1).  float64 is computed in float64, and everything else in
float32, in pieces of at most `_PIECE` numbers: temporaries are a few times that, whatever the size of the row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

_LIMITS = MappingProxyType({8: 127, 4: 7})  # the largest whole number, by bits
_SMALLEST_SCALE = 2.0**-126  # float32's smallest normal number: half the precision of a smaller one would be lost
_PIECE = 1 << 20
_LARGEST_BLOCK = 1 << 16  # so that pieces of every codec have the same ends
_SCALE_BYTES = 4


class RowBlocks(NamedTuple):
    """Some neighbouring blocks of each row: their place in the rows, whole numbers as they are stored, and scales."""

    place: slice
    stored: Tensor
    scales: Tensor


@dataclass(frozen=True)
class BlockCodec:
    """Encodes rows, and decodes them; block: the numbers that share a scale, a power of two; stochastic: at random.

    Tensors are [..., n], encoded [..., encoded_bytes(n)], uint8.  All but the last dimension are rows, which are
    encoded apart; dimensions may be transposed, but for the last.
    """

    bits: int
    block: int
    stochastic: bool = False

    def __post_init__(self) -> None:
        assert self.bits in _LIMITS, "8 or 4 bits"
        assert 2 <= self.block <= _LARGEST_BLOCK and self.block & (self.block - 1) == 0, "a power of two up to 2^16"

    def encoded_bytes(self, n: int) -> int:
        """Return the bytes of an encoded row of n numbers: a multiple of 4."""
        return self._scales_begin(n) + _SCALE_BYTES * -(-n // self.block)

    def encode(self, source: Tensor, encoded: Tensor, generator: torch.Generator | None = None) -> None:
        """Encode rows; generator: draws the numbers of a stochastic codec, on the source's device."""
        for piece in self.pieces(encoded, source.shape[-1]):
            self.encode_piece(source[..., piece.place], piece, generator)

    def decode(self, encoded: Tensor, output: Tensor) -> None:
        """Decode rows into an output of any floating-point dtype."""
        for piece in self.pieces(encoded, output.shape[-1]):
            output[..., piece.place] = self.decode_piece(piece, compute_dtype(output.dtype))

    def add_decoded(self, encoded: Tensor, output: Tensor) -> None:
        """Decode rows and add them to the numbers of an output in float32 or float64."""
        assert output.dtype is compute_dtype(output.dtype), "sums are those of float32 or float64"
        for piece in self.pieces(encoded, output.shape[-1]):
            output[..., piece.place] += self.decode_piece(piece, output.dtype)

    def pieces(self, encoded: Tensor, n: int, within: slice | None = None) -> Iterator[RowBlocks]:
        """Divide encoded rows of n numbers into pieces, the same for every codec; their tensors are views.

        within: a part of the rows, from a block's first number and of 8 bits each, in place of all.
        """
        first, last = (0, n) if within is None else (within.start, within.stop)
        assert first % self.block == 0, "parts are blocks"
        if first == last:
            return
        num_rows = encoded.shape[:-1].numel()
        step = max(_PIECE // max(num_rows, 1) // _LARGEST_BLOCK, 1) * _LARGEST_BLOCK
        begins = self._scales_begin(n)
        scales = encoded[..., begins : self.encoded_bytes(n)].view(torch.float32)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            stored = encoded[..., self._stored(begin) : self._stored(end)]
            yield RowBlocks(slice(begin, end), stored, scales[..., begin // self.block : -(-end // self.block)])

    def encode_piece(self, values: Tensor, piece: RowBlocks, generator: torch.Generator | None = None) -> None:
        """Encode the numbers [..., m] of a piece."""
        m, limit = values.shape[-1], _LIMITS[self.bits]
        values = values.to(compute_dtype(values.dtype))
        if short := -m % self.block:
            values = torch.nn.functional.pad(values, (0, short))
        blocks = values.reshape(*values.shape[:-1], -1, self.block)
        scales = blocks.abs().amax(-1).div_(limit).clamp_(min=_SMALLEST_SCALE).float()
        piece.scales.copy_(scales)
        quotients = blocks / scales.to(blocks.dtype).unsqueeze(-1)
        if self.stochastic:
            quotients += torch.rand(quotients.shape, generator=generator, dtype=blocks.dtype, device=blocks.device)
            quotients.floor_()
        else:
            quotients.round_()
        # The quotients of a block that is not finite may be nan, for which a conversion has no defined result.
        whole = quotients.nan_to_num_(nan=0.0).clamp_(-limit, limit).to(torch.int8).flatten(-2)
        if self.bits == 8:
            piece.stored.copy_(whole[..., :m].view(torch.uint8))
        else:
            halves = whole[..., : m + m % 2].add_(8).view(torch.uint8)
            torch.bitwise_or(halves[..., ::2], halves[..., 1::2] << 4, out=piece.stored)

    def decode_piece(self, piece: RowBlocks, dtype: torch.dtype) -> Tensor:
        """Return the numbers [..., m] of a piece in float32 or float64."""
        m = piece.place.stop - piece.place.start
        if self.bits == 8:
            whole = piece.stored.view(torch.int8).to(dtype)
        else:
            halves = torch.stack((piece.stored & 15, piece.stored >> 4), -1)
            whole = halves.flatten(-2)[..., :m].to(dtype).sub_(8)
        return whole.mul_(piece.scales.to(dtype).repeat_interleave(self.block, -1)[..., :m])

    def _stored(self, n: int) -> int:
        """Return the bytes of the whole numbers of a row of n, all of whose pieces but the last are even."""
        return -(-n * self.bits // 8)

    def _scales_begin(self, n: int) -> int:
        return -(-self._stored(n) // _SCALE_BYTES) * _SCALE_BYTES


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of `dtype` are encoded, decoded and summed."""
    return torch.float64 if dtype is torch.float64 else torch.float32
