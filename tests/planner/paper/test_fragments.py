"""Tests a training that ends for memory in pieces, and goes on where arenas are compacted."""

import pytest
import torch
from torch import nn

from megazero.errors import MemoryLimitError
from megazero.planner.dry.hollow import Hollow
from megazero.planner.paper.fragments import DEVICE_MIB, MIB, Tower, Trained, train

LIMIT = DEVICE_MIB * MIB


@pytest.fixture(scope="module")
def found() -> Trained:
    return train(defragments=True, limit=LIMIT)


def test_defragmentation_lets_a_training_go_on_that_fragments_end(found: Trained) -> None:
    assert found.compactions > 0 and found.outside == 0 and found.needed <= LIMIT
    # What ends computes nothing that is looked at, so it is run dry, as memory is the same then.
    with Hollow(), pytest.raises(MemoryLimitError, match="free in pieces"):
        train(defragments=False, limit=LIMIT)
    with Hollow(), pytest.raises(MemoryLimitError, match="free in pieces"):
        train(defragments=True, compacts=False, limit=LIMIT)
    with Hollow():
        dry = train(defragments=True, limit=LIMIT)
    assert dry._replace(losses=found.losses) == found
    # What is alive at once would fit in each case: it is the pieces that end them.
    plain, still = train(defragments=False), train(defragments=True, compacts=False)
    assert max(plain.alive, still.alive, found.alive) < 0.86 * LIMIT
    assert still.outside > 0 and still.compactions == plain.compactions == 0
    assert found.losses == plain.losses == still.losses


def test_losses_are_those_of_plain_torch(found: Trained) -> None:
    torch.manual_seed(1)
    model = Tower()
    batches = [torch.randn(length * 256, 256) for length in (4, 2, 6, 2, 5, 3)]
    assert all(isinstance(layer, nn.Linear) for layer in (*model.up, *model.down))
    losses = []
    for x in batches:
        for up, down in zip(model.up, model.down, strict=True):
            x = x + down(torch.nn.functional.gelu(up(x)))
        losses.append(x.square().mean().item())
    assert found.losses == pytest.approx(losses, rel=1e-6)
