"""One training step, from a batch to new parameters, without reading anything back from the device.

Averages divide once: every micro-batch's loss is divided by the number of token positions of the *global* batch, and
gradients are summed over micro-batches and ranks.  Positions masked out of the loss are counted on the way, and one
correction at the end makes the divisor the true number of loss tokens.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.optim.grad_norm import clip_coefficient
from megazero.optim.inner import StepInputs
from megazero.pipeline.runtime import execute
from megazero.pipeline.schedule import one_stage
from megazero.timers import Timers
from megazero.zero.engine import Engine


class LanguageModel(Protocol):
    """What a step needs of a model."""

    def summed_loss(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Negative log-likelihood of all labels, summed with the mask's weights (1 without a mask); no dimensions.

        tokens and labels int64 [b, s], loss_mask float [b, s].
        """


class DropoutSource(Protocol):
    """Random states that are a function of the sample."""

    def begin_micro_batch(self, first_sample: int) -> None: ...


@dataclass(frozen=True)
class StepParts:
    """What stays the same from step to step.

    num_positions: token positions of a global batch.  clip_grad: largest gradient norm, 0 for none.
    checks_overflow: whether a gradient that is not finite skips the step (fp16).
    """

    engine: Engine
    model: LanguageModel
    mesh: Mesh
    dropout: DropoutSource
    timers: Timers
    num_positions: int
    clip_grad: float
    checks_overflow: bool
    ledger: AnyLedger = field(default_factory=NullLedger)


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
    passes = _Passes(parts, batch, controls.loss_scale)
    with parts.timers.measure("forward-backward"):
        execute(one_stage(len(batch.micro_batches)), passes)
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


class _Passes:
    """Forward and backward of the step's micro-batches."""

    def __init__(self, parts: StepParts, batch: StepBatch, loss_scale: float) -> None:
        self._parts = parts
        self._batch = batch
        self._multiplier = loss_scale / parts.num_positions
        self._losses: dict[int, Tensor] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=parts.mesh.device)
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=parts.mesh.device)

    def forward(self, micro_batch: int) -> None:
        self._parts.ledger.phase("forward")
        batch = self._batch.micro_batches[micro_batch]
        self._parts.dropout.begin_micro_batch(batch.first_sample)
        loss, num_tokens = summed_loss(self._parts.model, batch, self._parts.mesh.device)
        self._losses[micro_batch] = loss * self._multiplier
        self.loss_sum += loss.detach()
        self.num_tokens += num_tokens

    def backward(self, micro_batch: int, *, is_last: bool) -> None:
        self._parts.ledger.phase("backward")
        self._parts.engine.backward(self._losses.pop(micro_batch), is_last=is_last)


def summed_loss(model: LanguageModel, batch: MicroBatch, device: torch.device) -> tuple[Tensor, Tensor | int]:
    """(sum of the losses of a micro-batch's unmasked tokens, their number); both without dimensions."""
    tokens, labels = (_to_device(part, device) for part in (batch.tokens, batch.labels))
    mask = None if batch.loss_mask is None else _to_device(batch.loss_mask, device)
    return model.summed_loss(tokens, labels, mask), labels.numel() if mask is None else mask.sum()


def _to_device(part: Tensor, device: torch.device) -> Tensor:
    """A copy that a GPU makes by itself needs pinned memory at its source; on the CPU nothing is copied."""
    return part.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else part.to(device)


def _overflow(parts: StepParts, square: Tensor, first_overflow: Tensor) -> tuple[Tensor, Tensor]:
    """(skipped, index of the parameter to blame), agreed on by all ranks; zeros where overflow is no subject."""
    if not parts.checks_overflow:
        return torch.zeros_like(square), torch.zeros_like(square)
    parts.mesh.world.all_reduce_scalars(first_overflow, "min").wait()
    return (~torch.isfinite(square)).to(square.dtype), first_overflow.to(square.dtype)
