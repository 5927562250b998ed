"""A user's module agrees with plain PyTorch in every stage on two ranks; what differs on a rank is found and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import TrainingError, UsageError
from megazero.verify.verdict import Report

ADAMW = {"type": "AdamW", "lr": 1e-2, "params": {"weight_decay": 0.1}}


class Irregular(nn.Module):
    """Tied, frozen and unused parameters, one without dimensions, dropout, and statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(5, 7), nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.second, self.third = nn.Linear(7, 7, bias=False), nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.scale, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(3))
        self.last = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(nn.functional.dropout(self.norm(self.first(x)), 0.3, self.training))
        return self.last(self.third(torch.tanh(self.second(x))) * self.scale)


class Drifting(nn.Linear):
    """A layer with state of its own on every rank, which scales what the second and later ranks compute."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def chain(factor: float = 1.0) -> nn.Module:
    layer = Drifting(5, 3)
    layer.factor = factor
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 1))


def with_hook(factor: float) -> nn.Module:
    model = chain()
    model[2].weight.register_hook(lambda gradient: gradient * factor)
    return model


def loss_of(model: Callable[[Tensor], Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def batches(count: int = 8) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(3, 5, generator=generator), "y": torch.ones(3, 1)} for _ in range(count)]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    every = list(parameters)
    return torch.optim.SGD([{"params": every[:2], "lr": 0.1}, {"params": every[2:]}], lr=0.01, momentum=0.9)


def verified(make: Callable[[], nn.Module], mesh: Any, stage: int = 1, **more: Any) -> Report:
    config = {"zero": {"zero_stage": stage}, "gradient_clipping": 0.5, **more.pop("config", {})}
    if "optimizer" not in more:
        config["optimizer"] = ADAMW
    return megazero.verify_module(make, loss_of, batches(), config, mesh=mesh, **more)


def compare_on_rank(rank: int) -> list[str]:
    mesh = mesh_in_worker(rank, dp=2)
    for stage in range(4):
        more: dict[str, Any] = {"gradient_accumulation_steps": 2} if stage % 2 else {"update_unused_parameters": True}
        report = verified(Irregular, mesh, stage, config=more)
        assert report.agrees, "\n".join(report.lines())
        assert len(report.steps) == (2 if stage % 2 else 4) and len(report.weights) == 10
    assert verified(Irregular, mesh, 3, optimizer=momentum, config={"gradient_allreduce_op": "sum"}).agrees
    drifting = verified(lambda: chain(1.0 + rank), mesh)
    hooked = verified(lambda: with_hook(1.0 + rank), mesh, 2)
    assert not drifting.agrees and not hooked.agrees and hooked.steps[0].loss.agrees
    with pytest.raises(TrainingError, match=r"FIRST DIFFERENCE: step 1, gradient of 2\.weight"):
        verified(lambda: with_hook(1.0 + rank), mesh, raises=True)
    return [drifting.first_difference(), hooked.first_difference()]


@pytest.mark.gloo
def test_what_two_ranks_compute_is_compared_with_one_process() -> None:
    first, second = run_ranks(2, compare_on_rank)
    assert first == second
    assert first[0].startswith("step 1, gradient of 0.weight: differs by")
    assert first[1].startswith("step 1, gradient of 2.weight: differs by")


def test_a_single_process_is_compared_too() -> None:
    lines: list[str] = []
    report = verified(Irregular, mesh_in_worker(0), steps=3, print_line=lines.append)
    assert report.agrees and len(report.steps) == 3 and "ZeRO stage 1" in next(iter(report.lines()))


@each(
    ("make", "loss", "given", "message"),
    [
        (lambda: [1], loss_of, batches(2), "returns list"),
        (chain, lambda model, batch: model(batch["x"]), batches(2), r"tensor of shape \[3, 1\]"),
        (chain, lambda model, batch: 1.0, batches(2), "returns a float"),
        (chain, lambda model, batch: batch["x"].mean(), batches(2), "without a gradient"),
        (chain, loss_of, [], "0 batches for 0 steps"),
        (chain, loss_of, 7, "batches of type int"),
    ],
)
def test_bad_input_is_refused(make: Any, loss: Any, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        megazero.verify_module(make, loss, given, {"optimizer": ADAMW}, mesh=mesh_in_worker(0))


def test_another_module_at_the_second_call_is_refused() -> None:
    made = iter((nn.Linear(5, 1), nn.Linear(5, 2)))
    with pytest.raises(UsageError, match="the same parameters whenever"):
        megazero.verify_module(lambda: next(made), loss_of, batches(), {}, mesh=mesh_in_worker(0))
