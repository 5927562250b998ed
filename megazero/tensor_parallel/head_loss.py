"""The LM head and its loss, a chunk of tokens at a time: whole logits, and their gradient, never exist.

The loss is a *sum* over tokens, so all that lies behind it multiplies its gradients by one number.  Forward therefore
makes them while it has a chunk's logits in hand, before that number is known, and backward only multiplies:

    for each chunk:   logits = x W^T;  loss;  d = (softmax - one-hot) * weight of the token
                      grad x = d W, summed over the ranks while  grad W += d^T x  is made
    in backward:      both times the gradient of the sum

Nothing is computed twice, neither x nor W is kept for backward, and the logits' memory is that of one chunk: the
constant-size buffers of ZeRO-R (paper section 6.2).  Rank r of t holds rows [r Vp/t, (r+1) Vp/t) of W; those past the
real vocabulary, the padding, are masked out of the softmax.

Where the sequence is split, a chunk takes the same rows of every rank's part of x: they are gathered on the way in, and
their gradient is reduced and scattered on the way out, so x is never whole either, and nothing is gathered twice.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator
from megazero.errors import Problem, UsageError
from megazero.tensor_parallel.regions import Arriving, Border


class Targets(NamedTuple):
    """What the head is to predict.

    labels: ids in the whole vocabulary, int64 [...], of all tokens on every rank.  token_weights: what every token's
    loss counts, [...]; 1 where None.  chunk_bytes: the most that a chunk's logits take in the loss's dtype, as far as
    those of one token (of each rank, where tokens are split) do not take more.
    """

    labels: Tensor
    token_weights: Tensor | None
    vocab_size: int
    chunk_bytes: int


def summed_cross_entropy(x: Tensor, weight: Tensor, targets: Targets, border: Border) -> Tensor:
    """The weighted sum of all tokens' cross-entropies, without dimensions, the same on every rank.

    x [..., h]: the same on every rank, or this rank's part of the tokens.  weight [Vp / t, h]: the rows held here.
    Computed and returned in float32 (in float64 for float64 x), in which the weight's gradient is summed too: chunks
    lose nothing against one product.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert targets.labels.numel() == len(rows) * border.num_parts, "every rank knows all labels"
    return _summed_cross_entropy(rows, weight, targets, border, torch.is_grad_enabled())


class _Chunk(NamedTuple):
    """Some tokens on their way through the head: the same m on every rank, or m of each rank's.

    logits: in the dtype of x, later their gradient [m or t m, Vp / t].  work: in the loss's dtype, the same memory
    where that is the same dtype.
    """

    x: Tensor
    labels: Tensor
    token_weights: Tensor | None
    logits: Tensor
    work: Tensor


