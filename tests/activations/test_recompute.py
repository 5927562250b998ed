"""Tests that recomputation of any code gives the same bits as none, refuses where it cannot, and reruns no more code
than needed.

Tests of its memory are in test_recompute_memory.py, tests with ZeRO stage 3 in test_recompute_partitioned.py.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.any_models import CASES, inputs_of, make
from support.each import each
from support.recomputed_programs import (
    CPU,
    KEEPINGS,
    PROGRAMS,
    WIDTH,
    Outcome,
    Parts,
    Run,
    equal,
    layer,
    outcome,
    plain,
    recomputation,
    same,
)
from torch import Tensor, nn

from megazero.activations.recompute import Recomputation
from megazero.errors import UsageError
from megazero.tensor_parallel.random import RandomRegions


def dtype_of(name: str) -> torch.dtype:
    return torch.float32 if name == "autocast" else torch.float64


@each("keeping", KEEPINGS)
@each("name", PROGRAMS)
def test_the_same_bits(name: str, keeping: str) -> None:
    dtype = dtype_of(name)
    assert same(outcome(PROGRAMS[name], recomputation(keeping).run, dtype), outcome(PROGRAMS[name], plain, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_same_bits_in_other_dtypes(dtype: torch.dtype) -> None:
    for name, body in PROGRAMS.items():
        assert same(outcome(body, recomputation("arena").run, dtype), outcome(body, plain, dtype)), name


def test_the_outcomes_can_tell_a_difference() -> None:
    def other(run: Run, m: Parts, x: Tensor) -> Tensor:
        return PROGRAMS["three_layers"](run, m, x * (1 + 2**-52))

    def longer(run: Run, m: Parts, x: Tensor) -> Tensor:
        found = PROGRAMS["three_layers"](run, m, x)
        torch.rand(1)
        return found

    expected = outcome(PROGRAMS["three_layers"], plain)
    assert not same(outcome(other, plain), expected) and not same(outcome(longer, plain), expected)


STEPS = st.sampled_from(["a", "b", "c", "norm", "tanh", "gate", "in place", "dropout", "add", "view", "[", "[", "]"])


def written(steps: list[str], run: Run, m: Parts, x: Tensor) -> Tensor:
    """Run a program of steps, in which steps between brackets, which may nest, are one function."""
    position = 0

    def block(x: Tensor, start: int) -> Tensor:
        nonlocal position
        position, first = start, x
        while position < len(steps):
            step = steps[position]
            position += 1
            if step == "]":
                break
            if step == "[":
                here = position
                x = run(lambda x, here=here: block(x, here), x)
            else:
                x = one_step(step, m, x, first)
        return x

    while position < len(steps):
        x = block(x, position)
    loss = (x + m.scale).square().mean()
    loss.backward()
    return loss


def one_step(step: str, m: Parts, x: Tensor, first: Tensor) -> Tensor:
    if step in ("a", "b", "c", "norm"):
        return getattr(m, step)(x)
    if step == "in place":
        return (x * 2).sin_().mul_(m.scale)
    if step == "view":
        return x.t().reshape(x.shape).narrow(0, 0, x.shape[0])
    other = {"tanh": x.tanh, "gate": lambda: x.sigmoid() * m.scale, "add": lambda: x + first}
    return other[step]() if step in other else nn.functional.dropout(x, 0.4)


@given(st.lists(STEPS, max_size=16), st.sampled_from(KEEPINGS))
def test_any_program(steps: list[str], keeping: str) -> None:
    def body(run: Run, m: Parts, x: Tensor) -> Tensor:
        return written(steps, run, m, x)

    assert same(outcome(body, recomputation(keeping).run), outcome(body, plain))


def with_recomputed_children(model: nn.Module, recomputed: Recomputation) -> nn.Module:
    """Make every module that has parameters, the model too, recompute its forward, each inside the one around it."""
    for module in model.modules():
        if list(module.parameters()):
            forward = module.forward
            module.forward = lambda *args, forward=forward, **kwargs: recomputed.run(forward, *args, **kwargs)
    return model


@each("keeping", ["itself", "host and arena"])
@each("name", CASES)
def test_models_that_know_nothing_of_it(name: str, keeping: str) -> None:
    expected, model = make(name), with_recomputed_children(make(name), recomputation(keeping))
    for step in range(2):
        losses = [CASES[name].loss(each, step, *inputs_of(name, step)) for each in (expected, model)]
        assert equal(*losses)
        for loss in losses:
            loss.backward()
    for (key, p), q in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert equal(p.grad, q.grad), key


def test_context_variables_are_those_of_the_first_run() -> None:
    factor: ContextVar[float] = ContextVar("factor", default=1.0)
    x = torch.ones(3, requires_grad=True)
    token = factor.set(3.0)
    y = recomputation().run(lambda x: (x * factor.get()).square().exp(), x * 1)
    factor.reset(token)
    y.sum().backward()
    assert torch.allclose(x.grad, torch.full((3,), 18 * torch.e**9)) and factor.get() == 1.0


def test_dropout_in_both_random_regions() -> None:
    """The function draws from both random states, which continue as if the second run had drawn nothing."""
    random = RandomRegions(5, 0, CPU)
    runs = Recomputation(random)

    def body(run: Run, m: Parts, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            x = nn.functional.dropout(m.a(x))
            with random.sharded():
                x = nn.functional.dropout(x)
            return nn.functional.dropout(x.tanh())

        random.begin_micro_batch(7)
        y = run(part, run(part, x))
        y.sum().backward()
        with random.sharded():
            inside = torch.rand(4)
        return y + inside.sum() + torch.rand(())

    assert same(outcome(body, runs.run), outcome(body, plain))


def test_the_random_state_is_put_back_after_an_error_too() -> None:
    calls = []

    def fails_later(x: Tensor) -> Tensor:
        calls.append(torch.rand(1))
        if len(calls) == 2:
            raise KeyError
        return x.exp()

    y = recomputation().run(fails_later, torch.ones(2, requires_grad=True) * 1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        y.sum().backward()
    assert torch.equal(calls[0], calls[1]) and torch.equal(torch.get_rng_state(), before)


class Changing:
    """A function that calls `first` in its first run and `second` in its second."""

    def __init__(self, first, second) -> None:
        self.bodies = [first, second]

    def __call__(self, x: Tensor) -> Tensor:
        return self.bodies.pop(0)(x)


@each(
    ("second", "given"),
    [
        (lambda x: x * 2, "0 tensors saved where there had been 2"),
        (lambda x: x.exp() * 2, "1 tensors saved where there had been 2"),
        (lambda x: x[:1].exp().sin(), r"\[1, 2\] of float32 saved where there had been \[3, 2\] of float32"),
        (lambda x: x.double().exp().sin(), r"\[3, 2\] of float64 saved where there had been \[3, 2\] of float32"),
    ],
)
def test_a_second_run_that_is_another(second, given: str) -> None:
    x = torch.ones(3, 2, requires_grad=True)
    y = recomputation().run(Changing(lambda x: x.exp().sin(), second), x * 1)
    with pytest.raises(UsageError, match=given) as raised:
        y.sum().backward()
    assert "a recomputed function does the same in both of its runs" in str(raised.value)


def test_what_it_has_saved_and_written_to_since() -> None:
    """A tensor that the function saves and then changes in place is refused, as in plain PyTorch."""

    def part(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.add_(1)
        return z.exp() + y

    y = recomputation().run(part, torch.ones(3, requires_grad=True))
    with pytest.raises(UsageError, match=r"a tensor of \[3\] that backward needs has been written to"):
        y.sum().backward()


def test_what_comes_after_the_last_saved_tensor_is_not_run_again() -> None:
    seen = []

    def part(x: Tensor) -> Tensor:
        seen.append("before")
        y = x.exp().sin()
        seen.append("after")
        return y + 1

    y = recomputation().run(part, torch.ones(3, requires_grad=True) * 1)
    y.sum().backward()
    assert seen == ["before", "after", "before"]


def test_the_second_run_is_the_same_whoever_is_still_there() -> None:
    """The second run does not depend on whether the second output has been dropped, which may differ between ranks."""
    seen = []

    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        first = x.exp()
        seen.append("between")
        return first, x.sin()

    first, _ = recomputation().run(part, torch.ones(3, requires_grad=True) * 1)
    del _
    first.sum().backward()
    assert seen == ["between", "between"]


@pytest.mark.parametrize(("retain", "runs"), [(False, 2), (True, 3)])
def test_a_backward_runs_every_function_once(retain: bool, runs: int) -> None:
    count = []

    def part(x: Tensor) -> Tensor:
        count.append(1)
        return x.exp().sin().cos() * x.tanh()

    y = recomputation().run(part, torch.ones(3, requires_grad=True) * 1)
    y.sum().backward(retain_graph=retain)
    if retain:
        y.sum().backward()
    assert len(count) == runs


def test_two_losses_share_one_second_run() -> None:
    count = []

    def part(x: Tensor) -> tuple[Tensor, Tensor]:
        count.append(1)
        return x.exp().sin(), x.tanh().cos()

    x = torch.ones(3, requires_grad=True)
    for output in recomputation().run(part, x.detach().requires_grad_()):
        output.sum().backward()
    assert len(count) == 2


def test_saved_tensors_can_be_looked_at() -> None:
    x = torch.ones(3, requires_grad=True)
    y = recomputation().run(torch.exp, x * 1)
    assert torch.equal(y.grad_fn._saved_result, y) and torch.equal(y.grad_fn._saved_result, y)
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_without_gradients_the_function_is_just_called() -> None:
    runs = recomputation("arena")
    with torch.no_grad():
        y = runs.run(torch.exp, torch.ones(3, requires_grad=True) * 1)
    assert not y.requires_grad and runs.checkpoints.copies.arena is None


class Watch:
    """A stopwatch that records the names of its measurements."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def measure(self, name: str) -> AbstractContextManager[None]:
        self.names.append(name)
        return nullcontext()


