"""Bandwidth, measured: what one rank sends a second, in bytes as the meter counts them (`metered.py`).

The figures are the slowest rank's, so all ranks have the same ones and decide the same by them.
"""

import math
import statistics
import time

import torch

from megazero.comm.mesh import Mesh
from megazero.comm.metered import sent_bytes

_REPETITIONS = 5


def axis_bandwidth(mesh: Mesh, axis: str, nbytes: int) -> float:
    """Bytes a second of all-gathers of `nbytes` on an axis, median of a few; infinite where a rank is alone.

    Every rank of the job calls it, and all groups of the axis measure at once, as they work in training.  The meter
    forgets what it has counted, so measuring comes before or between steps.
    """
    communicator = mesh.axis(axis)
    if communicator.size == 1:
        return math.inf
    whole = torch.zeros(communicator.size, -(-max(nbytes, 1) // communicator.size), dtype=torch.uint8)
    whole = whole.to(mesh.device)
    seconds = [_time_gather(mesh, axis, whole) for _ in range(1 + _REPETITIONS)]
    bandwidth = sent_bytes("all_gather", whole.nbytes, communicator.size) / statistics.median(seconds[1:])
    return agree(mesh, bandwidth)


def agree(mesh: Mesh, figure: float) -> float:
    """The least of all ranks' figures, on all of them; the meter forgets what it has counted."""
    told = torch.tensor([figure], dtype=torch.float64, device=mesh.device)
    mesh.world.all_reduce_scalars(told, "min").wait()
    mesh.meter.reset()
    return told.item()


def _time_gather(mesh: Mesh, axis: str, whole: torch.Tensor) -> float:
    """Seconds of one all-gather of whole [ranks, n]; the first one of all makes connections."""
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
