"""Tests of the boxes of flat ranges against numpy's indexing."""

import math
from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.checkpoint.slices import (
    Defect,
    format_box,
    fragment_pieces,
    index_within,
    intersect,
    piece_view,
    range_boxes,
    row_strides,
    split_range,
    tiling_defects,
    whole,
)
from megazero.parallel.param_spec import Box, ParamSpec

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, length - 1)) for length in shape)
    lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return Box(offset, lengths)


def region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.lengths, strict=True))


@given(ranges())
def test_boxes_of_a_range_hold_its_elements_in_order(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    numbers = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(range_boxes(shape, start, stop))
    found = [value for box in boxes for value in numbers[region(box)].reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_bound_on_the_number_of_boxes_is_reached() -> None:
    assert list(range_boxes((4, 5, 6), 40, 100)) == [
        Box((1, 1, 4), (1, 1, 2)),
        Box((1, 2, 0), (1, 3, 6)),
        Box((2, 0, 0), (1, 5, 6)),
        Box((3, 0, 0), (1, 1, 6)),
        Box((3, 1, 0), (1, 1, 4)),
    ]


@given(ranges(), st.integers(1, 40))
def test_split_covers_the_range_with_short_runs(case: tuple[tuple[int, ...], int, int], limit: int) -> None:
    shape, start, stop = case
    runs = list(split_range(shape, start, stop, limit))
    assert [index for a, b in runs for index in range(a, b)] == list(range(start, stop))
    assert all(0 < b - a <= limit for a, b in runs)


def test_split_prefers_row_boundaries() -> None:
    assert list(split_range((10, 6), 3, 60, 20)) == [(3, 18), (18, 36), (36, 54), (54, 60)]
    assert list(split_range((10, 60), 0, 130, 50)) == [(0, 50), (50, 100), (100, 130)]


@st.composite
def local_ranges(draw: st.DrawFn) -> tuple[ParamSpec, int, int]:
    """Draw a rank's tensor at any offset, perhaps partly or wholly past the full shape, and a range of its elements."""
    full = draw(SHAPES)
    local = tuple(draw(st.integers(1, 6)) for _ in full)
    offset = tuple(draw(st.integers(0, length + 1)) for length in full)
    numel = math.prod(local)
    start = draw(st.integers(0, numel))
    return ParamSpec("p", full, local, offset), start, draw(st.integers(start, numel))


@given(local_ranges(), st.one_of(st.none(), st.integers(1, 20)))
def test_pieces_take_each_element_from_its_place_and_no_padding(
    case: tuple[ParamSpec, int, int], limit: int | None
) -> None:
    spec, start, stop = case
    flat = torch.arange(start, stop)
    found: dict[tuple[int, ...], int] = {}
    for piece in fragment_pieces(spec, start, stop, limit):
        assert limit is None or piece.box.numel <= limit
        values = piece_view(flat, piece)
        for index in np.ndindex(*piece.box.lengths):
            place = tuple(o + i for o, i in zip(piece.box.offset, index, strict=True))
            assert place not in found
            found[place] = int(values[index])
    expected = {}
    for number in range(start, stop):
        local_index = np.unravel_index(number, spec.local_shape) if spec.local_shape else ()
        place = tuple(int(i) + o for i, o in zip(local_index, spec.offset, strict=True))
        if all(p < n for p, n in zip(place, spec.full_shape, strict=True)):
            expected[place] = number
    assert found == expected


def test_a_view_writes_through_also_into_a_strided_run() -> None:
    spec = ParamSpec("p", (2, 3), (2, 4), (0, 0))
    everything = torch.zeros(20)
    flat = everything[3:19:2]
    for piece in fragment_pieces(spec, 0, 8):
        piece_view(flat, piece).fill_(1)
    assert flat.tolist() == [1, 1, 1, 0, 1, 1, 1, 0]
    assert everything.sum() == 6


@given(st.data())
def test_intersection_equals_that_of_index_sets(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    counts = np.zeros(shape, dtype=int)
    counts[region(a)] += 1
    counts[region(b)] += 1
    shared = intersect(a, b)
    assert (counts == 2).sum() == (shared.numel if shared else 0)
    if shared is not None:
        assert (counts[region(shared)] == 2).all()
        numbers = np.arange(math.prod(shape)).reshape(shape)
        assert np.array_equal(numbers[region(a)][index_within(a, shared)], numbers[region(shared)])


@settings(max_examples=150)
@given(st.data())
def test_defects_equal_those_counted_element_by_element(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        counts[region(box)] += 1
    reported = np.zeros(shape, dtype=int)
    for defect in tiling_defects(whole(shape), boxes):
        expected = counts[region(defect.box)]
        assert (expected == 0).all() if defect.kind == "hole" else (expected > 1).all()
        reported[region(defect.box)] += 1
    assert np.array_equal(reported == 1, counts != 1)
    assert reported.max(initial=0) <= 1


@given(ranges())
def test_a_range_and_its_rest_tile_the_tensor(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = case
    cuts = (0, start, stop, math.prod(shape))
    boxes = [box for a, b in pairwise(cuts) for box in range_boxes(shape, a, b)]
    assert list(tiling_defects(whole(shape), boxes)) == []


def test_defects_of_tensors_without_elements_or_dims() -> None:
    assert list(tiling_defects(whole((0, 4)), [])) == []
    assert list(tiling_defects(whole(()), [Box((), ())])) == []
    assert list(tiling_defects(whole(()), [])) == [Defect("hole", Box((), ()))]
    assert list(tiling_defects(whole(()), [Box((), ())] * 2)) == [Defect("overlap", Box((), ()))]


def test_thousands_of_boxes_are_checked_quickly_enough_to_be_checked_always() -> None:
    # 8 tensor-parallel columns, each cut at other rows: 8 x 256 boxes, 2,049 slabs of 8.
    boxes = []
    for column in range(8):
        cuts = [0, *range(8 + column, 2048, 8), 2048]
        boxes += [Box((a, column * 4), (b - a, 4)) for a, b in pairwise(cuts)]
    assert list(tiling_defects(whole((2048, 32)), boxes)) == []
    assert next(tiling_defects(whole((2048, 32)), boxes[:-1])).kind == "hole"


def test_formatting_and_strides() -> None:
    assert format_box(Box((0, 4), (10, 4))) == "[0:10,4:8]"
    assert row_strides((2, 3, 4)) == (12, 4, 1)
