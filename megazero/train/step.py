"""One training step, from a batch to new parameters, without reading anything back from the device.

Averages divide once: every micro-batch's loss is divided by the number of token positions of the *global* batch, and
gradients are summed over micro-batches and ranks.  Positions masked out of the loss are counted meanwhile, and one
correction at the end makes the divisor the true number of loss tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megazero.data.loader import StepBatch
from megazero.optim.schedules import write_momentum, write_rate, write_weight_decay
from megazero.pipeline.runtime import execute
from megazero.train.attention_kernel import prefer_kernel
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses
from megazero.zero.step import reduce_gradients, update_parameters


class StepControls(NamedTuple):
    """The host's decisions for one step.

    stop, save: True if this rank requests to end the run after it, or to save then.  momentum: the optimizer's first
    beta; None: its own.  Where save is None, no rank ever requests it.
    weight_decay: that of the parameters which decay; None: the optimizer's own.
    decoupled_lr: the rate of parameters which have one of their own; None: there are none.
    """

    lr: float
    loss_scale: float
    stop: bool = False
    momentum: float | None = None
    weight_decay: float | None = None
    decoupled_lr: float | None = None
    save: bool | None = None


class StepReport(NamedTuple):
    """The figures of one step, float64 scalars on the device; the same on every rank but for `overflow`.

    loss: mean over the global batch's tokens.  grad_norm: before clipping, unscaled.
    stop, save: the number of ranks that request the end of the run, or a checkpoint.  skipped: 1 if the step was
    skipped.  overflow: index of this rank's first parameter with a gradient that was not finite.
    """

    loss: Tensor
    grad_norm: Tensor
    stop: Tensor
    skipped: Tensor
    overflow: Tensor
    save: Tensor


def training_step(context: StepContext, batch: StepBatch, controls: StepControls) -> StepReport:
    """Run forward and backward over the micro-batches, reduce and clip gradients, and update parameters."""
    engine = context.engine
    engine.begin_step()
    if context.scales is not None:
        context.scales.begin_step()
    actions = context.plan.step(len(batch.micro_batches))
    num_positions = batch.num_positions * context.mesh.topology.dp
    passes = StagePasses(context, batch.micro_batches, actions, multiplier=controls.loss_scale / num_positions)
    with context.timers.measure("forward-backward"), prefer_kernel(context.attention):
        execute(actions, passes)
        passes.finish()
    context.mesh.meter.flight.activity = "update"
    counts = 1.0 if context.mesh.coordinate("tp") == 0 else 0.0  # all tensor-parallel ranks have the same loss
    given = (controls.stop,) if controls.save is None else (controls.stop, controls.save)
    flags = [torch.full_like(passes.loss_sum, float(flag)) for flag in given]
    reduced = reduce_gradients(engine, context.timers, passes.loss_sum * counts, passes.num_tokens * counts, *flags)
    loss_sum, num_tokens, stop = reduced.figures[:3]
    num_tokens = num_tokens.clamp(min=1.0)

    write_momentum(engine.settings.optimizer.options, controls.momentum)
    write_weight_decay(context.decayed, controls.weight_decay)
    rates_differ = controls.decoupled_lr is not None or bool(context.scaled)
    if rates_differ:
        write_rate(engine.settings.optimizer.options, controls.lr)
    if controls.decoupled_lr is not None:
        write_rate(context.decoupled, controls.decoupled_lr)
    for group, factor in context.scaled:
        write_rate([group], factor * controls.lr)
    scale = engine.predivisor * num_positions / num_tokens / controls.loss_scale
    lr = None if rates_differ else controls.lr
    update = update_parameters(engine, context.timers, reduced, scale=scale, clip_grad=context.clip_grad, lr=lr)
    if context.scales is not None:
        context.scales.end_step(update.skipped)
    none = torch.zeros_like(stop)
    skipped = none if update.skipped is None else update.skipped
    save = none if controls.save is None else reduced.figures[3]
    return StepReport(
        loss_sum / num_tokens, update.grad_norm, stop, skipped, reduced.first_overflow.to(stop.dtype), save
    )
