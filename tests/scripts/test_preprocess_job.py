"""Tests of the array job that preprocesses, without Slurm: stand-ins for sbatch and scontrol act or record the call."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import ROOT
from support.warm_python import TOOLS, warm_python

JOB = ROOT / "scripts" / "slurm" / "preprocess.sbatch"
TASK = {"SLURM_JOB_ID": "100", "SLURM_ARRAY_JOB_ID": "99", "SLURM_ARRAY_TASK_ID": "7", "SLURM_CPUS_PER_TASK": "3"}

# This sbatch runs every task of an array at once, or the command of --wrap, and prints a job's id.
SBATCH = r"""#!/usr/bin/env bash
set -euo pipefail
printf '%s\n' "$*" >>"$STANDINS/sbatch.told"
while [[ "$1" == --* ]]; do
    case "$1" in
        --array=*) range="${1#--array=}" ;;
        --cpus-per-task=*) export SLURM_CPUS_PER_TASK="${1#*=}" ;;
        --wrap) exec bash -ec "$2" >&2 ;;
    esac
    shift
done
first="${range%-*}" last="${range#*-}"
export SLURM_ARRAY_JOB_ID=99 SLURM_ARRAY_TASK_MIN="$first" SLURM_ARRAY_TASK_MAX="$last"
export SLURM_ARRAY_TASK_COUNT=$((last - first + 1))
for ((task = first; task <= last; task++)); do
    SLURM_JOB_ID=$((100 + task)) SLURM_ARRAY_TASK_ID="$task" bash "$@" >&2
done
echo 99
"""
SCONTROL = '#!/bin/sh\nprintf "%s\\n" "$*" >>"$STANDINS/scontrol.told"\n'


@pytest.fixture
def surroundings(tmp_path: Path) -> Iterator[dict[str, str]]:
    for name, text in (("sbatch", SBATCH), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    yield {"PATH": path, "STANDINS": str(tmp_path), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def python_stand_in(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def run(environment: dict[str, str], *words: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", str(JOB), *words], env=environment, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def told(folder: Path, name: str) -> list[str]:
    path = folder / f"{name}.told"
    return path.read_text().splitlines() if path.exists() else []


def commands() -> str:
    """Return the two commands that the comment at the head of the script shows."""
    lines = [line.removeprefix("#").strip() for line in JOB.read_text().splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith('job="$(sbatch'))
    return "\n".join(lines[first : first + 4])


def test_the_commands_of_its_head_make_one_corpus(tmp_path: Path, surroundings: dict[str, str]) -> None:
    """The corpus is the same, byte for byte, as the one that the tool makes by itself."""
    book, output = tmp_path / "book.txt", tmp_path / "runs"
    book.write_text("".join(f"line {number} of a book\n" for number in range(180_000)))
    shown = commands()
    assert shown.count("sbatch") == 3 and "--array=0-31" in shown and '--dependency="afterok:$job"' in shown
    script = re.sub("--array=0-31", "--array=4-6", shown).replace("--cpus-per-task=16", "--cpus-per-task=1")
    script = script.replace("runs/book.txt", str(book)).replace("runs/", f"{output}/")
    script = script.replace(".venv/bin/python", warm_python(TOOLS))
    done = subprocess.run(
        ["bash", "-ec", script],
        env={**surroundings, "PYTHON": warm_python(TOOLS)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    array, wrapped = told(tmp_path, "sbatch")
    assert array.startswith("--parsable --array=4-6") and wrapped.startswith("--dependency=afterok:99 ")
    assert "task 4 of job 99, start 1" in done.stderr
    assert all((output / f"book_shard_{n:05d}_of_00003_text_document.bin").stat().st_size for n in range(3))
    whole = [
        warm_python(TOOLS),
        "tools/preprocess_data.py",
        "--input",
        str(book),
        "--output-prefix",
        str(tmp_path / "whole"),
    ]
    whole += ["--append-eod", "--tokenizer-type", "ByteTokenizer"]
    subprocess.run(whole, env=surroundings, cwd=ROOT, capture_output=True, timeout=60, check=True)
    for ending in ("bin", "idx", "json"):
        merged, expected = (
            folder.with_name(f"{folder.name}.{ending}")
            for folder in (output / "book_text_document", tmp_path / "whole_text_document")
        )
        assert merged.read_bytes() == expected.read_bytes(), ending


def test_a_task_is_a_shard_with_the_jobs_processors(tmp_path: Path, surroundings: dict[str, str]) -> None:
    python = {"PYTHON": python_stand_in(tmp_path, 'echo "$@"; exit 5')}
    done = run(surroundings | TASK | python, "--input", "x y", "--workers", "1")
    assert done.stdout.splitlines()[1:] == [
        "tools/preprocess_data.py --resume --shards-from-slurm --workers 3 --input x y --workers 1"
    ]
    assert done.returncode == 5 and told(tmp_path, "scontrol") == []
    done = run(surroundings | TASK | python | {"NUM_SHARDS": "32"})
    assert "--resume --shard-index 7 --num-shards 32 --workers 3" in done.stdout


def start(environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(["bash", str(JOB)], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < give_up
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("on_signal", "restarts", "status", "requeued"),
    [
        ("kill -9 $$", "0", 0, True),  # ended by a signal: continues later
        ("exit 0", "0", 0, False),  # finished before the warning took effect
        ("exit 2", "0", 2, False),  # an error that only the user can correct
        ("kill -9 $$", "20", 137, False),  # restarted often enough
    ],
)
def test_a_warned_task_is_requeued(
    tmp_path: Path, surroundings: dict[str, str], on_signal: str, restarts: str, status: int, requeued: bool
) -> None:
    body = f"trap '{on_signal}' TERM; touch {tmp_path}/ready; for ((;;)); do sleep 0.05; done"
    own = {"PYTHON": python_stand_in(tmp_path, body), "SLURM_RESTART_COUNT": restarts}
    with start(surroundings | TASK | own) as job:
        wait_for(tmp_path / "ready")
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=30)
    assert job.returncode == status, output
    assert told(tmp_path, "scontrol") == ["requeue 100"] * requeued
    assert ("stopped before the end; requeued" in output) is requeued


@pytest.mark.parametrize(
    ("variables", "message"),
    [({"SLURM_ARRAY_TASK_ID": ""}, "sbatch --array=0-7"), ({"PYTHON": "no/such"}, "no/such is missing")],
)
def test_what_is_missing_is_named(surroundings: dict[str, str], variables: dict[str, str], message: str) -> None:
    done = run(surroundings | TASK | variables)
    assert done.returncode == 2 and message in done.stderr


def test_another_folder_than_the_projects(tmp_path: Path, surroundings: dict[str, str]) -> None:
    assert run(surroundings | TASK, cwd=tmp_path).returncode == 2


def test_it_can_be_requeued_and_is_warned() -> None:
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", JOB.read_text(), re.MULTILINE))
    assert said["requeue"] == "" and said["open-mode"] == "append"
    assert said["signal"].startswith("B:USR1@")  # B: sends the signal to the batch shell, which ends the tool
    assert said["output"] == "slurm-%x-%A_%a.log"  # each task has its own log
