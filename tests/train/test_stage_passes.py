"""Tests of a stage's passes in whole and cut models: losses and tokens counted, dropout seeds, and graphs released."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import run_ranks
from support.small_runs import DrawnSamples, core_on_rank, tiny_run

from megazero.data.loader import build_step_batch
from megazero.generators import default_generator
from megazero.pipeline.runtime import execute
from megazero.train.build import batch_layout, step_context
from megazero.train.context import StepContext
from megazero.train.stage_passes import StagePasses


def test_losses_and_tokens_are_counted() -> None:
    config = tiny_run(micro_batch_size=4, global_batch_size=8)
    core = core_on_rank(0, config)
    parts = step_context(config, core)
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


class NotedDropout:
    """The run's dropout, with a record of the seeds that it has given the generator."""

    def __init__(self, parts: StepContext) -> None:
        self._dropout = parts.dropout
        self._generator = default_generator(parts.mesh.device)
        self.seeds: list[int] = []

    def begin_micro_batch(self, first_sample: int, part: int) -> None:
        self._dropout.begin_micro_batch(first_sample, part)
        self.seeds.append(self._generator.initial_seed())


def dropout_seeds(rank: int, pp: int, virtual: int) -> list[int]:
    """Return the generator's seed at each chunk's beginning of each micro-batch, in one step of four micro-batches."""
    settings: dict[str, Any] = {"pipeline_model_parallel_size": pp, "hidden_dropout": 0.1, "num_layers": pp * virtual}
    if virtual > 1:
        settings["num_layers_per_virtual_pipeline_stage"] = 1
    config = tiny_run(micro_batch_size=2, global_batch_size=8, **settings)
    core = core_on_rank(rank, config, pp=pp)
    parts = step_context(config, core)
    noted = NotedDropout(parts)
    parts = replace(parts, dropout=noted)
    batches = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None)).micro_batches
    step = parts.plan.step(len(batches))
    passes = StagePasses(parts, batches, step)
    parts.engine.begin_step()
    execute(step, passes)
    passes.finish()
    parts.engine.finish_reductions()
    core.engine.close()
    return noted.seeds


@pytest.mark.gloo
@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_every_chunk_drops_on_its_own(pp: int, virtual: int) -> None:
    """Each micro-batch of each chunk has its own seed; equal seeds would drop the same elements in several layers."""
    seeds = [seed for found in run_ranks(pp, dropout_seeds, pp, virtual) for seed in found]
    assert len(seeds) == len(set(seeds)) == 4 * pp * virtual


def test_a_step_leaves_no_graph_behind() -> None:
    config = tiny_run(micro_batch_size=4, global_batch_size=8)
    core = core_on_rank(0, config)
    parts = step_context(config, core)
    batches = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None)).micro_batches
    step = parts.plan.step(len(batches))
    passes = StagePasses(parts, batches, step, multiplier=1e-3)
    parts.engine.begin_step()
    execute(step, passes)
    parts.engine.finish_reductions()
    assert not (passes._roots or passes._inputs or passes._outgoing or passes._deferred)
    core.engine.close()
