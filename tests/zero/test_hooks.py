"""PyTorch's hooks call back once where they should."""

from typing import Any

import torch
from torch import Tensor, nn

from megazero.zero.hooks import accumulates, on_gradient


def test_every_trainable_parameter_reports_once_a_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model[1].weight = model[0].weight  # tied: one parameter
    ready: list[str] = []
    handles = on_gradient(dict(model.named_parameters()), ready.append)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert sorted(ready) == ["0.weight", "0.weight", "1.bias", "1.bias"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert len(ready) == 4


def test_a_backward_that_ends_elsewhere_does_not_accumulate() -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    asked: list[bool] = []

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(accumulates(ctx.next_functions[1][0]))
            return grad, grad

    def loss() -> Tensor:
        result: Tensor = Asks.apply(x, weight).sum()
        return result

    loss().backward()
    torch.autograd.grad(loss(), x)
    torch.autograd.grad(loss(), weight)
    loss().backward(inputs=[x])
    loss().backward(inputs=[weight])
    assert asked == [True, False, False, False, True]
