"""Tests the planner's command as a user starts it."""

import json
import os
import shlex
import subprocess
from pathlib import Path

from support.warm_python import RUNS, warm_python

# Layers of which a device of 500 MB has no room for all activations.
LONG = shlex.split(
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 128 --micro-batch-size 8"
    " --global-batch-size 64 --train-iters 10 --lr 1e-4 --zero-stage 2 --eval-iters 0 --precision bf16"
)
MACHINE = """
device: cuda
devices_per_node: 8
memory_bytes: {memory}
matrix: {{bf16: {{peak: 100e12, rates: 50e12}}}}
kernels: {{memory: 1e12}}
links:
  inside: {{latency_seconds: 3e-6, rates: 100e9}}
  across: {{latency_seconds: 7e-6, rates: 10e9}}
  host: {{latency_seconds: 1e-5, rates: 20e9}}
"""
ROOT = Path(__file__).resolve().parents[2]
RUN = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --micro-batch-size 1"
    " --global-batch-size 8 --train-iters 10 --lr 1e-4 --zero-stage 3 --eval-iters 0"
)


def plan(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [warm_python(RUNS), "-m", "megazero", "plan", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)


def test_a_plan_is_printed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = plan("--hardware", "dgx2-v100", "--world-size", "8", "--format", "json", *RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"] and found["world_size"] == 8 and found["hardware"] == "dgx2-v100"
    value, low, high = found["time"]["step_seconds"]
    assert 0 < low < value < high and found["time"]["tokens"] == 8 * 32
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_open_is_decided(tmp_path: Path) -> None:
    auto = ("--recompute-granularity", "auto", "--checkpoint-in-cpu", "auto")
    for memory, expected in ((10**10, "none"), (5 * 10**8, "full")):
        (tmp_path / "machine.yaml").write_text(MACHINE.format(memory=memory))
        done = plan("--hardware", "machine.yaml", "--world-size", "8", "--format", "json", *LONG, *auto, cwd=tmp_path)
        assert f"recompute_granularity {expected}" in json.loads(done.stdout)["auto"][-1], done.stderr


def test_a_page_is_a_new_file(tmp_path: Path) -> None:
    words = ("--world-size", "8", "--format", "html", "--what-if", "none", "--output", "plan.html", *RUN)
    done = plan(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "written: plan.html" in done.stdout and [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!doctype html>") and "--what-if none --output plan.html" in page
    done = plan(*words, cwd=tmp_path)
    assert done.returncode == 2 and "that is not there yet" in done.stderr
    assert plan(*words[:4], "--what-if", "stages", *RUN, cwd=tmp_path).returncode == 2


def test_the_status_tells_that_a_plan_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(
        "{device: cuda, devices_per_node: 8, memory_bytes: 1000, matrix: {bf16: {rates: 1e12}},"
        " kernels: {memory: 1e9}, links: {inside: {latency_seconds: 1e-6, rates: 1e9}}}"
    )
    done = plan("--hardware", "small.yaml", *RUN, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "does not fit: " in done.stdout.splitlines()[-3]
    assert done.stdout.splitlines()[-1] == "no layout was found that fits, on these nodes or more"


def test_help_and_a_wrong_flag(tmp_path: Path) -> None:
    assert "--paper" in plan("--help", cwd=tmp_path).stdout
    done = plan(*RUN, "--zero-stag", "2", cwd=tmp_path)
    assert done.returncode == 2 and "--zero-stage" in done.stderr


def test_a_calibration_has_no_flags_of_a_run(tmp_path: Path) -> None:
    done = plan("--calibrate", "mine.yaml", "--nodes", "2", "--zero-stage", "1", cwd=tmp_path)
    assert done.returncode == 2
    assert "--zero-stage 1 --nodes\n    rule:  a calibration is of this machine" in done.stderr
    assert plan("--calibrate", cwd=tmp_path).returncode == 2
    (tmp_path / "mine.yaml").write_text("kept")
    done = plan("--calibrate", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "that is not there yet" in done.stderr
    assert (tmp_path / "mine.yaml").read_text() == "kept"


def test_the_time_of_a_step_and_its_comparison_are_printed(tmp_path: Path) -> None:
    step = {"iteration": 1, "loss": 1.0, "skipped": False, "tokens_per_second": 1.0, "step_seconds": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step) + "\n")
    done = plan("--hardware", "cpu", *RUN, "--compare", "metrics.jsonl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "tokens/s  " in done.stdout and "what binds" in done.stdout
    assert "500.0 ms" in done.stdout
    done = plan(*RUN, "--compare", "gone.jsonl", cwd=tmp_path)
    assert done.returncode == 2 and "gone.jsonl" in done.stderr


def test_a_part_of_the_paper_by_its_name(tmp_path: Path) -> None:
    done = plan("--paper", "section-8", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(done.stdout)
    assert [round(row["ours"]) for row in table["rows"]] == [12, 13]
    for words in (("--paper", "figure-5"), ("--paper", "section-8", "--num-layers", "2"), ("--paper", "--nodes", "2")):
        done = plan(*words, cwd=tmp_path)
        assert done.returncode == 2 and "configuration error: --paper" in done.stderr, done.stderr
