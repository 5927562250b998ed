"""The two ends that are as wide as the vocabulary: the embedding and the cross-entropy, cut by vocabulary rows.

The vocabulary is *padded* so that every rank holds equally many rows; padding rows lie past the real ones, are never
looked up, and are masked out of the softmax, so they change neither the loss nor any gradient.

    V = vocabulary, Vp = padded vocabulary; rank r of tp holds rows [r Vp/tp, (r+1) Vp/tp)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator
from megazero.parallel.param_spec import Init, ParamSpec
from megazero.tensor_parallel.layers import TensorParallel, column_linear, uninitialised_parameter
from megazero.tensor_parallel.regions import reduce_from_region


class VocabParallelEmbedding(nn.Module):
    """Token ids [...] to vectors [..., h], the same on every rank."""

    def __init__(
        self, tp: TensorParallel, *, vocab_size: int, padded_vocab_size: int, hidden_size: int, init: Init
    ) -> None:
        super().__init__()
        self._communicator = tp.communicator
        self.weight = vocab_parameter(tp, vocab_size, padded_vocab_size, hidden_size, init=init)

    def forward(self, ids: Tensor) -> Tensor:
        num_rows = self.weight.shape[0]
        row = ids - self._communicator.rank * num_rows
        elsewhere = (row < 0) | (row >= num_rows)
        found = F.embedding(row.clamp(0, num_rows - 1), self.weight)
        return reduce_from_region(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._communicator)


class TiedHead(nn.Module):
    """Hidden states [..., h] to this rank's logits [..., Vp / tp], by the embedding's matrix."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self._communicator = tp.communicator

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return vocab_parallel_logits(x, weight, self._communicator)


class VocabParallelHead(nn.Module):
    """Hidden states [..., h] to this rank's logits [..., Vp / tp], by a matrix of its own (untied)."""

    def __init__(
        self, tp: TensorParallel, *, vocab_size: int, padded_vocab_size: int, hidden_size: int, init: Init
    ) -> None:
        super().__init__()
        self._communicator = tp.communicator
        self.weight = vocab_parameter(tp, vocab_size, padded_vocab_size, hidden_size, init=init)

    def forward(self, x: Tensor) -> Tensor:
        return vocab_parallel_logits(x, self.weight, self._communicator)


def vocab_parameter(
    tp: TensorParallel, vocab_size: int, padded_vocab_size: int, hidden_size: int, *, init: Init
) -> nn.Parameter:
    """This rank's rows of a [V, h] matrix, [Vp / tp, h]; some, or all, of the last ranks' rows may be padding."""
    size, rank = tp.communicator.size, tp.communicator.rank
    assert padded_vocab_size % size == 0 and padded_vocab_size >= vocab_size, (vocab_size, padded_vocab_size, size)
    local = (padded_vocab_size // size, hidden_size)
    spec = ParamSpec("", (vocab_size, hidden_size), local, (rank * local[0], 0), sharded_axes=("tp",), init=init)
    return uninitialised_parameter(tp, local, spec)


def vocab_parallel_logits(x: Tensor, weight: Tensor, communicator: Communicator) -> Tensor:
    """x [..., h] times the rows held here, [Vp / tp, h]: this rank's logits [..., Vp / tp]."""
    return column_linear(x, weight, None, communicator)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, communicator: Communicator
) -> Tensor:
    """Cross-entropy of every token.

    logits: this rank's, [..., Vp / size]; labels: ids in the whole vocabulary, [...].  Computed and returned in
    float32, or in float64 when logits are; [...].
    """
    rows = logits.reshape(-1, logits.shape[-1])
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, labels.reshape(-1), vocab_size, communicator
    )
    return losses.view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """log(sum of exp) - target over vocabulary slices: one max all-reduce, then one sum of two figures a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocab_size: int, communicator: Communicator) -> Tensor:
        width = logits.shape[1]
        start = communicator.rank * width
        num_real = min(max(vocab_size - start, 0), width)
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)  # [tokens, Vp / size]
        x[:, num_real:] = -torch.inf
        peak = x.amax(dim=1)
        communicator.all_reduce(peak, "max").wait()
        x -= peak.unsqueeze(1)
        column = (labels - start).clamp(0, width - 1).unsqueeze(1)
        is_here = (labels >= start) & (labels < start + num_real)
        target = x.gather(1, column).squeeze(1).masked_fill(~is_here, 0.0)
        x.exp_()
        sums = torch.stack((x.sum(dim=1), target))  # [2, tokens]
        communicator.all_reduce(sums).wait()
        softmax = x.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(softmax, column, is_here)
        ctx.logits_dtype = logits.dtype
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # softmax - one-hot, written over the saved softmax, the largest tensor there is; autograd notices should the
        # graph be walked a second time.
        softmax, column, is_here = ctx.saved_tensors
        softmax.scatter_add_(1, column, -is_here.unsqueeze(1).to(softmax.dtype))
        softmax.mul_(grad.unsqueeze(1))
        return softmax.to(ctx.logits_dtype), None, None, None
