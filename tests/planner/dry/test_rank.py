"""Tests that a dry rank takes and sends what a real one does, to the byte, on CPUs."""

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.planned_step import PARTS, differences, dry_figures, job_of
from support.processes import run_ranks

from megazero.config.optimizers import OPTIMIZERS, RUN_NAMES
from megazero.planner.dry.rank import DryRank, run_rank
from megazero.planner.trace import Begin, Compute, FileAccess, TraceWait

pytestmark = pytest.mark.gloo

CHECKPOINTS = {"recompute_granularity": "full", "partition_activations": True, "contiguous_checkpointing": True}
FILES = {"offload_optimizer": "nvme"}
LATE = {"delayed_parameter_update": True, "delayed_parameter_update_start": 0}
LAYOUTS: Mapping[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "alone, dropout": ({"global_batch_size": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1}, (1,)),
    "stage 3, checkpoints in host memory": (
        {"global_batch_size": 4, "zero_stage": 3, "checkpoint_in_cpu": True, "recompute_granularity": "full"},
        (2,),
    ),
    "stage 2, optimizer in host memory, bf16": (
        {"global_batch_size": 8, "zero_stage": 2, "offload_optimizer": "cpu", "precision": "bf16"},
        (2,),
    ),
    "stage 2, all of the optimizer and gradients in files": (
        {"global_batch_size": 8, "zero_stage": 2, **FILES, "offload_gradients_nvme": True, "sub_group_size": 3000},
        (2,),
    ),
    "stage 3, a half of the optimizer and parameters in files, NAdam": (
        {
            "global_batch_size": 4,
            "zero_stage": 3,
            **FILES,
            "offload_optimizer_nvme_ratio": 0.5,
            "offload_param": "nvme",
            "offload_param_buffer_count": 3,
            "optimizer": "nadam",
        },
        (2,),
    ),
    "stage 2, late updates in host memory, bf16": (
        {"global_batch_size": 8, "zero_stage": 2, "offload_optimizer": "cpu", "precision": "bf16", **LATE},
        (2,),
    ),
    "stage 3, late updates in files": ({"global_batch_size": 4, "zero_stage": 3, **FILES, **LATE}, (2,)),
    "stage 2, Adafactor": ({"global_batch_size": 4, "zero_stage": 2, "optimizer": "adafactor"}, (2,)),
    "stage 2, AdamW8bit": ({"global_batch_size": 4, "zero_stage": 2, "optimizer": "adamw8bit"}, (2,)),
    "stage 1, NAdam, fp16": (
        {"global_batch_size": 4, "zero_stage": 1, "optimizer": "nadam", "precision": "fp16"},
        (2,),
    ),
    "tensor parallel, partitioned checkpoints": (
        {"global_batch_size": 2, "tensor_model_parallel_size": 2, **CHECKPOINTS},
        (2,),
    ),
    "pipeline, sequence parallel, two nodes": (
        {
            "global_batch_size": 4,
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "sequence_parallel": True,
            "zero_stage": 1,
            "num_layers": 2,
        },
        (2, 2),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dry_rank_takes_what_a_real_one_does(layout: str, tmp_path: Path) -> None:
    settings, per_node = LAYOUTS[layout]
    if OPTIMIZERS[RUN_NAMES[settings.get("optimizer", "adam")]].package:
        pytest.importorskip("bitsandbytes", reason="the kernels are those of bitsandbytes")
    if "files" in layout:
        settings = {**settings, "nvme_path": tmp_path}
    found = run_ranks(sum(per_node), differences, settings, per_node)
    assert found == [[]] * sum(per_node)


def test_a_dry_run_makes_no_file_and_no_folder(tmp_path: Path) -> None:
    settings = {"global_batch_size": 2, "zero_stage": 3, **FILES, "offload_param": "nvme", **LATE}
    dry_figures(0, {**settings, "nvme_path": tmp_path / "none"}, (1,))
    assert not list(tmp_path.iterdir())


def test_garbage_is_collected_before_and_after_but_not_during_a_dry_run() -> None:
    with ExitStack() as stack:
        DryRank(job_of({"global_batch_size": 2}, (1,)), 0, stack)
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            DryRank(job_of({"global_batch_size": 2}, (1,)), 0, stack)
        assert not gc.isenabled(), "whoever has disabled it enables it"
    finally:
        gc.enable()


def test_a_late_update_runs_beside_the_next_step() -> None:
    """Backward waits for the host's kernels on the bucket that it is about to overwrite, the last bucket first."""
    settings = {"global_batch_size": 4, "zero_stage": 2, "offload_optimizer": "cpu", **LATE}
    record = run_rank(job_of(settings, (2,)), 0, ("start-up", "first step", "steady step"))
    events = record.trace.parts["steady step"]
    beside = [place for place, event in enumerate(events) if isinstance(event, Compute) and event.home == "beside"]
    assert beside == list(range(len(beside))), "from the beginning of the step"
    updates = {event.home for event in events if isinstance(event, Compute) and "adamw" in event.operation.name}
    assert updates == {"beside"}
    waits = [(event.number, place) for place, event in enumerate(events) if isinstance(event, TraceWait)]
    waited = [(number, place) for number, place in waits if number in beside]
    assert waited == sorted(waited) and waited[-1][0] == beside[-1]
    backwards = [place for place, event in enumerate(events) if isinstance(event, Begin) and event.kind == "B"]
    assert len(waited) > 3 and waited[0][1] > backwards[0], "in the order of the buckets, within backward"
    at_once = run_rank(job_of({**settings, "delayed_parameter_update": False}, (2,)), 0, PARTS)
    kernels = [event for event in at_once.trace.parts["steady step"] if isinstance(event, Compute)]
    assert sum(event.home == "host" for event in kernels) > 0 and not any(event.home == "beside" for event in kernels)


@pytest.mark.parametrize("quantized", [False, True])
def test_small_units_go_through_two_hops_together(quantized: bool) -> None:
    """A forward's first unit is gathered for itself; a call of each hop brings the others, which stay for backward."""
    settings = {"global_batch_size": 128, "zero_stage": 3, "hierarchical_collectives": "on", "reduce_bucket_size": None}
    job = job_of({**settings, "zero_quantized_weights": quantized}, (8,) * 8)
    traffic = run_rank(job, 0, ("start-up", "first step", "steady step")).parts["steady step"].traffic
    assert [traffic[axis]["all_gather"].calls for axis in ("dp_across", "dp_inside")] == [2, 2]


def test_a_step_waits_for_what_it_reads_from_files() -> None:
    settings = {"global_batch_size": 4, "zero_stage": 2, **FILES, "nvme_path": "/", "sub_group_size": 3000}
    events = run_rank(job_of(settings, (2,)), 0, PARTS).trace.parts["steady step"]
    accesses = {place: event.way for place, event in enumerate(events) if isinstance(event, FileAccess)}
    waited = {event.number: place for place, event in enumerate(events) if isinstance(event, TraceWait)}
    reads = [place for place, way in accesses.items() if way == "read"]
    assert reads and all(place in waited for place in reads)
    kernels = [place for place, event in enumerate(events) if isinstance(event, Compute) and event.home == "host"]
    assert waited[reads[0]] < kernels[-1] and reads[-1] > kernels[0], "some are read while others are updated"
    assert sum(way == "write" for way in accesses.values()) == len(reads)
