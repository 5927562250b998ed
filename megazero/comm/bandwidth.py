"""Times gathers, by which a job chooses how it sends (`wires/hop_choice.py`)."""

import time

import torch

from megazero.comm.interface import Communicator


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
