"""Tests that a state's home changes no bit of the training: losses, norms, weights and moments, in any layout.

Copies to and from the home are late: they are made when something waits for them, and what they copy to is full of NaN
until then, so that nothing can have read it before.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.configs import make_run
from support.layouts import is_accepted, pairs, pairs_in
from support.ledgered_step import Held, ledgered_step
from support.processes import run_ranks
from support.reference import decayed
from support.training import (
    Cell,
    Outcome,
    first_weights,
    train_late_on_rank,
    train_on_rank,
    write_text_corpus,
)

from megazero.config.run import RunConfig
from megazero.zero.plan import Home, Lifetime, OptimizerShape, model_state_bytes, resolve

OPTIMIZER = {"offload_optimizer": "cpu"}
PARAMETERS = {"offload_param": "cpu"}
BOTH = {**OPTIMIZER, **PARAMETERS}
FILES = {"offload_optimizer": "nvme"}
GRADIENT_FILES = {**FILES, "offload_gradients_nvme": True}
PARAMETER_FILES = {"offload_param": "nvme"}
SLICED = {"recompute_granularity": "full", "partition_activations": True, "checkpoint_in_cpu": True}
# As many buckets as a mix of homes is given at least, so that the norms of the run without it round alike.
CUT = {"reduce_bucket_size": 2500}
# By which the first step overflows, and later ones do not.
SCALE = {"initial_loss_scale": 2.0**18, "hysteresis": 1}


class Case(NamedTuple):
    """A cell that keeps all states on the device, and the settings that move some."""

    cell: Cell
    moved: Mapping[str, Any]


# Every pair of stage, precision, home and layout, and what else changes the way of a gradient or a weight.
CASES = (
    Case(Cell(dp=2, stage=1, precision="fp32"), OPTIMIZER),
    Case(
        Cell(tp=2, dp=2, stage=1, precision="bf16", accumulation=2, settings=CUT),
        {**OPTIMIZER, "offload_optimizer_ratio": 0.5},
    ),
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
    Case(  # reductions of several buckets, only some of which leave
        Cell(dp=2, stage=2, precision="fp32", settings={"allgather_bucket_size": 2900}),
        {**OPTIMIZER, "offload_optimizer_ratio": 0.5},
    ),
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
        Cell(tp=2, dp=2, stage=2, precision="fp16", settings={**SCALE, **SLICED, "sub_group_size": 1000}),
        OPTIMIZER,
    ),
    Case(Cell(tp=2, dp=2, stage=3, precision="fp32", settings={**SLICED, "sequence_parallel": True}), BOTH),
    Case(
        Cell(
            dp=2,
            stage=3,
            precision="bf16",
            accumulation=2,
            settings={**CUT, "param_persistence_threshold": 100, "optimizer": "sgd", "weight_decay": 0.0},
        ),
        {**BOTH, "offload_optimizer_ratio": 0.3},
    ),
    Case(Cell(dp=2, stage=3, precision="fp32"), OPTIMIZER),
    Case(Cell(pp=2, dp=2, stage=3, precision="fp16", accumulation=2, settings=SCALE), PARAMETERS),
    Case(Cell(stage=3, precision="fp16", settings={**SCALE, "recompute_granularity": "full"}), BOTH),
    Case(Cell(pp=2, dp=2, stage=1, precision="bf16", accumulation=2), FILES),
    Case(
        Cell(dp=2, stage=3, precision="bf16", accumulation=2, settings={"max_live_parameters": 0}),
        {**FILES, **PARAMETER_FILES, "offload_param_buffer_count": 1},
    ),
    Case(
        Cell(pp=2, dp=2, stage=3, precision="fp16", settings={**SCALE, "param_persistence_threshold": 100}),
        {**PARAMETER_FILES, "offload_param_max_in_cpu": 10_000},
    ),
    Case(
        Cell(stage=3, precision="fp32", settings={"overlap_comm": False}),
        {**OPTIMIZER, **PARAMETER_FILES, "offload_param_buffer_count": 1},
    ),
    Case(Cell(dp=2, stage=2, precision="fp16", settings={**SCALE, "optimizer": "sgd", "sgd_momentum": 0.9}), FILES),
    Case(
        Cell(tp=2, dp=2, stage=1, precision="bf16", settings={**SLICED, "optimizer": "lamb"}),
        {**FILES, "offload_buffer_count": 3},
    ),
    Case(
        Cell(dp=2, stage=2, precision="bf16", accumulation=2, settings={"optimizer": "adafactor"}),
        {**GRADIENT_FILES, "offload_buffer_count": 2},
    ),
    Case(Cell(dp=2, stage=1, precision="bf16", settings={"optimizer": "adafactor"}), OPTIMIZER),
    Case(
        Cell(stage=1, precision="fp32", settings=CUT),
        {**FILES, "offload_optimizer_ratio": 0.7, "offload_optimizer_nvme_ratio": 0.5},
    ),
    Case(Cell(dp=2, stage=1, precision="fp32", accumulation=2), GRADIENT_FILES),
    Case(
        Cell(dp=3, stage=2, precision="fp16", accumulation=2, settings={**SCALE, "global_batch_size": 12}),
        {**GRADIENT_FILES, "sub_group_size": 1000, "aio_block_size": 4096, "offload_buffer_count": 4},
    ),
    Case(
        Cell(pp=2, dp=2, stage=2, precision="fp32", accumulation=4),
        {**GRADIENT_FILES, "offload_pipeline_read": False, "offload_buffer_count": 4, "sub_group_size": 2000},
    ),
    Case(
        Cell(tp=2, dp=2, stage=3, precision="bf16", accumulation=2, settings={"sequence_parallel": True}),
        {**GRADIENT_FILES, **PARAMETER_FILES, "offload_pipeline_write": False, "sub_group_size": 2100},
    ),
    Case(
        Cell(
            dp=2,
            stage=3,
            precision="bf16",
            accumulation=3,
            settings={"accumulate_allreduce_grads_in_fp32": True, "global_batch_size": 12, "overlap_comm": False},
        ),
        {**GRADIENT_FILES, **PARAMETERS},
    ),
    Case(
        Cell(
            stage=2,
            precision="bf16",
            accumulation=2,
            settings={"optimizer": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0},
        ),
        {**GRADIENT_FILES, "offload_pipeline_read": False, "offload_pipeline_write": False, "sub_group_size": 1500},
    ),
    Case(
        Cell(dp=2, stage=1, precision="fp32", accumulation=2, settings={**CUT, "contiguous_gradients": False}),
        {**GRADIENT_FILES, "offload_optimizer_ratio": 0.7, "offload_optimizer_nvme_ratio": 0.5},
    ),
    # Sums over replicas, secondary partitions, and frozen parameters.
    Case(Cell(dp=2, stage=2, precision="bf16", accumulation=2, settings={"mics_shard_size": 1}), OPTIMIZER),
    Case(
        Cell(dp=2, stage=3, precision="bf16", accumulation=2, settings={"mics_shard_size": 1}),
        {**GRADIENT_FILES, **PARAMETER_FILES, "sub_group_size": 1000, "offload_buffer_count": 4},
    ),
    Case(Cell(dp=2, stage=3, precision="bf16", accumulation=2, settings={"zero_hpz_partition_size": 2}), BOTH),
    Case(
        Cell(dp=2, stage=3, precision="bf16", accumulation=2, settings={"lora_rank": 4, "lora_random_base": True}),
        {**OPTIMIZER, **PARAMETER_FILES, "offload_param_buffer_count": 1},
    ),
)


# {dimension: its choices}; the home of the optimizer's states and their gradients, or of the parameters.
GRID: Mapping[str, Sequence[Any]] = {
    "stage": (1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "home": tuple(tuple(home.items()) for home in (OPTIMIZER, FILES, GRADIENT_FILES, PARAMETERS, PARAMETER_FILES)),
    "layout": ("one process", "tp", "pp", "dp"),
}


def choices_of(case: Case) -> Iterator[dict[str, Any]]:
    """Yield the case's choice in every dimension of the grid, for each kind of state that it moves."""
    cell = case.cell
    layout = next((axis for axis in ("tp", "pp", "dp") if getattr(cell, axis) > 1), "one process")
    for kind in ({"offload_optimizer", "offload_gradients_nvme"}, {"offload_param"}):
        home = tuple(setting for setting in case.moved.items() if setting[0] in kind)
        if home:
            yield {"stage": cell.stage, "precision": cell.precision, "home": home, "layout": layout}


