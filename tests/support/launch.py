"""Starting pretrain_gpt.py: inside this process, or as a user does, with torchrun.

A *program* here is a running torchrun with its workers.  It leads a process group of its own, so that a test that fails
can end all of it and nothing else.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from megazero.console import run_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
# Far beyond what anything takes, even on a busy machine.
PATIENCE_SECONDS = 120.0

# The least that a run of the smallest model needs, by flag.
SMALL_RUN: Mapping[str, str] = {
    "--num-layers": "2",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--vocab-size": "100",
    "--micro-batch-size": "2",
    "--global-batch-size": "8",
    "--train-iters": "4",
    "--lr": "1e-3",
    "--lr-decay-style": "constant",
    "--eval-iters": "0",
    "--mock-data": "",
}


class Finished(NamedTuple):
    """A program that has ended."""

    code: int
    stdout: str
    stderr: str


def command_line(flags: Mapping[str, str | None]) -> list[str]:
    """Words from flags and values; an empty value is a switch, several values are parted by blanks, None is no flag."""
    return [word for flag, value in flags.items() if value is not None for word in (flag, *value.split())]


def set_launcher(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, world_size: int = 1) -> None:
    """The environment of one rank of a job whose other ranks don't exist; it cannot join any."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def pretrain_gpt() -> ModuleType:
    """The program as a module; it lies outside of the package, so it is loaded from its path."""
    spec = importlib.util.spec_from_file_location("pretrain_gpt", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The program's exit code, run in this process under the launcher's environment as it is."""
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    return run_program(pretrain_gpt().main)


class Program:
    """A torchrun in the background."""

    def __init__(self, arguments: Sequence[str], *, ranks: int, folder: Path) -> None:
        self._outputs = (folder / "stdout.txt", folder / "stderr.txt")
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self._outputs[0].open("w") as out, self._outputs[1].open("w") as err:
            self._process = subprocess.Popen(
                [*words, str(PROGRAM), *arguments],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def workers(self) -> list[int]:
        """Process ids of the ranks, lowest rank first."""
        found = [(int(environment["RANK"]), pid) for pid, environment in _children(self.pid) if "RANK" in environment]
        return [pid for _, pid in sorted(found)]

    def wait(self) -> Finished:
        """Wait for the end."""
        code = self._process.wait(PATIENCE_SECONDS)
        return Finished(code, *(path.read_text() for path in self._outputs))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something the program does; fails when it ends without having done it."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < give_up, self._outputs[1].read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """End torchrun and all workers; harmless when they have ended."""
        for pid in (*self.workers(), self.pid):
            if self._process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def torchrun(arguments: Sequence[str], *, ranks: int, folder: Path) -> Iterator[Program]:
    """pretrain_gpt.py under torchrun, with `folder` for its output; ended with the block at the latest."""
    program = Program(arguments, ranks=ranks, folder=folder)
    try:
        yield program
    finally:
        program.kill()


def run_torchrun(arguments: Sequence[str], *, ranks: int, folder: Path) -> Finished:
    """pretrain_gpt.py under torchrun, from start to end."""
    with torchrun(arguments, ranks=ranks, folder=folder) as program:
        return program.wait()


def read_steps(metrics_file: Path) -> dict[int, dict[str, Any]]:
    """The step lines of a metrics file, by iteration."""
    lines = metrics_file.read_text().splitlines(keepends=True) if metrics_file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [record for record in records if "evaluation" not in record]
    assert len({record["iteration"] for record in steps}) == len(steps), "an iteration is there twice"
    return {record["iteration"]: record for record in steps}


def _children(parent: int) -> Iterator[tuple[int, dict[str, str]]]:
    """(process id, environment) of a process's children; those that end meanwhile are left out."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name in parentheses may hold anything; what follows it is the state and the parent.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "environ").read_bytes().decode(errors="replace").split("\0") if fields else []
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(entry.name), dict(word.split("=", 1) for word in words if "=" in word)
