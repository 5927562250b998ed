"""The two layers that are as wide as the vocabulary: the embedding and the head, cut by vocabulary rows.

The vocabulary is *padded* so that every rank holds equally many rows; padding rows lie past the real ones, are never
looked up, and are masked out of the loss's softmax, so they change neither the loss nor any gradient.

A head returns logits, or the summed loss itself when it has targets (`head_loss.py`).  Where the sequence is split, the
embedding returns n / t of n tokens and a head reads as many; ids, labels and logits are those of all tokens.

    V = vocabulary, Vp = padded vocabulary; rank r of t holds rows [r Vp / t, (r + 1) Vp / t)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.parallel.gradient_slot import GetGradientSlot, add_to, gradient_slot_of
from megazero.parallel.param_spec import InitialValue, ParamSpec
from megazero.tensor_parallel.cross_entropy import IN_PLACE, Softmax
from megazero.tensor_parallel.head_loss import Targets, summed_cross_entropy
from megazero.tensor_parallel.layers import TensorParallel, column_linear, uninitialised_parameter
from megazero.tensor_parallel.regions import exit_region


class VocabParallelEmbedding(nn.Module):
    """A layer from token ids [...] to vectors [..., h], alike on all ranks; n ids to [n / t, h] if tokens are split."""

    def __init__(
        self, tp: TensorParallel, *, vocab_size: int, padded_vocab_size: int, hidden_size: int, init: InitialValue
    ) -> None:
        super().__init__()
        self._tp = tp
        self.weight = vocab_parameter(tp, vocab_size, padded_vocab_size, hidden_size, init=init)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self._tp.use(self.weight)
        if self._tp.communicator.size == 1:
            return _look_up(ids, weight, gradient_slot_of(weight))
        num_rows = weight.shape[0]
        row = ids - self._tp.communicator.rank * num_rows
        elsewhere = (row < 0) | (row >= num_rows)
        found = _look_up(row.clamp(0, num_rows - 1), weight, gradient_slot_of(weight))
        return exit_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._tp.border)


class _LookUp(torch.autograd.Function):
    """F.embedding with a backward that can write to the gradient's slot; rows [...], weight [m, h] to [..., h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, get_slot: GetGradientSlot | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.get_slot, ctx.num_rows = get_slot, weight.shape[0]
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        whole = torch.ops.aten.embedding_dense_backward(grad, rows, ctx.num_rows, -1, False)
        slot = None if ctx.get_slot is None else ctx.get_slot()
        if slot is None:
            return None, whole, None
        add_to(slot.tensor, whole, is_first=slot.is_first)
        return None, None, None


_look_up: Callable[..., Tensor] = _LookUp.apply


class TiedHead(nn.Module):
    """A head with the embedding's matrix: hidden [..., h] to this rank's logits [..., Vp / t], or the summed loss."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self._tp = tp
        self.softmax: Softmax = IN_PLACE

    def forward(self, x: Tensor, weight: nn.Parameter, *, targets: Targets | None = None) -> Tensor:
        return logits_or_loss(self._tp, x, weight, targets, self.softmax)


class VocabParallelHead(nn.Module):
    """A head with a matrix of its own: hidden [..., h] to this rank's logits [..., Vp / t], or the summed loss."""

    def __init__(
        self, tp: TensorParallel, *, vocab_size: int, padded_vocab_size: int, hidden_size: int, init: InitialValue
    ) -> None:
        super().__init__()
        self._tp = tp
        self.weight = vocab_parameter(tp, vocab_size, padded_vocab_size, hidden_size, init=init)
        self.softmax: Softmax = IN_PLACE

    def forward(self, x: Tensor, *, targets: Targets | None = None) -> Tensor:
        return logits_or_loss(self._tp, x, self.weight, targets, self.softmax)


def vocab_parameter(
    tp: TensorParallel, vocab_size: int, padded_vocab_size: int, hidden_size: int, *, init: InitialValue
) -> nn.Parameter:
    """Make this rank's rows of a [V, h] matrix, [Vp / t, h]; some, or all, of the last ranks' rows may be padding."""
    size, rank = tp.communicator.size, tp.communicator.rank
    assert padded_vocab_size % size == 0 and padded_vocab_size >= vocab_size, (vocab_size, padded_vocab_size, size)
    local = (padded_vocab_size // size, hidden_size)
    spec = ParamSpec(
        "",
        (vocab_size, hidden_size),
        local,
        (rank * local[0], 0),
        sharded_axes=("tp",),
        writes_gradient=True,
        init=init,
    )
    return uninitialised_parameter(tp, local, spec)


def logits_or_loss(
    tp: TensorParallel, x: Tensor, weight: nn.Parameter, targets: Targets | None, softmax: Softmax
) -> Tensor:
    """Map x [..., h] by the rows held here, [Vp / t, h], to logits [..., Vp / t], or to the summed loss of targets."""
    if targets is None:
        return column_linear(tp, x, weight, None, products=tp.head_products)
    return summed_cross_entropy(x, tp.use(weight), targets, tp.border, products=tp.head_products, softmax=softmax)
