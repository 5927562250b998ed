"""Moments in 8 bits: every stage and number of processes takes bitsandbytes' steps on the plain module, to the bit.

Sums over processes are exact here, since all of them have the same samples and their number is a power of two.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.config.optimizers import EIGHT_BIT_BLOCK, OPTIMIZERS
from megazero.errors import ConfigError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.state.access import safe_get_full_optimizer_state, safe_set_full_optimizer_state
from megazero.optim.eight_bit import KERNELS
from megazero.zero.parameters.gathered import GatheredParameters

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the reference is bitsandbytes itself")

STEPS = 5
OPTIONS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "AdamW8bit": {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2},
        "Adam8bit": {"betas": (0.85, 0.9), "weight_decay": 0.1},
        "Lion8bit": {"betas": (0.8, 0.95), "weight_decay": 0.1},
    }
)
LR = 0.01


class Odd(nn.Module):
    """Parameters that end within a block, at its end, of one element, frozen, and without a gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(37, 64)
        self.scale = nn.Parameter(torch.ones(()))
        self.sometimes = nn.Parameter(torch.randn(300))
        self.fixed = nn.Parameter(torch.randn(300), requires_grad=False)
        self.last = nn.Linear(64, 19)

    def forward(self, x: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.scale
        found = self.last(hidden) + self.fixed.sum() / 100
        return found + self.sometimes[:19] if step in (1, 3, 4) else found


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(8, 37, generator=generator)
    return x, torch.randn(8, 19, generator=generator)


def loss_of(model: Callable[..., Tensor], step: int) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x, step), y)


def published(kind: str) -> Any:
    """Return a class of bitsandbytes, which is slow to import, so that no other test waits for it."""
    return getattr(import_module("bitsandbytes").optim, kind)


def plain(kind: str, steps: int = STEPS) -> tuple[nn.Module, Any]:
    model = Odd()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = published(kind)(trained, lr=LR, min_8bit_size=1, **OPTIONS[kind])
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model, optimizer


def moments_of(optimizer: Any, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the moments of bitsandbytes' optimizer, as its state has them, in float32."""
    state = optimizer.state[parameter]
    found = {}
    for kind, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
        if f"state{number}" in state:
            codes, maxima = state[f"state{number}"], state[f"absmax{number}"]
            values = state[f"qmap{number}"][codes.int().flatten()]
            found[kind] = (values * maxima.repeat_interleave(256)[: values.numel()]).view(codes.shape)
    return found


def config(kind: str, stage: int, **zero: Any) -> dict[str, Any]:
    sizes = {"zero_stage": stage, "reduce_bucket_size": 1024, "param_persistence_threshold": 0, **zero}
    return {
        "zero": sizes,
        "precision": {"precision": "fp32"},
        "gradient_clipping": 0.0,
        "optimizer": {"type": kind, "lr": LR, "params": OPTIONS[kind]},
    }


def engine_of(kind: str, stage: int, rank: int = 0, dp: int = 1, **zero: Any) -> DataParallelEngine:
    mesh = mesh_in_worker(rank, dp=dp) if dp > 1 else None
    return megazero.initialize(Odd(), config(kind, stage, **zero), mesh=mesh)


def train(engine: DataParallelEngine, steps: range = range(STEPS)) -> None:
    for step in steps:
        engine.backward(loss_of(engine, step))
        engine.step()


def state_of(engine: DataParallelEngine, kind: str) -> dict[str, Tensor]:
    """Return weights by name, and moments by name and kind."""
    moments = KERNELS[kind][1]
    found = {
        f"{name} {moment}": safe_get_full_optimizer_state(p, moment)
        for name, p in engine.module.named_parameters()
        for moment in (moments if p.requires_grad else ())
    }
    with GatheredParameters(engine.module):
        return {name: p.detach().clone() for name, p in engine.module.named_parameters()} | found


def train_on_rank(rank: int, kind: str, stage: int, dp: int, zero: Mapping[str, Any]) -> dict[str, Tensor]:
    engine = engine_of(kind, stage, rank, dp, **zero)
    train(engine)
    found = state_of(engine, kind)
    engine.close()
    return found


def check_equal(found: dict[str, Tensor], kind: str) -> None:
    model, optimizer = plain(kind)
    for name, parameter in model.named_parameters():
        assert torch.equal(found.pop(name), parameter), name
        for moment, value in moments_of(optimizer, parameter).items() if parameter.requires_grad else ():
            assert torch.equal(found.pop(f"{name} {moment}"), value), (name, moment)
    assert not found


def test_every_kernel_is_tried() -> None:
    in_table = {kind for kind, optimizer in OPTIMIZERS.items() if optimizer.package}
    assert OPTIONS.keys() == KERNELS.keys() == in_table


@each("kind", list(OPTIONS))
@each("stage", range(4))
def test_one_process(kind: str, stage: int) -> None:
    check_equal(train_on_rank(0, kind, stage, 1, {}), kind)


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "dp"), [("AdamW8bit", 2), ("AdamW8bit", 4), ("Lion8bit", 2)])
def test_processes(kind: str, dp: int) -> None:
    for stage in range(4):
        for found in run_ranks(dp, train_on_rank, kind, stage, dp, {}):
            check_equal(found, kind)


@each("zero", [{"sub_group_size": 300}, {"contiguous_gradients": False}, {"reduce_bucket_size": 1 << 20}])
def test_cuts_and_buffers_change_nothing(zero: dict[str, Any]) -> None:
    for stage in (1, 2, 3):
        check_equal(train_on_rank(0, "AdamW8bit", stage, 1, zero), "AdamW8bit")


