"""The LM head and its loss, a chunk of tokens at a time: whole logits, and their gradient, never exist.

The loss is a *sum* over tokens, so all that lies behind it multiplies its gradients by one number.  Forward therefore
computes them while a chunk's logits exist, before that number is known, and backward only multiplies:

    for each chunk:   logits = x W^T;  loss;  d = (softmax - one-hot) * weight of the token
                      grad x = d W, summed over the ranks while  grad W += d^T x  is made
    in backward:      both times the gradient of the sum

Nothing is computed twice, neither x nor W is saved for backward, and the logits' memory is that of one chunk: the
constant-size buffers of ZeRO-R (ZeRO, section 6.2).  Rank r of t holds rows [r Vp/t, (r+1) Vp/t) of W; those past the
real vocabulary, the padding, are masked out of the softmax.

Where the sequence is split, a chunk takes the same rows of every rank's part of x: they are gathered on the way in, and
their gradient is reduced and scattered on the way out, so x is never whole either, and nothing is gathered twice.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.errors import Problem, UsageError
from megazero.parallel.gradient_slot import GetGradientSlot, GradientSlot, add_to, gradient_slot_of
from megazero.tensor_parallel.cross_entropy import IN_PLACE, Labels, Softmax
from megazero.tensor_parallel.products import TORCH, Products
from megazero.tensor_parallel.regions import Border, PendingTensor

_STEPS = (256, 64)  # of a chunk's rows


class Targets(NamedTuple):
    """The labels of the head's loss.

    labels: ids in the whole vocabulary, int64 [...], of all tokens on every rank.  token_weights: what every token's
    loss counts, [...]; 1 where None.  chunk_bytes: the most bytes of a chunk's logits in the loss's dtype, unless those
    of one token (of each rank, where tokens are split) take more.
    """

    labels: Tensor
    token_weights: Tensor | None
    vocab_size: int
    chunk_bytes: int


class _HeadSettings(NamedTuple):
    """The settings of one head; get_slot: returns the slot of the matrix's gradient, if there is one."""

    targets: Targets
    border: Border
    products: Products
    softmax: Softmax
    get_slot: GetGradientSlot | None

    def chunks(self, num_rows: int, vocab_rows: int, dtype: torch.dtype) -> tuple[slice, ...]:
        """Return the rows of every chunk among the num_rows tokens held here."""
        most = self.targets.chunk_bytes // (vocab_rows * dtype.itemsize * self.border.num_parts)
        return row_chunks(num_rows, most, self.border.num_parts)