def is_legal(stage: int, precision: str, home: tuple[tuple[str, Any], ...], layout: str) -> bool:
    folder = {"nvme_path": tempfile.gettempdir()} if "nvme" in dict(home).values() else {}
    cell = Cell(stage=stage, precision=precision, settings={**dict(home), **folder})
    cell = cell if layout == "one process" else replace(cell, **{layout: 2})
    config = replace(cell.config("text"), data=make_run(mock_data=True).data)
    return is_accepted(config, cell.world_size, cell.settings)


def test_every_legal_pair_of_choices_is_in_the_cases() -> None:
    found = pairs_in(choices for case in CASES for choices in choices_of(case))
    grid = [dict(zip(GRID, values, strict=True)) for values in product(*GRID.values())]
    missing = pairs_in(grid) - found
    assert not [choices for choices in grid if pairs(choices) & missing and is_legal(**choices)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(tmp_path_factory.mktemp("corpus"))


def compare(rank: int, case: Case, prefix: str) -> tuple[Outcome, Outcome]:
    """Train both ways on this rank."""
    plain = train_on_rank(rank, case.cell, prefix)
    folder = {"nvme_path": str(Path(prefix).parent)} if "nvme" in case.moved.values() else {}
    return plain, train_late_on_rank(rank, case.cell.with_settings({**case.moved, **folder}), prefix)


@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.cell} {'+'.join(case.moved)}")
def test_a_home_changes_no_bit(case: Case, corpus: str) -> None:
    outcomes = run_ranks(case.cell.world_size, compare, case, corpus)
    for plain, moved in outcomes:
        check_bytes(case, plain, moved)
        assert moved.losses == plain.losses
        assert list(map(str, moved.grad_norms)) == list(map(str, plain.grad_norms))  # not finite where a step overflows
        assert moved.skipped == plain.skipped
        assert not all(plain.skipped) and all(map(math.isfinite, plain.losses))
    plain, moved = zip(*outcomes, strict=True)
    for kind in {box.kind for outcome in plain for box in outcome.saved}:
        wanted, found = plain[0].full(plain[1:], kind), moved[0].full(moved[1:], kind)
        assert wanted.keys() == found.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), kind


