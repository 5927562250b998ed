"""Tests of the batch scripts without Slurm: stand-ins for srun and scontrol record their arguments."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from support.each import each
from support.source_tree import ROOT

FOLDER = ROOT / "scripts" / "slurm"
JOBS = sorted(FOLDER.glob("*.sbatch"))
TRAINING = [job for job in JOBS if job.stem != "preprocess"]
STOPPED = 75

# This srun ends with the next status of the file `statuses`, and records its arguments.
SRUN = """#!/bin/sh
printf '%s\\n' "$*" >>"$STANDINS/srun"
printf '%s %s\\n' "$MASTER_ADDR" "$MASTER_PORT" >>"$STANDINS/meeting"
status="$(head -n 1 "$STANDINS/statuses")"
sed -i 1d "$STANDINS/statuses"
[ "$status" != 75 ] || [ ! -e "$STANDINS/saves" ] || date +%N >"$RUN_FOLDER/checkpoints/latest"
exit "${status:-0}"
"""
SCONTROL = """#!/bin/sh
case "$1" in
    show) printf 'node3\\nnode4\\n' ;;
    *) printf '%s\\n' "$*" >>"$STANDINS/scontrol" ;;
esac
"""


class Ended(NamedTuple):
    """The outcome of a batch script that has run."""

    status: int
    output: str
    ranks: list[str]  # the arguments of srun, one line for each step
    requeued: bool


class Batch:
    """An environment for a batch script: stand-ins for Slurm's programs, and a folder for the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "run"
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def start(
        self,
        *statuses: int,
        script: str = "pretrain",
        words: tuple[str, ...] = (),
        restarts: int = 0,
        cwd: Path = ROOT,
        **variables: str,
    ) -> Ended:
        """Run the batch script once; its steps end with `statuses`."""
        for name in ("srun", "scontrol", "meeting"):
            (self.folder / "told" / name).unlink(missing_ok=True)
        (self.folder / "told").mkdir(exist_ok=True)
        (self.folder / "told" / "statuses").write_text("".join(f"{status}\n" for status in statuses))
        slurm = {
            "SLURM_JOB_ID": "123456",
            "SLURM_JOB_NAME": "trial",
            "SLURM_JOB_NODELIST": "node[3-4]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS": "4",
        }
        if restarts:
            slurm["SLURM_RESTART_COUNT"] = str(restarts)
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}", "STANDINS": str(self.folder / "told")}
        own = {"PYTHON": sys.executable, "RUN_FOLDER": str(self.run)}
        done = subprocess.run(
            ["bash", str(FOLDER / f"{script}.sbatch"), *(words or ("--lr", "1e-3"))],
            env=path | slurm | own | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )
        ranks = self.told("srun")
        return Ended(done.returncode, done.stdout + done.stderr, ranks, self.told("scontrol") == ["requeue 123456"])

    def told(self, name: str) -> list[str]:
        """Return the lines that a stand-in has recorded."""
        path = self.folder / "told" / name
        return path.read_text().splitlines() if path.exists() else []

    def save(self, step: int) -> None:
        """Make what a batch script takes for a new checkpoint."""
        (self.run / "checkpoints").mkdir(parents=True, exist_ok=True)
        (self.run / "checkpoints" / "latest").write_text(f"step_{step:07d}\n")


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


def test_a_finished_run_ends_the_job(batch: Batch) -> None:
    ended = batch.start(0, 0, SLURM_GPUS_ON_NODE="2", SLURM_CPUS_PER_TASK="3")
    assert ended.status == 0 and not ended.requeued, ended.output
    nodes, training = ended.ranks
    assert nodes.startswith("--distribution=block ") and "--cpus-per-task=3" in nodes
    assert nodes.endswith(f"task.sh {sys.executable} tools/preflight.py --gpus-per-node 2 --nodes node3,node4")
    saved = batch.run / "checkpoints"
    assert f"pretrain_gpt.py --save {saved} --load {saved} --metrics-file {batch.run / 'metrics.jsonl'} " in training
    assert training.endswith(f"--exit-status-when-stopped {STOPPED} --lr 1e-3")
    assert batch.told("meeting") == ["node3 13456", "node3 23456"]