def row_chunks(num_rows: int, most: int, num_parts: int = 1) -> tuple[slice, ...]:
    """Cut num_rows rows into chunks as equal as possible, of at most `most` rows each, though at least of one.

    A chunk's products have num_parts times as many rows.  These are a multiple of 256 (whole tiles of a GPU's
    products), or else of 64, where that takes at most an eighth more chunks than the fewest possible.  No chunk is
    shorter than another by more than this step; one of them is no multiple of it, where num_rows is none.
    """
    most = max(most, 1)
    fewest = -(-num_rows // most)
    for step in (*(rows // math.gcd(rows, num_parts) for rows in _STEPS), 1):
        num_steps = -(-num_rows // step)
        count = -(-num_steps // max(most // step, 1))
        if step <= most and 8 * count <= 9 * fewest:
            break
    if num_rows == 0:
        return ()
    # Longer chunks come first: memory allocated for one fits all that follow.
    longest = -(-num_steps // count) * step
    num_longest = num_steps - count * (longest // step - 1)
    lengths = [longest] * num_longest + [longest - step] * (count - num_longest)
    lengths[num_longest - 1] -= num_steps * step - num_rows
    ends = list(accumulate(lengths))
    return tuple(slice(end - length, end) for end, length in zip(ends, lengths, strict=True))


def summed_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Targets,
    border: Border,
    *,
    products: Products = TORCH,
    softmax: Softmax = IN_PLACE,
) -> Tensor:
    """Return the weighted sum of all tokens' cross-entropies, a scalar, the same on every rank.

    x [..., h]: the same on every rank, or this rank's part of the tokens.  weight [Vp / t, h]: the rows held here.
    Computed and returned in float32 (in float64 for float64 x), in which the weight's gradient is summed too: chunks
    lose nothing against one product.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert targets.labels.numel() == len(rows) * border.num_parts, "every rank has all labels"
    head = _HeadSettings(targets, border, products, softmax, gradient_slot_of(weight))
    return _summed_cross_entropy(rows, weight, head, torch.is_grad_enabled())


class _TokenChunk(NamedTuple):
    """A chunk of tokens: the same m on every rank, or m of each rank's; x [m or t m, h]."""

    x: Tensor
    labels: Labels


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: _HeadSettings, with_graph: bool) -> Tensor:
        wants_x, wants_weight = (with_graph and wanted for wanted in ctx.needs_input_grad[:2])
        dtype = torch.promote_types(x.dtype, torch.float32)
        chunks = head.chunks(len(x), weight.shape[0], dtype)
        total = torch.zeros((), dtype=dtype, device=x.device)
        x_sum = _InputGradient(x, head.border) if wants_x else None
        weight_sum = _WeightGradient(weight, dtype, head.products) if wants_weight else None
        for tokens, rows in _gathered_chunks(x, head, chunks):
            total += _loss_of_chunk(tokens, weight, head, None if x_sum is None else x_sum.at(rows), weight_sum)
        ctx.get_slot, ctx.num_rows = head.get_slot, max(1, _longest(chunks)) * head.border.num_parts
        ctx.gradients = tuple(None if gradient is None else gradient.result() for gradient in (x_sum, weight_sum))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            rule = "the head's gradients are computed in forward and released in backward"
            raise UsageError(Problem("a second backward through one loss", rule, "a forward for each backward"))
        (grad_x, grad_weight), ctx.gradients = ctx.gradients, None
        if grad_x is not None:
            _multiply(grad_x, grad, ctx.num_rows)
        if grad_weight is not None:
            # It stays in the loss's dtype; its accumulation casts it to the dtype of the parameter's gradient.
            grad_weight = _scale(grad_weight, grad, None if ctx.get_slot is None else ctx.get_slot())
        return grad_x, grad_weight, None, None


_summed_cross_entropy: Callable[..., Tensor] = _SummedCrossEntropy.apply


class _WeightGradient:
    """The sum over chunks of d^T x, in the loss's dtype.

    Where x is of a lower one, each product is rounded once, unless the library adds it in fp32 by itself.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, products: Products) -> None:
        self._weight, self._dtype, self._products = weight, dtype, products
        self._total: Tensor | None = None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        is_first = self._total is None
        if self._total is None:
            self._total = torch.empty_like(self._weight, dtype=self._dtype, memory_format=torch.contiguous_format)
        self._products.add_weight_gradient(self._total, gradient, x, is_first=is_first)

    def result(self) -> Tensor:
        if self._total is None:  # there was no token
            return torch.zeros_like(self._weight, dtype=self._dtype)
        return self._total


class _InputGradient:
    """The gradient of x, put together from its chunks' d W, each summed over the ranks."""

    def __init__(self, x: Tensor, border: Border) -> None:
        self._total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._border = border

    def at(self, rows: slice) -> Callable[[Tensor], PendingTensor]:
        """Return the function that reduces this rank's contribution to these rows."""
        return partial(self._reduce_into, self._total[rows])

    def result(self) -> Tensor:
        return self._total

    def _reduce_into(self, rows: Tensor, contribution: Tensor) -> PendingTensor:
        if self._border.splits_sequence:
            return self._border.reduce(contribution, out=rows)
        return self._border.reduce(rows.copy_(contribution))


def _gathered_chunks(x: Tensor, head: _HeadSettings, chunks: tuple[slice, ...]) -> Iterator[tuple[_TokenChunk, slice]]:
    """Yield the tokens of every chunk, and their rows among the tokens held here."""
    targets, border = head.targets, head.border
    parts = border.num_parts
    labels = targets.labels.reshape(parts, len(x))
    token_weights = None if targets.token_weights is None else targets.token_weights.reshape(parts, len(x))
    gathered = _gather_buffer(x, border, _longest(chunks))
    for rows in chunks:
        length = (rows.stop - rows.start) * parts
        whole = border.gather(x[rows], out=None if gathered is None else gathered[:length]).wait()
        here = None if token_weights is None else token_weights[:, rows].reshape(-1)
        yield _TokenChunk(whole, Labels(labels[:, rows].reshape(-1), here, targets.vocab_size)), rows


def _loss_of_chunk(
    tokens: _TokenChunk,
    weight: Tensor,
    head: _HeadSettings,
    reduce_x: Callable[[Tensor], PendingTensor] | None,
    weight_sum: _WeightGradient | None,
) -> Tensor:
    """Return the chunk's weighted loss; its logits [n, Vp / t] are overwritten by their gradient, then freed."""
    logits = head.products.output(tokens.x, weight, None)
    labels = tokens.labels
    wants_gradient = not (reduce_x is None and weight_sum is None)
    losses, differentiate = head.softmax.losses(logits, labels, head.border.communicator, wants_gradient=wants_gradient)
    loss = (losses if labels.token_weights is None else losses * labels.token_weights).sum()
    if not wants_gradient:
        return loss
    differentiate()
    in_flight = None if reduce_x is None else reduce_x(head.products.input_gradient(logits, weight))
    if weight_sum is not None:
        weight_sum.add(logits, tokens.x)
    if in_flight is not None:
        in_flight.wait()
    return loss


def _longest(chunks: tuple[slice, ...]) -> int:
    return chunks[0].stop if chunks else 0


def _gather_buffer(x: Tensor, border: Border, num_rows: int) -> Tensor | None:
    """Allocate memory for a chunk's tokens of all ranks, if they are split."""
    return x.new_empty((num_rows * border.num_parts, x.shape[1])) if border.splits_sequence else None


def _scale(gradient: Tensor, factor: Tensor, slot: GradientSlot | None) -> Tensor | None:
    """Return gradient times factor, or None if it has been written to its slot."""
    if slot is not None and slot.is_first and slot.tensor.dtype == gradient.dtype:
        torch.mul(gradient, factor, out=slot.tensor)
        return None
    gradient *= factor
    if slot is None:
        return gradient
    add_to(slot.tensor, gradient, is_first=slot.is_first)
    return None


def _multiply(gradient: Tensor, factor: Tensor, num_rows: int) -> None:
    """Multiply gradient [n, h] by factor, in place, at the factor's precision.

    On a CPU, which converts a whole operand beforehand, it is multiplied in pieces of num_rows.
    """
    factor = factor.view(1)  # without a dim it could first be rounded to a lower precision of the gradient's
    if gradient.dtype == factor.dtype or gradient.device.type != "cpu":
        gradient *= factor
        return
    for start in range(0, gradient.shape[0], num_rows):
        gradient[start : start + num_rows] *= factor
