"""Tests of recomputation under ZeRO stage 3, where parameters are partitioned when the second run begins.

Gradients must be those of plain PyTorch with released memory full of nan, and no parameter may stay gathered.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.irregular_model import alone, engine_around, owned_gradient, released_memory_is_nan
from support.processes import mesh_in_worker, run_ranks
from support.recomputed_programs import KEEPINGS, Run, plain, recomputation
from support.undeclared_parameters import D, Parts
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.zero.parameters.guard import PartitionedParameter
from megazero.zero.parameters.unit_memory import UnitState

Case = Callable[[Run, Parts, Tensor], Tensor]
CASES: dict[str, Case] = {}
SETTINGS: list[dict[str, Any]] = [
    {"prefetch_bucket_size": 0, "max_live_parameters": 0},
    {"prefetch_bucket_size": 10**6, "max_reuse_distance": 10**6, "param_persistence_threshold": 6},
    {"memory_efficient_linear": False},
]


def case(body: Case) -> Case:
    CASES[body.__name__] = body
    return body


@case
def one_module_at_a_time(run: Run, m: Parts, x: Tensor) -> Tensor:
    for block in m.blocks:
        x = torch.tanh(run(block, x))
    return x


@case
def several_modules_in_one(run: Run, m: Parts, x: Tensor) -> Tensor:
    x = run(lambda x: m.blocks[1](torch.tanh(m.blocks[0](x))), m.a(x))
    return run(lambda x: m.own(m.blocks[3](torch.tanh(m.blocks[2](x)))), x)


@case
def touched_in_the_function(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        x = torch.tanh(x @ m.lender.weight) * m.scale
        return m.blocks[1](torch.tanh(m.blocks[0](F.linear(x, m.b.weight, m.c.bias))))

    return run(part, m.a(x))


@case
def only_touched(run: Run, m: Parts, x: Tensor) -> Tensor:
    return run(lambda x: torch.tanh(x @ (m.a.weight @ m.b.weight)) * m.scale, x)


@case
def tied(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Use one layer in two recomputed calls, and its matrix once more outside them."""
    return run(lambda x: torch.tanh(m.a(torch.tanh(m.a(x)))), run(m.a, x)) @ m.a.weight


@case
def parameters_as_arguments(run: Run, m: Parts, x: Tensor) -> Tensor:
    x = run(lambda x, weight, bias: torch.tanh(x @ weight + bias), m.a(x), m.lender.weight, bias=m.b.bias)
    return run(lambda x, module: module(x), x, m.own)


@case
def views_of_parameters_as_arguments(run: Run, m: Parts, x: Tensor) -> Tensor:
    x = run(lambda x, weight: torch.tanh(x @ weight), m.a(x), m.lender.weight.t())
    return run(lambda x, weight: torch.tanh(x[:, :2] @ weight).exp(), x, m.lender(slice(2)))


@case
def a_view_that_backward_needs_late(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Take a view of a parameter whose unit is released, and others gathered, before backward needs the view."""

    def part(x: Tensor, weight: Tensor) -> Tensor:
        x = m.blocks[0](torch.tanh(x @ weight))
        return m.own(m.blocks[2](torch.tanh(m.blocks[1](x))))

    return run(part, m.a(x), m.lender.weight.t())


@case
def nested(run: Run, m: Parts, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, m.b.weight))
        return m.blocks[0](run(lambda x: run(m.own, x) @ m.lender.weight, x))

    return run(outer, m.a(x))


@case
def a_frozen_module(run: Run, m: Parts, x: Tensor) -> Tensor:
    m.b.requires_grad_(False)
    return run(lambda x: m.a(torch.tanh(m.b(x))), x)


@case
def a_gradient_inside(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        energy = m.own(torch.tanh(m.a(x))).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return m.b(force) + energy

    return run(part, x * 2)


class Around(nn.Module):
    """A module that recomputes a whole model in one call, as a user's code around a model may."""

    def __init__(self, run: Run, inner: Parts) -> None:
        super().__init__()
        self.inner, self._run = inner, run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.inner, x)


