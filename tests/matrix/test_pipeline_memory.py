"""Measures the memory of pipeline stages: gradients and activations against the number of micro-batches."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.configs import make_run
from support.flat_layout import padded_numel
from support.ledgered_step import BATCH, SEQUENCE, SETTINGS, VOCABULARY
from support.processes import mesh_in_worker, run_ranks

from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import CATEGORIES
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step

HIDDEN = int(SETTINGS["hidden_size"])
CUT = 4 * BATCH * SEQUENCE * HIDDEN  # bytes of a message in fp32
WORDS = 4 * VOCABULARY * HIDDEN  # bytes of the word embedding in fp32
STAGES, MICRO_BATCHES = 4, 6
# Every stage has as many layers, whatever the head costs, so that stages differ in their place alone.
FOUR_STAGES = {"pipeline_model_parallel_size": STAGES, "num_layers": 8, "pipeline_split": "2,2,2,2"}


@dataclass
class Held:
    """Bytes of one rank in its second step by category, at the peak and at the end, and of what the rank owns."""

    peaks: dict[str, int]
    peak_bytes: int
    left: dict[str, int]
    owned_gradients: int
    largest_bucket: int


def step_on_rank(rank: int, dp: int, num_micro_batches: int, changes: dict[str, Any]) -> Held:
    """Take two steps and return the bytes held in the second; `changes` override SETTINGS."""
    batch_size = {"global_batch_size": num_micro_batches * BATCH * dp}
    config = make_run(**{**SETTINGS, **batch_size, **changes})
    mesh = mesh_in_worker(rank, dp=dp, pp=config.parallel.pipeline_model_parallel_size, is_late=False)
    with Ledger(mesh.device) as ledger:
        buffers = FusedBuffers(0, mesh.device, ledger=ledger)
        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY, ledger=ledger)
        parts = step_context(config, core)
        tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCABULARY
        batch = StepBatch(0, [MicroBatch(index, tokens, tokens, None) for index in range(num_micro_batches)])
        for _ in range(2):
            ledger.reset()
            training_step(parts, batch, StepControls(1e-3, 1.0))
        step = ledger.take()
        core.engine.close()
    layout = core.engine.layout
    return Held(
        peaks={str(category): nbytes for category, nbytes in step.peaks.items()},
        peak_bytes=step.peak_bytes,
        left=dict(zip(CATEGORIES, map(int, step.timeline.live[-1]), strict=True)),
        owned_gradients=4 * padded_numel(layout, trainable=True) // dp,
        largest_bucket=4 * layout.max_reduced_numel,
    )


def four_stages(schedule: str, num_micro_batches: int, **changes: Any) -> list[Held]:
    """Return the bytes that the four stages hold, in their order."""
    settings = {**FOUR_STAGES, "pipeline_schedule": schedule, **changes}
    found: list[Held] = run_ranks(STAGES, step_on_rank, 1, num_micro_batches, settings)
    return found


def activations(held: Held) -> int:
    """Return the peak bytes of activations and checkpoints that micro-batches in flight leave."""
    return held.peaks["activations"] + held.peaks["activation_checkpoints"]


@pytest.mark.gloo
def test_gradients_of_stage_2_do_not_grow_with_micro_batches() -> None:
    settings = {"pipeline_model_parallel_size": 2, "num_layers": 4, "pipeline_split": "2,2", "zero_stage": 2}
    runs = [run_ranks(4, step_on_rank, 2, count, settings) for count in (2, 4)]
    for run in runs:
        for held, first in zip(run, runs[0], strict=True):
            assert held.peaks["gradients"] == first.peaks["gradients"]
            assert held.peaks["communication_buffers"] == first.peaks["communication_buffers"]
            assert held.peak_bytes <= first.peak_bytes + CUT
            # Beside the gradients that a rank owns there is one as autograd makes it, at most the largest one.
            assert held.owned_gradients <= held.peaks["gradients"] <= held.owned_gradients + WORDS
            assert held.peaks["communication_buffers"] <= 6 * held.largest_bucket
            assert held.left["gradients"] == held.owned_gradients


@pytest.mark.gloo
def test_1f1b_holds_as_many_micro_batches_as_stages_follow() -> None:
    """gpipe holds all m micro-batches, 1f1b min(m, p - s) on stage s; the bytes of one are measured on gpipe."""
    alone = four_stages("1f1b", 1)
    fewer, gpipe = (four_stages("gpipe", count) for count in (MICRO_BATCHES - 1, MICRO_BATCHES))
    alternating = four_stages("1f1b", MICRO_BATCHES)
    messages = 4 * CUT  # two being received and two sent; one micro-batch alone has none at its peak
    for stage in range(STAGES):
        one, in_flight = activations(gpipe[stage]) - activations(fewer[stage]), min(MICRO_BATCHES, STAGES - stage)
        assert messages < one / 8
        for run, count in ((alternating, in_flight), (gpipe, MICRO_BATCHES)):
            more = activations(run[stage]) - activations(alone[stage])
            assert abs(more - (count - 1) * one) <= messages, f"stage {stage}: {more} bytes more, {count} of {one}"


@pytest.mark.gloo
def test_checkpoints_are_those_of_micro_batches_in_flight() -> None:
    """Each of a stage's two layers has a checkpoint: the stage's input, and the first layer's output."""
    changes = {"recompute_granularity": "full"}
    alternating, gpipe = (four_stages(schedule, MICRO_BATCHES, **changes) for schedule in ("1f1b", "gpipe"))
    for stage in range(STAGES):
        in_flight = 2 * min(MICRO_BATCHES, STAGES - stage) * CUT
        assert in_flight <= alternating[stage].peaks["activation_checkpoints"] <= in_flight + CUT
        assert gpipe[stage].peaks["activation_checkpoints"] == 2 * MICRO_BATCHES * CUT


