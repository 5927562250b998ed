"""Tests what stands in `.grad`: averages that may be written where they are whole, errors with a remedy elsewhere."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import megazero
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero import GatheredParameters, safe_get_full_grad, safe_set_full_grad

DP, ACCUMULATION, STEPS, LR = 2, 2, 3, 0.1
PARTITIONED = pytest.mark.parametrize("stage", [1, 2, 3])
STAGES = pytest.mark.parametrize("stage", range(4))


class Net(nn.Module):
    """Two layers, an unused layer, a frozen parameter and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        self.gain = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x) * self.gain + self.frozen
        return output


def make_model() -> Net:
    torch.manual_seed(6)
    return Net().double()


def make_engine(
    stage: int, mesh: Any = None, *, accumulation: int = 1, kind: str = "AdamW", **zero: Any
) -> DataParallelEngine:
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 16, **zero},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": kind, "lr": LR, "params": {"weight_decay": 0.1}},
        "gradient_accumulation_steps": accumulation,
    }
    return megazero.initialize(make_model(), config, mesh=mesh)


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return model(x).square().mean() * 50


def weights(engine: DataParallelEngine) -> list[Tensor]:
    with GatheredParameters(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


# --- gradients that are whole ----------------------------------------------------------------------------------------


def clip(model: nn.Module) -> None:
    assert float(clip_grad_norm_(model.parameters(), 0.5)) > 1


def scale_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0.3
            p.grad.data.clamp_(-0.1, 0.1)


def replace(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.sign() * 0.1


def mask(model: nn.Module) -> None:
    model.get_parameter("gain").grad = None
    model.get_parameter("body.0.bias").grad = torch.ones(5, dtype=torch.float64)


def add_to_unused(model: nn.Module) -> None:
    model.get_parameter("unused.weight").grad = torch.ones(2, 2, dtype=torch.float64)


def drop_all(model: nn.Module) -> None:
    model.zero_grad()


WAYS = (clip, scale_by_hand, replace, mask, add_to_unused, drop_all)


def train_plain(kind: str, way: Callable[[nn.Module], None]) -> list[Tensor]:
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, kind)(trained, lr=LR, weight_decay=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for seed in range(DP * ACCUMULATION):
            (loss_of(model, 10 * step + seed) / (DP * ACCUMULATION)).backward()
        if step != 1:
            way(model)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(rank: int, contiguous: bool) -> list[list[Tensor]]:
    """Train in stage 0 with gradients written in every way, and return the weights of each."""
    mesh, found = mesh_in_worker(rank, dp=DP), []
    for kind in ("AdamW", "SGD"):
        for way in WAYS:
            engine = make_engine(0, mesh, accumulation=ACCUMULATION, kind=kind, contiguous_gradients=contiguous)
            for step in range(STEPS):
                for micro in range(ACCUMULATION):
                    loss_of(engine, 10 * step + DP * micro + rank).backward()
                    if micro == 0:
                        with pytest.raises(UsageError, match="a rank has the gradients of its own samples only"):
                            clip_grad_norm_(engine.module.parameters(), 1.0)
                        engine.step()
                if step != 1:
                    way(engine.module)
                engine.step()
            found.append(weights(engine))
            engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("contiguous", [True, False])
def test_what_is_written_is_what_the_step_uses(contiguous: bool) -> None:
    expected = [train_plain(kind, way) for kind in ("AdamW", "SGD") for way in WAYS]
    for ways in run_ranks(DP, train, contiguous):
        for index, (found, plain) in enumerate(zip(ways, expected, strict=True)):
            way = WAYS[index % len(WAYS)].__name__
            torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12, msg=way)


def read(rank: int, stage: int) -> list[Tensor]:
    """Return what stands in a parameter's `.grad` after the last backward, as read in several ways."""
    engine = make_engine(stage, mesh_in_worker(rank, dp=DP), prescale_gradients=True)
    weight = engine.module.body[0].weight
    engine.backward(loss_of(engine, rank))
    grad: Any = weight.grad
    full = safe_get_full_grad(weight)
    assert full is not None
    found = [full, grad.clone(), torch.stack([grad])[0], grad[:], grad + 0, grad.T.T, torch.Tensor.add(grad, 0)]
    assert torch.equal(full, safe_get_full_grad(weight)) and grad.norm() == full.norm()
    found = [value.detach().clone() for value in found]
    engine.step()
    return found


@pytest.mark.gloo
def test_the_average_stands_in_grad_on_every_rank() -> None:
    model = make_model()
    ((loss_of(model, 0) + loss_of(model, 1)) / 2).backward()
    for found in run_ranks(DP, read, 0):
        for value in found:
            torch.testing.assert_close(value, model.body[0].weight.grad, rtol=1e-12, atol=1e-14)


# --- gradients that are not ------------------------------------------------------------------------------------------


@PARTITIONED
@pytest.mark.parametrize("contiguous", [True, False])
def test_reading_a_part_is_an_error(stage: int, contiguous: bool) -> None:
    engine = make_engine(stage, accumulation=2, contiguous_gradients=contiguous)
    weight, parameters = engine.module.body[0].weight, list(engine.module.parameters())
    calls: list[Callable[[], Any]] = [
        lambda: clip_grad_norm_(parameters, 1.0),
        lambda: clip_grad_norm_([weight], 1.0, foreach=False),
        lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: weight.grad.norm(),
        lambda: weight.grad.data,
        lambda: weight.grad.mul_(2),
    ]
    for seed in range(2):
        engine.backward(loss_of(engine, seed))
        assert weight.grad is not None and weight.grad.shape == weight.shape and "body.0.weight" in repr(weight.grad)
        for call in calls:
            with pytest.raises(UsageError, match=r"safe_get_full_grad\(parameter\).*gradient_clipping"):
                call()
    engine.step()
    assert engine.was_step_applied()


@PARTITIONED
def test_a_written_gradient_is_refused_at_the_step(stage: int) -> None:
    engine = make_engine(stage)
    engine.backward(loss_of(engine, 0))
    engine.module.gain.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(UsageError, match=r"setting of the \.grad of parameter gain"):
        engine.step()
    engine.module.gain.grad = None  # no gradient: the parameter is left alone
    before = weights(engine)
    engine.step()
    same = [torch.equal(old, new) for old, new in zip(before, weights(engine), strict=True)]
    names = [name for name, _ in engine.module.named_parameters()]
    assert {name for name, is_same in zip(names, same, strict=True) if is_same} == {
        "gain",
        "frozen",
        "unused.weight",
        "unused.bias",
    }


@STAGES
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("contiguous", [True, False])
def test_zero_grad_of_modules_and_optimizers_works(stage: int, set_to_none: bool, contiguous: bool) -> None:
    """Between micro-batches it changes nothing."""
    engine, other = (make_engine(stage, accumulation=2, contiguous_gradients=contiguous) for _ in range(2))
    optimizer = torch.optim.SGD(engine.module.parameters(), lr=1.0)
    for seed in range(2 * 2):
        optimizer.zero_grad(set_to_none)
        engine.backward(loss_of(engine, seed))
        other.backward(loss_of(other, seed))
        engine.step()
        other.step()
        engine.module.zero_grad(set_to_none)
        engine.module.body.zero_grad(set_to_none)
    assert all(torch.equal(one, two) for one, two in zip(weights(engine), weights(other), strict=True))


@STAGES
def test_a_zeroed_gradient_decays(stage: int) -> None:
    """zero_grad(set_to_none=False) after the last backward leaves gradients of zero, by which weights decay."""
    engine = make_engine(stage)
    before = weights(engine)
    engine.backward(loss_of(engine, 0))
    engine.module.zero_grad(set_to_none=False)
    engine.step()
    names = [name for name, _ in engine.module.named_parameters()]
    for name, old, new in zip(names, before, weights(engine), strict=True):
        factor = 1.0 if name.startswith(("frozen", "unused")) else 1 - LR * 0.1
        torch.testing.assert_close(new, old * factor, rtol=1e-12, atol=0)


# --- gradients in the middle of a step -------------------------------------------------------------------------------


def so_far(rank: int, stage: int) -> list[list[Tensor | None]]:
    found = []
    for more in ({}, {"contiguous_gradients": False, "gradient_predivide_factor": 4.0}):
        engine = make_engine(stage, mesh_in_worker(rank, dp=DP), accumulation=2, **more)
        parameters = list(engine.module.parameters())
        found.append([safe_get_full_grad(p) for p in parameters])
        engine.backward(loss_of(engine, rank))
        found.append([safe_get_full_grad(p) for p in parameters])
        with engine.no_sync():
            engine.backward(loss_of(engine, 2 + rank))
            found.append([safe_get_full_grad(p) for p in parameters])
        engine.backward(loss_of(engine, 4 + rank))
        found.append([safe_get_full_grad(p) for p in parameters])
        engine.step()
        found.append([safe_get_full_grad(p) for p in parameters])
        engine.close()
    return found


def so_far_plain() -> Iterator[list[Tensor | None]]:
    model = make_model()
    nothing: list[Tensor | None] = [None for _ in model.parameters()]
    yield nothing
    for seed in (0, 2, 4):
        ((loss_of(model, seed) + loss_of(model, seed + 1)) / (DP * 2)).backward()
        yield [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    yield nothing


@pytest.mark.gloo
@STAGES
def test_gradients_so_far(stage: int) -> None:
    expected = list(so_far_plain()) * 2
    for found in run_ranks(DP, so_far, stage):
        for moment, (values, plain) in enumerate(zip(found, expected, strict=True)):
            for (name, p), mine, theirs in zip(make_model().named_parameters(), values, plain, strict=True):
                if mine is not None and theirs is None and name.startswith("unused"):
                    theirs = torch.zeros_like(p)
                assert (mine is None) == (theirs is None), (moment, name)
                if theirs is not None:
                    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14, msg=f"{moment} {name}")


@STAGES
def test_a_gradient_set_by_its_accessor_counts(stage: int) -> None:
    engine = make_engine(stage)
    engine.backward(loss_of(engine, 0))
    unused = engine.module.unused.weight
    safe_set_full_grad(unused, torch.full((2, 2), 2.0, dtype=torch.float64))
    with GatheredParameters([unused]):
        before = unused.detach().clone()
    engine.step()
    with GatheredParameters([unused]):
        assert (unused < before).all()


@pytest.mark.parametrize("stage", [1, 2])
def test_compiled_layers_are_compiled_anew_beside_guards(stage: int) -> None:
    """torch.compile describes the `.grad` of each parameter when it compiles for another shape between two passes."""
    engines = [make_engine(stage, accumulation=2) for _ in range(2)]
    layer = engines[0].module.body[0]
    layer.forward = torch.compile(layer.forward, backend="eager", dynamic=False)
    for samples in (4, 3, 4, 2):
        for engine in engines:
            engine.backward(engine(torch.ones(samples, 3, dtype=torch.float64)).square().mean())
            engine.step()
    assert all(torch.equal(one, two) for one, two in zip(*map(weights, engines), strict=True))
