"""Tests that the examples run as they say, and learn."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, load_program
from support.warm_python import warm_python

from megazero.checkpoint.reader import open_checkpoint

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(*words: str, folder: Path) -> str:
    """Run a program of the examples in a folder; return what it has printed."""
    done = subprocess.run(
        [warm_python(), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def under_torchrun(name: str, ranks: int, folder: Path) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run(*launcher, str(EXAMPLES / name), folder=folder)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "ranks", "lines"),
    [("vit.py", 2, 2), ("zero_init.py", 2, 3), ("device_mesh.py", 4, 4), ("lora.py", 2, 4), ("huggingface.py", 2, 2)],
)
def test_losses_fall(name: str, ranks: int, lines: int, tmp_path: Path) -> None:
    if name == "huggingface.py":
        pytest.importorskip("transformers")
    told = under_torchrun(name, ranks, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)", told, re.MULTILINE)]
    assert len(losses) == lines and losses[-1] < 0.9 * losses[0]


@pytest.mark.gloo
def test_a_run_from_a_file_and_its_checkpoint_in_numpy(tmp_path: Path) -> None:
    words = ["pretrain", "--processes", "2", "--config", str(EXAMPLES / "small_run.yaml"), "--mock-data"]
    run("-m", "megazero", *words, folder=tmp_path)
    tensors = load_program(EXAMPLES / "read_checkpoint.py").read(tmp_path / "runs" / "example" / "step_0000020")
    checkpoint = open_checkpoint(tmp_path / "runs" / "example")
    assert {entry.parameter for entry in checkpoint.manifest.tensors} == set(tensors)
    assert all(float(abs(tensor).max()) < 10 for tensor in tensors.values()), "no element is missing"


def test_examples_are_short() -> None:
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.*")) <= 60
