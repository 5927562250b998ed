"""The softmax and cross-entropy of a chunk of logits, between the head's matrix products.

    peak    the largest logit of every token                                  then: maximum over the ranks
    sums    sum of exp(logit - peak), and the label's logit - peak            then: sum over the ranks
    loss    log(sum of exp) - label's
    logits  become (softmax - one-hot) * weight of the token: their own gradient, of order 1 whatever the batch, so that
            fp16 holds it without a loss scale

All of it is computed in the loss's dtype.  *In place*, step by step, it needs the logits once in that dtype, and takes
a dozen passes over them.  *Fused* by torch's compiler it reads them in their own dtype.  On a GPU, where a pass over
the logits costs as much as a product, it takes three: one for the peak of this rank's columns and the sum of
exp(logit - this peak) at once, which is scaled to the peak over the ranks afterwards (Milakov and Gimelshein, arXiv
1805.02867), one that reads the logits and one that writes their gradient.  Where a GPU's rank has all columns, so that
nothing is exchanged in between, one kernel does it all (`cross_entropy_kernel.py`).

    V = vocabulary, Vp = padded vocabulary; rank r of t holds columns [r Vp / t, (r + 1) Vp / t); m tokens
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.comm.interface import Communicator
from megazero.tensor_parallel.compiler import compiled

_LARGEST_BLOCK, _SMALLEST_BLOCK = 1024, 64  # columns


class Labels(NamedTuple):
    """The labels of m tokens: ids in the whole vocabulary [m]; token_weights: what each counts, 1 if None."""

    ids: Tensor
    token_weights: Tensor | None
    vocab_size: int


class Softmax(Protocol):
    """An implementation of the loss and its gradient."""

    def losses(
        self, logits: Tensor, labels: Labels, communicator: Communicator, *, wants_gradient: bool = True
    ) -> tuple[Tensor, Callable[[], None]]:
        """Return the losses [m] of logits [m, Vp / t], unweighted, and a function that overwrites the logits.

        The function is called once, and turns the logits into their gradient.  Before that their content is undefined.
        wants_gradient: False where it will not be called.
        """


class InPlaceSoftmax:
    """The loss step by step, in as little memory as possible."""

    def losses(
        self, logits: Tensor, labels: Labels, communicator: Communicator, *, wants_gradient: bool = True
    ) -> tuple[Tensor, Callable[[], None]]:
        x = logits.to(_loss_dtype(logits))
        local = _VocabRange.of(logits, labels, communicator.rank)
        x[:, local.num_real :] = -torch.inf
        peak = x.amax(dim=1)
        communicator.all_reduce(peak, "max").wait()
        x -= peak.unsqueeze(1)
        column, is_here = local.columns(labels.ids)
        target = x.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill(~is_here, 0.0)
        sums = torch.stack((x.exp_().sum(dim=1), target))  # [2, m]
        communicator.all_reduce(sums).wait()

        def differentiate() -> None:
            gradient = x.div_(sums[0].unsqueeze(1))
            one_hot = is_here.unsqueeze(1).to(gradient.dtype)
            gradient.scatter_add_(1, column.unsqueeze(1), one_hot.neg_())
            if labels.token_weights is not None:
                gradient *= labels.token_weights.unsqueeze(1)
            if gradient is not logits:
                logits.copy_(gradient)

        return sums[0].log() - sums[1], differentiate


class FusedSoftmax:
    """The same loss in three functions, between which ranks communicate, or on one GPU in a kernel.

    compile=False leaves the functions to plain torch.
    """

    def __init__(self, *, compile: bool = True, searches: bool = False) -> None:
        pieces: list[Callable[..., Any]] = [_peak_and_total, _sums, _gradient]
        self._is_compiled = compile
        if compile:
            pieces = [compiled(piece, searches=searches) for piece in pieces]
        self._peak_and_total, self._sums, self._gradient = pieces

    def losses(
        self, logits: Tensor, labels: Labels, communicator: Communicator, *, wants_gradient: bool = True
    ) -> tuple[Tensor, Callable[[], None]]:
        local = _VocabRange.of(logits, labels, communicator.rank)
        if self._is_compiled and communicator.size == 1 and logits.is_cuda and logits.dtype != torch.float64:
            from megazero.tensor_parallel import cross_entropy_kernel  # needs Triton, which torch for GPUs has

            found = cross_entropy_kernel.losses(
                logits, labels.ids, labels.token_weights, local.num_real, wants_gradient=wants_gradient
            )
            return found, lambda: None
        logits[:, local.num_real :] = -torch.inf  # so that no pass over the logits compares columns
        peak, local_peak, total = self._peak_and_total(logits)
        communicator.all_reduce(peak, "max").wait()
        sums = self._sums(logits, peak, local_peak, total, labels.ids, local)
        communicator.all_reduce(sums).wait()

        def differentiate() -> None:
            self._gradient(logits, peak, sums, labels.ids, labels.token_weights, local)

        return sums[0].log() - sums[1], differentiate


class _VocabRange(NamedTuple):
    """The columns of the vocabulary that a rank holds: num_real from start on, then padding."""

    start: int
    num_real: int

    @staticmethod
    def of(logits: Tensor, labels: Labels, rank: int) -> "_VocabRange":
        width = logits.shape[1]
        return _VocabRange(rank * width, min(max(labels.vocab_size - rank * width, 0), width))

    def columns(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return every label's column here, and whether it is here at all."""
        column = (ids - self.start).clamp(0, max(self.num_real - 1, 0))
        return column, (ids >= self.start) & (ids < self.start + self.num_real)


