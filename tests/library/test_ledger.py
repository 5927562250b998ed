"""Tests that a program's ledger has the phases and the categories of an engine's step."""

import torch
from torch import nn

import megazero
from megazero.memory.ledger import Ledger


def test_a_ledger_has_the_phases_and_the_states_of_a_step() -> None:
    model = nn.Sequential(nn.Linear(3, 51), nn.Sigmoid(), nn.Linear(51, 1))
    numel = 3 * 51 + 51 + 51 + 1  # whole blocks: nothing is padded
    config = {"zero": {"zero_stage": 1}, "optimizer": {"type": "AdamW", "lr": 1e-3}, "gradient_accumulation_steps": 2}
    inputs = torch.ones(7, 3)
    with Ledger(torch.device("cpu")) as ledger:
        engine = megazero.initialize(model, config, ledger=ledger)
        ledger.reset()
        for is_plain in (False, True):
            loss = engine(inputs).square().mean()
            loss.backward() if is_plain else engine.backward(loss)
            engine.step()
        memory = ledger.take()
        assert memory is not None
        assert ledger.live_bytes()["moments"] == 2 * 4 * numel
        engine.close()
    passes = ["forward", "backward"]
    assert [mark.phase for mark in memory.timeline.phases] == [*passes, *passes, "reduce", "update"]
    assert memory.peaks["parameters"] == 4 * numel
    assert memory.peaks["activations"] >= 7 * 51 * 4  # the sigmoid's output at least
