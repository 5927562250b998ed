"""Tests of frozen parameters that are stored as blocks of integers: values, training, memory, traffic, checkpoints."""

import copy
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.parallel.nodes import Nodes

FROZEN = {"zero_quantized_nontrainable_weights": True}
WIDTH, SAMPLES, STEPS = 13, 8, 4


class Adapted(nn.Module):
    """Frozen layers, one of them used twice, beside small ones that are trained; sizes divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 61)
        self.down, self.up = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, 61, bias=False)
        self.twice = nn.Linear(61, 61)
        self.factor = nn.Parameter(torch.tensor([0.7]))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.last = nn.Linear(61, 2)
        for frozen in (*self.base.parameters(), *self.twice.parameters(), self.factor, self.nothing):
            frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x) + self.factor * self.up(self.down(x))
        y: Tensor = self.last(torch.tanh(self.twice(torch.tanh(self.twice(x)))))
        return y


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(11)
    return Adapted().to(dtype)


def rounded(value: Tensor, block: int = 256) -> Tensor:
    """Round a parameter by the format's definition, a block after the other."""
    flat = value.flatten().to(torch.float64 if value.dtype is torch.float64 else torch.float32)
    out = []
    for numbers in flat.split(block) if flat.numel() else ():
        scale = (numbers.abs().max() / 127).clamp(min=2.0**-126).float()
        out.append((numbers / scale).round() * scale)
    return torch.cat([*out, flat[:0]]).view(value.shape).to(value.dtype)


def is_frozen(name: str) -> bool:
    return name.startswith(("base", "twice", "factor", "nothing"))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=dtype)


ADAMW = {"type": "AdamW", "lr": 0.02, "params": {"weight_decay": 0.1}}


