"""Compares activation bytes of large models, by dry run, with formulas whose every term is named; exact to the byte."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

# A process group of torch's, though a fake one.
pytestmark = pytest.mark.gloo

TESTS = Path(__file__).parents[1]
SEQUENCE, BATCH, PADDED_VOCABULARY = 1024, 32, 50304
KERNELS = ("unfused", "GPU's flash", "CPU's flash", "CPU's math")
FULL = {"recompute_granularity": "full"}
PARTITIONED = {**FULL, "partition_activations": True}
KINDS: dict[str, dict[str, Any]] = {
    "whole": FULL,
    "partitioned": PARTITIONED,
    "in an arena": {**PARTITIONED, "contiguous_checkpointing": True},
    "on the host": {**PARTITIONED, "checkpoint_in_cpu": True},
}
# What is left of forward doesn't depend on how many chunks the head is made in, or buckets gradients are reduced in;
# few of them make a dry run short.
FEW = {"logits_chunk_bytes": 1 << 30, "reduce_bucket_size": 1 << 28, "allgather_bucket_size": 1 << 28}
LARGE: dict[str, Any] = {"hidden_size": 8192, "num_attention_heads": 64, "tp": 16, "dp": 25}
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 3,
    "seq_length": 40,
    "micro_batch_size": 2,
    "dp": 1,
}
SMALL_CASES: dict[str, dict[str, Any]] = {
    "flash": {"kernels": "CPU's flash", "precision": "bf16"},
    "math": {"kernels": "CPU's math"},
    "selective": {
        "kernels": "CPU's math",
        "precision": "bf16",
        "activations": {"recompute_granularity": "selective"},
    },
    "host": {
        "kernels": "CPU's math",
        "precision": "bf16",
        "activations": {**FULL, "contiguous_checkpointing": True, "checkpoint_in_cpu": True},
    },
}


def gpt2(kernels: str, layers: int = 1) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": 1600, "num_attention_heads": 25, "kernels": kernels}


MEASURED: dict[str, dict[str, Any]] = {
    **{
        f"100B, {layers} layers, {name}": {**LARGE, "num_layers": layers, "activations": kind}
        for layers in (3, 4)
        for name, kind in KINDS.items()
        if layers == 3 or name in ("whole", "on the host")
    },
    "deeper, full": {**gpt2("CPU's flash", 3), "activations": FULL},
    "deeper": gpt2("CPU's flash", 3),
    **{kernels: gpt2(kernels) for kernels in KERNELS},
    **{
        f"{name}, {'hollow' if is_hollow else 'real'}": {**SMALL, **case, "is_hollow": is_hollow}
        for name, case in SMALL_CASES.items()
        for is_hollow in (True, False)
    },
}
CASES = {name: {**case, "activations": {**FEW, **case.get("activations", {})}} for name, case in MEASURED.items()}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    """Return the figures that `dry_run` prints for every case, all from one process."""
    folders = [str(TESTS), str(TESTS.parent / "benchmarks"), str(TESTS.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [warm_python(), str(TESTS / "support" / "dry_run_activations.py"), json.dumps(list(CASES.values()))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def test_checkpoints_of_100_billion_parameters(seen: dict[str, dict[str, Any]]) -> None:
    """Checkpoints of batch 32 on 16 tensor ranks grow with depth alone: whole, in slices, in an arena, on the host."""
    one = 32 * 1024 * 8192 * 2
    for layers in (3, 4):
        whole, on_host = (seen[f"100B, {layers} layers, {name}"] for name in ("whole", "on the host"))
        assert whole["checkpoints"] == whole["most_checkpoints"] == layers * one
        assert (on_host["checkpoints"], on_host["most_checkpoints"]) == (0, 3 * one // 16)
        assert on_host["on_host"] == layers * one // 16
    for slices in (seen[f"100B, 3 layers, {name}"] for name in ("partitioned", "in an arena")):
        assert slices["checkpoints"] == slices["most_checkpoints"] == 3 * one // 16
    beside = {figures["activations"] for name, figures in seen.items() if name.startswith("100B")}
    assert len(beside) == 1, "what else is left depended on the checkpoints, or on the depth"
    assert (125 * one, 125 * one // 16) == (67_108_864_000, 4_194_304_000)


def test_checkpoints_of_gpt2(seen: dict[str, dict[str, Any]]) -> None:
    """A layer of width 1600 has a checkpoint of 105 MB at batch 32; those of all 48 layers take 5 GB."""
    figures, one = seen["deeper, full"], 32 * 1024 * 1600 * 2
    assert figures["checkpoints"] == figures["most_checkpoints"] == 3 * one
    assert 48 * one == 5_033_164_800


def left_by(layers: int, hidden: int, heads: int, kernels: str) -> int:
    """Return the bytes that an fp16 forward leaves without recomputation, with dropout (not in CPU flash's core)."""
    tokens = BATCH * SEQUENCE
    one, matrices = 2 * tokens * hidden, heads * SEQUENCE * tokens
    mask = one // 2 if kernels in ("unfused", "GPU's flash") else one  # bytes, or the activation's dtype
    cores = {
        "unfused": 3 * one + (2 + 1 + 2) * matrices + SEQUENCE**2,  # Q, K, V; softmax, mask, product; the causal mask
        "GPU's flash": 3 * one + 4 * heads * tokens + 16 + 8,  # Q, K, V; log-sum-exp; two random states
        "CPU's flash": 3 * one + 4 * heads * tokens,
        "CPU's math": 6 * one + (4 + 4 + 4) * matrices,  # everything in float32
    }
    statistics = 2 * 2 * tokens  # mean and 1/deviation of a norm, fp16
    norm = one + statistics  # includes the norm's input
    attention = norm + one + cores[kernels] + one + mask  # qkv's input, the projection's input
    feed_forward = norm + one + 4 * one + 4 * one + mask  # inputs of up, of GELU and of down
    embedding = mask  # the ids are the batch's own memory, as one tensor rank has them all
    head = norm + one + 4 * PADDED_VOCABULARY * hidden + 4  # gradients of its input and its matrix; the loss
    return layers * (attention + feed_forward) + embedding + head


@pytest.mark.parametrize(("case", "layers", "kernels"), [("deeper", 3, "CPU's flash"), *((k, 1, k) for k in KERNELS)])
def test_what_forward_leaves_is_the_formula_term_by_term(
    seen: dict[str, dict[str, Any]], case: str, layers: int, kernels: str
) -> None:
    figures = seen[case]
    assert figures["checkpoints"] == 0
    assert figures["activations"] == left_by(layers, 1600, 25, kernels)
    assert sum(figures["terms"].values()) == figures["activations"]
    assert [name for name in figures["terms"] if name.startswith("unexplained")] == []


def test_the_formula_in_the_literature_is_ours_without_small_terms() -> None:
    """For 1.5B at batch 32, sbh (34 + 5 as/h) per layer, 287 and 86 GB, is all but 0.5 and 1 percent."""
    sbh, matrices = BATCH * SEQUENCE * 1600, 25 * SEQUENCE * BATCH * SEQUENCE
    assert 48 * (34 * sbh + 5 * matrices) == 286_890_393_600
    assert left_by(48, 1600, 25, "unfused") / (48 * (34 * sbh + 5 * matrices)) == pytest.approx(1, abs=0.005)
    assert left_by(48, 1600, 25, "GPU's flash") / (48 * 34 * sbh) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("case", SMALL_CASES)
def test_hollow_tensors_leave_what_real_ones_do(seen: dict[str, dict[str, Any]], case: str) -> None:
    """The same small step with values and without has the same bytes in every term, and the same peak."""
    assert seen[f"{case}, hollow"] == seen[f"{case}, real"]
    assert seen[f"{case}, real"]["activations"] > 0
