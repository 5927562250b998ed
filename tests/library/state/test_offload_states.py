"""Tests that an engine's states leave the device between two steps, and come back as they were."""

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.comm.mesh import Mesh
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero import safe_get_full_fp32_param, safe_get_local_optimizer_state, safe_set_full_fp32_param

WIDTH = 12
ALL = ("optim_states", "hp_params", "lp_params", "lp_grads")


def make_engine(
    stage: int, precision: str = "bf16", optimizer: str = "AdamW", mesh: Mesh | None = None, **zero: Any
) -> DataParallelEngine:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    config = {
        "zero": {"zero_stage": stage, **zero},
        "precision": {"precision": precision},
        "optimizer": {"type": optimizer, "lr": 0.01},
    }
    return megazero.initialize(model, config, mesh=mesh)


def train(engine: DataParallelEngine, step: int) -> Tensor:
    dtype = next(engine.module.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
    loss: Tensor = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.detach()


@each(
    ("stage", "optimizer", "include"),
    [
        (0, "AdamW", ALL),
        (1, "Adagrad", ("optim_states",)),
        (2, "AdamW", None),
        (3, "AdamW", None),
        (3, "Adagrad", ("contiguous_grad_buffer", "lp_params")),
    ],
)
def test_training_goes_on_as_if_nothing_had_moved(stage: int, optimizer: str, include: tuple[str, ...] | None) -> None:
    through, moved = (make_engine(stage, optimizer=optimizer) for _ in range(2))
    for step in range(4):
        assert torch.equal(train(through, step), train(moved, step))
        assert moved.offload_states(include) > 0
        assert moved.offload_states(include) == 0, "they have left"
        moved.reload_states()
    for ours, theirs in zip(moved.state_dict().values(), through.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_bytes_are_those_of_the_states() -> None:
    engine = make_engine(3)
    train(engine, 0)
    held = engine.zero_engine.model_state_bytes()
    kind = Enum("OffloadStateTypeEnum", {name: name for name in ALL})
    assert engine.offload_states([]) == 0
    assert engine.offload_states("optim_states") == held.moments
    assert engine.offload_states([kind.optim_states]) == 0
    assert engine.offload_states(["hp_params", "lp_params"]) == held.master + held.parameters
    assert engine.offload_states() == held.gradients
    assert engine.zero_engine.model_state_bytes().total == 0
    engine.reload_states()
    assert engine.zero_engine.model_state_bytes() == held


def secondary_partitions(rank: int) -> None:
    hpz = {"zero_hpz_partition_size": 2, "param_persistence_threshold": 0}
    through, moved = (make_engine(3, mesh=mesh_in_worker(rank, dp=2), **hpz) for _ in range(2))
    for step in range(2):
        assert torch.equal(train(through, step), train(moved, step))
        held = moved.zero_engine.model_state_bytes().parameters
        assert moved.offload_states(["lp_params"]) == held
        assert moved.zero_engine.model_state_bytes().parameters == 0
        moved.reload_states()
        assert moved.zero_engine.model_state_bytes().parameters == held


@pytest.mark.gloo
def test_secondary_partitions_leave_with_the_partitions() -> None:
    run_ranks(2, secondary_partitions)


def test_memory_that_numpy_has_referred_to_stays(tmp_path: Path) -> None:
    """A save writes from a CPU's memory, which cannot be freed from then on; all else leaves, and comes back."""
    through, moved = make_engine(3), make_engine(3)
    for engine in (through, moved):
        train(engine, 0)
    moved.save_checkpoint(tmp_path)
    assert 0 < moved.offload_states() < through.offload_states()
    for engine in (through, moved):
        engine.reload_states()
    expected = train(through, 1)
    assert torch.equal(train(moved, 1), expected)
    moved.load_checkpoint(tmp_path)
    moved.offload_states()
    moved.reload_states()
    assert torch.equal(train(moved, 1), expected)


@each(("stage", "precision"), [(0, "bf16"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_model_computes_while_what_only_training_needs_is_away(tmp_path: Path, stage: int, precision: str) -> None:
    engine = make_engine(stage, precision=precision)
    train(engine, 0)
    parameter = next(engine.module.parameters())
    x = torch.ones(2, WIDTH, dtype=parameter.dtype)

    def readings() -> dict[str, Tensor]:
        with torch.no_grad():
            found = {"forward": engine(x), **engine.state_dict()}
        with megazero.zero.GatheredParameters(parameter):
            found["gathered"] = parameter.detach().clone()
        return found

    before = readings()
    assert engine.offload_states(["optim_states", "hp_params", "lp_grads"]) > 0
    after = readings()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    engine.save_16bit_model(tmp_path)
    loss = engine(x).sum()
    if stage < 2:  # gradients are whole
        engine.backward(loss)
    with pytest.raises(UsageError, match="has optim_states" if stage < 2 else "has lp_grads"):
        engine.step() if stage < 2 else engine.backward(loss)
    engine.reload_states()
    if stage < 2:
        engine.step()
    train(engine, 1)


def test_a_call_is_refused_for_the_kinds_that_it_needs(tmp_path: Path) -> None:
    engine = make_engine(3)
    train(engine, 0)
    parameter, state = next(engine.module.parameters()), engine.state_dict()

    def modify() -> None:
        with megazero.zero.GatheredParameters(parameter, modifier_rank=0):
            pass

    needed: dict[str, tuple[str, Callable[[], object]]] = {
        "set_master": ("hp_params, lp_params", lambda: safe_set_full_fp32_param(parameter, torch.zeros(WIDTH, WIDTH))),
        "modify": ("hp_params, lp_params", modify),
        "load": ("hp_params, lp_params", lambda: engine.load_state_dict(state)),
        "master": ("hp_params", lambda: safe_get_full_fp32_param(parameter)),
        "save": ("optim_states, hp_params", lambda: engine.save_checkpoint(tmp_path)),
        "save_working": ("lp_params", lambda: engine.save_16bit_model(tmp_path)),
        "save_masters": ("hp_params", lambda: engine.save_fp32_model(tmp_path)),
        "moment": ("optim_states", lambda: safe_get_local_optimizer_state(parameter, "exp_avg")),
        "forward": ("lp_params", lambda: engine(torch.ones(2, WIDTH, dtype=torch.bfloat16))),
    }
    for kind in ALL:
        engine.offload_states([kind])
        for name, (kinds, call) in needed.items():
            if kind in kinds:
                with pytest.raises(UsageError, match=f"has {kind} in host memory") as caught:
                    call()
                assert "reload_states" in str(caught.value), name
            else:
                call()
        engine.reload_states()
        assert not list(tmp_path.glob("*.tmp")), "a file that a refused call has begun"


def test_what_needs_the_states_is_refused_until_they_are_back(tmp_path: Path) -> None:
    engine = make_engine(3)
    train(engine, 0)
    engine.offload_states()
    parameter = next(engine.module.parameters())
    for call in (
        lambda: train(engine, 1),
        lambda: engine.save_checkpoint(tmp_path),
        lambda: safe_get_full_fp32_param(parameter),
        lambda: engine.state_dict(),
    ):
        with pytest.raises(UsageError, match="reload_states"):
            call()
    engine.reload_states()
    train(engine, 1)


def test_what_cannot_leave_is_said() -> None:
    engine = make_engine(2, offload_optimizer="cpu")
    assert engine.offload_states() == 0, "their home is host memory"
    with pytest.raises(UsageError, match="lp_weights"):
        engine.offload_states(["lp_weights"])
    with pytest.warns(UserWarning, match="moves nothing"):
        assert make_engine(2).offload_states(device="none") == 0
    with pytest.raises(UsageError, match="nvme"):
        engine.offload_states(device="nvme")
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).sum())
    with pytest.raises(UsageError, match="between a backward pass"):
        engine.offload_states()
