"""The engine's step as a rank of 1,024 takes it, on this machine: fake tensors, fake process group, the real code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize(("rank", "stage"), [(0, 2), (517, 1), (1023, 0), (300, 3)])
def test_a_step_of_1024_ranks(rank: int, stage: int) -> None:
    dp, tp = 64, 16
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT.parent)}
    command = [sys.executable, str(SUPPORT / "dry_run.py"), *map(str, (rank, dp, tp, stage))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])

    padded, h, layers = result["padded"], 4096, 6
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
    if stage == 3:  # two micro-batches; the tied matrix for the embedding and the head, no backward of the embeddings
        gathered = 2 * 2 * padded - 2 * result["units"]["embedding.position"]
        assert result["comm_bytes"]["dp"]["all_gather"] == 2 * gathered * 63 // 64
    else:
        assert result["comm_bytes"]["dp"]["all_gather"] == 2 * share
    tokens = 2 * 256
    all_reduces = (4 * layers + 2) * tokens * h * 2 + 3 * tokens * 4
    assert sum(result["comm_bytes"]["tp"].values()) == 2 * all_reduces * 15 // 16
