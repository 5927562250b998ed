"""The job's store: made by rank 0 or torchrun, and shared by all processes that MASTER_ADDR and MASTER_PORT connect.

Every way in which processes fail to meet ends in a message, on all ranks, within the time limit.  Long before it, a
line on stderr names what a node's first rank, or the job's, is waiting for.
"""

import errno
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from megazero.comm.faults.fault_report import ranks_text
from megazero.errors import Problem, TopologyError
from megazero.parallel.launch import Launch

_LONGEST_PAUSE_SECONDS = 0.5
_SILENCE_SECONDS = 20.0  # or a quarter of the limit, if that is less
_LEGAL_WAIT = "start all processes, or wait longer by --distributed-join-timeout-minutes"


def open_store(launch: Launch, limit_seconds: float) -> Store:
    """Open the job's store, and return it once all processes have; raises TopologyError if they don't meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        rule = f"{launch.world_size} processes find each other by MASTER_ADDR and MASTER_PORT"
        legal = "start with torchrun, which sets both; or mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500"
        raise TopologyError(Problem(f"no {' and no '.join(missing)} in the environment", rule, legal))
    host, port = os.environ["MASTER_ADDR"], _port(os.environ["MASTER_PORT"])
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    deadline = time.monotonic() + limit_seconds
    timeout = timedelta(seconds=limit_seconds)
    if launch.rank == 0 and not by_launcher:
        listening = _listen(host, port, launch)
        tcp = TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listening.detach())
    else:
        _await_server(host, port, launch, deadline, limit_seconds)
        tcp = TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt_{attempt}", tcp)
    _await_all(store, launch, deadline, limit_seconds)
    return store


def claim_gpu(store: Store, rank: int, gpu: str) -> None:
    """Enter a rank as the only one of its host that uses this GPU; raise TopologyError if another one does."""
    host = socket.gethostname()
    first = int(store.compare_set(f"gpu/{host}/{gpu}", "", str(rank)))
    if first != rank:
        given = f"ranks {first} and {rank} on {host} have the same GPU ({gpu})"
        legal = "as many processes on a node as CUDA_VISIBLE_DEVICES names GPUs, or a GPU of its own for each process"
        raise TopologyError(Problem(given, "NCCL needs a GPU of its own for every process", legal))


def check_backend(store: Store, rank: int, backend: str) -> None:
    """Compare a rank's backend with that of whichever came first; raise TopologyError where they differ."""
    mine = f"{backend} on {socket.gethostname()} (rank {rank})"
    first = store.compare_set("backend", "", mine).decode()
    if first.split()[0] != backend:
        legal = "GPUs that PyTorch sees on every node, or --device cpu on all of them"
        raise TopologyError(Problem(f"{first}, {mine}", "one backend carries the collectives of all ranks", legal))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 1 << 16):
        raise TopologyError(Problem(f"MASTER_PORT {text}", "a port is a whole number from 1 to 65535", "29500"))
    return int(text)


def _listen(host: str, port: int, launch: Launch) -> socket.socket:
    """Return a socket that listens at the job's address alone, if that is this host's, and the nodes can reach it."""
    family, address = _resolve(host, port)
    is_loopback = address.startswith("127.") or address == "::1"
    everywhere = is_loopback and launch.nodes.count > 1  # another node has another name for this host
    try:
        return _bound(family, ("" if everywhere else address, port))
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # the address is that of a gateway, which passes connections on
            return _bound(family, ("", port))
        rule = f"rank 0 listens there for the other processes: {error.strerror}"
        legal = "a free port in MASTER_PORT, the same on all nodes"
        raise TopologyError(Problem(f"MASTER_ADDR {host}, MASTER_PORT {port}", rule, legal)) from None


def _bound(family: int, address: tuple[str, int]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        raise
    return made


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the first address of a host, and its family; raise TopologyError for an unknown one."""
    try:
        family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return family, str(address)
    except OSError as error:
        rule = f"its name has an address on every node: {error.strerror}"
        raise TopologyError(Problem(f"MASTER_ADDR {host}", rule, "the name or the address of rank 0's host")) from None


def _await_server(host: str, port: int, launch: Launch, deadline: float, limit_seconds: float) -> None:
    _resolve(host, port)
    given = f"MASTER_ADDR {host}, MASTER_PORT {port}: nothing listens there"

    def is_there() -> bool:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
        except OSError:
            return False
        return True

    def line() -> str:
        return f"rank {launch.rank} on {socket.gethostname()} waits for rank 0: {given}"

    if not _wait_for(is_there, deadline, limit_seconds, line if launch.local_rank == 0 else None):
        rule = "the other processes meet where rank 0, or torchrun's first node, listens"
        raise TopologyError(Problem(f"{given}, {limit_seconds:g} s long", rule, _LEGAL_WAIT))


def _await_all(store: Store, launch: Launch, deadline: float, limit_seconds: float) -> None:
    """Wait until every rank has opened the store."""
    store.set(f"joined/{launch.rank}", socket.gethostname())
    if store.add("joined", 1) == launch.world_size:
        store.set("all_joined", "yes")

    def absent() -> str:
        missing = [rank for rank in range(launch.world_size) if not store.check([f"joined/{rank}"])]
        return f"{ranks_text(missing)} of {launch.world_size}"

    def line() -> str:
        return f"waiting for {absent()} to join"

    if _wait_for(lambda: store.check(["all_joined"]), deadline, limit_seconds, line if launch.rank == 0 else None):
        return
    given = f"{absent()} did not join within {limit_seconds:g} s"
    raise TopologyError(Problem(given, "a job begins when all its processes have joined", _LEGAL_WAIT))


def _wait_for(
    condition: Callable[[], bool], deadline: float, limit_seconds: float, line: Callable[[], str] | None
) -> bool:
    """Return True as soon as the condition holds, False if it doesn't before the deadline.

    line: makes the line that is printed once the wait is no short one; None prints nothing.
    """
    pause, silent_until = 0.01, time.monotonic() + min(_SILENCE_SECONDS, limit_seconds / 4)
    while not condition():
        now = time.monotonic()
        if now > deadline:
            return False
        if line is not None and now > silent_until:
            print(f"{line()}; the limit is {limit_seconds:g} s", file=sys.stderr, flush=True)
            line = None
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return True
