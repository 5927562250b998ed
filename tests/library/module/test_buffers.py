"""Tests running statistics on data-parallel ranks against torch's own DistributedDataParallel."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import megazero
from megazero.comm.local import LocalCommunicator
from megazero.library.module.buffers import ModuleBuffers
from megazero.zero.parameters.gathered import GatheredParameters

ACCUMULATION = 2
STEPS = 3


class Normalised(nn.Module):
    """A model of convolutions with batch normalisation and other buffers, of which one is shared and one not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 3, bias=False))
        self.norm = nn.BatchNorm1d(3, momentum=0.3)
        self.head = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("peak", torch.zeros(2, 3, dtype=torch.float64).t(), persistent=False)
        self.norm.register_buffer("again", self.seen)
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.norm(self.body(x).amax((2, 3)))
        self.peak.copy_(torch.maximum(self.peak, hidden.detach().amax(0).unsqueeze(1)))
        return self.head(hidden)


def make_model() -> Normalised:
    torch.manual_seed(5)
    return Normalised().double()


def batch(rank: int, step: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
    return torch.randn(4, 2, 7, 7, generator=generator, dtype=torch.float64) + rank


def state(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {name: value.detach().clone() for name, value in (*model.named_parameters(), *model.named_buffers())}


def with_ddp(rank: int) -> list[dict[str, Tensor]]:
    model = make_model()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            with nullcontext() if micro + 1 == ACCUMULATION else parallel.no_sync():
                (parallel(batch(rank, step, micro)).square().mean() / ACCUMULATION).backward()
            states.append(state(model))
        optimizer.step()
        optimizer.zero_grad()
        evaluate(parallel, rank, step)
        states.append(state(model))
    return states


def with_engine(rank: int, stage: int) -> list[dict[str, Tensor]]:
    model = make_model()
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "gradient_accumulation_steps": ACCUMULATION,
    }
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=2))
    states = []
    for step in range(STEPS):
        for micro in range(ACCUMULATION):
            engine.backward(engine(batch(rank, step, micro)).square().mean())
            states.append(state(model))
            engine.step()
        evaluate(engine, rank, step)
        states.append(state(model))
    engine.close()
    return states


def evaluate(model: Any, rank: int, step: int) -> None:
    """Evaluate after every second step, which makes all ranks' statistics equal, so that the next step need not."""
    if step % 2:
        model.eval()
        with torch.no_grad():
            model(batch(rank, step, 9))
        model.train()


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
def test_buffers_are_those_of_ddp(stage: int) -> None:
    expected, found = run_ranks(2, with_ddp), run_ranks(2, with_engine, stage)
    for rank in range(2):
        for index, (one, other) in enumerate(zip(found[rank], expected[rank], strict=True)):
            assert one.keys() == other.keys()
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=1e-11, atol=1e-13, msg=f"{name} after pass {index}")
    apart = [
        not torch.equal(one["norm.running_mean"], other["norm.running_mean"])
        for one, other in zip(*expected, strict=True)
    ]
    assert any(apart) and not all(apart), "the comparison needs statistics that differ between ranks"


def two_forwards(rank: int) -> bool:
    """The broadcast of the second forward does not disturb the backward of the first one."""
    model = make_model()
    config = {"zero": {"zero_stage": 0}, "precision": {"precision": "fp64"}, "optimizer": {"type": "SGD"}}
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=2))
    model.body[1].eval()  # puts the statistics into the graph
    loss = engine(batch(rank, 0, 0)).sum() + engine(batch(rank, 0, 1)).sum()
    engine.backward(loss)
    engine.step()
    return engine.was_step_applied()


@pytest.mark.gloo
def test_two_forwards_before_a_backward() -> None:
    assert run_ranks(2, two_forwards) == [True, True]


def test_one_rank_sends_nothing() -> None:
    model = make_model()
    buffers = ModuleBuffers(model, LocalCommunicator())
    model.body[1].running_mean.fill_(3.0)
    buffers.before_forward()
    buffers.after_forward(synchronised=True)
    buffers.before_forward()
    assert bool((model.body[1].running_mean == 3.0).all())
