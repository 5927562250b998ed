"""Jobs of two ranks of which one fails; every rank writes what it prints to a file in the job's folder.

Ranks are forked from the fork server of `processes.py`, so that a job costs its waiting and little else.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from support.processes import start_fork_server
from torch.distributed.distributed_c10d import _world

from megazero.checkpoint.journal import Journal, read_journal
from megazero.comm.faults import abort
from megazero.comm.faults.monitor import place_in_job
from megazero.comm.faults.shutdown import reported_faults
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.comm.startup import join, make_mesh
from megazero.console import run_program
from megazero.errors import DataError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology

LIMIT_SECONDS = 3.0
CPU = torch.device("cpu")


def killed(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def stopped(rank: int, mesh: Mesh) -> None:
    """Stop rank 0, which holds the store."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)


def asleep(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        time.sleep(1000)


def mismatched(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        mesh.world.all_reduce_scalars(torch.ones(1)).wait()


def user_error(rank: int, mesh: Mesh) -> None:
    """Fail on rank 0, which takes the store along."""
    if rank == 0:
        raise DataError("a damaged token")


def bug(rank: int, mesh: Mesh) -> None:
    if rank == 1:
        raise KeyError("a bug")


def slow_journal(rank: int, mesh: Mesh) -> None:
    """Fail on rank 1, whose file system then takes so long that rank 0, and the store with it, has gone."""
    bug(rank, mesh)


def hung_journal(rank: int, mesh: Mesh) -> None:
    """Fail on rank 1, whose file system then hangs."""
    bug(rank, mesh)


def device_error(rank: int, mesh: Mesh) -> None:
    """Fail on rank 1 of a job that torch lists as NCCL's, while rank 0 waits for the device for ever.

    The communicators of rank 0 cannot even be aborted.
    """
    for group in _world.pg_backend_config:
        _world.pg_backend_config[group] = "cuda:nccl"
    if rank == 1:
        raise DataError("a damaged token")
    abort._abort_process_group = lambda: time.sleep(1000)
    time.sleep(1000)


FAULTS: Mapping[str, Callable[[int, Mesh], None]] = MappingProxyType(
    {
        fault.__name__: fault
        for fault in (killed, stopped, asleep, mismatched, user_error, bug, slow_journal, hung_journal, device_error)
    }
)
FAILS_ON_RANK_0 = ("stopped", "user_error")
JOURNAL_SECONDS: Mapping[str, float] = MappingProxyType({"slow_journal": 4, "hung_journal": 1000})


class Ended(NamedTuple):
    """What became of a job, by rank: its exit code (None: it was still there), what it printed, seconds from the fault.

    journal: the reports in its journal.
    """

    codes: tuple[int | None, ...]
    printed: tuple[str, ...]
    seconds: tuple[float, ...]
    journal: list[list[str]]


def run_failing_jobs(folder: Path, patience: float) -> dict[str, Ended]:
    """Run a job for every fault, all at once, until only the stopped rank is left, or for `patience` seconds."""
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    jobs: dict[str, list[Any]] = {}
    for name in FAULTS:
        (folder / name).mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        jobs[name] = [context.Process(target=run_rank, args=(name, rank, port, folder / name)) for rank in range(2)]
        for process in jobs[name]:
            process.start()
    # One clock for all processes of the machine, so that a rank's end can be compared with the fault's time.
    start, ends = time.monotonic(), dict[int, float]()
    while len(ends) < 2 * len(jobs) - 1 and time.monotonic() - start < patience:
        for process in (process for ranks in jobs.values() for process in ranks):
            if process.exitcode is not None:
                ends.setdefault(process.pid, time.monotonic())
        time.sleep(0.05)
    found = {}
    for name, ranks in jobs.items():
        printed = tuple((folder / name / f"rank_{rank}.err").read_text() for rank in range(2))
        failed = float((folder / name / "fault_time").read_text())
        seconds = tuple(ends.get(process.pid, start + patience) - failed for process in ranks)
        journal = [entry["report"] for entry in read_journal(folder / name) if entry["event"] == "fault"]
        found[name] = Ended(tuple(process.exitcode for process in ranks), printed, seconds, journal)
        for process in ranks:
            process.kill()
            process.join()
    return found


def run_rank(name: str, rank: int, port: int, folder: Path) -> None:
    output = os.open(folder / f"rank_{rank}.err", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)  # what is printed before os._exit is there, as on a terminal
    launched = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in launched.items()}, GLOO_SOCKET_IFNAME="lo")
    os.chdir(folder)
    sys.exit(run_program(lambda: _train(name, rank, folder)))


def _train(name: str, rank: int, folder: Path) -> int:
    store = join(Launch(rank, 2, rank), backend="gloo", device=CPU, timeout_minutes=LIMIT_SECONDS / 60, join_minutes=1)
    meter, topology = Meter(), Topology(dp=2)
    job = place_in_job(
        rank,
        topology,
        limit_seconds=LIMIT_SECONDS,
        folder=folder,
        is_run=True,
        on_report=lambda lines: _write_journal(name, folder, lines),
    )
    try:
        with reported_faults(store, meter.flight, job):
            buffers = FusedBuffers(64, CPU)
            mesh = make_mesh(topology, rank, CPU, buffers, timeout_minutes=LIMIT_SECONDS / 60, meter=meter)
            meter.flight.activity = "forward"
            for step in range(1, 100):
                meter.flight.iteration = step
                if step == 10:
                    time.sleep(1.5)  # until both monitors have written a heartbeat
                    if rank == (0 if name in FAILS_ON_RANK_0 else 1):
                        (folder / "fault_time").write_text(str(time.monotonic()))
                    FAULTS[name](rank, mesh)
                mesh.axis("dp").all_reduce(torch.ones(1)).wait()
    finally:
        if not dist.is_initialized():
            print("no process groups are left", file=sys.stderr, flush=True)
    return 0


def _write_journal(name: str, folder: Path, lines: Sequence[str]) -> None:
    time.sleep(JOURNAL_SECONDS.get(name, 0))
    Journal(folder, print).write("fault", report=lines)
