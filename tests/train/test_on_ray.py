"""Tests of Ray Train: a run as its TorchTrainer, and the library inside one, with the real Ray on this machine."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, ROOT, SMALL_RUN, command_line

from megazero.checkpoint.reader import open_checkpoint
from megazero.errors import ConfigError
from megazero.train.on_ray import pretraining_trainer

ray = pytest.importorskip("ray", reason="Ray is not installed (pip install megazero[ray])")
train = pytest.importorskip("ray.train")

FLAGS = {**SMALL_RUN, "--save-interval": "2"}
TWO = train.ScalingConfig(num_workers=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    environment = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.mark.gloo
def test_a_run_that_fails_goes_on_from_the_checkpoint_that_ray_lists(cluster: None, tmp_path: Path) -> None:
    """The first attempt ends after two steps with a status that counts as a failure; the second one finishes."""
    stops = {"--exit-interval": "2", "--exit-status-when-stopped": "75"}
    flags = command_line({**FLAGS, **stops, "--zero-stage": "2"})
    kept = train.RunConfig(name="run", storage_path=str(tmp_path), failure_config=train.FailureConfig(max_failures=1))
    result = pretraining_trainer(flags, scaling_config=TWO, run_config=kept).fit()
    root = tmp_path / "run" / "checkpoints"
    assert result.error is None and Path(result.checkpoint.path) == root / "step_0000004"
    assert [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints] == ["step_0000002", "step_0000004"]
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    assert result.metrics["loss"] == steps[-1]["loss"] and result.metrics["iteration"] == 4
    checkpoint = open_checkpoint(root)
    assert checkpoint.step == 4 and [problem for problems in checkpoint.verify() for problem in problems] == []


@pytest.mark.gloo
def test_a_failing_run_gives_ray_its_message(cluster: None, tmp_path: Path) -> None:
    flags = command_line({**FLAGS, "--data-path": str(tmp_path / "nowhere"), "--mock-data": None})
    trainer = pretraining_trainer(flags, scaling_config=TWO, run_config=train.RunConfig(storage_path=str(tmp_path)))
    with pytest.raises(Exception, match="nowhere"):
        trainer.fit()


@pytest.mark.parametrize(
    ("more", "given"), [({"--save": "here"}, "--save here"), ({"--zero-stage": "4"}, "--zero-stage 4")]
)
def test_wrong_flags_are_refused_before_ray_starts_anything(more: dict[str, str], given: str) -> None:
    with pytest.raises(ConfigError, match=given):
        pretraining_trainer(command_line({**FLAGS, **more}), scaling_config=TWO)


@pytest.mark.gloo
def test_the_library_inside_a_trainer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "ray_train.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Ray prints what its workers have printed when it gets to it, even after the program's last line.
    (losses,) = re.findall(r"^([0-9.e-]+) ([0-9.e-]+)$", done.stdout, re.MULTILINE)
    first, last = map(float, losses)
    assert last < 0.5 * first
    assert "resumed at step 1" in done.stdout + done.stderr