def _peak_and_total(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the peak of every token's logits here [m], twice, since an all-reduce overwrites one, and the sum of exp.

    First come the peak and the sum of every block of columns, since a GPU has more to do at once then, and reads the
    logits once.
    """
    num_tokens, width = logits.shape
    blocks = logits.to(_loss_dtype(logits)).view(num_tokens, -1, _block_width(width))
    peaks = blocks.amax(dim=2)
    totals = (blocks - _finite(peaks).unsqueeze(2)).exp().sum(dim=2)
    peak = peaks.amax(dim=1)
    total = (totals * (peaks - _finite(peak).unsqueeze(1)).exp()).sum(dim=1)
    return peak, peak.clone(), total


def _finite(peak: Tensor) -> Tensor:
    """Return the peak, and 0 for minus infinity, from which no distance is a number."""
    return torch.where(peak == -torch.inf, 0.0, peak)


def _block_width(width: int) -> int:
    """Return the columns of a block: a divisor of width that fills most of the power of two that a kernel takes.

    It is at most what a kernel of torch's compiler reduces without a loop, or else the whole width.
    """
    fitting = (d for d in range(min(width, _LARGEST_BLOCK), _SMALLEST_BLOCK - 1, -1) if width % d == 0)
    return next((d for d in fitting if 4 * d > 3 << (d - 1).bit_length()), width)


def _sums(logits: Tensor, peak: Tensor, local_peak: Tensor, total: Tensor, ids: Tensor, local: _VocabRange) -> Tensor:
    """Return this rank's part of the sums [2, m] for the peak over all ranks, from the total for the peak here."""
    # A rank without real columns has a peak of minus infinity, from which no distance is a number.
    scaled = torch.where(local_peak == -torch.inf, 0.0, total * (local_peak - peak).exp())
    column, is_here = local.columns(ids)
    target = logits.gather(1, column.unsqueeze(1)).squeeze(1).to(peak.dtype) - peak
    return torch.stack((scaled, target.masked_fill(~is_here, 0.0)))


def _gradient(
    logits: Tensor, peak: Tensor, sums: Tensor, ids: Tensor, token_weights: Tensor | None, local: _VocabRange
) -> None:
    softmax = (logits.to(_loss_dtype(logits)) - peak.unsqueeze(1)).exp() / sums[0].unsqueeze(1)
    column, is_here = local.columns(ids)
    columns = torch.arange(logits.shape[1], device=logits.device).unsqueeze(0)
    is_label = (columns == column.unsqueeze(1)) & is_here.unsqueeze(1)
    gradient = softmax - is_label.to(softmax.dtype)
    logits.copy_(gradient if token_weights is None else gradient * token_weights.unsqueeze(1))


def _loss_dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


IN_PLACE = InPlaceSoftmax()
