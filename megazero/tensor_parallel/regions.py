"""The borders of tensor-parallel regions (Megatron-LM, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2).

Inside a *region* each tensor-parallel rank holds a part of every token's activation: some heads, some inner elements,
some of the vocabulary.  Outside, every rank holds the same: all tokens, whole; or, where the *sequence is split*, each
holds some of the tokens.  At the entry activations are gathered, at the exit partial sums are reduced:

                          entry: gather  exit: reduce
    every rank the same   nothing        all-reduce
    sequence is split     all-gather     reduce-scatter

The two are conjugate: in backward gradients are reduced at the entry, and gathered at the exit.  The exit is here; the
entry is a part of the layers behind it (`layers.column_linear`, `head_loss.summed_cross_entropy`), which overlap it
with a weight gradient.

Split activations are [n / t, ..]: rank r holds rows [r n / t, (r + 1) n / t) of the n tokens of a micro-batch.  The
code is independent of the communicator's axis, and one rank takes the same path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator, CompletedWork, Work


class PendingTensor:
    """A tensor that a collective in flight fills."""

    def __init__(self, tensor: Tensor, work: Work) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        """Wait until the tensor may be read, and return it."""
        self._work.wait()
        return self._tensor


@dataclass(frozen=True)
class Border:
    """The border of a region; splits_sequence: outside, each rank holds other tokens."""

    communicator: Communicator
    splits_sequence: bool = False

    @property
    def num_parts(self) -> int:
        """The number of ranks over which tokens are split outside."""
        return self.communicator.size if self.splits_sequence else 1

    def gather(self, x: Tensor, *, out: Tensor | None = None) -> PendingTensor:
        """Gather x for the inside: x itself, or [n / t, h] to [n, h], which is `out` if that is given."""
        if not self.splits_sequence:
            return PendingTensor(x, CompletedWork())
        if out is None:
            out = x.new_empty((x.shape[0] * self.num_parts, *x.shape[1:]))
        return PendingTensor(out, self.communicator.all_gather_into(out.view(-1), x.contiguous().view(-1)))

    def reduce(self, partial: Tensor, *, out: Tensor | None = None) -> PendingTensor:
        """Reduce for the outside: partial, summed in place, or this rank's part, [.., h] (n in all) to [n / t, h].

        partial is dense, has no other user, and is not written to until the result has arrived, which is `out` if that
        is given and the tokens are split.
        """
        assert partial.is_contiguous(), "a strided tensor would be summed wrongly"
        if not self.splits_sequence:
            return PendingTensor(partial, self.communicator.all_reduce(partial))
        if out is None:
            num_tokens = partial.shape[:-1].numel()
            assert num_tokens % self.num_parts == 0, f"{num_tokens} tokens over {self.num_parts} ranks"
            out = partial.new_empty((num_tokens // self.num_parts, partial.shape[-1]))
        return PendingTensor(out, self.communicator.reduce_scatter_into(out.view(-1), partial.view(-1)))


def exit_region(partial: Tensor, border: Border) -> Tensor:
    """Return the sum of partial over the ranks for the outside (dense, and not saved for its own backward)."""
    if border.splits_sequence:
        return _reduce_scatter(partial, border)
    return _reduce(partial, border)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, border: Border) -> Tensor:
        ctx.mark_dirty(partial)
        return border.reduce(partial).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_reduce: Callable[..., Tensor] = _Reduce.apply


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, border: Border) -> Tensor:
        ctx.border, ctx.shape = border, partial.shape
        return border.reduce(partial).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.border.gather(grad).wait().view(ctx.shape), None


_reduce_scatter: Callable[..., Tensor] = _ReduceScatter.apply
