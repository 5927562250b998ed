"""Tests of jobs that start their processes themselves."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from support.launch import PATIENCE_SECONDS, SMALL_RUN, command_line
from support.warm_python import warm_python

pytestmark = pytest.mark.gloo

# A program that starts itself as two ranks, which do as `act` says.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path

act = sys.argv[1]
if "RANK" not in os.environ:
    from megazero.cluster.local_processes import start_processes
    from megazero.parallel.job import read_job
    if act == "wait, started slowly":
        start = subprocess.Popen.__init__
        subprocess.Popen.__init__ = lambda *words, **more: start(*words, **more) or time.sleep(1)
    sys.exit(start_processes(read_job(sys.argv[1:])))
rank = int(os.environ["RANK"])
assert "--processes" not in sys.argv and os.environ["MASTER_ADDR"] == "127.0.0.1"
assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
stopped = []
signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
os.write(1, f"rank {rank} runs\\n".encode())  # in one piece, whatever the other rank prints
if act == "fail" and rank == 1:
    print("the reason", file=sys.stderr, flush=True)
    sys.exit(7)
if act == "die" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while act != "end" and not stopped:
    time.sleep(0.02)
if act == "leave 7":
    from megazero.command_line.processes import leave_status
    leave_status(7 * rank, rank)
Path(f"rank {rank} has ended").touch()
"""


def start(folder: Path, act: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    return begin(folder, str(folder / "program.py"), act, "--processes", "2")


def begin(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [warm_python(), *words],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        told, complaints = program.communicate(timeout=PATIENCE_SECONDS)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    return program.returncode, told, complaints


@pytest.mark.parametrize(
    ("act", "status", "complaints"),
    [
        ("end", 0, ""),
        ("fail", 7, "the reason\n"),
        ("die", 128 + signal.SIGKILL, "rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_first_failure_is_the_job_s(act: str, status: int, complaints: str, tmp_path: Path) -> None:
    """The launcher adds nothing to what a rank has printed, but for one that could print nothing."""
    found, told, printed = end(start(tmp_path, act))
    assert (found, printed) == (status, complaints)
    assert sorted(told.splitlines()) == ["rank 0 runs", "rank 1 runs"]
    assert (tmp_path / "rank 0 has ended").exists(), "the others are stopped by a signal that they can handle"


@pytest.mark.parametrize(
    ("act", "status"), [("wait", 128 + signal.SIGTERM), ("wait, started slowly", 128 + signal.SIGTERM), ("leave 7", 7)]
)
def test_a_signal_is_passed_on_and_waited_for(act: str, status: int, tmp_path: Path) -> None:
    """Ranks may run before the agent that starts them has gone on, as on a busy machine."""
    program = start(tmp_path, act)
    assert program.stdout is not None
    assert all(" runs" in program.stdout.readline() for _ in range(2))
    program.terminate()
    assert end(program) == (status, "", "")
    assert all((tmp_path / f"rank {rank} has ended").exists() for rank in range(2))


def test_what_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    words = ["-m", "megazero", "pretrain", "--processes", "2", *command_line(SMALL_RUN)]
    for more, environment, complaint in (
        (["--seed", "much"], {}, "configuration error: --seed much"),
        ([], {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "configuration error: --processes 2 in one of 2"),
    ):
        status, told, complaints = end(begin(tmp_path, *words, *more, **environment))
        assert (status, told) == (2, "") and complaints.startswith(complaint)


def test_each_node_starts_its_share_of_a_job_on_several(tmp_path: Path) -> None:
    """Two programs, as SkyPilot starts one on each node, and a later job of two as Kubeflow does, which resumes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2\n", "MASTER_PORT": port}
    pods = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port, "PET_NPROC_PER_NODE": "auto"}
    rank = {"RANK": "1", "WORLD_SIZE": "2"}  # which PyTorchJobs have too; they count pods
    saved = {"--save": "run", "--load": "run", "--zero-stage": "2"}
    for iterations, launcher, number, more in (
        ("2", sky, "SKYPILOT_NODE_RANK", {}),
        ("4", pods, "PET_NODE_RANK", rank),
    ):
        flags = command_line({**SMALL_RUN, **saved, "--train-iters": iterations, "--override-opt_param-scheduler": ""})
        words = ["-m", "megazero", "pretrain", "--processes", "1", *flags]
        common = {**launcher, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        other = begin(tmp_path, *words, **common, **{number: "1"}, **more)
        status, told, complaints = end(begin(tmp_path, *words, **common, **{number: "0"}))
        assert (status, end(other)[0]) == (0, 0), complaints
        assert "data 2 x tensor 1 = 2 ranks" in told and f"saved checkpoint of iteration {iterations} " in told
        assert ("resumed at iteration 2" in told) == (iterations == "4")
