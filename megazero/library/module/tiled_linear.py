"""Defines a linear layer in tiles, of whose weight ZeRO stage 3 gathers one tile at a time.

Memory-centric tiling (ZeRO-Infinity, section 5.1.3): a layer whose weight alone would not fit, or
would need one piece of memory larger than any that is free, becomes a grid of small linear layers, used one after the
other.  Each is a module of its own, so ZeRO stage 3, which gathers parameters module by module, has one tile in memory.

             in_splits
           +-----+-----+-----+
    out_   | 0.0 | 0.1 | 0.2 |--> y part 0 = x part 0 * W 0.0 + x part 1 * W 0.1 + x part 2 * W 0.2 + bias part 0
    splits +-----+-----+-----+
           | 1.0 | 1.1 | 1.2 |--> y part 1
           +-----+-----+-----+
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from megazero.errors import ConfigError, Problem, raise_problems
from megazero.zero.parameters.gathered import GatheredParameters


class TiledLinear(nn.Module):
    """A linear layer in in_splits x out_splits tiles: y [.., out_features] = x [.., in_features] W^T + b.

    `linears[o][i]` computes its share of output part o from input part i; the last tile of each row has the bias.
    Where sizes do not divide evenly, the first parts have one element more.

    input_is_already_split: forward takes the in_splits parts of x in a sequence, instead of x.
    combine_out_splits: False makes forward return the list of the out_splits parts of y, and y is never whole.
    linear_cls: the class of a tile, constructed with (inputs, outputs, bias=.., **kwargs); it has a weight and a bias.
    init_linear: a linear layer of the whole size, whose values the tiles take.  Without it each tile starts with
    linear_cls's own values, which are wider than the whole layer's where they depend on the number of inputs.
    kwargs: further arguments of linear_cls (device, dtype).

    Raises ConfigError for splits below 1 or above the features, and for an init_linear of another size.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        problems = [_check_splits("in", in_splits, in_features), _check_splits("out", out_splits, out_features)]
        raise_problems(ConfigError, [problem for problem in problems if problem is not None])
        self.in_features, self.out_features = in_features, out_features
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split = input_is_already_split
        self.combine_out_splits = combine_out_splits
        self._in_sizes, self._out_sizes = _cut(in_features, in_splits), _cut(out_features, out_splits)
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(inputs, outputs, bias=bias and index == last, **kwargs)
                for index, inputs in enumerate(self._in_sizes)
            )
            for outputs in self._out_sizes
        )
        self._has_bias = bias
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return y for input_ [.., in_features], or for its parts in a sequence; raise ConfigError for other sizes."""
        parts = self._parts_of(input_)
        outputs = [self._output_part(cast(nn.ModuleList, row), parts) for row in self.linears]
        if not self.combine_out_splits:
            return outputs
        return outputs[0] if self.out_splits == 1 else torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of `other`, a linear layer of the whole size; raise ConfigError if it has another size.

        Where parameters are partitioned this is collective, and every rank takes data-parallel rank 0's values.
        """
        raise_problems(ConfigError, self._problems_of(other))
        with GatheredParameters(other.parameters(recurse=False)):
            for tile, outputs, inputs in self._tiles():
                with GatheredParameters(tile, modifier_rank=0):
                    tile.weight.copy_(other.weight[outputs, inputs])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[outputs])

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self._has_bias}, "
            f"in_splits={self.in_splits}, out_splits={self.out_splits}"
        )

    def _tiles(self) -> Iterator[tuple[nn.Linear, slice, slice]]:
        """Yield every tile, with the slices of its outputs and inputs in the whole layer."""
        for row, outputs in zip(self.linears, _slices(self._out_sizes), strict=True):
            for tile, inputs in zip(cast(nn.ModuleList, row), _slices(self._in_sizes), strict=True):
                yield cast(nn.Linear, tile), outputs, inputs

    @staticmethod
    def _output_part(row: nn.ModuleList, parts: Sequence[Tensor]) -> Tensor:
        """Compute one part of y: the row's tiles, one after the other, each on its part of x."""
        total: Tensor | None = None
        for tile, part in zip(row, parts, strict=True):
            share = tile(part)
            # Not added in place: the tile's output may be a view that a hook has made.
            total = share if total is None else total + share
        assert total is not None, "a row has at least one tile"
        return total

    def _parts_of(self, input_: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
        if isinstance(input_, Tensor):
            whole = not self.input_is_already_split or self.in_splits == 1
            if whole and input_.shape[-1:] == (self.in_features,):
                return torch.split(input_, self._in_sizes, dim=-1)
            given = f"one tensor of shape {list(input_.shape)}"
        else:
            if self.input_is_already_split and [part.shape[-1] for part in input_] == self._in_sizes:
                return input_
            given = f"{len(input_)} tensors of shapes {', '.join(str(list(part.shape)) for part in input_)}"
        legal = f"a tensor [.., {self.in_features}]"
        if self.input_is_already_split:
            legal = "a sequence of tensors " + ", ".join(f"[.., {size}]" for size in self._in_sizes)
        rule = f"input_is_already_split={self.input_is_already_split} sets the form in which the input comes"
        raise ConfigError(Problem(f"the input of TiledLinear: {given}", rule, legal))

    def _problems_of(self, other: nn.Linear) -> list[Problem]:
        problems = []
        if other.weight.shape != (self.out_features, self.in_features):
            given = f"a weight of shape {list(other.weight.shape)} to copy into TiledLinear"
            legal = f"[{self.out_features}, {self.in_features}]"
            problems.append(Problem(given, "both layers have the same size", legal))
        if (other.bias is not None) != self._has_bias:
            given = f"a layer {'with' if other.bias is not None else 'without'} bias to copy into TiledLinear"
            problems.append(Problem(given, "both layers have a bias or none has", f"bias={self._has_bias}"))
        return problems


def _check_splits(side: str, splits: int, features: int) -> Problem | None:
    if 1 <= splits <= features:
        return None
    given = f"TiledLinear({side}_splits={splits}) of {side}_features={features}"
    return Problem(given, "every tile has at least one element on each side", f"{side}_splits from 1 to {features}")


def _cut(size: int, splits: int) -> list[int]:
    """Return the sizes of the parts, as equal as possible, larger ones first."""
    smallest, longer = divmod(size, splits)
    return [smallest + (part < longer) for part in range(splits)]


def _slices(sizes: Sequence[int]) -> list[slice]:
    """Return the slice of each part in the whole."""
    return [slice(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]
