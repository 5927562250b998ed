"""Tests Lion against the paper's formula, with weight decay, and on flat pieces of parameters."""

from typing import Any

import torch
from support.each import each
from support.published_optimizers import PublishedLion

from megazero.optim.lion import Lion
from megazero.optim.torch_optimizer import check_elementwise

OPTIONS: list[dict[str, Any]] = [
    {},
    {"betas": (0.6, 0.95), "weight_decay": 0.3},
    {"weight_decay": 0.1, "maximize": True},
    {"betas": (0.0, 0.0)},
]


@each("options", OPTIONS)
def test_steps_are_the_papers(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = Lion([ours], lr=0.03, **options), PublishedLion([theirs], lr=0.03, **options)
    for _ in range(6):
        ours.grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-14)
    assert not torch.allclose(ours, start, atol=0.02)


def test_it_works_element_by_element() -> None:
    assert check_elementwise(Lion, {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1, "maximize": False}) is None


def test_a_parameter_without_a_gradient_stays() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    Lion([parameter], lr=0.5, weight_decay=0.5).step()
    assert torch.equal(parameter, torch.ones(3))
