"""Tests of the batch scripts on a real Slurm on this machine: jobs cut by the time limit, requeued, resumed, finished.

They are skipped without root rights or without Slurm.  Both nodes are this machine: each rank has its own "node".
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.launch import ROOT, SMALL_RUN, read_steps, torchrun
from support.slurm import Cluster, local_slurm, what_is_missing

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(bool(what_is_missing()), reason=f"no Slurm to try: {what_is_missing()}"),
]

JOB = ROOT / "scripts" / "slurm" / "pretrain.sbatch"
ENDLESS = 1_000_000
# Slurm checks limits every 30 seconds, and sends the warning at the last check that is early enough: here the second
# one, when even a busy machine has begun to train.
LIMITED = ("--time=3", "--signal=USR1@110")
ENOUGH_SECONDS = 240.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # If a job's log is missing where it should be, it is in this folder, in which Slurm's daemons run.
    with local_slurm(tmp_path_factory.mktemp("slurm"), cpus_per_node=4) as cluster:
        yield cluster


class Job:
    """A job of the project's batch script, with one task on each of two nodes."""

    def __init__(self, slurm: Cluster, folder: Path, *words: str, options: tuple[str, ...] = (), **variables: str):
        self.slurm = slurm
        self.log = folder / "job.log"
        self.run = folder / "run"
        own = {
            "PYTHON": sys.executable,
            "RUN_FOLDER": str(self.run),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PREFLIGHT": "--message-mib 1",
        }
        options = ("--nodes=2", "--ntasks-per-node=1", f"--output={self.log}", *options)
        self.number = slurm.submit(*options, JOB, *words, cwd=ROOT, **{**own, **variables})

    def text(self) -> str:
        """Return the job's log so far."""
        return self.log.read_text() if self.log.exists() else ""

    def wait_for(self, text: str) -> None:
        """Wait until the log holds the text."""
        self.slurm.wait_until(lambda: text in self.text(), self.text, seconds=ENOUGH_SECONDS)

    def wait(self) -> dict[str, str]:
        """Wait until Slurm has ended the job; return Slurm's record of it."""
        return self.slurm.wait_for_end(self.number, log=self.log, seconds=ENOUGH_SECONDS)


def write_run(path: Path, train_iters: int) -> None:
    """Write the settings of a run, which each start of it reads again."""
    settings = {flag[2:].replace("-", "_"): value or True for flag, value in SMALL_RUN.items()}
    settings |= {"precision": "fp64", "zero_stage": 2, "train_iters": train_iters, "log_interval": ENDLESS}
    path.write_text(yaml.safe_dump(settings))


@pytest.mark.timeout(3 * ENOUGH_SECONDS)
def test_a_run_cut_by_the_time_limit_goes_on_to_its_end(slurm: Cluster, tmp_path: Path) -> None:
    settings = tmp_path / "run.yaml"
    # The run has so many steps that, even on a fast machine, the first start is cut before it ends.
    write_run(settings, ENDLESS)
    job = Job(slurm, tmp_path, "--config", str(settings), options=LIMITED, MAX_FAILURES="9")
    job.wait_for("stopped before the end; requeued")
    stopped = max(read_steps(job.run / "metrics.jsonl"))
    write_run(settings, stopped + 100)
    slurm.call("scontrol", "update", f"JobId={job.number}", "TimeLimit=10")

    through = tmp_path / "through"
    through.mkdir()
    flags = ["--config", str(settings), "--metrics-file", str(through / "steps")]
    with torchrun(flags, ranks=2, folder=through) as undisturbed:
        last = job.wait()
        assert undisturbed.wait().code == 0

    log = job.text()
    assert last["JobState"] == "COMPLETED" and int(last["Restarts"]) >= 1, log
    assert log.count("preflight: 2 nodes are sound") >= 2
    assert f"asked to stop after iteration {stopped} (SIGUSR1)" in log
    assert f"resumed at iteration {stopped}, {8 * stopped} samples consumed" in log
    assert f"finished {stopped + 100} iterations" in log and log.rstrip().endswith("finished")
    assert "Traceback" not in log
    steps, expected = read_steps(job.run / "metrics.jsonl"), read_steps(through / "steps")
    assert list(steps) == list(expected) == list(range(1, stopped + 101))
    for name in ("loss", "grad_norm", "consumed_samples"):
        assert [step[name] for step in steps.values()] == [step[name] for step in expected.values()], name


def stand_in(folder: Path, body: str) -> str:
    """Write a shell script to be used in Python's place, so that only Slurm and the batch scripts are tested."""
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_loop_of_crashes_ends(slurm: Cluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, PYTHON=stand_in(tmp_path, "kill -SEGV $$"), PREFLIGHT="no", MAX_FAILURES="2")
    last = job.wait()
    assert (last["JobState"], last["Restarts"]) == ("FAILED", "1"), job.text()
    assert "status 139, 2 times in a row without a new checkpoint: not started again" in job.text()


def test_a_cancelled_job_stays_cancelled(slurm: Cluster, tmp_path: Path) -> None:
    program = stand_in(tmp_path, "trap 'exit 75' TERM; echo started; for ((;;)); do sleep 0.1; done")
    job = Job(slurm, tmp_path, PYTHON=program, PREFLIGHT="no")
    job.wait_for("started")
    slurm.call("scancel", job.number)
    last = job.wait()
    assert (last["JobState"], last["Restarts"]) == ("CANCELLED", "0"), job.text()


def test_nodes_that_fall_short_are_named_and_nothing_is_tried_again(slurm: Cluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, PREFLIGHT="--message-mib 1 --min-bandwidth 100000")
    last = job.wait()
    assert (last["JobState"], last["ExitCode"], last["Restarts"]) == ("FAILED", "2:0", "0"), job.text()
    assert "no two nodes are fast together: dgx1 - dgx2:" in job.text()


def test_an_array_makes_shards_and_a_job_after_it_joins_them(slurm: Cluster, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {number} of a book\n" for number in range(180_000)))
    own = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    words = ("--input", str(tmp_path / "book.txt"), "--append-eod", "--tokenizer-type", "ByteTokenizer")
    options = ("--array=3-5", "--cpus-per-task=1", f"--output={tmp_path}/%a.log")
    script = ROOT / "scripts" / "slurm" / "preprocess.sbatch"
    array = slurm.submit(*options, script, *words, "--output-prefix", str(tmp_path / "book"), cwd=ROOT, **own)
    merging = f"tools/merge_datasets.py --input {tmp_path} --output-prefix {tmp_path}/all"
    after = (f"--dependency=afterok:{array}", f"--output={tmp_path}/merge.log", "--wrap", f"{sys.executable} {merging}")
    job = slurm.submit(*after, cwd=ROOT, **own)
    last = slurm.wait_for_end(job, log=tmp_path / "merge.log", seconds=ENOUGH_SECONDS)
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert last["JobState"] == "COMPLETED", logs
    assert "3 corpora with" in logs and "book_shard_00002_of_00003_text_document" in logs
    program = [sys.executable, "tools/preprocess_data.py", *words, "--output-prefix", str(tmp_path / "whole")]
    subprocess.run(program, cwd=ROOT, env={**os.environ, **own}, check=True, capture_output=True)
    for ending in ("bin", "idx", "json"):
        whole = tmp_path / f"whole_text_document.{ending}"
        assert (tmp_path / f"all.{ending}").read_bytes() == whole.read_bytes(), ending
