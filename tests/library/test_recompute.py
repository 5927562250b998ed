"""Tests `megazero.recompute` in a user's model, under configurations that set how its checkpoints are kept."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.activations.copy_stores import ArenaStore, HostStore
from megazero.errors import ConfigError, UsageError

DEPTH, WIDTH, ROWS, STEPS = 4, 10, 7, 3


class Trained(NamedTuple):
    """The losses and weights of a run, and the effects of its configuration: bytes, and the names of timed events."""

    losses: list[float]
    weights: dict[str, Tensor]
    sent_to_host: int
    arena_bytes: int
    tensor_parallel_bytes: int
    timed: set[str]


class Tower(nn.Module):
    """A model of layers with dropout, with a mask among its inputs and one matrix that all layers use."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.shared = nn.Parameter(torch.eye(WIDTH) / 2)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = F.gelu(x @ self.shared)
        for layer in self.layers:
            x = megazero.recompute(self.step, layer, x, keep=keep) if self.recomputes else self.step(layer, x, keep)
        return x.square().mean()

    def step(self, layer: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
        inner = F.dropout(F.gelu(layer(x @ self.shared)), 0.2, self.training)
        return x + inner.masked_fill(~keep, 0.0)


def train(rank: int, layout: tuple[int, int], config: dict[str, Any], recomputes: bool) -> Trained:
    tp, dp = layout
    torch.manual_seed(3)
    mesh = mesh_in_worker(rank, tp=tp, dp=dp)
    model = Tower(recomputes=recomputes)
    engine = megazero.initialize(model, config, mesh=mesh)
    generator = torch.Generator().manual_seed(5)
    losses = []
    for step in range(STEPS):
        x = torch.randn(2 * ROWS, WIDTH, generator=generator).chunk(dp)[mesh.coordinate("dp")]
        torch.manual_seed(100 + step)
        loss = engine(x, (x[:, :1] > -1.0).clone())
        engine.backward(loss)
        mesh_bytes = mesh.meter.bytes_by_axis().get("tp", {}).get("all_gather", 0)
        engine.step()
        losses.append(loss.item())
    with megazero.zero.GatheredParameters(model):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    copies = engine._recomputation.checkpoints.copies
    device_store = copies.device_store if isinstance(copies, HostStore) else copies
    timed = set(engine.take_checkpoint_seconds())
    engine.close()
    return Trained(
        losses,
        weights,
        sent_to_host=copies.host.sent_bytes if isinstance(copies, HostStore) else 0,
        arena_bytes=device_store.arena.statistics.capacity_bytes
        if isinstance(device_store, ArenaStore) and device_store.arena
        else 0,
        tensor_parallel_bytes=mesh_bytes,
        timed=timed,
    )


def own(stage: int, **activations: Any) -> dict[str, Any]:
    return {"zero": {"zero_stage": stage}, "optimizer": {"type": "AdamW", "lr": 1e-2}, "activations": activations}


@pytest.fixture(scope="module")
def trained_without() -> Callable[[int], list[Trained]]:
    """Return a function that trains without recomputation, once for every stage."""
    return functools.cache(lambda stage: run_ranks(4, train, (2, 2), own(stage), False))


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    "activations",
    [
        {},
        {"partition_activations": True},
        {"checkpoint_in_cpu": True, "profile_backward": True},
        {"partition_activations": True, "contiguous_checkpointing": True},
        {"partition_activations": True, "contiguous_checkpointing": True, "checkpoint_in_cpu": True},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_the_same_bits_as_without(
    stage: int, activations: dict[str, Any], trained_without: Callable[[int], list[Trained]]
) -> None:
    plain = trained_without(stage)
    found = run_ranks(4, train, (2, 2), own(stage, **activations), True)
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.losses == theirs.losses
        assert all(torch.equal(ours.weights[name], theirs.weights[name]) for name in theirs.weights)
        assert ours.timed == (
            {"checkpoint-forward", "checkpoint-recompute"} if "profile_backward" in activations else set()
        )
        assert (ours.sent_to_host > 0) == ("checkpoint_in_cpu" in activations)
        assert (ours.arena_bytes > 0) == ("contiguous_checkpointing" in activations)
        gathers = STEPS * DEPTH * (ROWS * WIDTH * 4 // 2) if "partition_activations" in activations else 0
        assert ours.tensor_parallel_bytes == gathers
        assert theirs.timed == set() and theirs.sent_to_host == theirs.tensor_parallel_bytes == 0


@pytest.mark.gloo
def test_deepspeed_names() -> None:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "activation_checkpointing": {
            "partition_activations": True,
            "cpu_checkpointing": True,
            "contiguous_memory_optimization": True,
            "number_checkpoints": DEPTH,
            "synchronize_checkpoint_boundary": True,
            "profile": True,
        },
    }
    found = run_ranks(2, train, (2, 1), config, True)[0]
    plain = run_ranks(2, train, (2, 1), {**config, "activation_checkpointing": {}}, False)[0]
    assert found.losses == plain.losses
    assert found.sent_to_host == STEPS * DEPTH * 2 * ROWS * WIDTH * 4 // 2
    assert found.arena_bytes > 0 and found.tensor_parallel_bytes > 0 and found.timed


def test_auto_is_for_runs_whose_sizes_are_known() -> None:
    with pytest.raises(ConfigError, match="known before the model runs"):
        megazero.initialize(Tower(recomputes=True), own(1, partition_activations="auto"))
    foreign = {"activation_checkpointing": {"cpu_checkpointing": "auto"}, "train_batch_size": 4}
    with pytest.raises(ConfigError, match="known before the model runs"):
        megazero.initialize(Tower(recomputes=True), foreign)


@pytest.mark.parametrize(
    "config",
    [
        {"zero": {"zero_stage": 3, "offload_param": "auto"}},
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}, "train_batch_size": 4},
    ],
)
def test_homes_are_left_to_runs_too(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"known before the model runs\n.*megazero\.plan shows"):
        megazero.initialize(Tower(recomputes=True), config)


