"""Programs that call parts of themselves through `run`, which recomputes them or just calls, and stores of checkpoints.

outcome(program, plain) and outcome(program, recomputation.run) must be equal to the bit: the program's results, every
gradient, the number of gradients that every parameter received, and the state of the random generator at the end.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megazero.activations.checkpoints import ActivationCheckpoints
from megazero.activations.copy_stores import ArenaStore, CopyStore, DeviceStore, HostStore
from megazero.activations.recompute import Recomputation
from megazero.comm.interface import Communicator
from megazero.generators import DefaultGenerators
from megazero.memory.host import HostMemory
from megazero.memory.ledger_interface import AnyLedger, NullLedger

CPU = torch.device("cpu")
WIDTH = 6
Run = Callable[..., Any]
Program = Callable[[Run, "Parts", Tensor], Any]
KEEPINGS = ("itself", "arena", "small arena", "host", "host and arena")


def places_of(keeping: str, ledger: AnyLedger | None = None) -> CopyStore | None:
    """Return the store of checkpoints' copies, None for "itself".  The small arena has room for one checkpoint."""
    ledger = ledger or NullLedger()
    arenas = {"arena": 8, "small arena": 1, "host and arena": 3}
    arena = ArenaStore(arenas[keeping], CPU, ledger=ledger) if keeping in arenas else None
    if keeping.startswith("host"):
        return HostStore(HostMemory(CPU, ledger=ledger), arena or DeviceStore(CPU, ledger=ledger))
    return arena


def recomputation(
    keeping: str = "itself", *, partition_over: Communicator | None = None, ledger: AnyLedger | None = None, **more: Any
) -> Recomputation:
    """Return a Recomputation with torch's default generators, which keeps its checkpoints as `keeping` names."""
    checkpoints = ActivationCheckpoints(partition_over=partition_over, copies=places_of(keeping, ledger), ledger=ledger)
    return Recomputation(DefaultGenerators(CPU), checkpoints, ledger=ledger or NullLedger(), **more)


def plain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function without recomputation."""
    return function(*args, **kwargs)


class Parts(nn.Module):
    """Layers and parameters that the programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.words = nn.Embedding(5, WIDTH)
        self.scale = nn.Parameter(torch.rand(WIDTH))


class Outcome(NamedTuple):
    """The outcome of a program.

    tensors: results, then the gradients of x and of the parameters; arrivals: the number of gradients that each
    parameter received; random: the state of torch's generator at the end.
    """

    tensors: list[Tensor | None]
    arrivals: dict[str, int]
    random: Tensor


def outcome(program: Program, run: Run, dtype: torch.dtype = torch.float64) -> Outcome:
    torch.manual_seed(3)
    parts = Parts().to(dtype)
    x = torch.randn(3, WIDTH, dtype=dtype, requires_grad=True)
    arrivals = {name: 0 for name, _ in parts.named_parameters()}
    for name, parameter in parts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrivals.update({name: arrivals[name] + 1}))
    found = program(run, parts, x)
    tensors = [leaf.detach() for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]
    gradients = [x.grad, *(parameter.grad for parameter in parts.parameters())]
    return Outcome([*tensors, *gradients], arrivals, torch.get_rng_state())


def same(first: Outcome, second: Outcome) -> bool:
    """Return True if two outcomes are equal to the bit."""
    pairs = zip(first.tensors, second.tensors, strict=True)
    return (
        all(equal(a, b) for a, b in pairs)
        and first.arrivals == second.arrivals
        and torch.equal(first.random, second.random)
    )


def equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b)


PROGRAMS: dict[str, Program] = {}


def program(body: Program) -> Program:
    PROGRAMS[body.__name__] = body
    return body


def layer(m: Parts, x: Tensor) -> Tensor:
    return x + torch.tanh(m.b(F.gelu(m.a(m.norm(x)))))


@program
def three_layers(run: Run, m: Parts, x: Tensor) -> Tensor:
    for _ in range(3):
        x = run(layer, m, x)
    loss = x.square().sum()
    loss.backward()
    return loss


@program
def two_passes(run: Run, m: Parts, x: Tensor) -> list[Tensor]:
    """Add up the gradients of two passes, with the second forward before the first backward."""
    losses = [run(layer, m, run(layer, m, x * factor)).square().sum() for factor in (1, 2)]
    for loss in losses:
        loss.backward()
    return losses


