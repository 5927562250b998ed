"""Measures bandwidths: the bytes that one rank sends a second, as the meter counts them (`metered.py`).

Figures are the slowest rank's, so that all ranks have the same ones and make the same decisions by them.
"""

import math
import statistics
import time

import torch

from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.comm.metered import sent_bytes

_REPETITIONS = 5


def axis_bandwidth(mesh: Mesh, axis: str, nbytes: int) -> float:
    """Return the bytes a second of all-gathers of `nbytes`, median of a few; infinite where a rank is alone.

    Every rank of the job calls it, and all groups of the axis measure at once, as they communicate in training.  It
    resets the meter, so it is called before or between steps.
    """
    communicator = mesh.axis(axis)
    if communicator.size == 1:
        return math.inf
    nbytes = -(-max(nbytes, 1) // communicator.size) * communicator.size
    # The first one of all makes connections.
    seconds = [gather_seconds(communicator, nbytes, mesh.world, mesh.device) for _ in range(1 + _REPETITIONS)]
    bandwidth = sent_bytes("all_gather", nbytes, communicator.size) / statistics.median(seconds[1:])
    return minimum_over_ranks(mesh, bandwidth)


def minimum_over_ranks(mesh: Mesh, figure: float) -> float:
    """Return the least of all ranks' figures, on all ranks; resets the meter."""
    least = torch.tensor([figure], dtype=torch.float64)
    mesh.control.all_reduce_scalars(least, "min").wait()
    mesh.meter.reset()
    return least.item()


def gather_seconds(communicator: Communicator, nbytes: int, world: Communicator, device: torch.device) -> float:
    """Return the seconds of one all-gather of so many bytes, rounded down to equal slices, of one byte at least.

    All groups begin together: every rank of `world` calls it.
    """
    whole = torch.zeros(communicator.size, max(nbytes // communicator.size, 1), dtype=torch.uint8, device=device)
    world.barrier()
    _finish(device)
    start = time.perf_counter()
    communicator.all_gather_into(whole.view(-1), whole[communicator.rank]).wait()
    _finish(device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