class _Exponentials(NamedTuple):
    """exp(logits - maximum) of a chunk, written over its `work`, and what else makes losses of them; [n] each.

    sums: of the exponentials over the whole vocabulary.  column: the label's, as far as it is_here, among our rows.
    """

    losses: Tensor
    sums: Tensor
    column: Tensor
    is_here: Tensor


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Targets, border: Border, with_graph: bool) -> Tensor:
        wants_x, wants_weight = (with_graph and wanted for wanted in ctx.needs_input_grad[:2])
        dtype = torch.promote_types(x.dtype, torch.float32)
        num_rows = max(1, targets.chunk_bytes // (weight.shape[0] * dtype.itemsize * border.num_parts))
        total = torch.zeros((), dtype=dtype, device=x.device)
        x_sum = _InputGradient(x, border, num_rows) if wants_x else None
        weight_sum = _WeightGradient(weight, dtype) if wants_weight else None
        for chunk, rows in _chunks(x, weight, targets, border, num_rows):
            exponentials = _exponentials(chunk, targets.vocab_size, border.communicator)
            losses = exponentials.losses
            total += (losses if chunk.token_weights is None else losses * chunk.token_weights).sum()
            if x_sum is None and weight_sum is None:
                continue
            _differentiate(chunk, exponentials)
            in_flight = None if x_sum is None else x_sum.put(chunk, rows, weight)
            if weight_sum is not None:
                weight_sum.add(chunk)
            if in_flight is not None:
                in_flight.wait()
        ctx.num_rows = num_rows * border.num_parts
        ctx.gradients = tuple(None if gradient is None else gradient.total for gradient in (x_sum, weight_sum))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            rule = "the head's gradients are made in forward and given away in backward"
            raise UsageError(Problem("a second backward through one loss", rule, "a forward for each backward"))
        (grad_x, grad_weight), ctx.gradients = ctx.gradients, None
        for gradient in (grad_x, grad_weight):
            if gradient is not None:
                _multiply(gradient, grad, ctx.num_rows)
        # The weight's stays in the loss's dtype: autograd casts it to what the parameter's gradient is kept in.
        return grad_x, grad_weight, None, None, None


_summed_cross_entropy: Callable[..., Tensor] = _SummedCrossEntropy.apply


class _WeightGradient:
    """The sum over chunks of d^T x, in the loss's dtype."""

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        self.total = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
        # Where x is of a lower precision, so are the factors, and a product is rounded once before it is added.
        self._product = None if weight.dtype == dtype else torch.empty_like(weight)

    def add(self, chunk: _Chunk) -> None:
        if self._product is None:
            self.total.addmm_(chunk.logits.t(), chunk.x)
        else:
            self.total += torch.mm(chunk.logits.t(), chunk.x, out=self._product)


class _InputGradient:
    """The gradient of x, put together from its chunks' d W, each summed over the ranks."""

    def __init__(self, x: Tensor, border: Border, num_rows: int) -> None:
        self.total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._border = border
        self._partial = _of_all_ranks(x, border, num_rows)

    def put(self, chunk: _Chunk, rows: slice, weight: Tensor) -> Arriving:
        place = self.total[rows]
        partial = place if self._partial is None else self._partial[: len(chunk.logits)]
        return self._border.reduce(torch.mm(chunk.logits, weight, out=partial), out=place)


def _chunks(
    x: Tensor, weight: Tensor, targets: Targets, border: Border, num_rows: int
) -> Iterator[tuple[_Chunk, slice]]:
    """The logits of every chunk and its place among the tokens held here; all chunks use the same memory."""
    parts = border.num_parts
    labels = targets.labels.reshape(parts, len(x))
    token_weights = None if targets.token_weights is None else targets.token_weights.reshape(parts, len(x))
    dtype = torch.promote_types(x.dtype, torch.float32)
    gathered = _of_all_ranks(x, border, num_rows)
    shape = (min(num_rows, len(x)) * parts, weight.shape[0])
    logits = torch.empty(shape, dtype=x.dtype, device=x.device)
    work = logits if dtype == x.dtype else torch.empty(shape, dtype=dtype, device=x.device)
    for start in range(0, len(x), num_rows):
        rows = slice(start, min(start + num_rows, len(x)))
        length = (rows.stop - rows.start) * parts
        whole = border.gather(x[rows], out=None if gathered is None else gathered[:length]).wait()
        here = None if token_weights is None else token_weights[:, rows].reshape(-1)
        chunk = _Chunk(whole, labels[:, rows].reshape(-1), here, logits[:length], work[:length])
        torch.mm(whole, weight.t(), out=chunk.logits)
        yield chunk, rows


def _of_all_ranks(x: Tensor, border: Border, num_rows: int) -> Tensor | None:
    """Memory for a chunk's tokens of all ranks, if they are split."""
    return x.new_empty((min(num_rows, len(x)) * border.num_parts, x.shape[1])) if border.splits_sequence else None


def _exponentials(chunk: _Chunk, vocab_size: int, communicator: Communicator) -> _Exponentials:
    """log(sum of exp) - target over vocabulary slices: one max all-reduce, then one sum of two figures a token."""
    x = chunk.work
    if x is not chunk.logits:
        x.copy_(chunk.logits)
    width = x.shape[1]
    start = communicator.rank * width
    num_real = min(max(vocab_size - start, 0), width)
    x[:, num_real:] = -torch.inf
    peak = x.amax(dim=1)
    communicator.all_reduce(peak, "max").wait()
    x -= peak.unsqueeze(1)
    column = (chunk.labels - start).clamp(0, width - 1)
    is_here = (chunk.labels >= start) & (chunk.labels < start + num_real)
    target = x.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0.0)
    sums = torch.stack((x.exp_().sum(dim=1), target))  # [2, n]
    communicator.all_reduce(sums).wait()
    return _Exponentials(sums[0].log() - sums[1], sums[0], column, is_here)


def _differentiate(chunk: _Chunk, exponentials: _Exponentials) -> None:
    """Exponentials to (softmax - one-hot) * weight of the token, which goes where the logits were.

    Of order 1 whatever the batch, so that fp16 holds it without a loss scale.
    """
    gradient = chunk.work.div_(exponentials.sums.unsqueeze(1))
    one_hot = exponentials.is_here.unsqueeze(1).to(gradient.dtype)
    gradient.scatter_add_(1, exponentials.column.unsqueeze(1), one_hot.neg_())
    if chunk.token_weights is not None:
        gradient *= chunk.token_weights.unsqueeze(1)
    if gradient is not chunk.logits:
        chunk.logits.copy_(gradient)


def _multiply(gradient: Tensor, factor: Tensor, num_rows: int) -> None:
    """gradient [n, h] *= factor, in place, at the factor's precision.

    The factor gets a dim, without which it could first be rounded to a lower precision of the gradient's; and the
    gradient is taken in pieces, since a CPU converts a whole operand beforehand.
    """
    factor = factor.view(1)
    if gradient.dtype == factor.dtype:
        gradient *= factor
        return
    for start in range(0, gradient.shape[0], num_rows):
        gradient[start : start + num_rows] *= factor