@program
def one_tensor_by_two_ways(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Give the inner function a tensor that is also the outer one's input: as its own input and, once, from outside."""
    h = m.c(x)
    z = run(lambda y: run(lambda a, b, c: m.a(a) + m.a(b).sin() * m.a(c).tanh(), y, y.sin(), h) * m.a(y).cos(), h)
    z.square().sum().backward()
    return z


@program
def many_arguments(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(a: Tensor, factor: float, *rest: Tensor, nested: Any, power: int, name: str, none: None) -> Tensor:
        assert name == "x" and none is None
        inner = nested["list"][1][0] * nested["list"][0] + rest[0] * rest[1]
        return (a * factor).pow(power) * torch.sigmoid(inner)

    nested = {"list": [m.a(x), (m.b(x), 7)]}
    y = run(part, m.c(x), 1.5, m.scale, x, nested=nested, power=2, name="x", none=None)
    y.sum().backward()
    return y


@program
def a_keyword_called_function(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda x, function, self: function(x) * self, m.a(x), function=torch.tanh, self=m.scale)
    y.square().sum().backward()
    return y


@program
def many_results(run: Run, m: Parts, x: Tensor) -> Any:
    def part(x: Tensor) -> Any:
        y = m.a(x).tanh()
        return {"both": (y, m.b(y).exp()), "none": None, "number": 3, "text": "t", "constant": y.detach() + 1}

    found = run(part, m.c(x))
    assert found["none"] is None and found["number"] == 3 and found["text"] == "t"
    assert not found["constant"].requires_grad
    (found["both"][0] * found["both"][1] + found["constant"]).sum().backward()
    return found


@program
def only_one_result_used(run: Run, m: Parts, x: Tensor) -> Tensor:
    y, _ = run(lambda x: (m.a(x).tanh(), m.b(x).exp()), m.c(x))
    y.square().sum().backward()
    return y


@program
def inputs_without_gradient(run: Run, m: Parts, x: Tensor) -> Tensor:
    ids, mask = torch.tensor([[4, 0, 1], [1, 2, 4]]), torch.tensor([True, False, True])
    frozen = m.c(x).detach()
    y = run(lambda ids, mask, frozen: (m.words(ids) * frozen * mask[:, None]).tanh(), ids, mask, frozen)
    y.square().sum().backward()
    return y


@program
def no_input_at_all(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda: torch.tanh(m.a.weight @ m.b.weight) * m.scale)
    y.square().sum().backward()
    return y


@program
def parameters_as_arguments(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda x, weight, bias: torch.tanh(F.linear(x, weight, bias)), m.b(x), m.a.weight, bias=m.a.bias)
    y = run(lambda x, transposed: x @ transposed, y, m.a.weight.t())
    y.square().sum().backward()
    return y


@program
def tied(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Use one layer twice in one function, and use the same layers in two functions."""
    for _ in range(2):
        x = run(lambda x: m.a(torch.tanh(m.a(x))) @ m.b.weight, x)
    y = x @ m.b.weight
    y.square().sum().backward()
    return y


@program
def a_closure_over_what_needs_gradients(run: Run, m: Parts, x: Tensor) -> Tensor:
    outside = m.b(x).tanh()
    y = run(lambda x: torch.sigmoid(m.a(x) * outside) + outside.sin(), x)
    y = run(lambda x: (x * outside).exp(), y)
    y.sum().backward()
    return y


@program
def in_place_on_its_own(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        y = m.a(x).mul_(2).add_(m.scale).relu_()
        z = torch.zeros_like(y)
        z[1:] = m.b(y[:-1])
        z[:, ::2].mul_(3)
        return z.tanh_()

    y = run(part, run(part, x))
    y.square().sum().backward()
    return y


@program
def views(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.cat([m.a(first.t().reshape(-1, WIDTH)), second.flip(0)])
        return whole[1:].tanh(), whole.view(-1)[::2]

    y = m.c(x)
    top, rest = run(part, y[:2], y.narrow(0, 1, 2))
    loss = top.square().sum() + rest.cos().sum()
    loss.backward()
    return loss


class TwiceRead(torch.autograd.Function):
    """A function whose backward reads its saved tensors twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        y = torch.exp(x) * factor
        ctx.save_for_backward(x, factor, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, factor, y = ctx.saved_tensors
        again, _, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return gradient * y, (gradient * y / factor).sum(0)


@program
def a_function_that_reads_twice(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda x: TwiceRead.apply(m.a(x), m.scale).sqrt(), x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    return y


@program
def backward_twice(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(layer, m, run(layer, m, x))
    y.square().sum().backward(retain_graph=True)
    (y * 3).sum().backward(retain_graph=True)
    y.sum().backward()
    return y


@program
def gradients_of_some(run: Run, m: Parts, x: Tensor) -> Any:
    y = run(layer, m, run(layer, m, x)).square().sum()
    some = torch.autograd.grad(y, [m.a.weight, x], retain_graph=True)
    more = torch.autograd.grad(y, [m.b.bias], retain_graph=True)
    y.backward()
    return some, more


@program
def two_losses(run: Run, m: Parts, x: Tensor) -> Any:
    """Run one backward for each of the two outputs of one function."""
    y, z = run(lambda x, w: (m.a(x).tanh(), m.b(w).exp()), x, torch.linspace(0, 1, WIDTH, dtype=x.dtype))
    y.sum().backward()
    z.sum().backward()
    return y, z


@program
def two_losses_of_a_shared_part(run: Run, m: Parts, x: Tensor) -> Any:
    y, z = run(lambda x: (m.a(x).tanh(), m.b(x).exp()), m.c(x))
    y.sum().backward(retain_graph=True)
    z.sum().backward()
    return y, z


@program
def a_gradient_inside(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        energy = m.b(torch.tanh(m.a(x))).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return m.c(force) + energy

    y = run(part, x * 2)
    y.square().sum().backward()
    return y


@program
def a_penalty_around(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(layer, m, run(layer, m, x)).square().sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    loss = y + slope.square().sum()
    loss.backward()
    return loss


@program
def nested(run: Run, m: Parts, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        y = run(layer, m, torch.tanh(x))
        return m.c(run(lambda y: run(layer, m, y.exp()), y)).sin()

    y = run(outer, run(outer, m.a(x)))
    y.square().sum().backward()
    return y


@program
def nested_and_backward_twice(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda x: run(layer, m, m.c(x).sin()), x)
    y.square().sum().backward(retain_graph=True)
    y.sum().backward()
    return y


@program
def dropped(run: Run, m: Parts, x: Tensor) -> Tensor:
    for _ in range(2):
        x = run(lambda x: F.dropout(layer(m, F.dropout(x, 0.3)), 0.5) + torch.rand(WIDTH, dtype=x.dtype), x)
    x.square().sum().backward()
    return x + torch.rand(())


@program
def a_part_without_gradients(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(x: Tensor) -> Tensor:
        with torch.no_grad():
            constant = m.b(F.dropout(x))
        return m.a(x) * constant

    y = run(part, x)
    with torch.no_grad():
        assert not run(part, x).requires_grad
    y.square().sum().backward()
    return y


@program
def under_inference_mode(run: Run, m: Parts, x: Tensor) -> Tensor:
    with torch.inference_mode():
        assert run(layer, m, x).is_inference()
        mask = torch.ones(WIDTH, dtype=x.dtype)
    y = run(lambda x, mask: torch.tanh(m.a(x) + mask), m.b(x), mask)
    y.square().sum().backward()
    return y


@program
def autocast(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Recompute outside the forward's autocast, and inside one where the forward had none."""
    with torch.autocast("cpu", torch.bfloat16):
        y = run(layer, m, run(layer, m, x))
        with torch.autocast("cpu", enabled=False):
            z = run(layer, m, x)
    y.float().square().sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        z.square().sum().backward()
    return y


@program
def strided_inputs(run: Run, m: Parts, x: Tensor) -> Tensor:
    def part(*inputs: Tensor) -> Tensor:
        return torch.stack([(i * i).tanh().sum() for i in inputs])

    y = m.a(x)
    wide = torch.cat([y, y]).unsqueeze(1).transpose(0, 2)  # [6, 1, 6] of strides (1, 6, 6)
    z = run(part, y.t(), wide, y[:, 1:4], y[::2], y[:1].expand(4, -1), y[1:, 2], y.unsqueeze(0)[:, 1:2])
    z.sum().backward()
    return z


@program
def empty_tensors(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda none, x: torch.cat([m.a(none), m.b(x)]).tanh(), m.c(x)[:0], m.c(x))
    y.square().sum().backward()
    return y


@program
def a_number(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = run(lambda number, x: (number * m.a(x)).tanh(), m.c(x).sum(), x)
    y.square().sum().backward()
    return y


@program
def nothing_that_needs_gradients(run: Run, m: Parts, x: Tensor) -> Tensor:
    m.requires_grad_(False)
    y = run(layer, m, x.detach())
    assert not y.requires_grad
    return y


@program
def identity(run: Run, m: Parts, x: Tensor) -> Tensor:
    z = run(lambda x: (x, x.tanh())[1], run(lambda x: x, m.a(x)))
    z.square().sum().backward()
    return z


@program
def one_tensor_twice(run: Run, m: Parts, x: Tensor) -> Tensor:
    y = m.a(x)
    z = run(lambda a, b: (a.square() if a is b else a * b).tanh() * b.sigmoid(), y, y)
    z.square().sum().backward()
    return z


@program
def a_graph_of_gradients_outlives_the_forward(run: Run, m: Parts, x: Tensor) -> Tensor:
    """Keep a graph of gradients alive after the forward's graph has gone and other tensors have taken its memory."""
    first = m.a(x)
    (slope,) = torch.autograd.grad(run(lambda x: x.pow(3).sum(), first), first, create_graph=True)
    others = [run(torch.tanh, m.b(x * factor)) for factor in range(1, 12)]
    loss = slope.square().sum() + torch.stack(others).sum()
    loss.backward()
    return loss
