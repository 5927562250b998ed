"""Starts the processes of a job on this machine: `megazero pretrain --processes 4 ...` instead of torchrun.

Where Kubernetes or SkyPilot has started one such program on each of several nodes, they are the job's on this node.

torch's elastic agent starts them and passes SIGTERM, SIGINT, SIGHUP and SIGQUIT on to them.  What torchrun adds to an
error, its own traceback and log, is left out: the last thing on the terminal is the message of the rank that failed.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megazero.command_line.processes import FLAG, STATUS_FOLDER, read_statuses, split_processes
from megazero.errors import ConfigError, Problem, TopologyError
from megazero.parallel.job import Job

# A rank that was requested to stop saves a checkpoint first; what still runs after that is killed.
_SAVING_SECONDS = 600
_JOINING_SECONDS = 900  # that nodes wait for each other
_STARTING_SECONDS = 0.1  # between two looks at whether the ranks have been started
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def start_processes(job: Job) -> int:
    """Run this process's own command line, without `--processes`, as the ranks of the job; return the exit status.

    That is the status of the rank that failed first.  After a signal it is that of a rank which did not end with 0,
    such as --exit-status-when-stopped, or else 128 and the number of the signal.
    Raises ConfigError if a launcher has started the ranks, TopologyError if the nodes do not meet.
    """
    count, share = job.processes, job.share
    assert count is not None, "without --processes, a launcher starts the ranks"
    if job.launch.world_size > 1 and share is None:
        rule = "processes are started by this program, or by a launcher such as torchrun or srun"
        given = f"{FLAG} {count} in one of {job.launch.world_size} processes of a launcher"
        raise ConfigError(Problem(given, rule, "one of the two"))
    logging.disable(logging.CRITICAL)  # the agent's, in this process
    if share is None:
        # Rank 0 makes the job's store then, at the job's own address.  The agent's would listen at all addresses.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    words = split_processes(sys.orig_argv[1:]).rest  # with python's own, which `job.rest` has not
    with tempfile.TemporaryDirectory(prefix="megazero-") as folder:
        os.environ[STATUS_FOLDER] = folder
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=count,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            shutdown_timeout=_SAVING_SECONDS,
            signals_to_handle="",  # by the agent itself
        )
        if share is not None:
            config = replace(
                config,
                min_nodes=share.nodes,
                max_nodes=share.nodes,
                run_id="none",  # the same on all nodes
                rdzv_backend="static",
                rdzv_endpoint=f"{share.host}:{share.port}",
                rdzv_configs={"rank": share.node, "timeout": _JOINING_SECONDS},
                local_addr=None,
            )
        try:
            with _signals_raised():
                elastic_launch(config, sys.executable)(*words)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode < 0:
                number = signal.Signals(-failure.exitcode)
                print(f"rank {rank} was ended by {number.name}", file=sys.stderr, flush=True)
                return 128 + number
            return failure.exitcode
        except SignalException as error:
            return next(filter(None, read_statuses(Path(folder))), 128 + error.sigval)
        except DistError as error:
            if share is None:
                raise
            given = f"node {share.node} of {share.nodes} at {share.host}:{share.port}: {str(error).splitlines()[0]}"
            rule = f"the nodes that the launcher names ({share.source}) meet within {_JOINING_SECONDS} s"
            raise TopologyError(Problem(given, rule, "start all nodes; a port that they can reach")) from error
    return 0


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise torch's exception where a signal arrives, for which the agent passes it on to the ranks and waits for them.

    While the agent starts them the signal is put off: torch's own handler would raise there too, and an agent whose
    start has been interrupted does not have the ranks, which would go on without it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name != "_start_workers":
            frame = frame.f_back
        if frame is None:
            raise SignalException(f"signal {number}", signal.Signals(number))
        again = threading.Timer(_STARTING_SECONDS, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    # What nohup, or a shell for a job in the background, lets be ignored, stays so.
    handled = [number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
