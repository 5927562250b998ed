"""The loss on held-out text: the same first samples every time, so that evaluations can be compared."""

from dataclasses import dataclass

import torch

from megazero.data.loader import BatchLayout, build_step_batch
from megazero.data.samples import Samples
from megazero.pipeline.runtime import execute
from megazero.train.attention_kernel import prefer_kernel
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out text: the first `num_batches` global batches of `source`.

    bytes_per_token: the mean over the text, None if it is unknown.
    """

    source: Samples
    layout: BatchLayout
    num_batches: int
    bytes_per_token: float | None = None


@torch.no_grad()
def evaluate(context: StepContext, held_out: EvaluationSet) -> float:
    """Return the mean loss over the set in nats per token, the same on every rank; a collective call."""
    context.model.train(False)
    totals = torch.zeros(2, dtype=torch.float64, device=context.mesh.device)  # loss sum, tokens
    for index in range(held_out.num_batches):
        first = index * held_out.layout.global_batch_size
        micro_batches = build_step_batch(held_out.source, first, held_out.layout).micro_batches
        actions = context.plan.evaluation(len(micro_batches))
        passes = StagePasses(context, micro_batches, actions)
        with prefer_kernel(context.attention):
            execute(actions, passes)
            passes.finish()
        totals += torch.stack([passes.loss_sum, passes.num_tokens])
    context.model.train(True)
    # All tensor-parallel ranks add the same sums, which leaves the mean as it is.
    context.mesh.world.all_reduce_scalars(totals).wait()
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1.0))
