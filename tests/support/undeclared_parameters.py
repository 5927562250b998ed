"""Forward functions over one set of layers that use parameters in ways that no module declares."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = 4
Body = Callable[["Parts", Tensor], Any]


class Own(nn.Module):
    """A module with its own parameters and layers inside, so that its forward goes on after those of the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(D, 5)), nn.Parameter(torch.randn(5, D))
        self.inner, self.norm = nn.Linear(5, 5), nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.tanh(self.inner(torch.tanh(x @ self.up)))) @ self.down


class Lender(nn.Module):
    """A module whose forward returns its parameter, or a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, rows: slice = slice(None)) -> Tensor:
        return self.weight[rows]


@dataclass
class Answer:
    """An output of a forward that is not a tensor."""

    values: Tensor
    more: dict[str, Any]


class Parts(nn.Module):
    """Layers and parameters that `body`, the forward, uses."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, D) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D)) for _ in range(4))
        self.own, self.lender = Own(), Lender()
        self.scale = nn.Parameter(torch.ones(D))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


CASES: dict[str, Body] = {}


def case(body: Body) -> Body:
    CASES[body.__name__] = body
    return body


@case
def touched_outside_its_module(m: Parts, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(m.a(x)), m.b.weight) * m.scale


@case
def two_units_in_one_function(m: Parts, x: Tensor) -> Tensor:
    return x @ (m.a.weight @ m.b.weight) + torch.addcmul(m.a.bias, m.b.bias, m.c.bias)


@case
def several_calls_of_one_module(m: Parts, x: Tensor) -> Tensor:
    for _ in range(3):
        x = torch.tanh(m.b(torch.tanh(m.a(x))))
    return x


@case
def recursion(m: Parts, x: Tensor) -> Tensor:
    m.depth = getattr(m, "depth", 0) + 1
    x = m(torch.tanh(m.a(x))) if m.depth % 3 else m.b(x)
    return x * m.scale


@case
def views_from_a_module(m: Parts, x: Tensor) -> Tensor:
    return x @ m.lender() + (x[:, :2] @ m.lender(slice(2)) + m.lender(slice(1, 3)).sum())


@case
def its_parameter_and_its_detached_values(m: Parts, x: Tensor) -> Tensor:
    return F.linear(m.a(x), m.lender.weight) + F.linear(x, m.a.weight.detach()) + m.a.weight.data.sum()


@case
def in_place(m: Parts, x: Tensor) -> Tensor:
    return m.a(x).add_(m.scale).mul_(2).add_(m.b(x))


@case
def other_outputs(m: Parts, x: Tensor) -> Answer:
    return Answer(m.a(x), {"list": [m.b(x), (m.own(x),)], "number": 3})


@case
def sparse_tensors(m: Parts, x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(x.shape[0], dtype=x.dtype).to_sparse(), m.a(x))


@case
def a_part_without_gradients(m: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = m.b(m.a(x))
    return m.a(x) * constant


@case
def gradients_in_a_part_without(m: Parts, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x).requires_grad_()
        with torch.enable_grad():
            z = m.own(torch.tanh(m.b(y))).square().sum()
        (slope,) = torch.autograd.grad(z, y)
    return m.c(x) * slope


@case
def a_gradient_inside_forward(m: Parts, x: Tensor) -> Tensor:
    energy = m.own(torch.tanh(m.a(x))).square().sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return m.b(force) + energy


@case
def offloading_inside(m: Parts, x: Tensor) -> Tensor:
    with save_on_cpu():
        x = torch.tanh(m.own(m.a(x)))
    return m.b(x)


@case
def hooks_that_keep_what_they_get(m: Parts, x: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        x = torch.tanh(m.own(m.a(x)))
    return m.b(x)


@case
def offloading_some_recomputing_some(m: Parts, x: Tensor) -> Tensor:
    with save_on_cpu():
        x = checkpoint(m.own, torch.tanh(m.a(x)), use_reentrant=False)
        x = checkpoint(m.blocks[0], x, use_reentrant=False)
    return m.blocks[1](x)


def recomputed(body: Callable[[Parts, Tensor, bool], Tensor]) -> None:
    """Register the body as two cases, with torch's reentrant and non-reentrant recomputation."""
    for reentrant, kind in ((False, "non-reentrant"), (True, "reentrant")):
        CASES[f"{body.__name__}, {kind}"] = lambda m, x, reentrant=reentrant: body(m, x, reentrant)


@recomputed
def one_block(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    for block in m.blocks:
        x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant))
    return x


@recomputed
def several_blocks_at_once(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    x = checkpoint(lambda x: m.blocks[1](torch.tanh(m.blocks[0](x))), m.a(x), use_reentrant=reentrant)
    return checkpoint(lambda x: m.blocks[3](torch.tanh(m.blocks[2](x))), x, use_reentrant=reentrant)


@recomputed
def part_of_a_block(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    linear, norm = m.blocks[0]
    x = norm(checkpoint(lambda x: torch.tanh(linear(x)), x, use_reentrant=reentrant))
    return m.blocks[1](x)


@recomputed
def a_module_around_others(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(m.own, torch.tanh(m.a(x)), use_reentrant=reentrant) * m.scale


@recomputed
def touched_in_a_function(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    def part(x: Tensor) -> Tensor:
        x = torch.tanh(x @ m.lender.weight) * m.scale
        return m.blocks[1](torch.tanh(m.blocks[0](x)))

    return checkpoint(part, m.a(x), use_reentrant=reentrant)


@recomputed
def two_units_in_one_recomputed_function(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda x: F.linear(x, m.b.weight @ m.lender.weight, m.c.bias), m.a(x), use_reentrant=reentrant)


@recomputed
def recomputation_in_a_recomputation(m: Parts, x: Tensor, reentrant: bool) -> Tensor:
    def part(x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, m.b.weight))
        return m.blocks[0](checkpoint(m.own, x, use_reentrant=reentrant))

    return checkpoint(part, m.a(x), use_reentrant=reentrant)
