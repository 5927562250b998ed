"""Measures bandwidths: the bytes that one rank sends a second, as the meter counts them (`metered.py`).

Figures are the slowest rank's, so that all ranks have the same ones and make the same decisions by them.
"""

import math
import statistics
import time

import torch

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
    whole = torch.zeros(communicator.size, -(-max(nbytes, 1) // communicator.size), dtype=torch.uint8)
    whole = whole.to(mesh.device)
    seconds = [_time_gather(mesh, axis, whole) for _ in range(1 + _REPETITIONS)]
    bandwidth = sent_bytes("all_gather", whole.nbytes, communicator.size) / statistics.median(seconds[1:])
    return minimum_over_ranks(mesh, bandwidth)


def minimum_over_ranks(mesh: Mesh, figure: float) -> float:
    """Return the least of all ranks' figures, on all ranks; resets the meter."""
    least = torch.tensor([figure], dtype=torch.float64)
    mesh.control.all_reduce_scalars(least, "min").wait()
    mesh.meter.reset()
    return least.item()


def _time_gather(mesh: Mesh, axis: str, whole: torch.Tensor) -> float:
    """Return the seconds of one all-gather of whole [ranks, n]; the first one of all makes connections."""
    communicator = mesh.axis(axis)
    mesh.world.barrier()
    _finish(mesh.device)
    start = time.perf_counter()
    communicator.all_gather_into(whole.view(-1), whole[communicator.rank]).wait()
    _finish(mesh.device)
    return time.perf_counter() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
