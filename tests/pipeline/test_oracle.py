"""Tests gradients of stages under the 1F1B and interleaved schedules of torch.distributed.pipelining."""

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks
from support.small_runs import DrawnSamples, core_on_rank, tiny_run
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from megazero.config.run import RunConfig
from megazero.data.loader import MicroBatch, build_step_batch
from megazero.model.gpt import GPT
from megazero.model.initial_values import initialize_
from megazero.model.sequences import Sequences
from megazero.pipeline.runtime import execute
from megazero.train.build import batch_layout, step_context
from megazero.train.stage_passes import StagePasses

pytestmark = pytest.mark.gloo

MICRO_BATCHES = 4
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class TheirChunk(nn.Module):
    """One of megazero's chunks, as a stage of torch's requires it: with the incoming tensor as its only input."""

    def __init__(self, model: GPT, index: int, length: int) -> None:
        super().__init__()
        self.model, self.index, self.length = model, index, length

    def forward(self, x: Tensor) -> Tensor:
        chunk = self.model.chunks[self.index]
        sequences = Sequences(self.length)
        rows = self.model.embed(x, sequences) if chunk.is_first else x.flatten(0, 1)
        rows = self.model.through(self.index, rows, sequences)
        return rows.view(-1, self.length, rows.shape[-1])


def config_of(schedule: str) -> RunConfig:
    virtual = {"num_layers_per_virtual_pipeline_stage": 1} if schedule == "interleaved" else {}
    return tiny_run(
        num_layers=4,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        pipeline_split=None if schedule != "interleaved" else "1,1,1,1",
        global_batch_size=2 * MICRO_BATCHES,
        untie_embeddings_and_output_weights=True,
        **virtual,
    )


def gradients_of_both(rank: int, schedule: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Return, by parameter of this rank, megazero's gradient of the summed loss, and torch's."""
    config = config_of(schedule)
    core = core_on_rank(rank, config, pp=2)
    batches = build_step_batch(DrawnSamples(), 0, batch_layout(config, core.mesh, None)).micro_batches
    parts = step_context(config, core)
    step = parts.plan.step(MICRO_BATCHES)
    parts.engine.begin_step()
    passes = StagePasses(parts, batches, step)
    execute(step, passes)
    passes.finish()
    parts.engine.finish_reductions()
    names = [name for name, _ in core.model.named_parameters()]
    ours = {name: torch.cat([piece.tensor for piece in core.engine.pieces(name, "gradient")]) for name in names}
    shapes = {name: parameter.shape for name, parameter in core.model.named_parameters()}
    core.engine.close()

    theirs = their_gradients(rank, schedule, core.model, batches)
    return {name: (ours[name].view(shapes[name]), theirs[name]) for name in names}


def their_gradients(rank: int, schedule: str, model: GPT, batches: list[MicroBatch]) -> dict[str, Tensor]:
    for parameter in model.parameters():
        parameter.grad = None
        parameter.data = torch.zeros_like(parameter.data)
    initialize_(model, tiny_run().training.seed)
    tokens, labels = (torch.cat([getattr(batch, field) for batch in batches]) for field in ("tokens", "labels"))
    length, chunks = tokens.shape[1], len(model.chunks)
    stages = [
        PipelineStage(
            TheirChunk(model, index, length), index * 2 + rank, 2 * chunks, torch.device("cpu"), group=group()
        )
        for index in range(chunks)
    ]

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return model.loss(x.flatten(0, 1), target)

    if schedule == "interleaved":
        run = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    else:
        run = THEIRS[schedule](stages[0], MICRO_BATCHES, loss_fn=loss, scale_grads=False)
    inputs = (tokens,) if rank == 0 else ()
    target = {"target": labels, "losses": []} if rank == 1 else {}
    run.step(*inputs, **target)
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_gradients_are_those_of_torchs_pipelines(schedule: str) -> None:
    for found in run_ranks(2, gradients_of_both, schedule):
        for name, (ours, theirs) in found.items():
            assert theirs.abs().max() > 0, name
            torch.testing.assert_close(
                ours, theirs, rtol=1e-12, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}"
            )
