"""Trains a small GPT with 8-bit products, on the same samples in every layout, and evaluates after each step."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from support.small_runs import LENGTH, core_on_rank, reference_batch, tiny_run
from support.training import boxes
from torch import Tensor

from megazero.data.loader import MicroBatch, StepBatch
from megazero.tensor_parallel.float8 import LayerScales, StepWeight
from megazero.train.build import step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

LAYERS, STEPS, MICRO_BATCHES, SAMPLES = 2, 3, 4, 16
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": LENGTH,
    "micro_batch_size": SAMPLES,
    "global_batch_size": MICRO_BATCHES * SAMPLES,
    "precision": "bf16",
    "fp8_format": "hybrid",
}


class Layout(NamedTuple):
    """The settings of a run and its degrees of parallelism."""

    settings: dict[str, Any]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    evaluates: bool = True

    def having(self, **settings: Any) -> "Layout":
        return self._replace(settings={**self.settings, **settings})


@dataclass
class Ran:
    """The results of a run on one rank.

    figures: loss and gradient norm of every step.  evaluations: losses between steps; none in pipelines.  state: all
    that this rank saves.  quantised: how many weights were quantised once a step.  scales and history: those of delayed
    scaling.  figures_sent: the bytes of figures that the last step sent over all ranks.
    """

    figures: list[tuple[float, float]]
    evaluations: list[float]
    state: dict[str, Tensor]
    quantised: int
    scales: Tensor
    history: Tensor
    figures_sent: int


def build(rank: int, layout: Layout) -> tuple[RunComponents, Any]:
    """Build a run's components and the context of its steps."""
    degrees = {"tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp}
    config = tiny_run(**{**SIZES, **degrees, **layout.settings})
    core = core_on_rank(rank, config, tp=layout.tp, pp=layout.pp, dp=layout.dp)
    return core, step_context(config, core)


def batch_of(core: RunComponents, step: int) -> StepBatch:
    """Return this rank's micro-batches of a step; all data-parallel ranks together have the same ones in any layout."""
    first, ranks = step * MICRO_BATCHES, core.mesh.topology.dp
    starts = [SAMPLES * (first + index) for index in range(core.mesh.coordinate("dp"), MICRO_BATCHES, ranks)]
    batches = {start: reference_batch(start, SAMPLES, masked=False) for start in starts}
    found = [MicroBatch(start, batch.tokens, batch.labels, None) for start, batch in batches.items()]
    return StepBatch(SAMPLES * first, found)


@torch.no_grad()
def evaluated(core: RunComponents) -> float:
    """Return the loss of other samples."""
    core.model.train(False)
    batch = reference_batch(1000, SAMPLES, masked=False)
    loss = core.model.summed_loss(batch.tokens, batch.labels).item()
    core.engine.end_walk(ends_pass=True)
    core.model.train(True)
    return loss


def ran(rank: int, layout: Layout) -> Ran:
    """Train and evaluate by turns."""
    core, context = build(rank, layout)
    quantised = 0
    if core.weights is not None:
        original = core.weights._quantise

        def counted(weight: Tensor, scales: LayerScales | None) -> StepWeight:
            nonlocal quantised
            quantised += 1
            return original(weight, scales)

        core.weights._quantise = counted
    figures, evaluations = [], []
    for step in range(STEPS):
        core.mesh.meter.reset()
        report = training_step(context, batch_of(core, step), StepControls(1e-2, 1.0))
        figures.append((report.loss.item(), report.grad_norm.item()))
        sent = core.mesh.meter.bytes_by_axis().get("world", {}).get("scalars", 0)
        if layout.pp == 1 and layout.evaluates:
            evaluations.append(evaluated(core))
    core.engine.close()
    state = {
        f"{box.kind} {box.name} {box.offset}": box.values for each in core.engine.owned_state() for box in boxes(each)
    }
    empty = torch.empty(0)
    scales, history = (empty, empty) if core.scales is None else (core.scales.scales, core.scales.history)
    return Ran(figures, evaluations, state, quantised, scales, history, sent)


def ran_all(rank: int, layouts: list[Layout]) -> list[Ran]:
    """Train in one layout after the other."""
    return [ran(rank, layout) for layout in layouts]


def check_bitwise(found: Ran, expected: Ran) -> None:
    """Check that two runs have the same figures, evaluations and state, to the last bit."""
    assert found.figures == expected.figures and found.evaluations == expected.evaluations
    assert found.state.keys() == expected.state.keys()
    for name, values in found.state.items():
        assert torch.equal(values, expected.state[name]), name
    assert torch.equal(found.scales, expected.scales) and torch.equal(found.history, expected.history)
