"""The loss on held-out text: the same first samples every time, so that evaluations can be compared."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megazero.data.loader import BatchLayout, MicroBatch, build_step_batch
from megazero.data.samples import Samples
from megazero.pipeline.runtime import execute
from megazero.train.attention_kernel import prefer_kernel
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out text: the first `num_batches` global batches of `source`.

    bytes_per_token: the mean over the text, None if it is unknown.  split: "validation" or "test".  group: the name of
    its group of corpora, "" without groups.
    """

    source: Samples
    layout: BatchLayout
    num_batches: int
    bytes_per_token: float | None = None
    split: str = "validation"
    group: str = ""


@torch.no_grad()
def evaluate(context: StepContext, held_out: EvaluationSet, stops: Callable[[], bool] = lambda: False) -> float | None:
    """Return the mean loss over the set in nats per token, the same on every rank; a collective call.

    stops: returns True if this rank requests the end of the run.  Before every batch ranks begin to exchange what it
    returns, and read it after the batch; all of them then leave out the rest, and return None.
    """
    context.model.train(False)
    totals = torch.zeros(2, dtype=torch.float64, device=context.mesh.device)  # loss sum, tokens
    is_cut = False
    for index in range(held_out.num_batches):
        stop = torch.tensor([float(stops())], dtype=torch.float64)
        exchange = context.mesh.control.all_reduce_scalars(stop, "max")
        first = index * held_out.layout.global_batch_size
        micro_batches = build_step_batch(held_out.source, first, held_out.layout).micro_batches
        totals += sums_of(context, micro_batches)
        exchange.wait()
        is_cut = stop.item() > 0 and index + 1 < held_out.num_batches
        if is_cut:
            break
    context.model.train(True)
    if is_cut:
        return None
    # All tensor-parallel ranks add the same sums, which leaves the mean as it is.
    context.mesh.world.all_reduce_scalars(totals).wait()
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1.0))


@torch.no_grad()
def sums_of(context: StepContext, micro_batches: Sequence[MicroBatch]) -> Tensor:
    """Return this rank's sums of a global batch, float64 [2]: of the losses, and the number of tokens they are of."""
    actions = context.plan.evaluation(len(micro_batches))
    passes = StagePasses(context, micro_batches, actions)
    with prefer_kernel(context.attention):
        execute(actions, passes)
        passes.finish()
    return torch.stack([passes.loss_sum, passes.num_tokens])
