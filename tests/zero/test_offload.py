"""Tests that a state's home changes no bit of the training: losses, norms, weights and moments, in any layout.

Copies to and from the home are late: they are made when something waits for them, and what they copy to is full of NaN
until then, so that nothing can have read it before.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import pytest
import torch
from support.late_copies import late_copies
from support.ledgered_step import Held, ledgered_step
from support.processes import run_ranks
from support.training import SETTINGS, Cell, Outcome, train_on_rank, write_text_corpus

from megazero.zero.plan import Home, host_traffic, model_state_bytes, resolve

OPTIMIZER = {"offload_optimizer": "cpu"}
PARAMETERS = {"offload_param": "cpu"}
BOTH = {**OPTIMIZER, **PARAMETERS}
# By which the first step overflows, and later ones do not.
SCALE = {"initial_loss_scale": 2.0**18, "hysteresis": 1}


class Case(NamedTuple):
    """A cell that keeps all states on the device, and the settings that move some."""

    cell: Cell
    moved: Mapping[str, Any]


# Every pair of stage, precision, home, layout, and of what else changes the way of a gradient or a weight.
CASES = (
    Case(Cell(dp=2, stage=1, precision="fp32"), OPTIMIZER),
    Case(Cell(tp=2, dp=2, stage=1, precision="bf16", accumulation=2), {**OPTIMIZER, "offload_optimizer_ratio": 0.5}),
    Case(
        Cell(
            dp=2,
            stage=1,
            precision="fp16",
            settings={**SCALE, "contiguous_gradients": False, "communication_data_type": "fp32"},
        ),
        OPTIMIZER,
    ),
    Case(Cell(pp=2, dp=2, stage=2, precision="fp32", accumulation=4), OPTIMIZER),
    Case(
        Cell(
            dp=2,
            stage=2,
            precision="bf16",
            accumulation=2,
            settings={"accumulate_allreduce_grads_in_fp32": True, "communication_data_type": "bf16"},
        ),
        OPTIMIZER,
    ),
    Case(
        Cell(dp=3, stage=2, precision="fp16", settings={**SCALE, "global_batch_size": 12, "sub_group_size": 1000}),
        OPTIMIZER,
    ),
    Case(Cell(tp=2, dp=2, stage=3, precision="fp32", settings={"sequence_parallel": True}), BOTH),
    Case(
        Cell(
            dp=2,
            stage=3,
            precision="bf16",
            accumulation=2,
            settings={"param_persistence_threshold": 100, "optimizer": "sgd", "weight_decay": 0.0},
        ),
        {**BOTH, "offload_optimizer_ratio": 0.3},
    ),
    Case(Cell(dp=2, stage=3, precision="fp32"), OPTIMIZER),
    Case(Cell(pp=2, dp=2, stage=3, precision="fp16", accumulation=2, settings=SCALE), PARAMETERS),
    Case(Cell(stage=3, precision="fp32", settings={"recompute_granularity": "full"}), OPTIMIZER),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(tmp_path_factory.mktemp("corpus"))


def compare(rank: int, case: Case, prefix: str) -> tuple[Outcome, Outcome]:
    """Train both ways on this rank."""
    plain = train_on_rank(rank, case.cell, prefix)
    with late_copies():
        moved = train_on_rank(rank, case.cell.with_settings(case.moved), prefix)
    return plain, moved


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cell} {'+'.join(case.moved)}")
def test_a_home_changes_no_bit(case: Case, corpus: str) -> None:
    for plain, moved in run_ranks(case.cell.world_size, compare, case, corpus):
        check_bytes(case, plain, moved)
        assert moved.losses == plain.losses
        assert list(map(str, moved.grad_norms)) == list(map(str, plain.grad_norms))  # not finite where a step overflows
        assert moved.skipped == plain.skipped
        assert not all(plain.skipped) and all(map(math.isfinite, plain.losses))
        assert len(moved.saved) == len(plain.saved)
        for ours, theirs in zip(moved.saved, plain.saved, strict=True):
            assert ours[:4] == theirs[:4]
            assert torch.equal(ours.values, theirs.values), (ours.name, ours.kind)


def check_bytes(case: Case, plain: Outcome, moved: Outcome) -> None:
    """Check what left the device, what it takes at home, and what crossed between the two, against the formulas."""
    cell = case.cell.with_settings(case.moved)
    plan = resolve((config := cell.config("corpus")).zero, config.precision)
    padded, _ = moved.layout
    assert "host" not in plain.comm_bytes and not any(plain.host_states.values())
    if "offload_optimizer_ratio" in case.moved:  # whole buckets leave, so that the share is met within half of one
        away, stay = (states["master"] // 4 for states in (moved.host_states, moved.model_state_bytes))
        bucket = SETTINGS["reduce_bucket_size"] // cell.dp
        assert abs(away - config.zero.offload_optimizer_ratio * (away + stay)) <= bucket / 2
        return
    persistent = moved.persistent_numel if cell.stage == 3 else 0
    if not persistent:
        assert moved.host_states == asdict(model_state_bytes(plan, padded, cell.dp, Home.HOST))
        assert moved.model_state_bytes == asdict(model_state_bytes(plan, padded, cell.dp))
    gathered = moved.comm_bytes.get("dp", {}).get("all_gather", 0) if plan.parameter.home is Home.HOST else 0
    if cell.dp > 1 and not config.parallel.sequence_parallel:  # whose partial gradients come back to be summed
        is_away = plan.gradient.home is Home.HOST
        tied = moved.comm_bytes.get("ends", {}).get("all_reduce", 0) if is_away else 0  # of two ranks: the bytes summed
        step = host_traffic(plan, padded, cell.dp, cell.accumulation, num_gathers=0)
        loaded = step.loaded + gathered // (cell.dp - 1)  # a rank sends its partition, which has come, to all others
        assert moved.comm_bytes["host"] == {"store": step.stored + tied, "load": loaded + tied}


def at_depths(rank: int, settings: Mapping[str, Any]) -> list[Held]:
    """Return what the device holds in a step of a model of 3 layers, and of one of 6."""
    return [ledgered_step(rank, 1, 2, {**settings, "num_layers": layers}) for layers in (3, 6)]


@pytest.mark.gloo
def test_what_is_offloaded_takes_no_memory_of_the_device_at_any_depth() -> None:
    common = {"precision": "bf16", "max_live_parameters": 0, "prefetch_bucket_size": 0}
    held = run_ranks(2, at_depths, {**common, **BOTH, "zero_stage": 3})[0]
    for depth in held:
        assert depth.peaks["parameters"] == depth.peaks["master"] == depth.peaks["moments"] == 0
    shallow, deep = ({name: held[at].peaks[name] for name in ("gathered_parameters", "gradients")} for at in (0, 1))
    assert deep == shallow, "a unit at a time is gathered, and its gradients leave"
    bucket = 2 * 5000  # in bf16
    assert all(depth.peaks["communication_buffers"] <= 12 * bucket for depth in held)
