"""The division of a parameter into matrices, and of a run of its elements into blocks of rows and columns.

The matrices are those that torch's Adafactor sees: the last two dims of the module's parameter, once for every place in
the others.  A parameter of one dim or none has no columns: each element is a row.

A rank has a range of its row-major local tensor, and the averages of rows and columns are of the logical one.  So
averages have the logical tensor's dims, of length 1 where they run over the dim:

    parameter                       [3, heads, head_dim, hidden], in the module [3 * heads * head_dim, hidden]
    averages of its rows            [3, heads, head_dim, 1]
    averages of its columns         [1,     1,        1, hidden]
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from megazero.parallel.param_spec import ParamSpec


class FactorBlock(NamedTuple):
    """Elements of a range that are some rows of some columns of some matrices; `place` is theirs in the range."""

    place: slice
    matrices: slice
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """The number of matrices, of rows and of columns."""
        matrices, rows, columns = (each.stop - each.start for each in self[1:])
        return matrices, rows, columns


@dataclass(frozen=True)
class Factors:
    """The matrices of a parameter.

    shape: that of the module's parameter, in which local dims of the spec are joined.  group: its optimizer group.
    """

    spec: ParamSpec
    shape: tuple[int, ...]
    group: int

    @property
    def has_columns(self) -> bool:
        return len(self.shape) > 1

    @cached_property
    def whole_numel(self) -> int:
        """The elements of the logical tensor."""
        return math.prod(self.spec.full_shape)

    @cached_property
    def averages(self) -> tuple[ParamSpec, ...]:
        """The specs of what there is: averages over rows, and over columns."""
        return (self.rows, self.columns) if self.has_columns else (self.rows,)

    @cached_property
    def local(self) -> tuple[int, int, int]:
        """The matrices on this rank, and their rows and columns, padding included."""
        if not self.has_columns:
            return 1, math.prod(self.shape), 1
        return math.prod(self.shape[:-2]), self.shape[-2], self.shape[-1]

    @cached_property
    def rows(self) -> ParamSpec:
        """The spec of the averages over each row: one value for every row."""
        return self._without(self._column_dims)

    @cached_property
    def columns(self) -> ParamSpec:
        """The spec of the averages over each column."""
        return self._without(self.row_dims)

    @cached_property
    def row_dims(self) -> tuple[int, ...]:
        """The logical dims that number the rows of a matrix."""
        return self._dims_of(len(self.shape) - 2 if self.has_columns else 0)

    @cached_property
    def _column_dims(self) -> tuple[int, ...]:
        return self._dims_of(len(self.shape) - 1) if self.has_columns else ()

    def blocks(self, start: int, stop: int) -> Iterator[FactorBlock]:
        """Yield the blocks of which elements [start, stop) of the local tensor consist, in order."""
        _, rows, columns = self.local
        numel, position = rows * columns, start
        while position < stop:
            matrix, within = divmod(position, numel)
            row, column = divmod(within, columns)
            end = min(stop, (matrix + 1) * numel)
            if within == 0 and stop - position >= numel:
                count = (stop - position) // numel
                block = slice(matrix, matrix + count), slice(0, rows), slice(0, columns)
            elif column == 0 and end - position >= columns:
                block = slice(matrix, matrix + 1), slice(row, row + (end - position) // columns), slice(0, columns)
            else:
                last = min(columns, column + end - position)
                block = slice(matrix, matrix + 1), slice(row, row + 1), slice(column, last)
            length = math.prod(each.stop - each.start for each in block)
            yield FactorBlock(slice(position - start, position - start + length), *block)
            position += length

    def _without(self, dims: tuple[int, ...]) -> ParamSpec:
        """Return the spec of values that are the same along these dims."""

        def reduced(lengths: tuple[int, ...], to: int) -> tuple[int, ...]:
            return tuple(to if dim in dims else length for dim, length in enumerate(lengths))

        spec = self.spec
        full, local, offset = reduced(spec.full_shape, 1), reduced(spec.local_shape, 1), reduced(spec.offset, 0)
        return replace(spec, full_shape=full, local_shape=local, offset=offset)

    def _dims_of(self, place: int) -> tuple[int, ...]:
        """Return the logical dims that are joined to the dim at this place of the module's parameter."""
        if len(self.shape) < 2:
            return tuple(range(len(self.spec.local_shape)))
        if len(self.shape) == len(self.spec.local_shape):
            return (place,)
        joined, current, filled = list[int](), 0, 1
        for dim, length in enumerate(self.spec.local_shape):
            if filled * length > self.shape[current]:
                current, filled = current + 1, 1
            filled *= length
            if current == place:
                joined.append(dim)
        return tuple(joined)


def whole_spec(spec: ParamSpec) -> ParamSpec:
    """Return the spec of a tensor of which every rank has all."""
    offset = (0,) * len(spec.full_shape)
    return replace(spec, local_shape=spec.full_shape, offset=offset, sharded_axes=())


def take(spec: ParamSpec, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, zeros in its padding: a view where that is all of it."""
    if spec.local_shape == spec.full_shape:
        return whole.view(spec.local_shape)
    local = whole.new_zeros(spec.local_shape)
    inside, outside = _places(spec)
    local[inside] = whole.view(spec.full_shape)[outside]
    return local


def put(spec: ParamSpec, local: Tensor) -> Tensor:
    """Return the whole tensor, flat, that has this rank's part without its padding, and else zeros."""
    if spec.local_shape == spec.full_shape:
        return local
    whole = local.new_zeros(spec.full_shape)
    inside, outside = _places(spec)
    whole[outside] = local.view(spec.local_shape)[inside]
    return whole.view(-1)


def _places(spec: ParamSpec) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the place of this rank's box in its own tensor, and in the whole."""
    offset, lengths = spec.box.offset, spec.box.lengths
    inside = tuple(slice(0, length) for length in lengths)
    return inside, tuple(slice(first, first + length) for first, length in zip(offset, lengths, strict=True))
