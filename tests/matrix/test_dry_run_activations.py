"""Activation bytes of large models, by dry run, against formulas whose every term is named; exact to the byte."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
SEQUENCE, BATCH, PADDED_VOCABULARY = 1024, 32, 50304
GPT2: dict[str, Any] = {"num_layers": 48, "hidden_size": 1600, "num_attention_heads": 25}
LARGE: dict[str, Any] = {"hidden_size": 8192, "num_attention_heads": 64, "tp": 16, "dp": 25}
FULL = {"recompute_granularity": "full"}
PARTITIONED = {**FULL, "partition_activations": True}
KERNELS = ("unfused", "GPU's flash", "CPU's flash", "CPU's math")


def dry_runs(*cases: dict[str, Any]) -> list[dict[str, Any]]:
    """What `dry_run` sees of every case."""
    folders = [str(TESTS), str(TESTS.parent / "benchmarks"), str(TESTS.parent)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, str(TESTS / "support" / "dry_run_activations.py"), json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    seen: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_checkpoints_of_100_billion_parameters() -> None:
    """Batch 32, 16 tensor-parallel ranks: whole, in slices, and in slices on the host; the same for every layer."""
    depths, kinds = (4, 7), (FULL, PARTITIONED, {**PARTITIONED, "checkpoint_in_cpu": True})
    cases = [{**LARGE, "num_layers": layers, "activations": kind} for layers in depths for kind in kinds]
    seen = dry_runs(
        *cases, {**LARGE, "num_layers": 5, "activations": {**PARTITIONED, "contiguous_checkpointing": True}}
    )
    one = 32 * 1024 * 8192 * 2
    for layers, (whole, sliced, on_host) in zip(depths, (seen[:3], seen[3:6]), strict=True):
        assert whole["checkpoints"] == whole["most_checkpoints"] == layers * one
        assert sliced["checkpoints"] == sliced["most_checkpoints"] == layers * one // 16
        assert (on_host["checkpoints"], on_host["most_checkpoints"]) == (0, 3 * one // 16)
        assert on_host["on_host"] == layers * one // 16
    assert seen[6]["checkpoints"] == seen[6]["most_checkpoints"] == 5 * one // 16
    beside = {case["activations"] - case["checkpoints"] * 0 for case in seen}
    assert len(beside) == 1, "what else is left depended on the checkpoints, or on the depth"
    assert 125 * one == 67_108_864_000 and 125 * one // 16 == 4_194_304_000


def test_checkpoints_of_gpt2() -> None:
    """All 48 layers of 1600, batch 32."""
    (seen,) = dry_runs({**GPT2, "kernels": "CPU's flash", "activations": FULL})
    assert seen["checkpoints"] == seen["most_checkpoints"] == 48 * 32 * 1024 * 1600 * 2 == 5_033_164_800


def left_by(layers: int, hidden: int, heads: int, kernels: str) -> int:
    """Bytes that a forward leaves without recomputation: fp16, dropout everywhere (in CPU's flash, not in the core)."""
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
    norm = one + statistics  # with its input
    attention = norm + one + cores[kernels] + one + mask  # qkv's input, the projection's input
    feed_forward = norm + one + 4 * one + 4 * one + mask  # up's input, GELU's, down's
    embedding = (8 + 1) * tokens + mask  # ids, which of them are elsewhere
    head = norm + one + 4 * PADDED_VOCABULARY * hidden + 4  # gradients of its input and its matrix; the loss
    return layers * (attention + feed_forward) + embedding + head


def test_what_forward_leaves_is_the_formula_term_by_term() -> None:
    shapes = [(3, 1600, 25, kernels) for kernels in KERNELS] + [(48, 1600, 25, "CPU's flash"), (2, 768, 12, "unfused")]
    names = ("num_layers", "hidden_size", "num_attention_heads", "kernels")
    seen = dry_runs(*(dict(zip(names, shape, strict=True)) for shape in shapes))
    for shape, figures in zip(shapes, seen, strict=True):
        assert figures["checkpoints"] == 0
        assert figures["activations"] == left_by(*shape), shape
        assert sum(figures["terms"].values()) == figures["activations"], shape
        assert [name for name in figures["terms"] if name.startswith("unexplained")] == [], shape


def test_the_formula_in_the_literature_is_ours_without_small_terms() -> None:
    """287 and 86 GB for 1.5B at batch 32: the layers' sbh (34 + 5 as/h) is all but half a percent and one percent."""
    sbh, matrices = BATCH * SEQUENCE * 1600, 25 * SEQUENCE * BATCH * SEQUENCE
    assert 48 * (34 * sbh + 5 * matrices) == 286_890_393_600
    assert left_by(48, 1600, 25, "unfused") / (48 * (34 * sbh + 5 * matrices)) == pytest.approx(1, abs=0.005)
    assert left_by(48, 1600, 25, "GPU's flash") / (48 * 34 * sbh) == pytest.approx(1, abs=0.01)


def test_fake_tensors_leave_what_real_ones_do() -> None:
    """The same small step with values and without: every term, and the peak."""
    small = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 3,
        "seq_length": 40,
        "micro_batch_size": 2,
        "dp": 1,
    }
    kinds: list[dict[str, Any]] = [
        {"kernels": "CPU's flash", "precision": "bf16"},
        {"kernels": "CPU's math"},
        {"kernels": "CPU's math", "activations": {"recompute_granularity": "selective"}},
        {"kernels": "CPU's math", "activations": {**FULL, "contiguous_checkpointing": True, "checkpoint_in_cpu": True}},
    ]
    seen = dry_runs(*({**small, **kind, "is_fake": is_fake} for kind in kinds for is_fake in (True, False)))
    for kind, fake, real in zip(kinds, seen[::2], seen[1::2], strict=True):
        assert fake == real, kind
