"""Tests DeepSpeed's names of activation checkpointing: `configure` sets how `checkpoint` stores its inputs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import megazero
from megazero.activations.context import configure_recomputation, configured_recomputation
from megazero.activations.copy_stores import ArenaStore, HostStore
from megazero.deepspeed import checkpointing
from megazero.errors import ConfigError, UsageError

WIDTH = 6


@pytest.fixture(autouse=True)
def configured_by_no_other_test() -> Iterator[None]:
    yield
    configure_recomputation(None)


class Tower(nn.Module):
    """Layers with dropout, of which each is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpointing.checkpoint(self.run, x, layer=layer)
        return x.square().mean()

    def run(self, x: Tensor, layer: nn.Module) -> Tensor:
        self.calls += 1
        return x + torch.dropout(torch.tanh(layer(x)), 0.3, self.training)


def gradients(tower: Tower) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in tower.named_parameters() if p.grad is not None}


def outside_an_engine() -> dict[str, Tensor]:
    tower = Tower()
    torch.manual_seed(4)
    tower(torch.ones(2, WIDTH)).backward()
    assert tower.calls == 2 * len(tower.layers)
    return gradients(tower)


def inside_an_engine() -> dict[str, Tensor]:
    tower = Tower()
    engine = megazero.initialize(tower, {"zero": {"zero_stage": 0}, "optimizer": {"type": "SGD", "lr": 0.1}})
    for _ in range(2):  # the second forward fills the same memory again
        torch.manual_seed(4)
        engine.zero_grad()
        engine.backward(engine(torch.ones(2, WIDTH)))
    found = gradients(tower)
    engine.close()
    return found


@pytest.mark.parametrize("by_file", [True, False])
def test_configured_checkpoints_have_the_same_gradients(by_file: bool, tmp_path: Path) -> None:
    expected = outside_an_engine()
    assert not checkpointing.is_configured()
    checkpointing.reset()
    if by_file:
        path = tmp_path / "config.json"
        path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true}, "train_batch_size": 1}')
        checkpointing.configure(None, path)
    else:
        checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=3)
    assert checkpointing.is_configured()
    settings = configured_recomputation()
    assert settings is not None and isinstance(settings.checkpoints.copies, HostStore if by_file else ArenaStore)
    for found in (outside_an_engine(), inside_an_engine()):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        checkpointing.reset()


def test_arguments_replace_the_configuration() -> None:
    section = {"cpu_checkpointing": True, "contiguous_memory_optimization": True}
    checkpointing.configure(None, {"activation_checkpointing": section}, checkpoint_in_cpu=False, num_checkpoints=5)
    settings = configured_recomputation()
    assert settings is not None and isinstance(settings.checkpoints.copies, ArenaStore)


def test_what_has_no_meaning_here_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"configure\(profile=True\)"):
        checkpointing.configure(profile=True)
    with pytest.raises(UsageError, match="get_cuda_rng_tracker"):
        checkpointing.get_cuda_rng_tracker()
    with pytest.raises(UsageError, match="model_parallel_cuda_manual_seed"):
        checkpointing.model_parallel_cuda_manual_seed(3)
    with pytest.raises(ConfigError, match="number_checkpoints"):
        checkpointing.configure(num_checkpoints=0)
    assert not checkpointing.is_configured()
