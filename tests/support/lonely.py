"""One rank of a job whose ranks do not do the same; prints what became of it as JSON.

python lonely.py CASE    under torchrun, with collectives that wait for TIMEOUT_SECONDS
"""

import json
import os
import sys
import time

import torch
from support.awkward import Awkward, engine_around, make_model
from torch import Tensor

from megazero.comm.build import Launch, join, make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.zero.gathered import GatheredParameters

TIMEOUT_SECONDS = 3.0


def block_on_rank_0(rank: int, model: Awkward) -> None:
    if rank == 0:
        with GatheredParameters(model.first.weight):
            raise AssertionError("the block was entered alone")


def module_on_rank_0(rank: int, model: Awkward) -> None:
    if rank == 0:
        model.first(torch.ones(1, 7, dtype=torch.float64))


def touch_on_rank_0(rank: int, model: Awkward) -> None:
    if rank == 0:
        model.unused.register_forward_pre_hook(lambda *_: use(model.first.bias))
        with GatheredParameters([]):
            model.unused(torch.ones(1, 5, dtype=torch.float64))
    else:
        model.unused(torch.ones(1, 5, dtype=torch.float64))


def use(parameter: Tensor) -> None:
    parameter.sum()


def rank_1_is_gone(rank: int, model: Awkward) -> None:
    if rank == 1:
        os._exit(7)
    with GatheredParameters(model.first.weight):
        raise AssertionError("the block was entered alone")


CASES = (block_on_rank_0, module_on_rank_0, touch_on_rank_0, rank_1_is_gone)


def main(name: str) -> None:
    launch, device = Launch.from_environment(), torch.device("cpu")
    minutes = TIMEOUT_SECONDS / 60
    join(launch, backend="gloo", device=device, timeout_minutes=minutes)
    mesh = make_mesh(Topology(dp=2), launch.rank, device, FusedBuffers(1 << 20, device), timeout_minutes=minutes)
    model = make_model()
    engine_around(model, mesh)
    start = time.monotonic()
    outcome = {"rank": launch.rank, "error": "", "text": ""}
    try:
        next(case for case in CASES if case.__name__ == name)(launch.rank, model)
        mesh.axis("dp").barrier()  # what the other rank does meanwhile
    except Exception as error:
        outcome |= {"error": type(error).__name__, "text": str(error)}
    outcome["seconds"] = time.monotonic() - start
    print(json.dumps(outcome), flush=True)
    os._exit(0)  # no goodbye to a rank that may be gone


if __name__ == "__main__":
    main(sys.argv[1])
