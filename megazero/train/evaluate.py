"""The loss on held-out text: the same first samples every time, so that evaluations compare."""

from dataclasses import dataclass

import torch

from megazero.data.loader import BatchLayout, build_step_batch
from megazero.data.samples import Samples
from megazero.pipeline.runtime import execute
from megazero.train.context import StepParts
from megazero.train.stage_passes import StagePasses


@dataclass(frozen=True)
class EvaluationSet:
    """num_batches global batches, from sample 0 on; bytes_per_token of the text, None where nobody tells."""

    source: Samples
    layout: BatchLayout
    num_batches: int
    bytes_per_token: float | None = None


@torch.no_grad()
def evaluate(parts: StepParts, held_out: EvaluationSet) -> float:
    """Mean loss in nats a token over the set; every rank of the job takes part and gets the same figure."""
    parts.model.train(False)
    totals = torch.zeros(2, dtype=torch.float64, device=parts.mesh.device)  # loss sum, tokens
    for index in range(held_out.num_batches):
        first = index * held_out.layout.global_batch_size
        micro_batches = build_step_batch(held_out.source, first, held_out.layout).micro_batches
        actions = parts.plan.evaluation(len(micro_batches))
        passes = StagePasses(parts, micro_batches, actions)
        execute(actions, passes)
        passes.finish()
        totals += torch.stack([passes.loss_sum, passes.num_tokens])
    parts.model.train(True)
    # Tensor-parallel ranks all hold the same, which leaves the mean as it is.
    parts.mesh.world.all_reduce_scalars(totals).wait()
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1.0))
