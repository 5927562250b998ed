"""Tests of the preflight tool as a launcher starts it: real processes and their exit statuses."""

import os
import subprocess
from pathlib import Path

import pytest
from support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[2]


def torchrun(*arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    words = [warm_python(), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
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
    assert whole.startswith("all ranks together: ") and end == "preflight: 1 node is sound"


@pytest.mark.gloo
def test_nodes_that_fall_short_are_told_once() -> None:
    done = torchrun("--gpus-per-node", "3", "--node-name", "here", "--min-shared-memory", "1e9")
    assert done.returncode == 1, done  # torchrun's own status; that of the processes is 2
    assert done.stderr.count("2 topology errors:") == 1 and done.stderr.count("here: ") == 2
    assert "exitcode  : 2" in done.stderr and "every node has 3 GPUs" in done.stderr
    assert "preflight" not in done.stdout


def by_hand(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [warm_python(), str(ROOT / "tools" / "preflight.py"), "--device", "cpu", *arguments],
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.gloo
def test_flags_that_cannot_be_read_are_told_once() -> None:
    done = torchrun("--gpus-per-node", "x")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("--gpus-per-node x\n    rule:  --gpus-per-node is a whole number, at least 0") == 1


def test_numbers_are_checked_before_anything_is_opened() -> None:
    """Numbers are checked first: no rank 0 is at the address, so that opening the store would wait for it."""
    wrong = {
        "--gpus-per-node": ["-1"],
        "--min-bandwidth": ["nan", "-1"],
        "--max-clock-skew": ["-2.5", "inf"],
        "--min-shared-memory": ["1e300", "nan"],
        "--message-mib": ["0", "-4"],
        "--timeout": ["0", "1e20"],
    }
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    for turn in range(2):
        done = by_hand(*(f"{flag}={values[turn % len(values)]}" for flag, values in wrong.items()), **job)
        assert done.returncode == 2 and done.stdout == "", done
        assert done.stderr.startswith("6 configuration errors:\n"), done
        assert [flag for flag in wrong if f"\n{flag} " not in done.stderr] == []
        assert done.stderr.count("rule:") == done.stderr.count("legal: ") == 6
    assert "--message-mib -4\n    rule:  --message-mib is a number, greater than 0, at most 65536\n" in done.stderr


def test_one_process_needs_nobody() -> None:
    done = by_hand("--gpus-per-node", "0")
    assert done.stdout.endswith("preflight: 1 node is sound\n"), done
