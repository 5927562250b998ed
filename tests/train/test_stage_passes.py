"""A stage's passes: what is counted, what is held of a micro-batch, whole models and cut ones alike."""

import torch
import torch.nn.functional as F
from support.small_runs import DrawnSamples, core_on_rank, tiny_run

from megazero.data.loader import build_step_batch
from megazero.pipeline.runtime import execute
from megazero.train.build import batch_layout, step_parts
from megazero.train.stage_passes import StagePasses


def test_losses_and_tokens_are_counted() -> None:
    config = tiny_run(micro_batch_size=4, global_batch_size=8)
    core = core_on_rank(0, config)
    parts = step_parts(config, core)
    batches = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None)).micro_batches
    mask = (torch.arange(batches[1].labels.numel()) % 3 == 0).float().view_as(batches[1].labels)
    batches[1] = batches[1]._replace(loss_mask=mask)
    expected = 0.0
    with torch.no_grad():
        for batch in batches:
            logits = core.model(batch.tokens)[..., : core.model.vocab_size]
            losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
            expected += float(losses.sum() if batch.loss_mask is None else losses[mask.bool().flatten()].sum())
        step = parts.plan.evaluation(len(batches))
        passes = StagePasses(parts, batches, step)
        execute(step, passes)
        passes.finish()
    torch.testing.assert_close(passes.loss_sum.item(), expected, rtol=1e-13, atol=0)
    assert passes.num_tokens.item() == batches[0].labels.numel() + int(mask.sum())


def test_a_step_leaves_no_graph_behind() -> None:
    config = tiny_run(micro_batch_size=4, global_batch_size=8)
    core = core_on_rank(0, config)
    parts = step_parts(config, core)
    batches = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None)).micro_batches
    step = parts.plan.step(len(batches))
    passes = StagePasses(parts, batches, step, multiplier=1e-3)
    parts.engine.begin_step()
    execute(step, passes)
    parts.engine.finish_reductions()
    assert not (passes._roots or passes._inputs or passes._outgoing or passes._held)
    core.engine.close()
