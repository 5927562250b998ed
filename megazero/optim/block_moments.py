"""Moments of an optimizer in 8 bits (Dettmers et al., arXiv 2110.02861): a code for each element, a maximum a block.

    value of an element = values[its code] * the maximum of its block of 256 elements

The 256 values lie between -1 and 1, or 0 and 1, many near 0.  They and the update are those of bitsandbytes; here is
what the engine does with such moments: cut them, read them in fp32, and write them.

*Again*: what has been read is written back to the same values, bit for bit, as long as it fills the same blocks.  For
that the maximum has to be found again, and the values have 1 but not -1: of a block whose largest element is negative,
what is read has only `values[0]` of the maximum.  So the quotient is tried as the maximum, and the numbers next to it,
since it is rounded.  What no maximum gives back, as numbers that were never codes, is rounded to the nearest.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.config.optimizers import EIGHT_BIT_BLOCK as BLOCK

_PIECE = 1 << 18  # elements that are read or written at once; temporaries are some 30 bytes for each


class BlockMoment:
    """A flat moment of whole blocks; what it stores at first are zeros.

    codes: uint8 [elements].  maxima: float32 [blocks].  values: float32 [256], ascending.
    """

    def __init__(self, codes: Tensor, maxima: Tensor, values: Tensor) -> None:
        self.codes, self.maxima, self.values = codes, maxima, values
        self._open: dict[tuple[int, int], Tensor] = {}

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The tensors in which the moment is stored."""
        return self.codes, self.maxima

    def __getitem__(self, within: slice) -> "BlockMoment":
        """Return a part that begins at a block's first element, a view."""
        assert within.start % BLOCK == 0, "parts begin at a block"
        blocks = slice(within.start // BLOCK, -(-within.stop // BLOCK))
        return BlockMoment(self.codes[within], self.maxima[blocks], self.values)

    def read(self) -> Tensor:
        """Return the elements in float32."""
        found = torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        for within, blocks in _pieces(found.numel()):
            found[within] = _decoded(self.codes[within], self.maxima[blocks], self.values)
        return found

    def write(self, elements: Tensor) -> None:
        """Store the first elements; those behind them in the last block, which are padding, become zeros."""
        for within, blocks in _pieces(elements.numel()):
            piece = elements[within].to(self.maxima.device, torch.float32)
            padded = torch.nn.functional.pad(piece, (0, -piece.numel() % BLOCK)).view(-1, BLOCK)
            codes, self.maxima[blocks] = _encoded(padded, self.values)
            place = self.codes[within.start : within.start + padded.numel()]
            place.copy_(codes.view(-1)[: place.numel()])

    def opened(self, within: slice) -> Tensor:
        """Return elements of a part as float32 that may be written to; `close` stores what they are then."""
        key = within.start, within.stop
        if key not in self._open:
            self._open[key] = self[within].read()
        return self._open[key]

    def close(self) -> None:
        """Store what has been opened."""
        for (start, _), elements in self._open.items():
            self[slice(start, start + -(-elements.numel() // BLOCK) * BLOCK)].write(elements)
        self._open.clear()


class BlockElements(NamedTuple):
    """Elements of a moment in 8 bits, in float32 once they are asked for.

    is_written: what is written to them is stored by `BlockMoment.close`.
    """

    moment: BlockMoment
    within: slice
    is_written: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def view(self) -> Tensor:
        return self.moment.opened(self.within) if self.is_written else self.moment[self.within].read()


def _pieces(numel: int) -> Iterator[tuple[slice, slice]]:
    """Yield the pieces of so many elements, and their blocks."""
    for start in range(0, numel, _PIECE):
        stop = min(start + _PIECE, numel)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _decoded(codes: Tensor, maxima: Tensor, values: Tensor) -> Tensor:
    return values[codes.int()] * maxima.repeat_interleave(BLOCK)[: codes.numel()]


def _encoded(blocks: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [blocks, 256] and the maxima [blocks] of elements [blocks, 256] in float32."""
    largest = blocks.abs().amax(1)
    codes = _nearest(blocks, largest, values)
    if values[0] == 0:
        return codes, largest
    maxima, quotient = largest.clone(), blocks.amin(1) / values[0]
    infinity = torch.full_like(quotient, torch.inf)
    found = _gives_back(blocks, codes, maxima, values)
    for tried in (quotient, quotient.nextafter(infinity), quotient.nextafter(-infinity)):
        its_codes = _nearest(blocks, tried, values)
        better = ~found & (tried > 0) & _gives_back(blocks, its_codes, tried, values)
        codes, maxima = torch.where(better[:, None], its_codes, codes), torch.where(better, tried, maxima)
        found = found | better
    return codes, maxima


def _nearest(blocks: Tensor, maxima: Tensor, values: Tensor) -> Tensor:
    quotients = torch.where(maxima[:, None] > 0, blocks / maxima[:, None], 0.0)
    return torch.bucketize(quotients, (values[1:] + values[:-1]) / 2).to(torch.uint8)


def _gives_back(blocks: Tensor, codes: Tensor, maxima: Tensor, values: Tensor) -> Tensor:
    """Return the blocks [blocks] that are read again exactly."""
    return (values[codes.int()] * maxima[:, None] == blocks).all(1)
