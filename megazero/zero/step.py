"""The end of an optimizer step, the same for a run and for the library: from gradients to new parameters.

`reduce_gradients` finishes the reductions and brings together what all ranks must agree on; the caller derives from it
the scale that makes averages of the sums; `update_parameters` clips and updates.  Nothing is read back from the device:
a figure that is not finite (an overflow in fp16; in any format, where the engine checks) travels as `found_inf` to the
inner optimizer, which skips the step, together with one factor that unscales and clips.
"""

from collections.abc import Mapping
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
    finite.  figures: the caller's own, summed over all ranks.  skipped: float64, 1 if the step must not be taken, the
    same on every rank; None where nothing is checked.  absent: `Engine.absent_gradients`.
    """

    square: Tensor
    first_overflow: Tensor
    figures: tuple[Tensor, ...]
    skipped: Tensor | None
    absent: Mapping[str, Tensor]


class Update(NamedTuple):
    """The result of an update, in tensors without dimensions.

    grad_norm: that of the averaged gradients over all ranks, before clipping, float64.
    skipped: `ReducedGradients.skipped`.
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
    with timers.measure("grad-norm"):
        local = engine.local_norms()
        totals = torch.stack([local.square, *figures])
        present = engine.present_gradients()
        sent = totals if present is None else torch.cat([totals, present])
        engine.world.all_reduce_scalars(sent).wait()
    totals, counts = sent[: len(totals)], sent[len(totals) :]
    square, *summed = totals.unbind()
    absent = {} if present is None else engine.absent_gradients(counts)
    return ReducedGradients(square, local.first_overflow, tuple(summed), _skipped(engine, totals), absent)


def _skipped(engine: Engine, totals: Tensor) -> Tensor | None:
    """Return 1 if the step must not be taken, float64; totals: the square of the norm, then the caller's figures."""
    if not engine.settings.checks_finite and not engine.plan.may_overflow:
        return None
    checked = totals if engine.settings.checks_finite else totals[:1]
    skipped = torch.isfinite(checked).all().logical_not_().to(totals.dtype)
    if not engine.plan.may_overflow:
        skipped = engine.stopped = torch.maximum(engine.stopped, skipped)
    return skipped


def first_overflow(engine: Engine, index: int) -> str:
    """Return the first parameter, over all ranks, with a gradient that is not finite; "" if there is none.

    index: `ReducedGradients.first_overflow` of this rank.  A collective call.
    """
    least = torch.tensor(index, dtype=torch.int32)
    engine.mesh.control.all_reduce_scalars(least, "min").wait()
    return engine.parameter_name(int(least.item()))


def update_parameters(
    engine: Engine,
    timers: Timers,
    reduced: ReducedGradients,
    *,
    scale: Tensor | float,
    clip_grad: float,
    lr: float | None,
) -> Update:
    """Clip, update what this rank owns and publish it, unless the step is skipped.

    scale: the factor that turns stored gradients into averages.  clip_grad: largest norm of the average, 0 for none.
    lr: learning rate; None: the optimizer's param groups have their own.
    """
    grad_norm = reduced.square.sqrt() * scale
    factor = clip_coefficient(grad_norm, clip_grad) * scale
    found_inf = reduced.skipped.float() if reduced.skipped is not None and engine.refuses_updates else None
    with timers.measure("optimizer"):
        engine.update(StepInputs(lr, factor, found_inf), reduced.absent)
    return Update(grad_norm, reduced.skipped)
