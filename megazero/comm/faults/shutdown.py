"""The end of a job in which a rank has failed: one message, and no tracebacks of the ranks that have not.

A rank that meets an error of its own (a damaged token that only it has read, a bug) prints it and exits, and the others
end silently with its status.  An error of communication is another rank's fault, so ranks that meet one print nothing
of their own: the monitors report which rank it was (`monitor.py`).
"""

import atexit
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from megazero.comm.faults.flight_record import FlightRecord
from megazero.comm.faults.monitor import JobPlace, Monitor
from megazero.console import print_error
from megazero.errors import CollectiveError, UserError, first_line

_LOST = (
    "gloo",
    "Connection closed",
    "Connection reset",
    "Application timeout caused pair closure",
    "NCCL",
    "Broken pipe",
)


@contextmanager
def reported_faults(store: Store | None, flight: FlightRecord, job: JobPlace) -> Iterator[None]:
    """Watch over the block on all ranks; an error of one of them ends all, by SystemExit, reported once.

    store: the job's; None for a job of one process, whose errors pass through.
    """
    if store is None:
        yield
        return
    monitor = Monitor(store, flight, job)
    monitor.start()
    try:
        yield
    except KeyboardInterrupt as error:
        monitor.fail(error, "interrupted", status=130, is_reported=False)
        raise
    except Exception as error:
        raise SystemExit(end_of(error, monitor, print_error)) from None
    except BaseException:  # this rank leaves by itself
        monitor.close()
        raise
    monitor.close()


def end_of(error: BaseException, monitor: Monitor, print_user_error: Callable[[UserError], object]) -> int:
    """Print an error unless another rank has failed before, or it is another's fault; return the exit status of all."""
    if is_of_communication(error):
        return monitor.fail(error, first_line(error), status=1, is_reported=True)
    status = error.exit_code if isinstance(error, UserError) else 1
    if monitor.claim(error, first_line(error), status=status):
        if isinstance(error, UserError):
            print_user_error(error)
        else:
            traceback.print_exception(error)
            print(monitor.position_of(error), file=sys.stderr, flush=True)
    return monitor.fail(error, first_line(error), status=status, is_reported=False)


def is_of_communication(error: BaseException) -> bool:
    """Return True if an error began with a collective that another rank has not entered, or has broken off."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return _is_loss(error)


def _is_loss(error: BaseException) -> bool:
    if isinstance(error, (CollectiveError, dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


class FaultHook:
    """The handler of exceptions that nothing catches (`sys.excepthook`), around the one that was there before.

    It is how a user's program, whose main function megazero does not call, takes part in the report of a fault.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._before = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        lost = is_of_communication(error)
        if not lost and self.monitor.claim(error, first_line(error), status=1):
            self._before(kind, error, trace)
            print(self.monitor.position_of(error), file=sys.stderr, flush=True)
        self.monitor.fail(error, first_line(error), status=1, is_reported=lost)


def watch_program(store: Store, flight: FlightRecord, job: JobPlace) -> None:
    """Watch over the calling program until it ends; a second call follows another flight record."""
    hook = sys.excepthook
    if isinstance(hook, FaultHook):
        hook.monitor.follow(flight)
        return
    monitor = Monitor(store, flight, job)
    sys.excepthook = FaultHook(monitor)
    atexit.register(monitor.close)
    monitor.start()