@pytest.mark.gloo
def test_zero_bubble_holds_no_more_micro_batches_than_there_are_stages() -> None:
    """Micro-batches are held until their weight gradients, which later stages make at the end: p there, not p - s."""
    alone, plain = (four_stages(schedule, 1) for schedule in ("zero-bubble", "1f1b"))
    split, longer = (four_stages("zero-bubble", count) for count in (MICRO_BATCHES, MICRO_BATCHES + 3))
    for stage in range(STAGES):
        least = STAGES - stage
        one = alone[stage].peaks["activations"] + alone[stage].peaks["temporary"]
        held = split[stage].peaks["activations"] + split[stage].peaks["temporary"]
        assert activations(plain[stage]) * least <= activations(split[stage]) + 2 * STAGES * CUT
        assert held <= STAGES * one + 2 * CUT, f"stage {stage} holds {held / one:.2f} micro-batches"
        assert longer[stage].peak_bytes <= split[stage].peak_bytes + CUT


@pytest.mark.gloo
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_of_a_step_stays(schedule: str, stage: int) -> None:
    settings: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_layers": 4, "zero_stage": stage}
    settings |= {"num_layers_per_virtual_pipeline_stage": 1 if schedule == "interleaved" else None}
    for held in run_ranks(2, step_on_rank, 1, 4, {**settings, "pipeline_schedule": schedule}):
        assert held.peaks["activations"] > 0
        for category in ("activations", "activation_checkpoints", "gathered_parameters"):
            assert held.left[category] == 0, category
        assert held.left["temporary"] < CUT, "no message is left"


@pytest.mark.gloo
def test_messages_do_not_pile_up() -> None:
    """More micro-batches have the same peak: a sent message is released once its receipt is proven."""
    few, many = (four_stages("1f1b", count) for count in (MICRO_BATCHES, MICRO_BATCHES + 3))
    assert [held.peak_bytes for held in many] == [held.peak_bytes for held in few]
