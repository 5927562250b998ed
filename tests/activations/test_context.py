"""Tests of `recompute`, which uses the settings of the forward it runs in, or else plain recomputation."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megazero.activations.checkpoints import ActivationCheckpoints
from megazero.activations.context import recompute, recomputing
from megazero.activations.recompute import Recomputation
from megazero.generators import DefaultGenerators


class Counting(Recomputation):
    """A Recomputation that records the functions it runs."""

    seen: list[Any]

    def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(function)
        return super().run(function, *args, **kwargs)


def counting() -> Counting:
    settings = Counting(random=DefaultGenerators(torch.device("cpu")))
    object.__setattr__(settings, "seen", [])
    return settings


def gradient_of(x: Tensor, how: Any) -> Tensor:
    torch.manual_seed(1)
    leaf = x.clone().requires_grad_()
    how(lambda y, *, power: torch.nn.functional.dropout(y.sin(), 0.5) ** power, leaf, power=3).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_alone_it_is_plain_recomputation() -> None:
    x = torch.linspace(0, 1, 11)
    plain = gradient_of(x, lambda function, *args, **kwargs: function(*args, **kwargs))
    assert torch.equal(gradient_of(x, recompute), plain)


def test_inside_it_does_as_the_settings_say_and_outside_not() -> None:
    outer, inner = counting(), counting()
    x = torch.ones(3, requires_grad=True)
    with recomputing(outer):
        recompute(torch.sin, x)
        with recomputing(inner):
            recompute(torch.cos, x)
        recompute(torch.tan, x)
    recompute(torch.exp, x)
    assert (outer.seen, inner.seen) == ([torch.sin, torch.tan], [torch.cos])


def test_settings_go_when_a_forward_fails() -> None:
    settings = counting()
    with pytest.raises(ZeroDivisionError), recomputing(settings):
        raise ZeroDivisionError
    recompute(torch.sin, torch.ones(3))
    assert settings.seen == []


def test_another_thread_has_none() -> None:
    settings = counting()
    with recomputing(settings):
        thread = threading.Thread(target=recompute, args=(torch.sin, torch.ones(3)))
        thread.start()
        thread.join()
    assert settings.seen == []


def test_each_forward_is_a_pass() -> None:
    passes = []

    class Noting(ActivationCheckpoints):
        def begin_pass(self) -> None:
            passes.append("begun")
            super().begin_pass()

    settings = Recomputation(random=DefaultGenerators(torch.device("cpu")), checkpoints=Noting())
    for _ in range(2):
        with recomputing(settings):
            recompute(torch.sin, torch.ones(3, requires_grad=True)).sum().backward()
    assert passes == ["begun"] * 2
