"""The end of an optimizer step, the same for a run and for the library: from gradients to new parameters.

`reduce_gradients` finishes the reductions and brings together what all ranks must agree on; the caller derives from it
the scale that makes averages of the sums; `update_parameters` clips and updates.  Nothing is read back from the device:
an overflow (a gradient that is not finite, fp16) travels as `found_inf` to the inner optimizer, which skips the step,
together with one factor that unscales and clips.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megazero.optim.grad_norm import clip_coefficient
from megazero.optim.inner import StepInputs
from megazero.timers import Timers
from megazero.zero.engine import Engine


class ReducedGradients(NamedTuple):
    """The figures of a step's gradients once they are reduced; tensors without dimensions, on the device.

    square: sum of squares of the gradients as they are kept, float64, the same on every rank; not finite after an
    overflow on any of them.  first_overflow: int32 index of this rank's first parameter with a gradient that is not
    finite.  figures: the caller's own, summed over all ranks.
    """

    square: Tensor
    first_overflow: Tensor
    figures: tuple[Tensor, ...]


class Update(NamedTuple):
    """The result of an update, in tensors without dimensions.

    grad_norm: that of the averaged gradients over all ranks, before clipping, float64.
    skipped: float64, 1 after an overflow and else 0; None where nothing can overflow.
    """

    grad_norm: Tensor
    skipped: Tensor | None


def reduce_gradients(engine: Engine, timers: Timers, *figures: Tensor) -> ReducedGradients:
    """Finish the step's reductions and take the norm; a collective call of all ranks.

    figures: float64 without dimensions, which are summed in the same all-reduce.
    """
    ledger = engine.settings.ledger
    ledger.phase("reduce")
    with timers.measure("all-grads-sync"):
        engine.finish_reductions()
    ledger.phase("update")
    local = engine.local_norms()
    totals = torch.stack([local.square, *figures])
    engine.world.all_reduce_scalars(totals).wait()
    square, *summed = totals.unbind()
    return ReducedGradients(square, local.first_overflow, tuple(summed))


def first_overflow(engine: Engine, reduced: ReducedGradients) -> Tensor:
    """Reduce `first_overflow` to the least of all ranks, which `Engine.parameter_name` names; a collective call."""
    engine.world.all_reduce_scalars(reduced.first_overflow, "min").wait()
    return reduced.first_overflow


def update_parameters(
    engine: Engine,
    timers: Timers,
    reduced: ReducedGradients,
    *,
    scale: Tensor | float,
    clip_grad: float,
    lr: float | None,
) -> Update:
    """Clip, update what this rank owns and publish it, unless a gradient has overflowed.

    scale: the factor that turns stored gradients into averages.  clip_grad: largest norm of the average, 0 for none.
    lr: learning rate; None: the optimizer's param groups have their own.
    """
    grad_norm = reduced.square.sqrt() * scale
    factor = clip_coefficient(grad_norm, clip_grad) * scale
    skipped = (~torch.isfinite(reduced.square)).to(reduced.square.dtype) if engine.plan.may_overflow else None
    with timers.measure("optimizer"):
        engine.update(StepInputs(lr, factor, None if skipped is None else skipped.float()))
    return Update(grad_norm, skipped)
