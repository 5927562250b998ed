"""The borders of tensor-parallel regions (Megatron-LM, section 3; Korthikanti et al., arXiv 2205.05198, section 4.2).

Inside a *region* each tensor-parallel rank holds a part of every token's activation: some heads, some inner elements,
some of the vocabulary.  Outside, every rank holds the same: all tokens, whole; or, where the *sequence is split*, each
holds some of the tokens.  On the way in activations are gathered, on the way out partial sums are reduced:

                          in: gather     out: reduce
    every rank the same   nothing        all-reduce
    sequence is split     all-gather     reduce-scatter

The two are conjugate: gradients are reduced on their way back through the entry, and gathered through the exit.  The
exit is here; the entry is a part of the layers behind it (`layers.column_linear`, `head_loss.summed_cross_entropy`),
which hide it behind a weight gradient.

Split activations are [n / t, ..]: rank r holds rows [r n / t, (r + 1) n / t) of the n tokens of a micro-batch.  Nothing
here knows which axis the communicator belongs to, and one rank takes the same path.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megazero.comm.interface import Communicator, Done, Work


class Arriving:
    """A tensor that a collective in flight fills."""

    def __init__(self, tensor: Tensor, work: Work) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        """The tensor, when it may be read."""
        self._work.wait()
        return self._tensor


@dataclass(frozen=True)
class Border:
    """How activations come into a region and out of it; splits_sequence: what each rank holds outside differs."""

    communicator: Communicator
    splits_sequence: bool = False

    @property
    def num_parts(self) -> int:
        """Over how many ranks the tokens are split outside."""
        return self.communicator.size if self.splits_sequence else 1

    def gather(self, x: Tensor, *, out: Tensor | None = None) -> Arriving:
        """x as it is inside: itself, or [n / t, h] to [n, h], which is `out` if that is given."""
        if not self.splits_sequence:
            return Arriving(x, Done())
        if out is None:
            out = x.new_empty((x.shape[0] * self.num_parts, *x.shape[1:]))
        return Arriving(out, self.communicator.all_gather_into(out.view(-1), x.contiguous().view(-1)))

    def reduce(self, partial: Tensor, *, out: Tensor | None = None) -> Arriving:
        """The sum over the ranks as it is outside: written over partial, or its part, [.., h] (n in all) to [n / t, h].

        partial is dense and nobody else's, and stays as it is until the result has come, which is `out` if that is
        given and not partial's memory anyway.
        """
        assert partial.is_contiguous(), "a strided tensor would be summed wrongly"
        if not self.splits_sequence:
            return Arriving(partial, self.communicator.all_reduce(partial))
        if out is None:
            num_tokens = partial.shape[:-1].numel()
            assert num_tokens % self.num_parts == 0, f"{num_tokens} tokens over {self.num_parts} ranks"
            out = partial.new_empty((num_tokens // self.num_parts, partial.shape[-1]))
        return Arriving(out, self.communicator.reduce_scatter_into(out.view(-1), partial.view(-1)))


def leave_region(partial: Tensor, border: Border) -> Tensor:
    """The sum of partial over the ranks as it is outside (dense, and not needed by its own backward)."""
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
