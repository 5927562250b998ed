"""One training step, from a batch to new parameters, without reading anything back from the device.

Averages divide once: every micro-batch's loss is divided by the number of token positions of the *global* batch, and
gradients are summed over micro-batches and ranks.  Positions masked out of the loss are counted on the way, and one
correction at the end makes the divisor the true number of loss tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megazero.data.loader import StepBatch
from megazero.pipeline.runtime import execute
from megazero.train.context import StepParts
from megazero.train.stage_passes import StagePasses
from megazero.zero.step import first_overflow, reduce_gradients, update_parameters


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
    counts = 1.0 if parts.mesh.coordinate("tp") == 0 else 0.0  # tensor-parallel ranks all hold the same loss
    wish = torch.full_like(passes.loss_sum, float(controls.stop))
    reduced = reduce_gradients(engine, parts.timers, passes.loss_sum * counts, passes.num_tokens * counts, wish)
    loss_sum, num_tokens, stop = reduced.figures
    num_tokens = num_tokens.clamp(min=1.0)

    zero = torch.zeros_like(reduced.square)
    overflow = first_overflow(engine, reduced).to(zero.dtype) if parts.checks_overflow else zero
    scale = engine.predivisor * parts.num_positions / num_tokens / controls.loss_scale
    update = update_parameters(engine, parts.timers, reduced, scale=scale, clip_grad=parts.clip_grad, lr=controls.lr)
    skipped = zero if update.skipped is None else update.skipped
    return StepReport(loss_sum / num_tokens, update.grad_norm, stop, skipped, overflow)
