"""Functions that the processes of a benchmark's job run in tests; they lie here so that those can import them."""

import os
import time
from typing import Any

from megazero.comm.mesh import gather_json
from megazero.comm.startup import make_mesh
from megazero.errors import ConfigError, Problem
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

PROBLEM = Problem("--something 3", "a rule", "2")


def who(place: Any, word: str) -> tuple[str, list[int]]:
    """Return the word, and the ranks that take part in a gather over the world."""
    buffers = FusedBuffers(1 << 16, place.device)
    mesh = make_mesh(Topology(dp=place.launch.world_size), place.launch.rank, place.device, buffers)
    return word, gather_json(mesh.control, place.launch.rank)


def fail(place: Any, rank: int, how: str) -> None:
    """Make one rank fail in the way that `how` names while the others sleep for ten minutes."""
    if place.launch.rank == rank:
        if how == "user":
            raise ConfigError(PROBLEM, PROBLEM)
        if how == "bug":
            raise KeyError("a bug")
        os._exit(7)
    time.sleep(600)


def together(place: Any, seconds: float) -> float:
    """Return how many seconds this process waits for all others; local rank 0 comes `seconds` late."""
    if place.launch.local_rank == 0:
        time.sleep(seconds)
    start = time.perf_counter()
    place.wait_for_all()
    return time.perf_counter() - start
