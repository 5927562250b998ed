"""Computes a bad step again, with every value checked, to name the first one that is not finite.

The bad step has changed no weights, and dropout is a function of the sample, so the same values come again; where they
do not, a device or its memory has failed.  What only arises from sums of finite gradients, over micro-batches or ranks,
is not found here: then the gradient norm's first parameter is all that can be named.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch

from megazero.data.loader import StepBatch
from megazero.pipeline.runtime import execute
from megazero.pipeline.schedule import Action
from megazero.pipeline.timeline import Span
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses
from megazero.zero.gradients.not_finite import Verdict, Watch, cause_in_words, first_of_all
from megazero.zero.step import first_overflow


class _ActionsOfWatch:
    """A trace that keeps a watch informed of the action that computes."""

    def __init__(self, watch: Watch, context: StepContext) -> None:
        self._watch = watch
        self._starts = [chunk.layers.start for chunk in context.model.chunks]

    @contextmanager
    def computing(self, action: Action) -> Iterator[None]:
        self._watch.micro_batch, self._watch.place = action.micro_batch, self._starts[action.chunk]
        yield

    def begin(self) -> None:
        """Do nothing: the watch records from the start."""

    def end(self) -> list[Span]:
        return []


class BadStep(NamedTuple):
    """The batch and the loss scale of a step whose figures were not finite.

    overflow: this rank's first parameter with such a gradient, `StepReport.overflow`.
    """

    batch: StepBatch
    loss_scale: float
    overflow: int


class Cause(NamedTuple):
    """The cause of a bad step.

    verdict: the first value that is not finite, None if the step was finite when it was computed again.
    parameter: the first one, in the order of the model, whose summed gradient was not finite; "" if all were.
    """

    verdict: Verdict | None
    parameter: str

    @property
    def in_weights(self) -> bool:
        """True if a weight was not finite before the step."""
        return self.verdict is not None and self.verdict.finding.is_weight

    def __str__(self) -> str:
        again = (
            "computed again, every value is finite on every rank, which leaves their sums, or a fault of the machine"
        )
        return cause_in_words(self.verdict, self.parameter, otherwise=again)


def find_cause(context: StepContext, step: BadStep) -> Cause:
    """Compute a step again up to its gradients, and return the first value that is not finite; a collective call.

    Weights and moments stay as they are.
    """
    engine, mesh = context.engine, context.mesh
    parameter = first_overflow(engine, step.overflow)
    watch = Watch(engine.model, engine.units)
    replayed = replace(context, trace=_ActionsOfWatch(watch, context))
    micro_batches = step.batch.micro_batches
    actions = context.plan.step(len(micro_batches))
    multiplier = step.loss_scale / (step.batch.num_positions * mesh.topology.dp)
    try:
        with _uncompiled():
            engine.begin_step()
            passes = StagePasses(replayed, micro_batches, actions, multiplier=multiplier)
            execute(actions, passes)
            passes.finish()
            engine.finish_reductions()
    finally:
        watch.close()
    found = watch.found
    if found is not None:
        batch = micro_batches[found.micro_batch]
        samples = f"samples {batch.first_sample} to {batch.first_sample + len(batch.tokens) - 1}"
        found = replace(found, note=samples)
    return Cause(first_of_all(found, mesh), parameter)


def _uncompiled() -> AbstractContextManager[object]:
    """Return a context in which compiled code runs as it is written, since hooks within it would not be called."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