@each("stage", [1, 3])
def test_in_host_memory(stage: int) -> None:
    moved = {"offload_optimizer": "cpu", "offload_optimizer_ratio": 0.5}
    check_equal(train_on_rank(0, "AdamW8bit", stage, 1, moved), "AdamW8bit")
    late = {"offload_optimizer": "cpu", "delayed_parameter_update": True}
    assert train_on_rank(0, "AdamW8bit", stage, 1, late).keys()


@each("kind", list(OPTIONS))
def test_their_bytes(kind: str) -> None:
    """A code of one byte for each element, and a float32 for each block, of every parameter's own blocks."""
    engine = engine_of(kind, 2)
    blocks = sum(-(-p.numel() // EIGHT_BIT_BLOCK) for p in Odd().parameters() if p.requires_grad)
    found = engine.zero_engine.model_state_bytes().moments
    assert found == len(KERNELS[kind][1]) * blocks * (EIGHT_BIT_BLOCK + 4)
    engine.close()


def save(rank: int, kind: str, stage: int, dp: int, folder: Path, steps: int) -> None:
    engine = engine_of(kind, stage, rank, dp)
    train(engine, range(steps))
    engine.save_checkpoint(str(folder))
    engine.close()


def go_on(rank: int, kind: str, stage: int, dp: int, folder: Path, steps: int) -> dict[str, Tensor]:
    engine = engine_of(kind, stage, rank, dp)
    engine.load_checkpoint(str(folder))
    train(engine, range(steps, STEPS))
    found = state_of(engine, kind)
    engine.close()
    return found


@each("kind", list(OPTIONS))
def test_it_goes_on_where_it_was_saved(kind: str, tmp_path: Path) -> None:
    save(0, kind, 2, 1, tmp_path / kind, 2)
    check_equal(go_on(0, kind, 2, 1, tmp_path / kind, 2), kind)


@pytest.mark.gloo
def test_it_goes_on_at_another_number_of_processes(tmp_path: Path) -> None:
    run_ranks(2, save, "AdamW8bit", 3, 2, tmp_path / "two", 2)
    check_equal(go_on(0, "AdamW8bit", 1, 1, tmp_path / "two", 2), "AdamW8bit")
    save(0, "AdamW8bit", 0, 1, tmp_path / "one", 2)
    for found in run_ranks(2, go_on, "AdamW8bit", 2, 2, tmp_path / "one", 2):
        check_equal(found, "AdamW8bit")


def test_adamw_goes_on_from_it_and_it_from_adamw(tmp_path: Path) -> None:
    save(0, "AdamW8bit", 1, 1, tmp_path, 2)
    settings = {**config("AdamW8bit", 2), "optimizer": {"type": "AdamW", "lr": LR, "params": OPTIONS["AdamW8bit"]}}
    engine = megazero.initialize(Odd(), settings)
    engine.load_checkpoint(str(tmp_path))
    _, optimizer = plain("AdamW8bit", steps=2)
    saved = [moments_of(optimizer, p) for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    for p, moments in zip(trained, saved, strict=True):
        for kind, value in moments.items():
            assert torch.equal(safe_get_full_optimizer_state(p, kind), value)
    train(engine, range(2, 3))
    before = state_of(engine, "AdamW8bit")
    engine.save_checkpoint(str(tmp_path / "wide"))
    engine.close()
    narrow = engine_of("AdamW8bit", 1)
    narrow.load_checkpoint(str(tmp_path / "wide"))
    for name, value in state_of(narrow, "AdamW8bit").items():
        tolerance = 0.01 * float(value.abs().max()) if " exp_avg" in name else 0.0
        torch.testing.assert_close(value, before[name], rtol=0, atol=tolerance, msg=name)
    narrow.close()


def test_moments_are_set_and_read_again() -> None:
    engine = engine_of("AdamW8bit", 2)
    train(engine, range(2))
    weight = engine.module.first.weight
    moment = safe_get_full_optimizer_state(weight, "exp_avg")
    safe_set_full_optimizer_state(weight, moment, "exp_avg")
    assert torch.equal(safe_get_full_optimizer_state(weight, "exp_avg"), moment)
    safe_set_full_optimizer_state(weight, torch.zeros_like(moment), "exp_avg")
    assert not safe_get_full_optimizer_state(weight, "exp_avg").any()
    state = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(state)
    assert torch.equal(engine.optimizer.state_dict()["state"][0]["exp_avg_sq"], state["state"][0]["exp_avg_sq"])
    engine.close()


def test_what_does_not_combine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_files = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW8bit"}}
    in_files["zero_optimization"] |= {"offload_optimizer": {"device": "nvme", "nvme_path": "."}}
    with pytest.raises(ConfigError, match=r"optimizer.type AdamW8bit with (?s:.*)nvme(?s:.*)a maximum for each block"):
        megazero.initialize(Odd(), in_files)
    with pytest.raises(ConfigError, match=r"AdamW8bit(?s:.*)for moments in 8 bits, optimizer.type AdamW8bit"):
        megazero.initialize(Odd(), {"zero": {"zero_stage": 1}}, optimizer=published("AdamW8bit"))
    monkeypatch.setattr("megazero.rules.states.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"is not installed(?s:.*)pip install 'megazero\[bitsandbytes\]', or AdamW"):
        megazero.initialize(Odd(), config("AdamW8bit", 1))