def shape_of(config: RunConfig) -> OptimizerShape:
    """Return what the formulas need of a run's optimizer: Adafactor has a value for each row, and for each column."""
    if config.optimizer.optimizer == "adafactor":
        weights = first_weights(config)
        numels = (w.numel() // w.shape[-1] + w.shape[-1] if decayed(name) else w.numel() for name, w in weights.items())
        return OptimizerShape(num_moments=0, num_averages=sum(numels), num_passes=2)
    return OptimizerShape(num_passes=1) if config.optimizer.optimizer == "lamb" else OptimizerShape()


def check_bytes(case: Case, plain: Outcome, moved: Outcome) -> None:
    """Check what left the device, what it takes at home, and what crossed between the two."""
    cell = case.cell.with_settings(case.moved)
    plan = resolve((config := cell.config("corpus")).zero, config.precision)
    padded, _ = moved.layout
    partitions = config.zero.mics_shard_size if config.zero.mics_shard_size > 0 else cell.dp
    assert "host" not in plain.comm_bytes and not any(plain.host_states.values())
    shape = shape_of(config)
    check_traffic(cell, shape, moved)
    if "offload_optimizer_ratio" in case.moved:  # whole buckets leave, so that the share is met within half of one
        found = {Home.DEVICE: moved.model_state_bytes, Home.HOST: moved.host_states, Home.FILE: moved.file_states}
        # At full precision the device has no master weights, and without momentum SGD has no moments.
        numel = {home: max(states["master"], states["moments"] // 2) // 4 for home, states in found.items()}
        limits = (config.zero.reduce_bucket_size, config.zero.allgather_bucket_size)
        bucket = min(limit for limit in limits if limit is not None) // cell.dp
        for home, share in numel.items():
            assert abs(share - plan.share_at(home) * sum(numel.values())) <= bucket
        return
    if config.optimizer.optimizer == "sgd":  # the formulas are Adam's
        return
    if not (persistent_numel(cell, moved) or config.model.lora_rank):
        assert moved.host_states == asdict(model_state_bytes(plan, padded, partitions, Home.HOST, shape))
        assert moved.file_states == asdict(model_state_bytes(plan, padded, partitions, Home.FILE, shape))
        assert moved.model_state_bytes == asdict(model_state_bytes(plan, padded, partitions, optimizer=shape))


def persistent_numel(cell: Cell, moved: Outcome) -> int:
    """Return the elements of parameters that are whole on a rank where others are partitioned."""
    return moved.persistent_numel if cell.stage == 3 else 0


def check_traffic(cell: Cell, shape: OptimizerShape, moved: Outcome) -> None:
    """Check that a step moves what is announced before the first, and files what follows from their sizes."""
    config = cell.config("corpus")
    plan = resolve(config.zero, config.precision)
    announced, beside_gathers = moved.announced
    in_host = {"store": 0, "load": 0, **moved.comm_bytes.get("host", {})}
    in_files = {"write": 0, "read": 0, **moved.comm_bytes.get("file", {})}
    assert in_host["store"] == announced.stored
    assert beside_gathers.loaded <= in_host["load"] <= announced.loaded
    has_replicas = config.zero.mics_shard_size > 0
    if cell.dp > 1 and plan.parameter.home is not Home.DEVICE and plan.secondary == 1 and not has_replicas:
        # A rank sends its partition, which has come, to all others, and what it has updated of whole parameters.
        gathered = moved.comm_bytes.get("dp", {}).get("all_gather", 0) // (cell.dp - 1)
        gathered -= persistent_numel(cell, moved) * plan.parameter.itemsize // cell.dp
        assert in_host["load"] == beside_gathers.loaded + gathered
    # What is summed over another axis too is read and written once more for that.
    is_summed = config.parallel.sequence_parallel or cell.pp > 1 or has_replicas
    summed = moved.file_states["gradients"] if is_summed else 0
    reductions = cell.accumulation if plan.gradient.lifetime is Lifetime.LEASED else 1
    is_plain = not (is_summed or plan.mixes_homes or config.model.lora_rank or persistent_numel(cell, moved))
    if is_plain and plan.secondary == 1:  # the table of the documentation
        owned, takes_partitions = moved.layout[0] // cell.dp, plan.parameter.home is not Home.DEVICE
        gradient, weights = owned * plan.gradient.itemsize, owned * plan.parameter.itemsize
        stored, loaded = weights, 0
        if plan.optimizer.home is not Home.DEVICE:
            stored = reductions * gradient
            loaded = (reductions - 1) * gradient + (0 if takes_partitions else weights)
        assert (in_host["store"], beside_gathers.loaded) == (stored, loaded)
        assert announced.loaded == loaded + (2 * cell.accumulation * weights if takes_partitions else 0)
    assert in_files["write"] <= announced.written and in_files["read"] <= announced.read
    assert is_summed or in_files["write"] == announced.written
    passes = 2 * cell.accumulation if plan.parameter.home is Home.FILE else 2  # that gather, or that read gradients
    passes += shape.num_passes
    if not config.model.lora_rank:  # by which hardly a partition is written
        assert in_files["read"] <= passes * in_files["write"], "what is still in a buffer is not read again"
    if config.optimizer.optimizer == "sgd":
        return
    states = moved.file_states
    parameters = states["parameters"] if plan.parameter.home is Home.FILE else 0
    written = sum(states.values()) + (reductions - 1) * states["gradients"] + shape.num_passes * states["moments"]
    visits = 1 + shape.num_passes
    read = visits * (states["master"] + states["moments"]) + (reductions + visits) * states["gradients"]
    read += 2 * cell.accumulation * parameters
    # A message of sums over replicas has more blocks than there are buffers: it is read again for what it changes.
    assert in_files["read"] <= read + (2 if has_replicas else 1) * summed
    assert is_summed or announced.read == read
    if shape.num_passes:  # with few buffers hardly anything is still in one
        assert 0.8 * read <= in_files["read"]
    if not config.model.lora_rank:
        assert written <= in_files["write"] <= written + summed


def at_depths(rank: int, settings: Mapping[str, Any]) -> list[Held]:
    """Return what the device holds in a step of a model of 3 layers, and of one of 6."""
    return [ledgered_step(rank, 1, 2, {**settings, "num_layers": layers}) for layers in (3, 6)]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "moved"), [(1, OPTIMIZER), (2, OPTIMIZER), (3, BOTH)])
def test_the_ledger_has_what_stays_on_the_device_and_what_leaves_by_the_formulas(
    stage: int, moved: Mapping[str, str]
) -> None:
    """A rank's device has p + g at stage 1, p and buckets in flight at 2, two units at most and buckets at 3."""
    common = {
        "precision": "bf16",
        "max_live_parameters": 0,
        "prefetch_bucket_size": 0,
        "param_persistence_threshold": 0,
    }
    ranks = 2
    depths = run_ranks(ranks, at_depths, {**common, **moved, "zero_stage": stage})[0]
    for held in depths:
        p = g = 2 * held.numel
        k = (4 + 8) * held.numel
        temporaries = 4 * held.bucket_numel // ranks  # of the host's update
        leaving = g + k + (p if stage == 3 else 0)
        assert held.elsewhere == {"pinned_host": 0, "host": leaving // ranks + temporaries}
        peaks = held.peaks
        assert peaks["master"] == peaks["moments"] == 0
        assert peaks["parameters"] == (0 if stage == 3 else p)
        assert peaks["gathered_parameters"] <= (2 * 2 * held.unit_numel if stage == 3 else 0)
        if stage == 1:
            assert (peaks["gradients"], peaks["communication_buffers"]) == (g, 0)
        else:
            assert peaks["gradients"] + peaks["communication_buffers"] <= 10 * 2 * held.bucket_numel
    if stage > 1:
        constant = ("gathered_parameters", "gradients", "communication_buffers")
        shallow, deep = ([held.peaks[name] for name in constant] for held in depths)
        assert deep == shallow, "a unit at a time is gathered, and its gradients leave"