def differing(rank: int) -> str:
    """Return the error's message when the tensor-parallel ranks have been given different data."""
    engine = megazero.initialize(
        Tower(recomputes=True), own(1, partition_activations=True), mesh=mesh_in_worker(rank, tp=2)
    )
    with pytest.raises(UsageError) as raised:
        engine(torch.full((ROWS, WIDTH), float(rank)), torch.ones(ROWS, 1, dtype=torch.bool))
    engine.close()
    return str(raised.value)


@pytest.mark.gloo
def test_inputs_that_differ_between_tensor_parallel_ranks_are_refused() -> None:
    for message in run_ranks(2, differing):
        assert "differs between tensor-parallel ranks" in message


class Probing(nn.Module):
    """A model that keeps a figure on rank 0, so that a part of its graph outlives that of the other ranks."""

    def __init__(self, keeps: bool, probes: str) -> None:
        super().__init__()
        self.first, self.probe, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.keeps, self.probes = keeps, probes
        self.log: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        inside = megazero.recompute(self.part, x)
        if self.probes == "between":
            self.note(megazero.recompute(self.probe, inside * 2))
        return megazero.recompute(self.last, inside * 3).square().mean()

    def part(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        if self.probes == "inside":
            self.note(self.probe(y).tanh())
        return y

    def note(self, figure: Tensor) -> None:
        if self.keeps:
            self.log.append(figure.mean())


def probe(rank: int, layout: tuple[int, int], probes: str) -> float:
    torch.manual_seed(0)
    model = Probing(rank == 0, probes)
    config = own(3 if layout[1] > 1 else 1, partition_activations=layout[0] > 1)
    engine = megazero.initialize(model, config, mesh=mesh_in_worker(rank, tp=layout[0], dp=layout[1]))
    for _ in range(2):
        model.log.clear()
        loss = engine(torch.ones(2, 6))
        engine.backward(loss)
        engine.step()
    engine.close()
    return float(loss.item())


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [(1, 2), (2, 1)])
@pytest.mark.parametrize("probes", ["inside", "between"])
def test_ranks_communicate_alike_whatever_they_keep(layout: tuple[int, int], probes: str) -> None:
    assert len(set(run_ranks(2, probe, layout, probes, timeout=20))) == 1
