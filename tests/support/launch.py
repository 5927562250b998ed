"""Starts pretrain_gpt.py inside the calling process, or a program with torchrun as a user does.

A *program* here is a running torchrun with its workers.  It leads its own process group, so that a test that fails can
end the whole program and nothing else.
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
from support.warm_python import warm_python

from megazero.console import run_program

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
# Far more than any program here needs, even on a busy machine.
PATIENCE_SECONDS = 120.0

# The flags that a run of the smallest model needs, with their values.
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
    """The exit code and output of a program that has ended."""

    code: int
    stdout: str
    stderr: str


def command_line(flags: Mapping[str, str | None]) -> list[str]:
    """Return the words of a command line.

    A flag with an empty value is a switch, blanks separate several values, and a flag whose value is None is left out.
    """
    return [word for flag, value in flags.items() if value is not None for word in (flag, *value.split())]


def set_launcher(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, world_size: int = 1) -> None:
    """Set the environment of one rank of a job whose other ranks do not exist, and which therefore cannot be joined."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", world_size)):
        monkeypatch.setenv(name, str(value))


def load_program(path: Path) -> ModuleType:
    """Load a program as a module from its path, because it lies outside the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_here(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the program in the calling process, under the environment as it is, and return its exit code."""
    monkeypatch.setattr(sys, "argv", [str(PROGRAM), *arguments])
    return run_program(lambda: load_program(PROGRAM).main(sys.argv[1:]))


class Program:
    """A torchrun in the background that runs pretrain_gpt.py, or another program at `path`."""

    def __init__(
        self, arguments: Sequence[str], *, ranks: int, folder: Path, path: Path = PROGRAM, python: str = sys.executable
    ) -> None:
        self._outputs = (folder / "stdout.txt", folder / "stderr.txt")
        words = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),  # for a program that does not lie beside megazero/
        }
        with self._outputs[0].open("w") as out, self._outputs[1].open("w") as err:
            self._process = subprocess.Popen(
                [*words, str(path), *arguments],
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def workers(self) -> list[int]:
        """Return the process ids of the ranks, lowest rank first."""
        found = [(int(environment["RANK"]), pid) for pid, environment in _children(self.pid) if "RANK" in environment]
        return [pid for _, pid in sorted(found)]

    def wait(self) -> Finished:
        """Wait until the program has ended."""
        code = self._process.wait(PATIENCE_SECONDS)
        return Finished(code, *(path.read_text() for path in self._outputs))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fail when the program ends before it does."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < give_up, self._outputs[1].read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill torchrun and all workers; do nothing when they have ended."""
        for pid in (*self.workers(), self.pid):
            if self._process.poll() is None:
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def torchrun(
    arguments: Sequence[str], *, ranks: int, folder: Path, path: Path = PROGRAM, python: str = sys.executable
) -> Iterator[Program]:
    """Run a program under torchrun with its output in `folder`, and kill it at the end of the block."""
    program = Program(arguments, ranks=ranks, folder=folder, path=path, python=python)
    try:
        yield program
    finally:
        program.kill()


def run_torchrun(arguments: Sequence[str], *, ranks: int, folder: Path, python: str | None = None) -> Finished:
    """Run pretrain_gpt.py under torchrun until it has ended, by a python that has its imports unless one is given."""
    with torchrun(arguments, ranks=ranks, folder=folder, python=python or warm_python()) as program:
        return program.wait()


def run_script(text: str, *, ranks: int, folder: Path, python: str | None = None) -> None:
    """Write a user's program into `folder` and run it there under torchrun; it must end with exit code 0."""
    script = folder / "program.py"
    script.write_text(text)
    with torchrun([], ranks=ranks, folder=folder, path=script, python=python or warm_python()) as program:
        finished = program.wait()
    assert finished.code == 0, finished.stderr


def read_steps(metrics_file: Path) -> dict[int, dict[str, Any]]:
    """Return the step records of a metrics file, by iteration."""
    lines = metrics_file.read_text().splitlines(keepends=True) if metrics_file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    steps = [record for record in records if "evaluation" not in record]
    assert len({record["iteration"] for record in steps}) == len(steps), "an iteration is there twice"
    return {record["iteration"]: record for record in steps}


def _children(parent: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the process id and environment of each child of a process, but of those that end meanwhile."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            # The name in parentheses may hold any character; the state and the parent's id follow it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "environ").read_bytes().decode(errors="replace").split("\0") if fields else []
        except OSError:
            continue
        if int(fields[1]) == parent:
            yield int(entry.name), dict(word.split("=", 1) for word in words if "=" in word)
