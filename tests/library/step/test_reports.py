"""The times of an engine's steps are printed every `steps_per_print` steps, by either form of the configuration."""

from typing import Any

import pytest
import torch
from torch import nn

import megazero

OWN = {"optimizer": {"type": "AdamW", "lr": 0.1}, "zero": {"zero_stage": 1}, "steps_per_print": 2}
FOREIGN = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
}
EVERY = ["step", "optimizer", "forward-compute", "backward-compute", "grad-norm", "optimizer-inner-step"]


def lines_of(config: dict[str, Any], capsys: pytest.CaptureFixture[str], steps: int = 5) -> list[str]:
    """Train for some steps of two micro-batches; return what is printed."""
    engine = megazero.initialize(nn.Linear(3, 1), {**config, "gradient_accumulation_steps": 2})
    for _ in range(2 * steps):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    engine.close()
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    "config",
    [FOREIGN, {**OWN, "reports": {"timing_log_level": 2, "timing_log_option": "minmax"}}],
    ids=["deepspeed", "own"],
)
def test_both_forms_time_every_part(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(config, capsys)
    headings = [line for line in lines if not line.startswith("    ")]
    assert headings == [
        f"step {number}: milliseconds a step, over 2 steps, minimum and maximum of all ranks:" for number in (2, 4)
    ]
    parts = [line.split()[0] for line in lines if line.startswith("    ")]
    assert set(EVERY) <= set(parts[: len(parts) // 2]) == set(parts[len(parts) // 2 :])


def test_a_level_leaves_out_the_parts_above_it(capsys: pytest.CaptureFixture[str]) -> None:
    config = {**OWN, "reports": {"timing_log_level": 1, "timing_log_option": "max"}}
    _, *lines = lines_of(config, capsys, steps=2)
    assert [line.split()[0] for line in lines] == ["step", "all-grads-sync", "optimizer"]
    assert all(len(line.split()) == 2 for line in lines)


@pytest.mark.parametrize("reports", [{}, {"wall_clock_breakdown": False, "steps_per_print": float("inf")}], ids=str)
@pytest.mark.filterwarnings("ignore:config")
def test_without_either_nothing_is_printed(reports: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    foreign = {name: value for name, value in FOREIGN.items() if name != "wall_clock_breakdown"}
    assert lines_of({**foreign, **reports}, capsys) == []


def test_recomputed_parts_are_taken_beside_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """They are those of whole steps since the last call, whether or not steps are reported."""

    class Recomputing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return megazero.recompute(super().forward, x)

    for level in (0, 1):
        config = {**OWN, "activations": {"profile_backward": True}, "reports": {"timing_log_level": level}}
        if not level:
            del config["steps_per_print"]
        engine = megazero.initialize(Recomputing(3, 1), config)
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()
            assert engine.take_checkpoint_seconds().keys() == {"checkpoint-forward", "checkpoint-recompute"}
            assert engine.take_checkpoint_seconds() == {}
        engine.close()
    assert "checkpoint-recompute" in capsys.readouterr().err
