"""Real ranks for tests: a pool of worker processes for each world size, connected by gloo over loopback.

Starting processes that import torch costs seconds, a call into a running pool milliseconds, so pools live as long as
the test session. Meshes that calls have left behind are dropped when there are many, and earlier when another pool is
called, because every mesh has threads, sockets and a buffer. Workers are forked by a
*fork server* that has imported torch and megazero and computed nothing (a fork of a process that has run
multi-threaded kernels hangs in OpenMP). After a failure, or when a rank does not answer in time, the pool is killed and
the next call builds a new one, so that no test inherits an unfinished collective.

Meshes of tests are *late* (`late_communicator.py`): a result that is read before its wait is nan, and a work that is
never waited for makes the test fail.

    def fn(rank: int, x: float) -> float: ...          # at module level, in any test file
    results = run_ranks(4, fn, 0.5)                    # one result per rank
"""

import atexit
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.disks import skipped_fsync
from support.late_communicator import late_mesh, unfinished

from megazero.comm import groups
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.comm.wires.shard_group import PLAIN, Wires
from megazero.config.engine_sections import ZeroConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.data_axis import data_axis
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.zero.plan import wires

TIMEOUT_SECONDS = 60.0
MOST_MESHES = 16  # meshes that a worker may keep from call to call
MOST_IDLE_MESHES = 32  # meshes that all workers of a pool may keep while another pool is called
GRACE_SECONDS = 5.0  # how long the other ranks may go on after one has failed
STACK_SIGNAL = signal.SIGUSR2
SCRATCH_BYTES = 1 << 24
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "pytest", "support.training"]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message holds every failing rank's traceback or stacks."""


class _Reply(NamedTuple):
    ok: bool
    payload: bytes  # pickled result, or the traceback's text
    num_meshes: int = 0  # that the worker keeps now


class _Worker(NamedTuple):
    process: Any
    connection: Connection
    stacks: Path  # where faulthandler writes this worker's stacks


class WorkerPool:
    """The worker processes of one world size."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="ranks_")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        start_fork_server()
        self.workers = [self._start(context, rank) for rank in range(world_size)]
        self.num_meshes = 0

    def _start(self, context: Any, rank: int) -> _Worker:
        ours, theirs = context.Pipe()
        stacks = Path(self._folder.name) / f"rank_{rank}.stacks"
        arguments = (rank, self.world_size, self._store.port, theirs, str(stacks))
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours, stacks)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> dict[int, _Reply]:
        """Call fn(rank, *args) on every worker and return replies by rank, without ranks that died or were too slow."""
        head = pickle.dumps((fn.__module__, inspect.getsourcefile(fn), fn.__qualname__))
        body = pickle.dumps(args)
        for worker in self.workers:
            worker.connection.send_bytes(head)
            worker.connection.send_bytes(body)
        return self._collect(time.monotonic() + timeout)

    def _collect(self, deadline: float) -> dict[int, _Reply]:
        replies: dict[int, _Reply] = {}
        waiting = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(waiting), left):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                reply = _receive(connection)
                if reply is not None:
                    replies[rank] = reply
                    self.num_meshes = max(self.num_meshes, reply.num_meshes)
                if reply is None or not reply.ok:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return replies

    def stacks(self, rank: int) -> str:
        """Return the stacks of the threads of a rank that has not answered, or its exit code if it has died."""
        worker = self.workers[rank]
        if worker.connection.poll():  # the pipe has closed: the process is ending, and its exit code will come
            worker.process.join(GRACE_SECONDS)
        if not worker.process.is_alive():
            return f"process died with exit code {worker.process.exitcode}"
        os.kill(worker.process.pid, STACK_SIGNAL)
        give_up = time.monotonic() + GRACE_SECONDS
        while not worker.stacks.stat().st_size and time.monotonic() < give_up:
            time.sleep(0.1)
        time.sleep(0.2)  # lets faulthandler write the rest of the text
        return "no answer; stacks:\n" + worker.stacks.read_text()

    def close(self) -> None:
        for worker in self.workers:
            worker.connection.close()
            worker.process.kill()
            worker.process.join()
        self._folder.cleanup()


def start_fork_server() -> None:
    """Start a fork server that has imported the modules nearly every rank needs, unless one runs already."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    # The fork server of Python 3.11 does not use the search path that it is given.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        multiprocessing.forkserver.ensure_running()


