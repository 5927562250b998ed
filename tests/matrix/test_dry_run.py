"""Tests the engine's step as one rank of 1,024 takes it: the real code with fake tensors and a fake process group."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

from megazero.timers import PARTS

# A process group of torch's, though a fake one.
pytestmark = pytest.mark.gloo

SUPPORT = Path(__file__).parents[1] / "support"


DP, TP = 64, 16
RANKS = [(0, 2), (517, 1), (1023, 0), (300, 3)]  # (rank, stage)
TIMED = (517, 1)  # one of those, once more with every part of its step timed
# Wires of stage 3 on nodes of 32 ranks, 2 of every data-parallel group.
ON_NODES = {"ranks_per_node": 32}
HOPS = {**ON_NODES, "hierarchical_collectives": "auto"}
ROUNDED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_error_feedback": True}
WIRES = {"hops": HOPS, "rounded": {**ON_NODES, **ROUNDED, "zero_hpz_partition_size": 2}}
SMALL = {"hidden_size": 512, "num_attention_heads": 16}
PP, DP_OF_A_STAGE, MICRO_BATCHES = 4, 16, 4
PIPELINES = [(0, "1f1b"), (1, "zero-bubble"), (3, "interleaved")]  # (pipeline rank, schedule)


def chunks_of(schedule: str) -> int:
    """Return the chunks of a rank, each of one layer."""
    return 2 if schedule == "interleaved" else 1


def case_of(pipeline_rank: int, schedule: str) -> list[Any]:
    """Return the arguments of the dry run of one rank of a pipeline stage."""
    chunks = chunks_of(schedule)
    settings = {
        "num_layers": PP * chunks,
        "pipeline_schedule": schedule,
        "pipeline_split": ",".join(["1"] * PP * chunks),
        "sequence_parallel": True,
        "zero3_reshard_after": "window",
        "num_micro_batches": MICRO_BATCHES,
    }
    settings |= {"num_layers_per_virtual_pipeline_stage": 1} if chunks > 1 else {}
    return [pipeline_rank * DP_OF_A_STAGE * TP + 37, DP_OF_A_STAGE, TP, 3, PP, settings]


@pytest.fixture(scope="module")
def figures() -> dict[tuple[int, Any], dict[str, Any]]:
    """Return the figures that `support/dry_run.py` prints for all cases, which one process takes in turn."""
    cases = [[rank, DP, TP, stage] for rank, stage in RANKS] + [case_of(*pipeline) for pipeline in PIPELINES]
    cases.append([TIMED[0], DP, TP, TIMED[1], 1, {"timing_log_level": 2}])
    cases += [[300, DP, TP, 3, 1, settings] for settings in WIRES.values()]
    cases += [[300, DP, TP, stage, 1, SMALL] for stage in (2, 3)]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT.parent)}
    command = [warm_python(), str(SUPPORT / "dry_run.py"), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(
        zip(
            [*RANKS, *PIPELINES, "timed", *WIRES, ("small", 2), ("small", 3)],
            json.loads(done.stdout.splitlines()[-1]),
            strict=True,
        )
    )


@pytest.mark.parametrize(("rank", "stage"), RANKS)
def test_a_step_of_1024_ranks(rank: int, stage: int, figures: dict[tuple[int, Any], dict[str, Any]]) -> None:
    dp, tp = DP, TP
    result = figures[rank, stage]

    padded, h, layers = result["padded"], 4096, 2
    psi = layers * ((12 * h * h + 7 * h) // tp + 6 * h)
    vocabulary_rows = -(-50257 // (128 * tp)) * 128 * tp // tp
    psi += vocabulary_rows * h + 256 * h + 2 * h
    assert psi <= padded < psi + (2 + layers + 1) * dp * 16
    owned = padded if stage == 0 else padded // dp
    assert result["states"] == {
        "parameters": 2 * (padded // dp if stage == 3 else padded),
        "gradients": 2 * (padded // dp if stage >= 2 else padded),
        "master": 4 * owned,
        "moments": 8 * owned,
    }
    share = padded * 63 // 64
    reductions = 2 if stage >= 2 else 1
    assert result["comm_bytes"]["dp"]["reduce_scatter"] == 2 * reductions * share
    if stage == 3:
        # 2 micro-batches; the tied matrix for embedding and head, no backward of the embeddings.  The second knows the
        # order of uses, and the last layer and the final norm stay until its backward.
        units = result["units"]
        gathered = 2 * 2 * padded - 2 * units["embedding.position"] - units["layers.1"] - units["final_norm"]
        assert result["comm_bytes"]["dp"]["all_gather"] == 2 * gathered * 63 // 64
    else:
        assert result["comm_bytes"]["dp"]["all_gather"] == 2 * share
    tokens = 2 * 256
    all_reduces = (4 * layers + 2) * tokens * h * 2 + 3 * tokens * 4
    assert sum(result["comm_bytes"]["tp"].values()) == 2 * all_reduces * 15 // 16


def test_small_units_of_many_ranks_are_laid_out_together(figures: dict[Any, dict[str, Any]]) -> None:
    """Where they are whole anyway: all 2 million parameters are one message, where a layer's slices are of 6 KiB."""
    together, apart = figures["small", 2], figures["small", 3]
    assert len(together["buckets"]) == 1 and len(apart["buckets"]) == 5
    assert together["messages"]["dp reduce_scatter"] == [2, 2 * 2 * together["padded"] * 63 // 64]
    assert together["messages"]["dp all_gather"] == [1, 2 * together["padded"] * 63 // 64]
    assert together["states"]["parameters"] == 2 * together["padded"]
    assert apart["padded"] - 5 * DP * 16 < together["padded"] <= apart["padded"]


def test_a_step_of_1024_ranks_in_two_hops(figures: dict[Any, dict[str, Any]]) -> None:
    """What one hop sends to 63 others goes to 31 nodes, and from every node's slices to the other rank of this one."""
    plain, hops = figures[300, 3], figures["hops"]
    assert hops["notice"] == "hierarchical_collectives auto: two hops, since nothing can be measured in a dry run"
    assert plain["states"] == hops["states"]
    for axis, slices in (("dp_across", 31), ("dp_inside", 32)):
        for name in ("all_gather", "reduce_scatter"):
            assert hops["comm_bytes"][axis][name] == plain["comm_bytes"]["dp"][name] // 63 * slices
    assert hops["bytes_across_nodes"] == {"dp_across": hops["comm_bytes"]["dp_across"]}


def blocks(numel: int, bits: int) -> int:
    """Return the bytes of a rank's slice in blocks of 256 integers, each with a scale of 4 bytes."""
    return numel // DP * bits // 8 + 4 * -(-(numel // DP) // 256)


def test_a_step_of_1024_ranks_with_wires_that_round(figures: dict[Any, dict[str, Any]]) -> None:
    """The first forward gathers integers, later gathers come from the secondary partition; gradients are exchanged."""
    plain, rounded = figures[300, 3], figures["rounded"]
    secondary = 2 * plain["padded"] // 2
    assert rounded["states"] == {**plain["states"], "parameters": plain["states"]["parameters"] + secondary}
    sent, buckets = rounded["comm_bytes"], plain["buckets"]
    assert sent["dp"]["all_gather"] == sum(63 * blocks(numel, 8) for numel in buckets)
    for axis, slices in (("dp_across", 31), ("dp_inside", 32)):
        assert sent[axis] == {"all_to_all": sum(2 * slices * blocks(numel, 4) for numel in buckets)}
    gathered = plain["comm_bytes"]["dp"]["all_gather"] // 63 * 64  # the whole of what two micro-batches gather
    assert sent["dp_secondary"] == {"all_gather": (gathered - 2 * sum(buckets)) // 2}


@pytest.mark.parametrize(("pipeline_rank", "schedule"), PIPELINES)
def test_a_step_of_1024_ranks_in_three_dimensions(
    pipeline_rank: int, schedule: str, figures: dict[tuple[int, Any], dict[str, Any]]
) -> None:
    """A step of 4 pipeline stages x 16 x tensor 16 splits the sequence, and ZeRO stage 3 gathers once a window."""
    pp, dp, tp, m, h, tokens = PP, DP_OF_A_STAGE, TP, MICRO_BATCHES, 4096, 256
    chunks = chunks_of(schedule)
    result = figures[pipeline_rank, schedule]

    first, last = pipeline_rank == 0, pipeline_rank == pp - 1
    cuts = pp * chunks - 1
    forwards = chunks - last  # chunks whose output goes to another stage
    backwards = chunks - first
    assert result["comm_bytes"]["pp"] == {"send": m * (forwards + backwards) * 2 * tokens * h // tp}
    assert (forwards, backwards) == (cuts // pp + (not last), cuts // pp + (not first))

    # Parameters are gathered once a window: once a step, or, if chunks take turns, once for every run of p
    # micro-batches.
    word, position = result["units"].get("embedding.word", 0), result["units"].get("embedding.position", 0)
    padded = result["padded"]
    if chunks == 1:
        assert result["comm_bytes"]["dp"]["all_gather"] == 2 * padded * (dp - 1) // dp
    else:
        assert result["comm_bytes"]["dp"]["all_gather"] < 2 * 2 * m * padded * (dp - 1) // dp // 3
    assert result["comm_bytes"]["dp"]["reduce_scatter"] == 2 * m * padded * (dp - 1) // dp
    assert (word > 0, position > 0) == (first or last, first)
    shared = result["comm_bytes"].get("ends", {}).get("all_reduce", 0)
    assert shared == (2 * word // dp if first or last else 0)

    # A layer gathers two inputs in forward, two gradients in backward, and for its weights the inputs once more; where
    # weight gradients are made later, the output gradients too.
    layers = chunks
    share = 2 * tokens * h * (tp - 1) // tp
    gathers = layers * (2 + 2 + 2 + 2 * (schedule == "zero-bubble")) + first + last
    scatters = layers * (2 + 2) + first + last
    assert result["comm_bytes"]["tp"]["all_gather"] == m * gathers * share
    assert result["comm_bytes"]["tp"]["reduce_scatter"] == m * scatters * share


def test_every_statistic_is_one_small_message_at_a_log_interval(figures: dict[Any, dict[str, Any]]) -> None:
    """Norms of parameters and moments and the zeros of the gradient and its norm
    in every layer are one all-gather of 17 numbers and one a layer, the times of all
    parts one row for rank 0; the step itself sends what it sends without them, and so do steps between intervals.
    """
    quiet, timed = figures[TIMED], figures["timed"]
    assert timed["messages"] == quiet["messages"] != {}
    for case, each in figures.items():  # every rank of a pipeline has a place for the layers of all stages
        blocks = PP * (2 if case[1] == "interleaved" else 1) if case in PIPELINES else 2
        assert each["layers"] == 3 + blocks, "embeddings, final norm, and blocks"
        assert each["statistics"] == {"world all_gather": [1, (DP * TP - 1) * (17 + each["layers"]) * 8]}
    assert timed["parts"] == len(PARTS)
    assert timed["times"] == [{}, {"world send": [1, 8 * len(PARTS)]}]
    assert quiet["times"] == [{}, {}]
