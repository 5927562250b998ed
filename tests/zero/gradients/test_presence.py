"""Tests that a parameter without a gradient in a step is left alone by the optimizer, as in plain PyTorch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from support.published_optimizers import reference_class
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero.parameters.gathered import GatheredParameters

DP, ACCUMULATION, LR = 2, 2, 0.02
OPTIONS: Mapping[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.2},
    "NAdam": {"weight_decay": 0.1},
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Lamb": {"weight_decay": 0.1},
    "Lion": {"weight_decay": 0.1},
    "Adafactor": {"weight_decay": 0.1, "eps": (1e-4, 1e-2)},
}


class Use(NamedTuple):
    """The parameters that a micro-batch uses: an expert, -1 for none, and the shift on these data-parallel ranks."""

    expert: int
    shift_on: tuple[int, ...]


# By step, the micro-batches: the shift has a gradient on both ranks, on one, in one micro-batch, and nowhere.
STEPS = (
    (Use(0, (0, 1)), Use(1, ())),
    (Use(-1, ()), Use(0, ())),
    (Use(2, (1,)), Use(0, ())),
    (Use(1, ()), Use(1, ())),
    (Use(0, (0,)), Use(2, (0, 1))),
)


class Choosing(nn.Module):
    """A layer and three experts, of which a call uses one or none; another layer is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(5))
        self.first = nn.Linear(3, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.never = nn.Linear(3, 4)

    def forward(self, x: Tensor, expert: int, *, shifts: bool) -> Tensor:
        x = torch.tanh(self.first(x)) + (self.shift if shifts else self.shift.detach())
        return x if expert < 0 else torch.tanh(self.experts[expert](x))


def make_model() -> Choosing:
    torch.manual_seed(4)
    return Choosing().double()


def loss_of(model: Any, step: int, micro: int, rank: int) -> Tensor:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + 2 * micro + rank), dtype=torch.float64)
    use = STEPS[step][micro]
    output: Tensor = model(x.to(next(model.parameters()).dtype), use.expert, shifts=rank in use.shift_on)
    return output.square().mean()


def train_plain(kind: str) -> dict[str, Tensor]:
    model = make_model()
    optimizer = reference_class(kind)(model.parameters(), lr=LR, **OPTIONS[kind])
    for step in range(len(STEPS)):
        optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            for rank in range(DP):
                (loss_of(model, step, micro, rank) / (DP * ACCUMULATION)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def make_engine(stage: int, kind: str, mesh: Any = None, **more: Any) -> DataParallelEngine:
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 40, **more.pop("zero", {})},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": kind, "lr": LR, "params": OPTIONS[kind]},
        "gradient_accumulation_steps": ACCUMULATION,
        **more,
    }
    return megazero.initialize(make_model(), config, mesh=mesh)


def take_step(engine: DataParallelEngine, step: int, rank: int, factor: float = 1.0) -> None:
    for micro in range(ACCUMULATION):
        engine.backward(loss_of(engine, step, micro, rank) * factor)
        engine.step()


def weights(engine: DataParallelEngine) -> dict[str, Tensor]:
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def train(rank: int, stage: int) -> list[dict[str, Tensor]]:
    mesh, found = mesh_in_worker(rank, dp=DP), []
    for kind in OPTIONS:
        engine = make_engine(stage, kind, mesh, zero={"contiguous_gradients": kind != "NAdam"})
        for step in range(len(STEPS)):
            take_step(engine, step, rank)
        found.append(weights(engine))
        engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
def test_unused_parameters_are_left_alone_as_in_plain_torch(stage: int) -> None:
    for ways in run_ranks(DP, train, stage):
        for kind, found in zip(OPTIONS, ways, strict=True):
            for name, expected in train_plain(kind).items():
                torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-12, msg=f"{name} with {kind}")


def state(engine: DataParallelEngine, name: str) -> list[Tensor | None]:
    parameter = engine.module.get_parameter(name)
    moments = [megazero.zero.safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")]
    return [megazero.zero.safe_get_full_fp32_param(parameter), *moments]


@pytest.mark.parametrize(
    ("stage", "precision", "kind"),
    [(0, "bf16", "AdamW"), (3, "fp16", "AdamW"), (2, "fp16", "NAdam"), (1, "fp16", "Lamb")],
)
def test_low_precision(stage: int, precision: str, kind: str) -> None:
    """Weights and moments stay to the bit, and a step that overflows counts for no parameter."""
    scale = {"initial_loss_scale": 1.0} if precision == "fp16" else {}
    sections = {"precision": {"precision": precision, **scale}, "gradient_accumulation_steps": 2}
    engines = [make_engine(stage, kind, **sections) for _ in range(2)]
    for step in range(len(STEPS)):
        for index, engine in enumerate(engines):
            before = state(engine, "experts.0.weight")
            if precision == "fp16" and index == 1:
                take_step(engine, step, 0, factor=1e30)
                assert not engine.was_step_applied()
            take_step(engine, step, 0)
            used = any(use.expert == 0 for use in STEPS[step])
            same = all(
                (old is None) == (new is None) and (old is None or new is None or torch.equal(old, new))
                for old, new in zip(before, state(engine, "experts.0.weight"), strict=True)
            )
            assert same == (not used), step
    one, other = map(weights, engines)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_key_without_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match="update_unused_parameters: true"):
        make_engine(1, "AdamW", zero={"ignore_unused_parameters": False}, update_unused_parameters=True)


def test_deepspeed_updates_all() -> None:
    """DeepSpeed's zero gradients decay weights, by its configuration or by the key of megazero's own."""
    optimizer = {"type": "AdamW", "params": {"lr": LR, **OPTIONS["AdamW"]}}
    foreign = {"zero_optimization": {"stage": 2}, "optimizer": optimizer, "gradient_accumulation_steps": ACCUMULATION}
    engines = [
        megazero.initialize(make_model(), {**foreign, "train_micro_batch_size_per_gpu": 6}),
        make_engine(2, "AdamW", update_unused_parameters=True),
        make_engine(2, "AdamW"),
    ]
    for engine, decays in zip(engines, (True, True, False), strict=True):
        before = engine.module.never.weight.detach().double().clone()
        take_step(engine, 0, 0)
        factor = 1 - LR * 0.2 if decays else 1.0
        torch.testing.assert_close(engine.module.never.weight.detach().double(), before * factor, rtol=1e-6, atol=0)
