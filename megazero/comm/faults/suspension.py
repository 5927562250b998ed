"""Kills the process of a rank that stays stopped where its launcher would not: one that is alone on its node.

A process that is stopped (SIGSTOP) cannot end itself.  torchrun kills it when another rank of the same node has failed,
as all running ranks do; on a node with one rank there is no other, and torchrun would wait for ever.  A small process
beside such a rank, in a session of its own, looks at it once a second.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import megazero
from megazero.owner import ProcessState, process_start, process_state

_INTERVAL_SECONDS = 1.0


def kill_when_suspended(seconds: float, *, every: float = _INTERVAL_SECONDS) -> "subprocess.Popen[bytes] | None":
    """Start a process that kills this one once it has been stopped for `seconds`, and ends when this one has ended.

    every: the seconds between two looks at it.  Returns None where the system does not publish the states of processes.
    """
    pid, started = os.getpid(), process_start(os.getpid())
    if started is None:
        return None
    folder = str(Path(megazero.__file__).parents[1])
    program = f"import sys; sys.path.insert(0, {folder!r}); from {__name__} import watch; "
    # Without site-packages and the environment's additions, python starts in some 30 ms and takes 15 MB.
    words = [sys.executable, "-S", "-E", "-c", f"{program} watch({pid}, {started}, {seconds}, every={every})"]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)


def watch(pid: int, started: int, seconds: float, *, every: float) -> None:
    """Look at a process until it has ended; kill it once it has been stopped for so long without a break."""
    stopped_since: float | None = None
    while (state := process_state(pid, started)) is not ProcessState.GONE:
        now = time.monotonic()
        stopped_since = (stopped_since or now) if state is ProcessState.STOPPED else None
        if stopped_since is not None and now - stopped_since >= seconds:
            os.kill(pid, signal.SIGKILL)
            return
        time.sleep(min(every, seconds))
