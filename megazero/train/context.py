"""The context that every step of a run is given, whether it trains or evaluates."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.model.sequences import Sequences
from megazero.parallel.layer_split import Chunk
from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.trace import NO_TRACE, AnyTrace
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.float8_scales import DelayedScales
from megazero.timers import Timers
from megazero.zero.engine import Engine


class LanguageModel(Protocol):
    """The chunks of a model on one rank; between chunks activations are rows of h elements."""

    @property
    def chunks(self) -> Sequence[Chunk]: ...

    @property
    def dtype(self) -> torch.dtype:
        """The number format of activations."""

    def sequences(self, length: int, *, positions: Tensor | None, documents: Tensor | None) -> Sequences:
        """Return a micro-batch's rows of `length` tokens; positions and documents: int64 [b, s], or None."""

    def activation_shape(self, num_tokens: int) -> tuple[int, int]:
        """Return the shape of the activations of `num_tokens` tokens between layers on this rank."""

    def embed(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """Embed tokens, int64 [b, s]; return activations.  Only the model's first chunk has an embedding."""

    def through(self, index: int, x: Tensor, sequences: Sequences) -> Tensor:
        """Run the layers of this rank's chunk `index` on activations `x`; return activations."""

    def loss(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None) -> Tensor:
        """Return all labels' negative log-likelihood, summed with the mask's weights (1 without a mask), a scalar.

        x: activations of the model's last chunk.  labels int64 [b, s], loss_mask float [b, s].
        """

    def logits_of(self, x: Tensor, token: int) -> Tensor:
        """Return this rank's logits [Vp/t] of one of a micro-batch's tokens, by activations of the last chunk."""

    def train(self, mode: bool = True) -> nn.Module:
        """Set the training mode, in which dropout is active."""


class DropoutSource(Protocol):
    """The random states of dropout, a function of the sample and the part of the model."""

    def begin_micro_batch(self, first_sample: int, part: int) -> None: ...


@dataclass(frozen=True)
class StepContext:
    """The components and figures that stay the same from step to step.

    clip_grad: largest gradient norm, 0 for none.
    checks_overflow: True if a gradient that is not finite skips the step (fp16).  plan: this rank's pipeline stage.
    deferred: the store for weight gradients that the schedule computes later, None if it does not.
    attention: the kernel that attention prefers (`attention_kernel.py`), None for torch's own choice.
    decayed, decoupled: the optimizer's param groups whose weight decay may increase, and those with --decoupled-lr.
    scaled: those with a rate of their own, which is the others' times a factor.
    scales: those of 8-bit numbers that follow from earlier steps, None without delayed scaling.
    """

    engine: Engine
    model: LanguageModel
    mesh: Mesh
    dropout: DropoutSource
    timers: Timers
    clip_grad: float
    checks_overflow: bool
    ledger: AnyLedger = field(default_factory=NullLedger)
    plan: StagePlan = field(default_factory=StagePlan)
    deferred: DeferredGradients | None = None
    trace: AnyTrace = NO_TRACE
    attention: str | None = None
    decayed: Sequence[dict[str, Any]] = ()
    decoupled: Sequence[dict[str, Any]] = ()
    scaled: Sequence[tuple[dict[str, Any], float]] = ()
    scales: DelayedScales | None = None