def test_the_stopwatch_measures_both_runs() -> None:
    watch = Watch()
    found: Outcome = outcome(PROGRAMS["three_layers"], recomputation(stopwatch=watch).run)
    assert watch.names == ["checkpoint-forward"] * 3 + ["checkpoint-recompute"] * 3
    assert same(found, outcome(PROGRAMS["three_layers"], plain))


class Phases:
    """A ledger that records the phases it is set to."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def tag(self, tensor: Tensor, category: str) -> None: ...

    def phase(self, phase: str) -> None:
        self.phases.append(phase)


def test_the_second_run_is_a_forward_to_the_ledger() -> None:
    ledger = Phases()
    runs = recomputation(ledger=ledger)
    m = Parts()
    y = runs.run(layer, m, runs.run(layer, m, torch.ones(2, WIDTH)))
    assert ledger.phases == []
    y.sum().backward()
    assert ledger.phases == ["forward", "backward"] * 2


@each("keeping", KEEPINGS)
@each("view", ["slice", "expanded", "transposed", "strided", "column"])
def test_inputs_with_gaps_take_the_same_way_again(keeping: str, view: str) -> None:
    """Both runs use the same kernel, which torch chooses by the input's strides where the matrix needs no gradient."""
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    leaf = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
    h = leaf * 2
    views = {
        "slice": h[:, :-1],
        "expanded": h[:1].expand(3, 5, 6),
        "transposed": h.transpose(0, 1),
        "strided": h[:, ::2],
        "column": h[..., :1].expand(2, 5, 6),
    }

    def part(x: Tensor) -> Tensor:
        return torch.tanh(x @ matrix)

    (plain,) = torch.autograd.grad(part(views[view]).sum(), leaf, retain_graph=True)
    (found,) = torch.autograd.grad(recomputation(keeping).run(part, views[view]).sum(), leaf)
    assert torch.equal(found, plain)
