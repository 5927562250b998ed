"""Runs a real Slurm of two nodes on one machine for the length of a block; slurm_local.sh starts its daemons."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SCRIPT = Path(__file__).with_name("slurm_local.sh")
NODES = 2
PATIENCE_SECONDS = 60.0
_UNSHARE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_PROGRAMS = ("unshare", "munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "srun")


class Cluster:
    """A running Slurm; its methods call Slurm's clients and return their output as text."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        """Run a client of Slurm and return its output; fail when it does."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**self._environment, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, *words: str | Path, cwd: Path, **variables: str) -> str:
        """Submit a job and return its id."""
        return self.call("sbatch", "--parsable", *words, cwd=cwd, **variables).strip()

    def job(self, job: str) -> dict[str, str]:
        """Return scontrol's description of a job, by its names (JobState, Restarts, ExitCode)."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_end(self, job: str, *, log: Path, seconds: float) -> dict[str, str]:
        """Wait until the job neither runs nor waits, and return scontrol's description of it."""
        on_its_way = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")
        self.wait_until(
            lambda: self.job(job)["JobState"] not in on_its_way,
            lambda: log.read_text() if log.exists() else str(self.job(job)),
            seconds=seconds,
        )
        return self.job(job)

    def wait_until(self, condition: Callable[[], bool], told: Callable[[], str], *, seconds: float) -> None:
        """Wait until the condition holds; fail with the text of `told` when it does not in time."""
        give_up = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up, told()
            time.sleep(0.5)


def what_is_missing() -> str:
    """Return the reason why Slurm cannot run on this machine, or an empty string when it can."""
    if os.geteuid() != 0:
        return "only root can start a Slurm of its own"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if absent:
        return f"no {', '.join(absent)} (Debian: slurmctld slurmd slurm-client munge)"
    if subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode:
        return "this machine lets nobody make namespaces"
    return ""


@contextmanager
def local_slurm(folder: Path, *, cpus_per_node: int) -> Iterator[Cluster]:
    """Run Slurm with its files in `folder`; daemons and jobs have ended after the block, however that ends."""
    environment = {**os.environ, "PATH": _path()}
    with (folder / "up.log").open("w") as log:
        words = ["bash", str(SCRIPT), str(folder), str(NODES), str(cpus_per_node), str(_first_port())]
        # All processes in its namespace end with it.
        process = subprocess.Popen([*_UNSHARE, *words], env=environment, stdout=log, stderr=log)
    try:
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not (folder / "up").exists():
            told = "".join(path.read_text() for path in sorted(folder.glob("*.log")))
            assert process.poll() is None and time.monotonic() < give_up, told
            time.sleep(0.1)
        yield Cluster(folder, environment)
    finally:
        process.kill()
        process.wait()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def _first_port() -> int:
    """Return the first of a row of free ports, one for each daemon."""
    for port in range(17100, 32000, 100):
        if all(_is_free(each) for each in range(port, port + 1 + NODES)):
            return port
    raise AssertionError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
