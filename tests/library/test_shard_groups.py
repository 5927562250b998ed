"""Tests of the library with ZeRO over a part of the data-parallel processes: sums, states, checkpoints, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError, UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)
from megazero.zero.parameters.gathered import GatheredParameters

WIDTH, SAMPLES = 10, 8


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def make_engine(rank: int, stage: int, *, dp: int = 4, precision: str = "fp32", **zero: Any) -> DataParallelEngine:
    zero = {"zero_stage": stage, "reduce_bucket_size": 64, **zero}
    config: dict[str, Any] = {"zero": zero, "precision": {"precision": precision}}
    config["optimizer"] = {"type": "AdamW", "lr": 0.01, "params": {"weight_decay": 0.1}}
    return megazero.initialize(make_model(), config, mesh=mesh_in_worker(rank, dp=dp))


def batch_of(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch_of(step, rank, next(model.parameters()).dtype)).square().mean()


def take_step(engine: DataParallelEngine, step: int) -> None:
    engine.backward(loss_of(engine, step, engine.mesh.axis("dp").rank))
    engine.step()


def sums(rank: int, stage: int) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter's gradient: the engine's average, and that of sums inside a shard group, then across."""
    engine, found = make_engine(rank, stage, mics_shard_size=2), []
    engine.backward(loss_of(engine, 0, rank))
    plain = make_model()
    of_ranks = [torch.autograd.grad(loss_of(plain, 0, other), list(plain.parameters())) for other in range(4)]
    for index, parameter in enumerate(engine.module.parameters()):
        mine = safe_get_full_grad(parameter)
        first, second, third, fourth = (gradients[index] for gradients in of_ranks)
        assert mine is not None
        found.append((mine, ((first + second) + (third + fourth)) * 0.25))
    engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_summed_inside_a_shard_group_first(stage: int) -> None:
    for found in run_ranks(4, sums, stage):
        for mine, expected in found:
            assert torch.equal(mine, expected)


def states(rank: int, stage: int, folder: Path) -> None:
    """Read, write, save and load states, beside plain PyTorch in float64."""
    engine = make_engine(rank, stage, precision="fp64", mics_shard_size=2)
    plain = make_model().double()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.1)

    def step_both(step: int, engine: DataParallelEngine) -> None:
        take_step(engine, step)
        optimizer.zero_grad()
        (sum(loss_of(plain, step, other) for other in range(4)) / 4).backward()
        optimizer.step()

    def compare(engine: DataParallelEngine) -> None:
        for mine, expected in zip(engine.module.parameters(), plain.parameters(), strict=True):
            master, moment = safe_get_full_fp32_param(mine), safe_get_full_optimizer_state(mine, "exp_avg_sq")
            assert master is not None and moment is not None
            torch.testing.assert_close(master.double(), expected.detach(), rtol=1e-6, atol=1e-9)
            torch.testing.assert_close(moment.double(), optimizer.state[expected]["exp_avg_sq"], rtol=1e-6, atol=1e-12)

    for step in range(2):
        step_both(step, engine)
    compare(engine)
    parameter, twin = next(engine.module.parameters()), next(plain.parameters())
    safe_set_full_fp32_param(parameter, torch.full_like(twin, 0.25))
    twin.data.fill_(0.25)
    bias, its_twin = list(engine.module.parameters())[-1], list(plain.parameters())[-1]
    with GatheredParameters([bias], modifier_rank=3):
        if rank == 3:
            bias.data.fill_(0.5)
    its_twin.data.fill_(0.5)
    step_both(2, engine)
    compare(engine)
    engine.save_checkpoint(folder)
    other = make_engine(rank, 3, precision="fp64")  # partitioned over all four
    other.load_checkpoint(folder)
    back = make_engine(rank, stage, precision="fp64", num_distributed_optimizer_instances=2)
    back.load_checkpoint(folder)
    step_both(3, engine)
    for loaded in (other, back):
        take_step(loaded, 3)
        compare(loaded)
    for one in (engine, other, back):
        one.close()


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_states_are_those_of_plain_pytorch(stage: int, tmp_path: Path) -> None:
    run_ranks(4, states, stage, tmp_path)


def traffic(rank: int, stage: int) -> tuple[dict[str, dict[str, int]], int]:
    engine = make_engine(rank, stage, mics_shard_size=2)
    take_step(engine, 0)
    take_step(engine, 1)
    engine.mesh.meter.reset()
    take_step(engine, 2)
    numel = sum(section.numel for section in engine.zero_engine.layout.sections)
    found = engine.mesh.meter.bytes_by_axis()
    engine.close()
    return found, numel


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_only_partitions_of_gradients_cross_between_shard_groups(stage: int) -> None:
    for found, numel in run_ranks(4, traffic, stage):
        half = 4 * numel // 2  # bytes of a partition, which a rank sends to the other of its shard group
        assert found["dp_replica"] == {"all_reduce": half}  # 2 (R - 1) / R of it
        assert found["dp_shard"]["reduce_scatter"] == half
        gathers = 1 if stage < 3 else 2  # backward still has the last unit
        assert half <= found["dp_shard"]["all_gather"] <= gathers * half
        assert "reduce_scatter" not in found.get("dp", {}) and "all_gather" not in found.get("dp", {})


def refused(rank: int, zero: dict[str, Any]) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        make_engine(rank, 2, **zero)
    return str(caught.value)


@pytest.mark.gloo
@each(
    ("zero", "said"),
    [
        ({"mics_shard_size": 3}, ("mics_shard_size 3", "4 data-parallel processes", "zero.mics_shard_size 4")),
        ({"num_distributed_optimizer_instances": 8}, ("num_distributed_optimizer_instances 4",)),
        ({"mics_shard_size": 2, "num_distributed_optimizer_instances": 2}, ("the same choice",)),
    ],
)
def test_unequal_groups_are_refused(zero: dict[str, Any], said: tuple[str, ...]) -> None:
    for message in run_ranks(4, refused, zero):
        assert all(part in message for part in said), message
