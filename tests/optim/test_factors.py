"""Tests how a parameter divides into matrices, rows and columns, on one rank and as one of several slices."""

import math

import torch
from support.each import each

from megazero.optim.factors import Factors, put, take, whole_spec
from megazero.parallel.param_spec import ParamSpec

SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (5, 3), (1, 6), (6, 1), (2, 3, 4), (3, 1, 2), (2, 3, 2, 3)]


def factors_of(shape: tuple[int, ...]) -> Factors:
    return Factors(ParamSpec("w", shape, shape, (0,) * len(shape)), shape, 0)


@each("shape", SHAPES)
def test_blocks_tile_any_range_of_any_shape(shape: tuple[int, ...]) -> None:
    """Rows and columns of a block are those of torch's tensor: its last two dims, or one column of a vector."""
    numel = math.prod(shape)
    matrices, rows, columns = (*shape[:-2], *shape[-2:]) if len(shape) == 3 else (1, 1, 1)
    if len(shape) != 3:
        matrices = math.prod(shape[:-2])
        rows, columns = shape[-2:] if len(shape) > 1 else (numel, 1)
    places = torch.arange(numel).view(matrices, rows, columns)
    factors = factors_of(shape)
    for start in range(numel):
        for stop in range(start + 1, numel + 1):
            found, end = [], 0
            for block in factors.blocks(start, stop):
                assert block.place.start == end and block.place.stop - end == math.prod(block.shape)
                end = block.place.stop
                found.append(places[block.matrices, block.rows, block.columns].flatten())
            assert torch.cat(found).tolist() == list(range(start, stop))
            assert len(found) <= 7, "at most three in the matrices at both ends, and the whole ones"


def test_averages_have_the_logical_dims_that_the_module_joins() -> None:
    """A fused weight [3, heads, 5, 6], of which this rank has heads 2 and 3 of 4, is a matrix [30, 6] in the module."""
    spec = ParamSpec("qkv", (3, 4, 5, 6), (3, 2, 5, 6), (0, 2, 0, 0), sharded_axes=("tp",))
    factors = Factors(spec, (30, 6), 0)
    assert factors.local == (1, 30, 6) and factors.whole_numel == 360
    assert factors.rows.full_shape == (3, 4, 5, 1) and factors.columns.full_shape == (1, 1, 1, 6)
    assert factors.rows.local_shape == (3, 2, 5, 1) and factors.rows.offset == (0, 2, 0, 0)
    joined = Factors(ParamSpec("out", (6, 4, 5), (6, 2, 5), (0, 2, 0), sharded_axes=("tp",)), (6, 10), 0)
    assert joined.rows.full_shape == (6, 1, 1) and joined.columns.full_shape == (1, 4, 5)
    flat = Factors(ParamSpec("bias", (3, 4, 5), (3, 2, 5), (0, 2, 0), sharded_axes=("tp",)), (30,), 0)
    assert not flat.has_columns and flat.rows.full_shape == (3, 4, 5) and flat.local == (1, 30, 1)
    assert whole_spec(factors.rows).is_counted_on({"tp": 0}) and not whole_spec(factors.rows).is_counted_on({"tp": 1})


def test_a_slice_is_put_where_it_lies_without_its_padding() -> None:
    """The second of two ranks has 4 rows of a matrix of 7, the last of them padding."""
    spec = ParamSpec("w", (7, 2), (4, 2), (4, 0), sharded_axes=("tp",))
    rows = Factors(spec, (4, 2), 0).rows
    whole = put(rows, torch.tensor([1.0, 2.0, 3.0, 9.0]))
    assert whole.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert take(rows, whole).flatten().tolist() == [1, 2, 3, 0]
    beyond = Factors(ParamSpec("w", (4, 2), (4, 2), (4, 0), sharded_axes=("tp",)), (4, 2), 0).rows
    assert beyond.box.numel == 0
