"""Boxes: how a range of a rank's flat tensor becomes boxes of the logical tensor, and how boxes intersect.

A *range* is [start, stop) of a row-major flattened tensor.  It is at most 2 * ndim - 1 boxes, whatever its ends:

        . . . . . .
        . . . a a a      a   the rest of the first row touched        (a range of one dim less)
        b b b b b b      b   whole rows
        b b b b b b
        c c . . . .      c   the beginning of the last row touched    (a range of one dim less)

A *piece* is one such box in logical coordinates, clipped to the unpadded tensor, with the position and strides at which
its elements lie in the flat range.  Everything here is arithmetic; no element is read or written.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add, sub
from typing import Literal

from torch import Tensor

from megazero.parallel.param_spec import Box, ParamSpec


@dataclass(frozen=True)
class BoxPiece:
    """A box of the logical tensor inside a flat range.

    box:      the region, in logical coordinates.
    position: index of its first element in the flat range, in elements.
    strides:  distance of neighbours in the flat range, per dim, in elements.
    """

    box: Box
    position: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Defect:
    """A region that a set of boxes does not cover ("hole") or covers more than once ("overlap")."""

    kind: Literal["hole", "overlap"]
    box: Box


def format_box(box: Box) -> str:
    """Format a box as `[0:10,4:8]`: first and past-the-last index, per dim."""
    return "[" + ",".join(f"{a}:{a + n}" for a, n in zip(box.offset, box.lengths, strict=True)) + "]"


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense row-major tensor of this shape, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def range_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up elements [start, stop) of a row-major tensor, in order; at most 2 * ndim - 1."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        yield from _within_row(shape, first, head, tail)
        return
    if head:
        yield from _within_row(shape, first, head, row)
        first += 1
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    yield from _within_row(shape, last, 0, tail)


def _within_row(shape: tuple[int, ...], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in range_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.lengths))


def split_range(shape: tuple[int, ...], start: int, stop: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into runs of at most `limit` elements, at row boundaries where rows are short enough."""
    rows = [math.prod(shape[dim:]) for dim in range(len(shape) + 1)]
    grain = max((row for row in rows if 0 < row <= limit), default=1)
    step = max(1, limit // grain) * grain
    while start < stop:
        end = min(stop, (start // step + 1) * step)
        yield start, end
        start = end


def fragment_pieces(spec: ParamSpec, start: int, stop: int, limit: int | None = None) -> Iterator[BoxPiece]:
    """Yield the pieces of elements [start, stop) of this rank's tensor, without padding, each at most `limit` long."""
    strides = row_strides(spec.local_shape)
    runs = [(start, stop)] if limit is None else split_range(spec.local_shape, start, stop, limit)
    for a, b in runs:
        for local in range_boxes(spec.local_shape, a, b):
            box = _logical(spec, local)
            if box.numel:
                position = sum(i * stride for i, stride in zip(local.offset, strides, strict=True)) - start
                yield BoxPiece(box, position, strides)


def piece_view(state: Tensor, piece: BoxPiece) -> Tensor:
    """Return the elements of a piece as a view of the flat range, in the shape of the piece's box."""
    step = state.stride(0)
    strides = tuple(stride * step for stride in piece.strides)
    return state.as_strided(piece.box.lengths, strides, state.storage_offset() + piece.position * step)


def _logical(spec: ParamSpec, local: Box) -> Box:
    """Return a box of the local tensor in logical coordinates, clipped to the full shape (lengths may become 0)."""
    offset = tuple(base + index for base, index in zip(spec.offset, local.offset, strict=True))
    room = (full - begin for full, begin in zip(spec.full_shape, offset, strict=True))
    return Box(offset, tuple(max(0, min(length, free)) for length, free in zip(local.lengths, room, strict=True)))


def intersect(a: Box, b: Box) -> Box | None:
    """Return the region two boxes of one tensor share, or None."""
    # Most boxes of a tensor lie apart in its first dim, and readers compare thousands of them.
    if a.offset and not a.offset[0] - b.lengths[0] < b.offset[0] < a.offset[0] + a.lengths[0]:
        return None
    offset = tuple(map(max, a.offset, b.offset))
    ends = tuple(min(o + n, p + m) for o, n, p, m in zip(a.offset, a.lengths, b.offset, b.lengths, strict=True))
    lengths = tuple(end - begin for begin, end in zip(offset, ends, strict=True))
    return Box(offset, lengths) if all(length > 0 for length in lengths) else None


def index_within(outer: Box, inner: Box) -> tuple[slice, ...]:
    """Return the index that selects `inner` from a tensor that holds exactly `outer`."""
    begins = (i - o for i, o in zip(inner.offset, outer.offset, strict=True))
    return tuple(slice(begin, begin + n) for begin, n in zip(begins, inner.lengths, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that a whole tensor of this shape is."""
    return Box((0,) * len(shape), tuple(shape))


def bounds_of(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that contains these boxes of one tensor, at least one."""
    offset = tuple(map(min, zip(*(box.offset for box in boxes), strict=True)))
    ends = map(max, zip(*(map(add, box.offset, box.lengths) for box in boxes), strict=True))
    return Box(offset, tuple(map(sub, ends, offset)))


def tiling_defects(region: Box, boxes: Iterable[Box]) -> Iterator[Defect]:
    """Yield the parts of a region of a tensor that boxes of the same tensor do not cover exactly once.

    Cuts the region into slabs at every begin and end of a box along a dim, and searches each slab one dim deeper.  An
    iterator, so that a caller that shows only the first few defects does not pay for the rest.
    """
    if region.numel:
        yield from _slab_defects(region, [shared for box in boxes if (shared := intersect(box, region))], ())


def _slab_defects(region: Box, boxes: Sequence[Box], above: tuple[tuple[int, int], ...]) -> Iterator[Defect]:
    """Yield defects inside the slab that `above` (begin and length per dim so far) selects; `boxes` all span it."""
    dim = len(above)
    if not boxes or dim == len(region.offset):
        if len(boxes) != 1:
            slab = (*above, *zip(region.offset[dim:], region.lengths[dim:], strict=True))
            box = Box(tuple(begin for begin, _ in slab), tuple(length for _, length in slab))
            yield Defect("overlap" if boxes else "hole", box)
        return
    first, last = region.offset[dim], region.offset[dim] + region.lengths[dim]
    ends = {end for box in boxes for end in (box.offset[dim], box.offset[dim] + box.lengths[dim])}
    waiting = sorted(boxes, key=lambda box: box.offset[dim], reverse=True)
    active: list[Box] = []
    for low, high in pairwise(sorted(ends | {first, last})):
        active = [box for box in active if box.offset[dim] + box.lengths[dim] > low]
        while waiting and waiting[-1].offset[dim] == low:
            active.append(waiting.pop())
        yield from _slab_defects(region, active, (*above, (low, high - low)))
