"""Runs pretrain_gpt.py on an emulated cluster (`cluster.sh`): starts ranks as a launcher does, and follows their steps.

Every run has a metrics file of its own, which is read while it grows; the bytes that have left every node over its link
are read when a line arrives.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
_SCRIPT = Path(__file__).with_name("cluster.sh")
_POLL_SECONDS = 0.005
_PATIENCE_SECONDS = 300.0  # the longest wait for a step
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of Linux
# Where the ranks of a job on a cluster meet.
MEETING: Mapping[str, str] = MappingProxyType({"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"})


class ClusterError(Exception):
    """Raised where this machine cannot make a cluster: not root, no iproute2, or a kernel that refuses."""


class Cluster:
    """Nodes with links that exist as long as the `with` block lasts, and are removed whatever ends it."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._name = f"mz{os.getpid()}"

    def __enter__(self) -> "Cluster":
        try:
            self._call("up", str(self.nodes))
        except ClusterError:
            raise  # the script has removed what it made; anything older belongs to another program
        except BaseException:
            self._call("down")
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("down")

    def set_rate(self, mbit: float | None) -> None:
        """Set the rate of every link in both directions, in Mbit/s; None: as fast as the machine can."""
        self._call("rate", "none" if mbit is None else f"{round(1000 * mbit)}kbit")

    def sent_bytes(self) -> list[int]:
        """Return the bytes that every node has sent over its link since the cluster was made."""
        ends = (f"/sys/class/net/{self._name}v{node}/statistics/rx_bytes" for node in range(self.nodes))
        return [int(Path(end).read_text()) for end in ends]

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"{self._name}n{node}"

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str], log: Path) -> "Process":
        """Start a command on a node, in the folder of the log, to which its output goes."""
        words = ["bash", str(_SCRIPT), "exec", str(node), *command]
        with log.open("wb") as sink:
            popen = subprocess.Popen(
                words,
                env={**os.environ, **environment, "CLUSTER": self._name},
                cwd=log.parent,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only this program, which ends its processes itself
            )
        return Process(popen, log)

    def _call(self, *words: str) -> None:
        """Run the script to its end: Ctrl-C doesn't reach it, and takes effect when it has done its work."""
        process = subprocess.Popen(
            ["bash", str(_SCRIPT), *words],
            env={**os.environ, "CLUSTER": self._name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, said = process.communicate()
        except BaseException:
            process.wait()
            raise
        if process.returncode:
            raise ClusterError(f"cluster.sh {' '.join(words)}: {said.strip() or f'status {process.returncode}'}")


def enter(namespace: str) -> None:
    """Make a network namespace that of this process, which has one thread, and of what it starts."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open("rb") as place:
        if libc.setns(place.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace {namespace}")


def obstacle() -> str:
    """Try to make a cluster, and return the reason why this machine cannot; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces and the rate of a link need root"
    try:
        with Cluster(1) as cluster:
            cluster.set_rate(100)
    except ClusterError as error:
        return f"it needs the right to make network namespaces, and ip and tc (Debian: iproute2): {error}"
    return ""


class Process(NamedTuple):
    """The process of one rank, and the file of its output."""

    popen: "subprocess.Popen[bytes]"
    log: Path


class Step(NamedTuple):
    """A step's line of the metrics file, and the bytes that every node had sent over its link when it was read."""

    record: Mapping[str, Any]
    sent: list[int]


class Run:
    """A run of pretrain_gpt.py with so many ranks (processes) on every node, which ends with the `with` block.

    The ranks have no state that outlives them.  `steps` raises RuntimeError when a rank has ended or takes too long.
    """

    def __init__(self, cluster: Cluster, flags: Sequence[str], folder: Path, *, processes: int) -> None:
        self._cluster = cluster
        self._folder = folder
        self._processes = processes
        self._metrics = folder / "metrics.jsonl"
        records = ["--metrics-file", str(self._metrics), "--log-interval", "1"]
        self._command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags, *records]
        self._ranks: list[Process] = []
        self._seen = 0  # bytes of the metrics file that have been read

    def __enter__(self) -> "Run":
        self._folder.mkdir(parents=True)
        try:
            for rank in range(self._cluster.nodes * self._processes):
                log = self._folder / f"rank{rank}.log"
                node = rank // self._processes
                self._ranks.append(self._cluster.start(node, self._command, self._environment(rank), log))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def forget(self) -> None:
        """Leave the steps that have ended by now out of `steps`."""
        self._lines()

    def steps(self, number: int) -> list[Step]:
        """Return the next steps, as soon as all of them have ended."""
        found: list[Step] = []
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            ended = next((rank for rank in self._ranks if rank.popen.poll() is not None), None)
            for line in self._lines(number - len(found)):
                found.append(Step(json.loads(line), self._cluster.sent_bytes()))
                deadline = time.monotonic() + _PATIENCE_SECONDS
            if len(found) == number:
                return found
            if ended is not None or time.monotonic() > deadline:
                log = (ended or self._ranks[0]).log
                what = "has ended" if ended else f"has taken no step in {_PATIENCE_SECONDS:g} s"
                raise RuntimeError(f"a rank {what}; {log.name} ends:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(_POLL_SECONDS)

    def _lines(self, most: int | None = None) -> list[bytes]:
        """Return whole lines of the metrics file that have not been read yet, at most so many."""
        if not self._metrics.exists():
            return []
        lines = self._metrics.read_bytes()[self._seen :].split(b"\n")[:-1][:most]
        self._seen += sum(len(line) + 1 for line in lines)
        return lines

    def _environment(self, rank: int) -> dict[str, str]:
        """Return the variables that torchrun would set for a rank, with one thread each, as cores are few."""
        told = {
            "RANK": rank,
            "WORLD_SIZE": self._cluster.nodes * self._processes,
            "LOCAL_RANK": rank % self._processes,
            "LOCAL_WORLD_SIZE": self._processes,
            "OMP_NUM_THREADS": 1,
        }
        return {**MEETING, **{name: str(value) for name, value in told.items()}}

    def _end(self) -> None:
        for rank in self._ranks:
            rank.popen.kill()
        for rank in self._ranks:
            rank.popen.wait()


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception, so that everything is taken down."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
