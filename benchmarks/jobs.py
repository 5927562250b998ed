"""Jobs of several processes on this machine: started, joined, asked for their results, ended.

A benchmark that needs several jobs (other numbers of processes, or steps that may be refused for want of memory) starts
them itself.  Processes are forked by a *fork server* that has imported torch and computed nothing, so a job costs about
a second; each computes with one thread.  Jobs that run *side by side* share a barrier, so that the machine can be kept
as busy by four jobs of one process as by one job of four.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore

from megazero.comm.build import Launch, choose_device, join
from megazero.errors import UserError

# The last one is what torch imports when a dispatch mode, such as the ledger's, meets its first backward.
_PRELOADED = ["torch", "torch.distributed", "megazero.train.build", "torch._dynamo"]


class Place(NamedTuple):
    """Where a process stands: in its job, on which device, and how it waits for all processes of all jobs."""

    launch: Launch
    device: torch.device
    wait_for_all: Callable[[], object]


class _Reply(NamedTuple):
    """What a process has to say at its end: a result, a user's error by its parts, or a traceback."""

    result: Any = None
    error: tuple[type[UserError], tuple[Any, ...]] | None = None
    traceback: str = ""


class _Worker(NamedTuple):
    process: Any
    connection: Connection


def run_job(world_size: int, fn: Callable[..., Any], *args: Any, device: str = "auto") -> list[Any]:
    """fn(place, *args) on every process of one job; results by rank."""
    return run_jobs(1, world_size, fn, *args, device=device)[0]


def run_jobs(number: int, world_size: int, fn: Callable[..., Any], *args: Any, device: str = "auto") -> list[list[Any]]:
    """The same for `number` jobs side by side; results by job and rank.

    fn stands at the top of a module; arguments and results are pickled.  The first process that fails ends all of
    them: a UserError is raised here again, anything else is a RuntimeError with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    barrier = context.Barrier(number * world_size)
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(number)]
    workers = []
    for job, store in enumerate(stores):
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            launch = Launch(rank, world_size, job * world_size + rank)
            process = context.Process(
                target=_serve, args=(launch, store.port, device, barrier, theirs, fn, args), daemon=True
            )
            process.start()
            theirs.close()
            workers.append(_Worker(process, ours))
    try:
        results = _collect(workers)
    finally:
        _end(workers)
    return [results[job * world_size : (job + 1) * world_size] for job in range(number)]


def _serve(*told: Any) -> None:
    """The life of a process; it stays until it is ended, so that nobody sees its connections break."""
    launch, port, device_name, barrier, connection, fn, args = told
    # The names that torchrun gives, with the store in the process that has started this one.
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo"
    )
    torch.set_num_threads(1)
    try:
        device = choose_device(device_name, launch.local_rank)
        join(launch, backend="auto", device=device, timeout_minutes=10)
        reply = _Reply(fn(Place(launch, device, barrier.wait), *args))
    except UserError as error:
        reply = _Reply(error=(type(error), error.problems))
    except Exception:
        reply = _Reply(traceback=traceback.format_exc())
    connection.send(reply)
    connection.poll(None)


def _collect(workers: Sequence[_Worker]) -> list[Any]:
    waiting = {worker.connection: index for index, worker in enumerate(workers)}
    results: list[Any] = [None] * len(workers)
    while waiting:
        replies = {waiting.pop(connection): _receive(connection) for connection in wait(list(waiting))}
        # A user's error explains the others' broken connections, so it goes first.
        for reply in replies.values():
            if reply.error is not None:
                kind, problems = reply.error
                raise kind(*problems)
        for rank, reply in replies.items():
            if reply.traceback:
                raise RuntimeError(f"process {rank} of {len(workers)} failed:\n{reply.traceback}")
            results[rank] = reply.result
    return results


def _receive(connection: Any) -> _Reply:
    try:
        reply: _Reply = connection.recv()
        return reply
    except (EOFError, ConnectionResetError):
        return _Reply(traceback="it died without a word")


def _end(workers: Sequence[_Worker]) -> None:
    """They have no state that outlives them."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()