def test_a_stopped_run_goes_on_in_the_same_job_without_end(batch: Batch) -> None:
    (batch.run / "checkpoints").mkdir(parents=True)
    (batch.folder / "told").mkdir()
    (batch.folder / "told" / "saves").touch()
    for restarts in range(6):
        ended = batch.start(0, STOPPED, restarts=restarts)
        assert ended.requeued and "stopped before the end; requeued" in ended.output


def test_a_run_that_stops_without_a_checkpoint_ends(batch: Batch) -> None:
    assert [batch.start(0, STOPPED, restarts=n).requeued for n in range(3)] == [True, True, False]


def test_failures_are_tried_again_until_they_bring_nothing_new(batch: Batch) -> None:
    assert [batch.start(0, 137, restarts=n).requeued for n in range(3)] == [True, True, False]
    assert batch.start(1, restarts=3).status == 1  # a preflight that fails counts as a failure too
    assert batch.start(0, 1, restarts=0).requeued  # the job was submitted again
    assert batch.start(0, 1, restarts=1).requeued
    batch.save(10)
    assert [batch.start(0, 1, restarts=n).requeued for n in (2, 3)] == [True, True]
    batch.save(20)
    assert batch.start(0, 1, restarts=4).requeued
    assert not batch.start(0, 1, restarts=5, MAX_FAILURES="2").requeued


def test_the_last_failure_is_told(batch: Batch) -> None:
    ended = batch.start(0, 134, MAX_FAILURES="1")
    assert (
        ended.status == 134
        and "status 134, 1 times in a row without a new checkpoint: not started again" in ended.output
    )


@pytest.mark.parametrize("statuses", [(2,), (0, 2)])
def test_what_a_person_must_mend_is_not_tried_again(batch: Batch, statuses: tuple[int, ...]) -> None:
    ended = batch.start(*statuses)
    assert ended.status == 2 and not ended.requeued and len(ended.ranks) == len(statuses)


def test_preflight_has_flags_and_can_be_left_out(batch: Batch) -> None:
    assert batch.start(0, 0, PREFLIGHT="--min-bandwidth 80").ranks[0].endswith("--min-bandwidth 80")
    (training,) = batch.start(0, PREFLIGHT="no").ranks
    assert "pretrain_gpt.py" in training


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "sbatch [options]"),
        ({"SLURM_NTASKS": ""}, "--ntasks-per-node"),
        ({"SLURM_NTASKS": "3"}, "3 tasks on 2 nodes"),
        ({"PYTHON": "no/such/python"}, "no/such/python is missing"),
    ],
)
def test_what_is_missing_is_named(batch: Batch, variables: dict[str, str], message: str) -> None:
    ended = batch.start(**variables)
    assert ended.status == 2 and message in ended.output and ended.ranks == []


@pytest.mark.parametrize("words", [("--save", "x"), ("--lr", "1", "--load=x")])
def test_where_a_run_is_kept_is_said_once(batch: Batch, words: tuple[str, ...]) -> None:
    ended = batch.start(words=words)
    assert ended.status == 2 and "is set by the job; RUN_FOLDER=" in ended.output and ended.ranks == []


def test_another_folder_than_the_projects(batch: Batch, tmp_path: Path) -> None:
    ended = batch.start(cwd=tmp_path)
    assert ended.status == 2 and ended.ranks == []


def test_a_task_becomes_a_rank() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NNODES": "2"}
    done = subprocess.run(
        ["bash", str(FOLDER / "task.sh"), "env"],
        env={"PATH": os.environ["PATH"], **slurm, "SLURM_CPUS_PER_TASK": "3"},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in ("RANK=5", "WORLD_SIZE=8", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=4", "OMP_NUM_THREADS=3"):
        assert line in done.stdout.splitlines()


def directives(job: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", job.read_text(), re.MULTILINE))


@each("job", TRAINING, ids=lambda job: job.stem)
def test_every_job_can_be_requeued_and_is_warned(job: Path) -> None:
    said = directives(job)
    assert said["requeue"] == "" and said["open-mode"] == "append"
    assert re.fullmatch(r"USR1@\d+", said["signal"])  # with B: the shell would get the signal in place of the ranks
    assert said["output"] == "slurm-%x-%j.log"


@each("script", JOBS, ids=lambda path: path.name)
def test_a_job_is_sound(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--external-sources", str(script)], check=True, cwd=ROOT)
