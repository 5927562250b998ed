"""Tests LAMB's two passes over parts of a parameter against the paper's formula for whole parameters."""

from typing import Any

import torch
from support.each import each
from support.published_optimizers import PublishedLamb
from torch import Tensor

from megazero.config.choices import defaults_of
from megazero.config.optimizers import OPTIMIZERS
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.grouping import DECAYED
from megazero.optim.inner import ElementRun, StepInputs
from megazero.optim.lamb import Lamb

CUT = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.6, 0.95), "weight_decay": 0.3, "eps": 1e-3},
    {"eps": 0.1, "eps_inside_sqrt": True},
    {"bias_correction": False, "max_coeff": 1e6},
    {"min_coeff": 5.0, "max_coeff": 7.0},
    {"min_coeff": 0.0, "max_coeff": 0.01},
]


def steps_in_parts(options: dict[str, Any], start: Tensor, gradients: list[Tensor], *, factor: float) -> Tensor:
    """Train a flat parameter in two parts, as two ranks would that have one each."""
    optimizer = Lamb(defaults_of(OPTIMIZERS["Lamb"].params) | options)
    buffers = FusedBuffers(1 << 16, torch.device("cpu"))
    master = start.clone()
    moments = {name: torch.zeros_like(master) for name in Lamb.moments}
    for number, gradient in enumerate(gradients):
        step = torch.tensor(number + 1.0)
        run = ElementRun(master, gradient / factor, moments, DECAYED)
        parts = (run.part(0, CUT), run.part(CUT, master.numel()))
        inputs = StepInputs(0.03, torch.tensor([factor], dtype=master.dtype), None)
        squares = torch.zeros(2, dtype=torch.float64)
        for part in parts:
            optimizer.measure(0, part, step, inputs, squares, buffers=buffers)
        for part in parts:
            optimizer.update(0, part, step, inputs._replace(figures=(squares,)), buffers=buffers)
    return master


def values(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(11, generator=generator, dtype=torch.float64) for _ in range(count)]


@each("options", OPTIONS)
def test_steps_are_the_papers(options: dict[str, Any]) -> None:
    start, *gradients = values(6)
    theirs = torch.nn.Parameter(start.clone())
    reference = PublishedLamb([theirs], lr=0.03, **options)
    for gradient in gradients:
        theirs.grad = gradient.clone()
        reference.step()
    found = steps_in_parts(options, start, gradients, factor=4.0)
    torch.testing.assert_close(found, theirs.detach(), rtol=1e-12, atol=1e-13)
    assert not torch.allclose(found, start, atol=1e-3)


def test_a_parameter_of_zeros_has_the_ratio_one_and_one_at_rest_stays() -> None:
    _, gradient = values(2)
    zeros = torch.zeros_like(gradient)
    found = steps_in_parts({"bias_correction": True, "max_coeff": 0.1}, zeros, [gradient], factor=1.0)
    torch.testing.assert_close(found, -0.03 * gradient.sign(), rtol=1e-6, atol=0.0)
    assert torch.equal(steps_in_parts({}, gradient, [zeros], factor=1.0), gradient)
