"""Measures activation memory, gathers and temporaries of real steps with ledger and meter (ZeRO, sections 6 and 8)."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from support.ledgered_step import BATCH, SEQUENCE, SETTINGS, Held, ledgered_step
from support.processes import run_ranks

LAYERS = 4
CHECKPOINT = 4 * BATCH * SEQUENCE * int(SETTINGS["hidden_size"])  # bytes in fp32
MICRO_BATCHES = 2
FULL = {"num_layers": LAYERS, "recompute_granularity": "full"}
SLICED = {**FULL, "partition_activations": True}


Measure = Callable[..., Held]


@pytest.fixture(scope="module")
def held() -> Measure:
    """Return a function that measures a step on tp x dp ranks, once for the same settings."""

    def measure(tp: int, dp: int = 1, **changes: Any) -> Held:
        found: Held = run_ranks(tp * dp, ledgered_step, tp, dp, changes)[0]
        return found

    return functools.cache(measure)


@pytest.mark.gloo
@pytest.mark.parametrize(("tp", "contiguous"), [(2, True), (3, False)])
def test_checkpoints_fall_by_exactly_the_degree(held: Measure, tp: int, contiguous: bool) -> None:
    arena = {"contiguous_checkpointing": True} if contiguous else {}
    whole, sliced = held(tp, **FULL, **arena), held(tp, **SLICED, **arena)
    assert whole.peaks["activation_checkpoints"] == LAYERS * CHECKPOINT
    assert sliced.peaks["activation_checkpoints"] == LAYERS * CHECKPOINT // tp
    for seen in (whole, sliced):
        assert seen.arena_bytes == (seen.peaks["activation_checkpoints"] if contiguous else 0)
        assert seen.arena_high_water == seen.arena_bytes, "the arena was meant to be full at the forward's end"
        assert seen.outside == 0


@pytest.mark.gloo
@pytest.mark.parametrize(("tp", "contiguous"), [(2, True), (3, False)])
def test_on_the_host_only_slices_on_their_way_stay(held: Measure, tp: int, contiguous: bool) -> None:
    seen = held(tp, **SLICED, checkpoint_in_cpu=True, contiguous_checkpointing=contiguous)
    assert seen.peaks["activation_checkpoints"] == 3 * CHECKPOINT // tp, "in use, being gathered, coming back"
    assert seen.host_peak_bytes == LAYERS * CHECKPOINT // tp
    assert seen.outside == 0
    assert seen.arena_bytes == (3 * CHECKPOINT // tp if contiguous else 0)


@pytest.mark.gloo
def test_layers_of_a_segment_share_a_checkpoint(held: Measure) -> None:
    assert held(1, **FULL, recompute_num_layers=3).peaks["activation_checkpoints"] == 2 * CHECKPOINT
    block = held(1, **FULL, recompute_method="block", recompute_num_layers=3)
    assert block.peaks["activation_checkpoints"] == 3 * CHECKPOINT


@pytest.mark.gloo
def test_each_choice_keeps_less(held: Measure) -> None:
    choices = ({"num_layers": LAYERS}, {**FULL, "recompute_granularity": "selective"}, FULL)
    everything, selective, full = (held(3, **choice) for choice in choices)
    assert everything.peaks["activation_checkpoints"] == 0
    # The peak of everything is not compared: temporaries that gloo has not released yet add to it.
    kept = [seen.peaks["activations"] + seen.peaks["activation_checkpoints"] for seen in (full, selective, everything)]
    assert kept[0] < kept[1] < kept[2]


@pytest.mark.gloo
@pytest.mark.parametrize(("tp", "dropout"), [(2, 0.1), (3, 0.0)])
def test_traffic_of_slices(held: Measure, tp: int, dropout: float) -> None:
    """Slices cost one gather more for every block, counted in units of b s h sent (tp-1)/tp times: an all-reduce is 2,
    a gather 1.

    A block has 2 all-reduces in forward and 2 in backward. Recomputation stops with the last tensor that backward
    needs: with dropout that is the mask made after the second all-reduce, and both are repeated (12 in all, the gather
    is 1/12); without dropout the second, useless one is skipped (10, 1/10).
    """
    changes = {"hidden_dropout": dropout} if dropout else {}
    nothing, full, sliced = (held(tp, **choice, **changes) for choice in ({"num_layers": LAYERS}, FULL, SLICED))
    unit = LAYERS * MICRO_BATCHES * CHECKPOINT * (tp - 1) // tp
    repeated = full.comm_bytes["tp"]["all_reduce"] - nothing.comm_bytes["tp"]["all_reduce"]
    assert repeated == (4 if dropout else 2) * unit
    blocks = 8 * unit + repeated
    assert sliced.comm_bytes["tp"]["all_reduce"] == full.comm_bytes["tp"]["all_reduce"]
    assert sliced.comm_bytes["tp"]["all_gather"] == unit
    assert blocks == (12 if dropout else 10) * unit
    assert "all_gather" not in full.comm_bytes["tp"]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_temporaries_do_not_grow_with_the_model(held: Measure, stage: int, precision: str) -> None:
    """More layers need the same constant-size buffers, and the same peaks of all temporary memory."""
    changes = {"zero_stage": stage, "precision": precision, "recompute_granularity": "full"}
    small, large = held(1, 2, num_layers=2, **changes), held(1, 2, num_layers=4, **changes)
    for category in ("temporary", "communication_buffers", "gathered_parameters"):
        assert large.peaks[category] <= small.peaks[category] + 1024, category
    grown = {name for name in large.peaks if large.peaks[name] > small.peaks[name] + 1024}
    assert grown <= {"parameters", "gradients", "master", "moments", "activation_checkpoints"}
