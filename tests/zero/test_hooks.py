"""PyTorch's hooks call back once where they should."""

import torch
from torch import nn

from megazero.zero.frames import on_gradient


def test_every_trainable_parameter_reports_once_a_backward() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].bias.requires_grad_(False)
    model[1].weight = model[0].weight  # tied: one parameter
    ready: list[str] = []
    handles = on_gradient(dict(model.named_parameters()), lambda name, _: ready.append(name))
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert sorted(ready) == ["0.weight", "0.weight", "1.bias", "1.bias"]
    for handle in handles:
        handle.remove()
    model(torch.ones(1, 3)).sum().backward()
    assert len(ready) == 4