def make(body: Case, run: Run) -> Parts:
    torch.manual_seed(5)
    return Parts(lambda m, x: body(run, m, x)).double()


def inputs(step: int, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, D, dtype=torch.float64, generator=generator).requires_grad_()


@cache
def plain_passes(name: str, step: int, ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return every rank's loss, and the gradients of their sum, in plain PyTorch."""
    model = make(CASES[name], plain)
    losses = [model(inputs(step, rank)).square().sum() for rank in range(ranks)]
    for loss in losses:
        loss.backward()
    gradients = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
    return [loss.detach() for loss in losses], gradients


def passes(name: str, mesh: Mesh, keeping: str, settings: dict[str, Any]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return this rank's loss and its part of the gradients, for each of three steps."""
    runs = recomputation(keeping)
    model = make(CASES[name], runs.run)
    engine = engine_around(model, mesh, **settings)
    found = []
    for step in range(3):
        engine.begin_step()
        runs.checkpoints.begin_pass()
        loss = model(inputs(step, mesh.rank)).square().sum()
        engine.backward(loss, is_last=True)
        engine.finish_reductions()
        shapes = {key: p.shape for key, p in model.named_parameters()}
        owned = {key: owned_gradient(engine, key, shape.numel()).view(shape) for key, shape in shapes.items()}
        found.append((loss.detach(), owned))
        assert engine.gathered_numel[0] == 0
    for unit in engine._gather._units.values():
        assert unit.pins == 0 and unit.state is not UnitState.WHOLE
        assert all(type(parameter) is PartitionedParameter for parameter in unit.parameters)
    engine.close()
    return found


def check(name: str, found: list[list[tuple[Tensor, dict[str, Tensor]]]]) -> None:
    """Compare the losses and gradients of every rank with plain PyTorch's; found: what `passes` returned, by rank."""
    for step in range(3):
        losses, gradients = plain_passes(name, step, len(found))
        for rank, loss in enumerate(losses):
            torch.testing.assert_close(found[rank][step][0], loss, rtol=1e-13, atol=0)
        summed = {key: sum(one[step][1][key] for one in found) for key in gradients}
        torch.testing.assert_close(summed, gradients, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("keeping", KEEPINGS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_plain_torch(name: str, keeping: str) -> None:
    with released_memory_is_nan():
        check(name, [passes(name, alone(), keeping, {})])


@pytest.mark.parametrize("name", CASES)
def test_whatever_the_gathering_does(name: str) -> None:
    """The settings take turns."""
    settings = SETTINGS[list(CASES).index(name) % len(SETTINGS)]
    with released_memory_is_nan():
        check(name, [passes(name, alone(), "itself", settings)])


@pytest.mark.parametrize("name", CASES)
def test_when_released_memory_is_really_gone(name: str) -> None:
    check(name, [passes(name, alone(), "itself", {})])


def on_a_rank(rank: int, dp: int, keeping: str) -> dict[str, list[tuple[Tensor, dict[str, Tensor]]]]:
    mesh = mesh_in_worker(rank, dp=dp)
    with released_memory_is_nan():
        return {name: passes(name, mesh, keeping, {}) for name in CASES}


@pytest.mark.gloo
@pytest.mark.parametrize("keeping", ["itself", "host and arena"])
def test_the_same_on_two_ranks(keeping: str) -> None:
    found = run_ranks(2, on_a_rank, 2, keeping)
    for name in CASES:
        check(name, [one[name] for one in found])


@each("keeping", KEEPINGS)
def test_a_model_recomputed_as_a_whole(keeping: str) -> None:
    body = CASES["touched_in_the_function"]
    expected = Around(plain, make(body, plain))
    expected(inputs(0)).square().sum().backward()
    model = Around(recomputation(keeping).run, make(body, plain))
    with released_memory_is_nan():
        engine = engine_around(model, alone())
        engine.begin_step()
        engine.backward(model(inputs(0)).square().sum(), is_last=True)
        engine.finish_reductions()
    for key, p in expected.named_parameters():
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(owned_gradient(engine, key, p.numel()).view(p.shape), gradient)
    assert engine.gathered_numel[0] == 0
