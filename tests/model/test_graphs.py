"""Recorded passes of blocks train as the blocks themselves do.

A CPU has no CUDA graphs: here a recording is repeated by running the same function again and copying its results to
where the first ones are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from support.families import FAMILIES
from support.processes import run_ranks
from support.small_runs import core_on_rank, reference_batch, tiny_run
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megazero.data.loader import MicroBatch, StepBatch
from megazero.model.graphs import record_blocks
from megazero.train.build import step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

pytestmark = pytest.mark.gloo

STEPS, MICRO_BATCHES = 3, 3
T = TypeVar("T")
ROTATED = {**FAMILIES["qwen3"], "num_query_groups": 1}


class Rerun:
    """A recorder that runs functions again; order: the numbers of its recordings, as they are repeated."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.num_recorded = 0

    def warm_up(self, function: Callable[[], object]) -> None:
        function()

    def record(self, function: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        result, number = function(), self.num_recorded
        self.num_recorded += 1

        def repeat() -> None:
            self.order.append(number)
            for place, found in zip(tree_leaves(result), tree_leaves(function()), strict=True):
                if isinstance(place, Tensor):
                    place.detach().copy_(found)

        return result, repeat


class Ran(NamedTuple):
    figures: list[tuple[float, float]]
    evaluations: list[float]
    weights: dict[str, Tensor]
    order: list[int]


def run(rank: int, settings: dict[str, Any], dp: int, *, is_recorded: bool) -> Ran:
    """Train for a few steps; order: that in which recorded passes were repeated."""
    batch = {"global_batch_size": 2 * MICRO_BATCHES * dp, "compile": "on", "num_layers": 3}
    config = tiny_run(**{**batch, **settings})
    original, recorder = torch.compile, Rerun()
    # Blocks as for a compiler, which is left out, since it takes long; only with it is dropout drawn as in its graphs.
    traces = config.model.hidden_dropout > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda f, **_: original(f, fullgraph=True, backend="eager") if traces else f)
        core = core_on_rank(rank, config, dp=dp)
    if is_recorded:
        record_blocks(core.model, lambda: recorder)
    context, figures, evaluations = step_context(config, core), [], []
    for step in range(STEPS):
        report = training_step(context, batch_of(core, step), StepControls(1e-2, 1.0))
        figures.append((report.loss.item(), report.grad_norm.item()))
        evaluations.append(evaluated(core))
    weights = {name: parameter.detach().clone() for name, parameter in core.model.named_parameters()}
    core.engine.close()
    return Ran(figures, evaluations, weights, recorder.order)


def batch_of(core: RunComponents, step: int) -> StepBatch:
    """Return this data-parallel rank's micro-batches of a step."""
    first, replicas = step * 2 * MICRO_BATCHES * core.mesh.topology.dp, core.mesh.topology.dp
    starts = [first + 2 * (index * replicas + core.mesh.coordinate("dp")) for index in range(MICRO_BATCHES)]
    batches = [(start, reference_batch(start, 2, masked=False)) for start in starts]
    return StepBatch(first, [MicroBatch(start, batch.tokens, batch.labels, None) for start, batch in batches])


@torch.no_grad()
def evaluated(core: RunComponents) -> float:
    """Return the loss of a sample alone, whose rows are fewer than those of a micro-batch."""
    core.model.train(False)
    batch = reference_batch(1000, 1, masked=False)
    loss = core.model.summed_loss(batch.tokens, batch.labels).item()
    core.engine.end_walk(ends_pass=True)
    core.model.train(True)
    return loss


def plain_and_recorded(rank: int, settings: dict[str, Any], dp: int) -> tuple[Ran, Ran]:
    return run(rank, settings, dp, is_recorded=False), run(rank, settings, dp, is_recorded=True)


@pytest.mark.parametrize(
    ("dp", "settings"),
    [
        (1, {"zero_stage": 0}),
        (1, {"zero_stage": 2, "hidden_dropout": 0.2, "attention_dropout": 0.1}),
        (1, {"zero_stage": 1, "compile_num_layers": 2}),
        (2, {"zero_stage": 0, "reduce_bucket_size": 300}),
        (2, {"zero_stage": 1, "reduce_bucket_size": 300, **FAMILIES["bloom"]}),  # with the mask of ALiBi
        (2, {"zero_stage": 2, "reduce_bucket_size": 300, **ROTATED}),
        (2, {"zero_stage": 1, "lora_rank": 2}),  # the first block's input needs no gradient
        (2, {"zero_stage": 1, "contiguous_gradients": False}),  # `.grad` holds the sum of all micro-batches
        (2, {"zero_stage": 1, "precision": "bf16"}),
        (2, {"zero_stage": 2, "precision": "bf16", "accumulate_allreduce_grads_in_fp32": True}),
        (2, {"zero_stage": 2, "offload_optimizer": "cpu", "precision": "bf16"}),
    ],
    ids=str,
)
def test_recorded_passes_train_as_the_blocks_do(dp: int, settings: dict[str, Any]) -> None:
    """In the same numbers to the bit; every micro-batch repeats all forward passes, then all backward passes."""
    for plain, recorded in run_ranks(dp, plain_and_recorded, settings, dp):
        assert recorded.figures == plain.figures
        assert recorded.evaluations == plain.evaluations
        for name, weight in plain.weights.items():
            assert torch.equal(recorded.weights[name], weight), name
        passes = 2 * (2 if "compile_num_layers" in settings else 3)
        assert plain.order == [] and recorded.order == list(range(passes)) * MICRO_BATCHES * STEPS
