"""The tool as a launcher starts it: real processes, and what they exit with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run(
        [*words, str(ROOT / "tools" / "preflight.py"), "--message-mib", "0.1", "--timeout", "30", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.gloo
def test_sound_nodes() -> None:
    done = torchrun("--gpus-per-node", "0", "--node-name", "here", "--device", "cpu", "--min-bandwidth", "1e-6")
    assert done.returncode == 0, done
    head, row, whole, end = done.stdout.splitlines()
    assert head.split()[:3] == ["node", "ranks", "GPUs"] and row.split()[:3] == ["here", "2", "0"]
    assert whole.startswith("all ranks together: ") and end == "preflight: 1 nodes are sound"


@pytest.mark.gloo
def test_nodes_that_fall_short_are_told_once() -> None:
    done = torchrun("--gpus-per-node", "3", "--node-name", "here", "--min-shared-memory", "1e9")
    assert done.returncode == 1, done  # torchrun's own; the processes' is 2
    assert done.stderr.count("2 topology errors:") == 1 and done.stderr.count("here: ") == 2
    assert "exitcode  : 2" in done.stderr and "every node has 3 GPUs" in done.stderr
    assert "preflight" not in done.stdout


def test_one_process_needs_nobody() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    words = [sys.executable, str(ROOT / "tools" / "preflight.py"), "--gpus-per-node", "0", "--device", "cpu"]
    done = subprocess.run(
        words, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("preflight: 1 nodes are sound\n"), done
