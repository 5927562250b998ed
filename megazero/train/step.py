"""One training step, from a batch to new parameters, without reading anything back from the device.

Averages divide once: every micro-batch's loss is divided by the number of token positions of the *global* batch, and
gradients are summed over micro-batches and ranks.  Positions masked out of the loss are counted on the way, and one
correction at the end makes the divisor the true number of loss tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megazero.data.loader import StepBatch
from megazero.optim.grad_norm import clip_coefficient
from megazero.optim.inner import StepInputs
from megazero.pipeline.runtime import execute
from megazero.train.context import StepParts
from megazero.train.stage_passes import StagePasses


class StepControls(NamedTuple):
    """What the host decides for one step; `stop` is this rank's wish to end the run after it."""

    lr: float
    loss_scale: float
    stop: bool = False


class StepReport(NamedTuple):
    """Figures of one step, still on the device; the same on every rank.

    loss: mean over the global batch's tokens.  grad_norm: before clipping, unscaled.  stop: ranks that wish to end.
    skipped: 1 where the step was skipped.  overflow: index of the first parameter with a gradient that was not finite.
    All float64 without dimensions.
    """

    loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    skipped: Tensor
    overflow: Tensor


def training_step(parts: StepParts, batch: StepBatch, controls: StepControls) -> StepReport:
    """Forward and backward over the micro-batches, then norm, clipping, update and publishing."""
    engine = parts.engine
    engine.begin_step()
    actions = parts.plan.step(len(batch.micro_batches))
    passes = StagePasses(parts, batch.micro_batches, actions, multiplier=controls.loss_scale / parts.num_positions)
    with parts.timers.measure("forward-backward"):
        execute(actions, passes)
        passes.finish()
    parts.ledger.phase("reduce")
    with parts.timers.measure("all-grads-sync"):
        engine.finish_reductions()

    parts.ledger.phase("update")
    local = engine.local_norms()
    counts = 1.0 if parts.mesh.coordinate("tp") == 0 else 0.0  # tensor-parallel ranks all hold the same loss
    wish = torch.full_like(local.square, float(controls.stop))
    totals = torch.stack([local.square, passes.loss_sum * counts, passes.num_tokens * counts, wish])
    parts.mesh.world.all_reduce_scalars(totals).wait()
    square, loss_sum, num_tokens, stop = totals.unbind()

    correction = engine.predivisor * parts.num_positions / num_tokens.clamp(min=1.0)
    grad_norm = square.sqrt() * (correction / controls.loss_scale)
    skipped, overflow = _overflow(parts, square, local.first_overflow)
    factor = clip_coefficient(grad_norm, parts.clip_grad) * (correction / controls.loss_scale)
    with parts.timers.measure("optimizer"):
        engine.update(StepInputs(controls.lr, factor, skipped.float() if parts.checks_overflow else None))
    return StepReport(loss_sum / num_tokens.clamp(min=1.0), grad_norm, stop, skipped, overflow)


def _overflow(parts: StepParts, square: Tensor, first_overflow: Tensor) -> tuple[Tensor, Tensor]:
    """(skipped, index of the parameter to blame), agreed on by all ranks; zeros where overflow is no subject."""
    if not parts.checks_overflow:
        return torch.zeros_like(square), torch.zeros_like(square)
    parts.mesh.world.all_reduce_scalars(first_overflow, "min").wait()
    return (~torch.isfinite(square)).to(square.dtype), first_overflow.to(square.dtype)
