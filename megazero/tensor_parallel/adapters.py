"""Low-rank adapters beside linear layers whose weights are frozen (LoRA; Hu et al., arXiv 2106.09685).

An adapted layer computes W x + (alpha / r) B A x.  Its weight W [out, in] stays as it is; A [r, in] and B [out, r] are
trained, and B begins as zero, so that the layer begins as it was.  On several ranks A and B are cut as W is, and what
is sent between them is r wide:

    W's outputs are cut    A is whole on every rank, outside of the region; B's outputs are cut, as W's
    W's inputs are cut     A's inputs are cut, as W's; B is whole on every rank, outside of the region

A parameter that is whole on every rank is outside of sharded regions: its gradient is the same everywhere, or, where
the sequence is split, a part of the tokens', and summed up.  Products of adapters are never of 8-bit numbers.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.parallel.param_spec import InitialValue, spec_of
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedKeyValueLinear,
    RowParallelLinear,
    TensorParallel,
    replicated_parameter,
)


class LowRank(NamedTuple):
    """The form of adapters: their rank r, what their output is multiplied by (alpha / r), and dropout before them."""

    rank: int
    scale: float
    dropout: float = 0.0


class Adapter(nn.Module):
    """A product of two thin layers, scale * lora_B(lora_A(dropout(x))), to be added to a frozen layer's output."""

    def __init__(self, lora_a: nn.Module, lora_b: nn.Module, *, scale: float, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout
        self.lora_A = lora_a
        self.lora_B = lora_b
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        # The inner product is the thinnest place to multiply.
        y: Tensor = self.lora_B(self.lora_A(self.dropout(x)) * self.scale)
        return y


def train_adapters_alone(model: nn.Module) -> None:
    """Freeze every parameter of the model but those of its adapters."""
    model.requires_grad_(False)
    for adapter in adapters(model):
        adapter.requires_grad_(True)


def adapters(model: nn.Module) -> Iterator[Adapter]:
    """Yield the adapters within a module."""
    return (module for module in model.modules() if isinstance(module, Adapter))


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """Return W + scale B A of [*out, in], A [r, in] and B [*out, r], in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    product: Tensor = torch.tensordot(lora_b.to(wide), lora_a.to(wide), dims=1)
    return weight.to(wide) + scale * product


def is_adapters(name: str) -> bool:
    """Return True for the name of a parameter of an adapter."""
    return ".adapter.lora_" in name


def first_std(inputs: int) -> float:
    """Return the standard deviation of A's first values: that of PEFT's, uniform up to 1 / sqrt(in)."""
    return 1 / math.sqrt(3 * inputs)


def adapt_column(tp: TensorParallel, layer: ColumnParallelLinear | ReplicatedKeyValueLinear, form: LowRank) -> None:
    """Give a layer whose outputs are cut an adapter."""
    *outputs, inputs = spec_of("", layer.weight).full_shape
    tp = replace(tp, products=tp.head_products)
    init = InitialValue("zeros")
    if isinstance(layer, ReplicatedKeyValueLinear):
        two, heads, width = outputs
        pairs = (two, heads, width, form.rank)
        second: nn.Module = ReplicatedKeyValueLinear(
            tp, logical_shape=pairs, used=layer.used, init=init, has_bias=False
        )
    else:
        shape = (*outputs, form.rank)
        second = ColumnParallelLinear(tp, logical_shape=shape, split_dim=layer.split_dim, init=init, has_bias=False)
    first = _Outside(tp, form.rank, inputs, InitialValue("normal", first_std(inputs)))
    layer.adapter = Adapter(first, second, scale=form.scale, dropout=_Dropout(tp, form.dropout, is_inside=False))


def adapt_row(tp: TensorParallel, layer: RowParallelLinear, form: LowRank) -> None:
    """Give a layer whose inputs are cut an adapter."""
    outputs, inputs = spec_of("", layer.weight).full_shape
    tp = replace(tp, products=tp.head_products)
    init = InitialValue("normal", first_std(inputs))
    first = RowParallelLinear(tp, logical_shape=(form.rank, inputs), init=init, has_bias=False)
    second = _Outside(tp, outputs, form.rank, InitialValue("zeros"))
    layer.adapter = Adapter(first, second, scale=form.scale, dropout=_Dropout(tp, form.dropout, is_inside=True))


class _Outside(nn.Module):
    """A linear layer outside of sharded regions, [n, in] to [n, out], whose weight every rank holds whole."""

    def __init__(self, tp: TensorParallel, outputs: int, inputs: int, init: InitialValue) -> None:
        super().__init__()
        self._tp = tp
        self.weight = replicated_parameter(tp, (outputs, inputs), init=init, decay=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._tp.use(self.weight))


class _Dropout(nn.Module):
    """Dropout of an adapter's input, outside or inside of sharded regions, where ranks hold different elements."""

    def __init__(self, tp: TensorParallel, p: float, *, is_inside: bool) -> None:
        super().__init__()
        self._tp, self._p, self._is_inside = tp, p, is_inside

    def forward(self, x: Tensor) -> Tensor:
        if not self._is_inside or self._p == 0 or not self.training:
            return self._tp.residual_dropout(x, self._p, self.training)
        # Compiled code draws from the current state.
        with nullcontext() if torch.compiler.is_compiling() else self._tp.random.sharded():
            return F.dropout(x, self._p)
