"""Starts jobs of several processes on this machine, joins their process groups, collects their results, and ends them.

A benchmark that needs several jobs (other numbers of processes, or steps that may be refused for want of memory) starts
them itself.  Processes are forked by a *fork server* that has imported torch and computed nothing, so a job costs about
a second; each computes with one thread, unless another number is given.  Jobs that run *side by side* share a barrier,
so that the machine can be kept as busy by four jobs of one process as by one job of four.  A job that *stays* keeps an
object in each of its processes, whose methods can be called; between two calls it sleeps.  A job on an emulated cluster
(`nodes.py`) has one process on each node.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from nodes import MEETING, Cluster, enter
from torch.distributed import TCPStore

from megazero.comm.startup import choose_device, join
from megazero.errors import UserError
from megazero.parallel.launch import Launch

# torch imports the last one at the first backward under a dispatch mode, such as the ledger's.
_PRELOADED = ["torch", "torch.distributed", "megazero.train.build", "torch._dynamo"]


class Place(NamedTuple):
    """The place of a process: its rank in the job, its device, and a barrier of all processes of all jobs."""

    launch: Launch
    device: torch.device
    wait_for_all: Callable[[], object]


class _Reply(NamedTuple):
    """The reply of a process to a call: a result, a user's error by its parts, or a traceback."""

    result: Any = None
    error: tuple[type[UserError], tuple[Any, ...]] | None = None
    traceback: str = ""


class _Worker(NamedTuple):
    process: Any
    connection: Connection


class _Start(NamedTuple):
    """The parameters of a process.

    meeting: variables by which those of a job meet.  stays: the object that fn returns is kept there, so that it can be
    called.  namespace: of the network; "": this machine's.
    """

    launch: Launch
    meeting: Mapping[str, str]
    device: str
    num_threads: int
    barrier: Any
    connection: Connection
    stays: bool = False
    namespace: str = ""


class Job:
    """Processes that stay: `fn(place, *args)` makes an object in each, and `ask` calls a method of all of them.

    Errors are raised as by `run_job`, and the job has ended then.  Nothing is computed between two calls of `ask`.
    """

    def __init__(
        self, world_size: int, fn: Callable[..., Any], *args: Any, device: str = "auto", num_threads: int = 1
    ) -> None:
        context = _context()
        self._store = _store()
        barrier = context.Barrier(world_size)
        self._workers: list[_Worker] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            launch = Launch(rank, world_size, rank)
            start = _Start(launch, _meeting(self._store), device, num_threads, barrier, theirs, stays=True)
            self._workers.append(_start(context, start, ours, fn, args))
        self._answers()

    def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the object in every process at once, and return the results by rank."""
        for worker in self._workers:
            worker.connection.send((method, args))
        return self._answers()

    def end(self) -> None:
        """Kill the processes; a second time it does nothing."""
        _end(self._workers)
        self._workers = []

    def _answers(self) -> list[Any]:
        try:
            return _collect(self._workers)
        except BaseException:
            self.end()
            raise


def run_job(world_size: int, fn: Callable[..., Any], *args: Any, device: str = "auto") -> list[Any]:
    """Call fn(place, *args) on every process of one job, and return the results by rank."""
    return run_jobs(1, world_size, fn, *args, device=device)[0]


def run_jobs(number: int, world_size: int, fn: Callable[..., Any], *args: Any, device: str = "auto") -> list[list[Any]]:
    """Call fn(place, *args) on every process of `number` jobs side by side, and return the results by job and rank.

    fn must be defined at the top of a module; arguments and results are pickled.  The first process that fails ends
    all of them: a UserError is raised here again, any other error as a RuntimeError with its traceback.
    """
    context = _context()
    barrier = context.Barrier(number * world_size)
    stores = [_store() for _ in range(number)]
    workers = []
    for job, store in enumerate(stores):
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            launch = Launch(rank, world_size, job * world_size + rank)
            start = _Start(launch, _meeting(store), device, 1, barrier, theirs)
            workers.append(_start(context, start, ours, fn, args))
    results = _collected(workers)
    return [results[job * world_size : (job + 1) * world_size] for job in range(number)]


def run_on_cluster(cluster: Cluster, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call fn(place, *args) on a process of every node, and return the results by rank, as `run_job` does."""
    context = _context()
    barrier = context.Barrier(cluster.nodes)
    workers = []
    for rank in range(cluster.nodes):
        ours, theirs = context.Pipe()
        launch = Launch(rank, cluster.nodes, 0, (1,) * cluster.nodes)
        meeting = {**MEETING, "TORCHELASTIC_USE_AGENT_STORE": "False", "GLOO_SOCKET_IFNAME": "eth0"}
        start = _Start(launch, meeting, "cpu", 1, barrier, theirs, namespace=cluster.namespace(rank))
        workers.append(_start(context, start, ours, fn, args))
    return _collected(workers)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _store() -> TCPStore:
    """Return the store through which the processes of a job find each other."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _meeting(store: TCPStore) -> dict[str, str]:
    """Return the variables by which processes of this machine meet at a store, as torchrun sets them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
    return {**place, "TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store is in the process that has started this one


def _start(context: Any, start: _Start, ours: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> _Worker:
    process = context.Process(target=_serve, args=(start, fn, args), daemon=True)
    process.start()
    start.connection.close()
    return _Worker(process, ours)


def _serve(start: _Start, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run a process of a job, which stays until it is ended, so that its connections to other processes don't break."""
    if start.namespace:
        enter(start.namespace)
    os.environ.update(
        start.meeting,
        RANK=str(start.launch.rank),
        WORLD_SIZE=str(start.launch.world_size),
        LOCAL_RANK=str(start.launch.local_rank),
    )
    torch.set_num_threads(start.num_threads)
    made: list[Any] = []

    def make() -> Any:
        device = choose_device(start.device, start.launch)
        join(start.launch, backend="auto", device=device, timeout_minutes=10)
        made.append(fn(Place(start.launch, device, start.barrier.wait), *args))
        return None if start.stays else made[0]

    start.connection.send(_reply(make))
    while True:
        try:
            method, words = start.connection.recv()
        except EOFError:
            return
        start.connection.send(_reply(getattr(made[0], method), *words))


def _reply(fn: Callable[..., Any], *args: Any) -> _Reply:
    try:
        return _Reply(fn(*args))
    except UserError as error:
        return _Reply(error=(type(error), error.problems))
    except Exception:
        return _Reply(traceback=traceback.format_exc())


def _collected(workers: Sequence[_Worker]) -> list[Any]:
    """Return the results of workers, which end then."""
    try:
        return _collect(workers)
    finally:
        _end(workers)


def _collect(workers: Sequence[_Worker]) -> list[Any]:
    waiting = {worker.connection: index for index, worker in enumerate(workers)}
    results: list[Any] = [None] * len(workers)
    while waiting:
        replies = {waiting.pop(connection): _receive(connection) for connection in wait(list(waiting))}
        # A user's error explains the other processes' broken connections, so it is raised first.
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
    """Kill the processes, which have no state that outlives them."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()
