"""The loss on held-out text: the same first samples every time, so that evaluations compare."""

from dataclasses import dataclass

import torch
from torch import nn

from megazero.comm.mesh import Mesh
from megazero.data.loader import BatchLayout, build_step_batch
from megazero.data.samples import Samples
from megazero.train.step import LanguageModel, summed_loss


@dataclass(frozen=True)
class EvaluationSet:
    """num_batches global batches, from sample 0 on; bytes_per_token of the text, None where nobody tells."""

    source: Samples
    layout: BatchLayout
    num_batches: int
    bytes_per_token: float | None = None


@torch.no_grad()
def evaluate(model: LanguageModel, mesh: Mesh, held_out: EvaluationSet) -> float:
    """Mean loss in nats a token over the set; every rank of the job takes part and gets the same figure."""
    module = model if isinstance(model, nn.Module) else nn.Module()
    was_training = module.training
    module.eval()
    totals = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # loss sum, tokens
    for index in range(held_out.num_batches):
        first = index * held_out.layout.global_batch_size
        for batch in build_step_batch(held_out.source, first, held_out.layout).micro_batches:
            loss, num_tokens = summed_loss(model, batch, mesh.device)
            totals[0] += loss
            totals[1] += num_tokens
    module.train(was_training)
    mesh.axis("dp").all_reduce_scalars(totals).wait()
    loss_sum, num_tokens = totals.tolist()
    return float(loss_sum / max(num_tokens, 1.0))