def make_engine(rank: int, size: int, precision: str = "fp64", **zero: Any) -> DataParallelEngine:
    """Make an engine of ranks that are two to a node."""
    config = {"zero": {"zero_stage": 3, **FROZEN, **zero}, "precision": {"precision": precision}, "optimizer": ADAMW}
    per_node = min(size, 2)
    job = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    mesh = mesh_in_worker(rank, dp=size, nodes=Nodes((per_node,) * (size // per_node)))
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with patch.dict(os.environ, {name: str(value) for name, value in job.items()}):
        return megazero.initialize(make_model(dtype), config, mesh=mesh)


def take_steps(engine: DataParallelEngine, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step, rank)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def trained(rank: int, size: int, zero: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    engine = make_engine(rank, size, **zero)
    losses = take_steps(engine, rank, range(STEPS))
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return losses, weights


def plain_training(size: int, block: int) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train in plain PyTorch, with rounded values of what is frozen; return every rank's losses, and the weights."""
    model = make_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_frozen(name):
                parameter.copy_(rounded(parameter, block))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02, weight_decay=0.1)
    losses: list[list[float]] = [[] for _ in range(size)]
    for step in range(STEPS):
        optimizer.zero_grad()
        each_rank = [model(batch(step, rank)).square().mean() for rank in range(size)]
        torch.stack(each_rank).mean().backward()
        optimizer.step()
        for own, loss in zip(losses, each_rank, strict=True):
            own.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.gloo
@each(
    ("size", "zero"),
    [
        (1, {}),
        (2, {}),
        (4, {}),
        (2, {"zero_quantized_block_size": 16, "reduce_bucket_size": 500}),
        (2, {"max_live_parameters": 0, "prefetch_bucket_size": 0, "param_persistence_threshold": 62}),
        (4, {"hierarchical_collectives": True}),
        (4, {"zero_hpz_partition_size": 2, "mics_shard_size": 2}),
        (2, {"offload_optimizer": "cpu"}),
        (2, {"offload_param": "cpu", "offload_optimizer": "cpu"}),
        (4, {"offload_param": "cpu", "zero_hpz_partition_size": 2, "hierarchical_collectives": True}),
    ],
)
def test_training_is_that_of_a_plain_model_with_rounded_values(size: int, zero: dict[str, Any]) -> None:
    block = zero.get("zero_quantized_block_size", 256)
    expected, weights = plain_training(size, block)
    kept_whole = zero.get("param_persistence_threshold", 0)
    for rank, (losses, found) in enumerate(run_ranks(size, trained, size, zero)):
        if not kept_whole:  # what stays whole on every rank is not rounded
            assert losses == pytest.approx(expected[rank], rel=1e-9)
        assert found.keys() == weights.keys()
        for name, value in weights.items():
            if is_frozen(name) and value.numel() < kept_whole:
                assert torch.equal(found[name], make_model().state_dict()[name]), name
            elif is_frozen(name):
                assert torch.equal(found[name], value), name
            elif not kept_whole:
                assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name


@pytest.mark.gloo
@each(
    "zero",
    [
        {**FROZEN},
        {"zero_quantized_nontrainable_weights": False, "zero_quantized_weights": True},
        {"zero_quantized_nontrainable_weights": False, "hierarchical_collectives": True},
        {**FROZEN, "zero_quantized_weights": True, "hierarchical_collectives": True, "zero_quantized_gradients": True},
    ],
)
def test_wires_have_room_for_frozen_buckets_that_are_larger_than_trained_ones(zero: dict[str, Any]) -> None:
    """Every wire's buffers hold the largest bucket that it gathers, of the layer that is not trained."""
    for losses, _ in run_ranks(4, trained, 4, zero):
        assert losses[-1] < losses[0]


def stored(rank: int, size: int, precision: str) -> tuple[dict[str, Tensor], int, int, int, int]:
    """Return weights, the bytes of parameters and of a forward's gathers, and both as formulas have them."""
    engine = make_engine(rank, size, precision)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    core = engine.zero_engine
    itemsize = next(engine.module.parameters()).element_size()
    held_by_formula, gathered = 0, 0
    for section in core.layout.sections:
        for own in (bucket.numel // size for bucket in section.buckets):
            nbytes = own * itemsize if section.trainable else own + 4 * (own // 256)
            held_by_formula += nbytes
            gathered += nbytes * (2 if section.unit == "twice" else 1)
    engine.mesh.meter.reset()
    engine.eval()
    with torch.no_grad():
        engine(batch(0, rank, next(engine.module.parameters()).dtype))
    sent = engine.mesh.meter.bytes_by_axis()["dp"]["all_gather"]
    found = core.model_state_bytes().parameters
    engine.close()
    return weights, found, sent, held_by_formula, (size - 1) * gathered


@pytest.mark.gloo
@each("precision", ["fp64", "fp32", "bf16"])
@each("size", [1, 2, 4])
def test_what_is_stored_and_sent(size: int, precision: str) -> None:
    """A number of a frozen parameter takes a byte, and a block four more, in memory and on the wire."""
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    expected = make_model(dtype).state_dict()
    for weights, held, sent, by_formula, sent_by_formula in run_ranks(size, stored, size, precision):
        assert (held, sent) == (by_formula, sent_by_formula)
        for name, value in expected.items():
            wanted = rounded(value) if is_frozen(name) else value
            assert torch.equal(weights[name], wanted), name


def written(rank: int, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Write to two frozen parameters; return what the next gather has, and what was written."""
    engine = make_engine(rank, size)
    module: Any = engine.module
    chosen = [module.twice.weight, module.factor]
    values = [torch.randn(p.ds_shape, generator=torch.Generator().manual_seed(3)).double() for p in chosen]
    with megazero.zero.GatheredParameters(chosen, modifier_rank=0), torch.no_grad():
        if engine.mesh.axis("dp").rank == 0:
            for parameter, value in zip(chosen, values, strict=True):
                parameter.copy_(value)
    found = [engine.state_dict()[name].clone() for name in ("twice.weight", "factor")]
    take_steps(engine, rank, range(1))
    engine.close()
    return found, values


@pytest.mark.gloo
@each("size", [1, 2])
def test_what_a_user_writes_is_rounded(size: int) -> None:
    for found, values in run_ranks(size, written, size):
        assert all(torch.equal(one, rounded(value)) for one, value in zip(found, values, strict=True))


def saved(rank: int, size: int, folder: Path) -> dict[str, Tensor]:
    engine = make_engine(rank, size)
    take_steps(engine, rank, range(2))
    engine.save_checkpoint(folder)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return weights


def loaded(rank: int, size: int, folder: Path) -> list[dict[str, Tensor]]:
    """Return the weights after a load, and once more after saving and loading them again."""
    engine = make_engine(rank, size, zero_quantized_block_size=256)
    found = []
    for source in (folder, folder / f"again{size}"):
        engine.load_checkpoint(source)
        found.append({name: value.clone() for name, value in engine.state_dict().items()})
        engine.save_checkpoint(folder / f"again{size}")
    engine.close()
    return found


@pytest.mark.gloo
def test_a_checkpoint_is_read_as_it_was_written_by_any_number_of_ranks(tmp_path: Path) -> None:
    weights = run_ranks(2, saved, 2, tmp_path)[0]
    for size in (1, 2, 4):
        for found in run_ranks(size, loaded, size, tmp_path)[0]:
            assert all(torch.equal(found[name], value) for name, value in weights.items())


def interrupted(rank: int) -> list[bool]:
    """Write to state that a load wants, and never end it; the next load is of one parameter."""
    engine = make_engine(rank, 2)
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    for fragment in engine.zero_engine.wanted_state():
        if fragment.spec.name.startswith("base"):
            fragment.tensor.fill_(5.0)
    engine.load_state_dict({**before, "twice.bias": torch.ones_like(before["twice.bias"])})
    after = engine.state_dict()
    same = [torch.equal(after[name], value) for name, value in before.items() if name != "twice.bias"]
    same.append(bool((after["twice.bias"] - 1).abs().max() < 1e-6))  # 127 times the scale, which is a float32
    engine.close()
    return same


@pytest.mark.gloo
def test_a_load_that_failed_leaves_nothing() -> None:
    assert all(all(same) for same in run_ranks(2, interrupted))


def frozen_alone(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the output of a model whose parameters are all frozen, and that of plain PyTorch."""
    model = make_model().requires_grad_(False)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(rounded(parameter))
    config = {"zero": {"zero_stage": 3, **FROZEN}, "precision": {"precision": "fp64"}}
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=size))
    with torch.no_grad():
        found, expected = engine(batch(0, rank)), plain(batch(0, rank))
        engine.offload_states()
        engine.reload_states()
        assert torch.equal(engine(batch(0, rank)), found)
    engine.close()
    return found, expected


@pytest.mark.gloo
@each("size", [1, 2])
def test_everything_may_be_frozen(size: int) -> None:
    for found, expected in run_ranks(size, frozen_alone, size):
        assert torch.equal(found, expected)


def test_a_model_without_frozen_parameters_is_told() -> None:
    config = {"zero": {"zero_stage": 3, **FROZEN}, "precision": {"precision": "fp64"}, "optimizer": ADAMW}
    with pytest.warns(UserWarning, match="moot here, because every parameter is trained"):
        megazero.initialize(nn.Linear(3, 2).double(), config).close()


@each(
    ("zero", "said"),
    [
        ({"zero_stage": 2, **FROZEN}, "zero_quantized_nontrainable_weights"),
        ({"zero_stage": 3, **FROZEN, "offload_param": "nvme", "nvme_path": "/tmp"}, "are in memory"),
        ({"zero_stage": 3, **FROZEN, "zero_quantized_block_size": 100}, "a power of two"),
    ],
)
def test_what_does_not_go_together_is_refused(zero: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        megazero.initialize(make_model(), {"zero": zero, "optimizer": ADAMW})