_pools: dict[int, WorkerPool] = {}
_late_meshes: dict[tuple[Topology, Wires, Nodes | None, int | None], Mesh] = {}  # this worker's, by layout and seed


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT_SECONDS) -> list[Any]:
    """Call fn(rank, *args) on every rank of a job of `world_size` and return the results in rank order.

    fn is a module-level function; arguments and results are pickled.  The default process group is initialised, and
    torch uses one thread.  Raises RankFailure with the tracebacks of failed ranks, or the stacks of those that hung.
    """
    pool = _pools.get(world_size)
    if pool is None:
        pool = _pools[world_size] = WorkerPool(world_size)
    for other in _pools.values():
        if other.num_meshes > (MOST_MESHES if other is pool else MOST_IDLE_MESHES // other.world_size):
            other.num_meshes = 0
            other.call(drop_meshes, (), timeout)  # its ranks are idle, so the call cannot interfere with another
    replies = pool.call(fn, args, timeout)
    failures = [_failure(pool, rank, replies.get(rank)) for rank in range(world_size)]
    if any(failures):
        _pools.pop(world_size).close()
        raise RankFailure("\n".join(text for text in failures if text))
    return [pickle.loads(replies[rank].payload) for rank in range(world_size)]


@atexit.register
def close_pools() -> None:
    """Kill all workers; called at the end of the test session at the latest."""
    while _pools:
        _pools.popitem()[1].close()


@functools.cache
def _cached_mesh(rank: int, topology: Topology, chosen: Wires, nodes: Nodes | None) -> Mesh:
    device = torch.device("cpu")
    return make_mesh(topology, rank, device, FusedBuffers(SCRATCH_BYTES, device), wires=chosen, nodes=nodes)


def drop_meshes(rank: int) -> None:
    """Drop the meshes that this worker keeps, and with them their process groups."""
    _late_meshes.clear()
    _cached_mesh.cache_clear()
    gc.collect()


def mesh_in_worker(
    rank: int,
    *,
    tp: int = 1,
    dp: int = 1,
    pp: int = 1,
    zero: ZeroConfig | None = None,
    nodes: Nodes | None = None,
    is_late: bool = True,
    seed: int | None = None,
) -> Mesh:
    """Return the mesh of this worker, its meter at zero; every rank must call this inside fn with the same arguments.

    Process groups are made once per layout and kept for a while, since each new one costs sockets and threads.
    zero: the configuration of the data-parallel axis' parts and wires; nodes: those that the ranks are said to be on.
    seed: draws the order in which late works finish; without one each of them needs its own wait.
    """
    topology, chosen = Topology(tp=tp, dp=dp, pp=pp), PLAIN
    if zero is not None:
        topology = data_axis(zero, topology, nodes)
        chosen = wires(zero)
    mesh = _cached_mesh(rank, topology, chosen, nodes)
    mesh.meter.reset()
    if not is_late:
        return mesh
    if (topology, chosen, nodes, seed) not in _late_meshes:
        in_hops = {"gathers_in_hops": True, "sums_in_hops": True, "hops_if_faster": False}
        taken = replace(chosen, **in_hops) if chosen.hops_if_faster else chosen  # late works have no speed to compare
        _late_meshes[topology, chosen, nodes, seed] = late_mesh(mesh, seed, taken)
    return _late_meshes[topology, chosen, nodes, seed]


def _failure(pool: WorkerPool, rank: int, reply: _Reply | None) -> str:
    if reply is None:
        return f"rank {rank} of {pool.world_size}: {pool.stacks(rank)}"
    return "" if reply.ok else f"rank {rank} of {pool.world_size} raised:\n{reply.payload.decode()}"


def _receive(connection: Connection) -> _Reply | None:
    try:
        ok = connection.recv_bytes() == b"ok"
        return _Reply(ok, connection.recv_bytes(), int(connection.recv_bytes()))
    except (EOFError, ConnectionResetError):
        return None


def _serve(rank: int, world_size: int, port: int, connection: Connection, stacks: str) -> None:
    """Run a worker: join the others, then answer calls until the parent closes the pipe."""
    with open(stacks, "w") as log:
        faulthandler.register(STACK_SIGNAL, file=log, all_threads=True)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        share_gloo_devices()
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        os.fsync = skipped_fsync  # as in the process of the tests: see conftest.py
        gc.freeze()  # what torch and megazero hold stays, and going through it took an eighth of the tests' time
        while (head := _next_message(connection)) is not None:
            reply = _answer(rank, head, connection.recv_bytes())
            connection.send_bytes(b"ok" if reply.ok else b"failed")
            connection.send_bytes(reply.payload)
            connection.send_bytes(str(_cached_mesh.cache_info().currsize).encode())
        os._exit(0)  # without torch's shutdown: the other ranks may have exited already


def share_gloo_devices() -> None:
    """Let all gloo groups that this process makes from here on, torch's own too, use the same devices.

    Each device has a thread that wakes a hundred times a second for good, and torch makes one for each of its groups.
    """
    with ThreadPoolExecutor(1) as thread:
        devices = thread.submit(_yielding_devices).result()
    groups._gloo_devices = lambda: devices
    gloo: Any = dist.ProcessGroupGloo
    construct = gloo.__init__

    def share(
        self: Any, store: dist.Store, rank: int, size: int, options: Any = None, timeout: timedelta | None = None
    ) -> None:
        if options is None:
            options = gloo._Options()
            options._devices, options._threads = devices, 2 * len(devices)
            options._timeout = timeout or timedelta(minutes=30)
        construct(self, store, rank, size, options)

    gloo.__init__ = share


def _yielding_devices() -> Sequence[Any]:
    """Return gloo's devices, whose threads inherit a low priority from this one.

    Where a rank loses its core inside gloo, with a connection's lock, its device asks for the lock without a pause
    until the rank has a core again: with many ranks on few cores, a fifth of the processor time of their tests.
    """
    if sys.platform == "linux":  # elsewhere a priority is that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
    return groups._gloo_devices()


def _next_message(connection: Connection) -> bytes | None:
    try:
        return connection.recv_bytes()
    except (EOFError, ConnectionResetError):
        return None


def _answer(rank: int, head: bytes, body: bytes) -> _Reply:
    before = set(_groups())
    try:
        fn = _find(*pickle.loads(head))
        payload = pickle.dumps(fn(rank, *pickle.loads(body)))
        forgotten = [name for mesh in _late_meshes.values() for name in unfinished(mesh)]
        assert not forgotten, f"never waited for: {', '.join(forgotten)}"
        return _Reply(True, payload)
    except BaseException:
        return _Reply(False, traceback.format_exc().encode())
    finally:
        # Groups of device meshes stay, since torch's caches of sharded products refer to them.
        for group in set(_groups()) - before:
            if not group.group_desc.startswith("mesh_"):
                dist.destroy_process_group(group)


def _groups() -> Iterable[dist.ProcessGroup]:
    """Return the process groups that torch has registered."""
    return dist.distributed_c10d._world.pg_map


def _find(module_name: str, file: str, qualified_name: str) -> Callable[..., Any]:
    """Return the function of that name; its module is loaded from `file` if it is a test module of pytest's.

    Such a module cannot be imported by name.  It is registered under pytest's name for it, so that objects pickled in
    pytest's process can be unpickled in the worker.
    """
    if module_name not in sys.modules:
        if _is_importable(module_name):
            importlib.import_module(module_name)
        else:
            spec = importlib.util.spec_from_file_location(module_name, file)
            assert spec is not None and spec.loader is not None, file
            sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module_name])
    found: Any = sys.modules[module_name]
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found


def _is_importable(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:
        return False
