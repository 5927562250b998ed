"""A job of real runs of pretrain_gpt.py whose ranks are forked from a process that has imported torch.

A rank starts in some hundredths of a second, in a session of its own as under torchrun; its standard streams are files,
or a terminal.
"""

import fcntl
import multiprocessing
import os
import pty
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from support.launch import PATIENCE_SECONDS, PROGRAM, load_program
from support.processes import start_fork_server

from megazero.console import run_program


class ForkedJob:
    """A launcher process and its ranks: `pids`, lowest rank first.  A context manager, which kills what still runs.

    variables: the environment that the launcher gives its ranks beside their numbers.  screen: with `terminal`, the
    descriptor at which a person sits; closing it hangs up.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        ranks: int,
        folder: Path,
        variables: Mapping[str, str] | None = None,
        terminal: bool = False,
    ) -> None:
        self._output = folder / "output.txt"
        self._told = ""
        self.screen, shown = pty.openpty() if terminal else (-1, -1)
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._statuses, theirs = context.Pipe(duplex=False)
        stream = str(self._output) if shown < 0 else os.ttyname(shown)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **(variables or {})}
        words = (list(arguments), ranks, folder, environment, stream, theirs)
        self.launcher = context.Process(target=_launch, args=words)
        self.launcher.start()
        theirs.close()
        self.pids: list[int] = self._statuses.recv()
        if shown >= 0:
            os.close(shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        self.launcher.join()
        self.hang_up()

    def wait(self) -> list[int]:
        """Return the exit statuses of the ranks; that of a signal is negative."""
        assert self._statuses.poll(PATIENCE_SECONDS), self.output()
        statuses: list[int] = self._statuses.recv()
        return statuses

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; fail with the job's output if that takes too long."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < give_up, self.output()
            time.sleep(0.02)

    def output(self) -> str:
        """Return what the ranks have printed so far."""
        if self.screen < 0:
            return self._output.read_text()
        while self._read(seconds=0):
            pass
        return self._told

    def read_screen(self, text: str) -> str:
        """Read what the terminal shows until `text` is there; return it all."""
        while text not in self._told:
            assert self._read(PATIENCE_SECONDS), self._told
        return self._told

    def _read(self, seconds: float) -> bool:
        """Read some of what the terminal shows; return False if nothing comes for so long, or all ranks have ended."""
        ready, _, _ = select.select([self.screen], [], [], seconds)
        read = ""
        with suppress(OSError):  # nobody has the terminal open any more
            read = os.read(self.screen, 4096).decode() if ready else ""
        self._told += read
        return bool(read)

    def hang_up(self) -> None:
        """Close the terminal, if there is one."""
        if self.screen >= 0:
            os.close(self.screen)
            self.screen = -1


def is_running(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _launch(
    arguments: list[str], ranks: int, folder: Path, environment: dict[str, str], stream: str, connection: Connection
) -> None:
    os.chdir(folder)  # a job without --save writes its reports of faults where it runs
    os.environ.update(environment, WORLD_SIZE=str(ranks), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            connection.close()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            _become_rank(arguments, stream, controls=rank == 0)
        pids.append(pid)
    connection.send(pids)
    connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def _become_rank(arguments: list[str], stream: str, *, controls: bool) -> None:
    status = 1
    try:
        os.setsid()
        # A terminal belongs to the first session that opens it, unless it is opened like this.
        opened = os.open(stream, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        if controls and os.isatty(opened):
            fcntl.ioctl(opened, termios.TIOCSCTTY, 0)
        for descriptor in range(3):
            os.dup2(opened, descriptor)
        sys.argv = [str(PROGRAM), *arguments]
        try:
            status = run_program(lambda: load_program(PROGRAM).main(sys.argv[1:]))
        except SystemExit as ended:  # of a rank with an error of its own
            status = ended.code if isinstance(ended.code, int) else 1
        sys.stdout.flush()
    finally:
        os._exit(status)
