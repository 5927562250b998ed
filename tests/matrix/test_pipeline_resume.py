"""Tests runs of the program that are stopped and resumed in other layouts, twice: no step and no state is lost."""

import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import run_ranks
from support.small_runs import train_run
from support.training import max_relative

from megazero.checkpoint.reader import open_checkpoint

BOUND = 1e-9
PART, STEPS = 1, 3
SETTINGS = {
    "num_layers": 4,
    "global_batch_size": 8,
    "train_iters": STEPS,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "clip_grad": 0.5,
    "weight_decay": 0.1,
}


class Leg(NamedTuple):
    """The layout of one part of a run."""

    tp: int
    pp: int
    dp: int
    stage: int
    settings: dict[str, Any] = {}  # noqa: RUF012 - never written to

    @property
    def size(self) -> int:
        return self.tp * self.pp * self.dp


TURNS = {"num_layers_per_virtual_pipeline_stage": 1}
SPLIT = {"sequence_parallel": True}
CHAINS = [
    (Leg(2, 1, 2, 2), Leg(1, 4, 1, 0, {"pipeline_schedule": "gpipe"}), Leg(2, 1, 2, 3, SPLIT)),
    (Leg(1, 2, 2, 3, {"zero3_reshard_after": "window"}), Leg(4, 1, 1, 1), Leg(1, 2, 2, 2)),
    (Leg(2, 2, 1, 1, TURNS), Leg(1, 1, 4, 3), Leg(2, 2, 2, 0, {"pipeline_schedule": "zero-bubble", **SPLIT})),
]


def reason_of_run(rank: int, size: int, settings: dict[str, Any]) -> str:
    return train_run(rank, size, settings).reason


def run_leg(leg: Leg, folder: Path, until: int) -> None:
    """Resume from the last checkpoint in the folder, if there is one, and stop after `until` steps with another."""
    settings = {
        **SETTINGS,
        "tensor_model_parallel_size": leg.tp,
        "pipeline_model_parallel_size": leg.pp,
        "zero_stage": leg.stage,
        "micro_batch_size": 2 if leg.dp < 4 else 1,
        "save": str(folder / "save"),
        "load": str(folder / "save"),
        "metrics_file": str(folder / "m.jsonl"),
        "exit_interval": until,
        **leg.settings,
    }
    reasons = run_ranks(leg.size, reason_of_run, leg.size, settings)
    expected = "exit interval" if until < STEPS else "finished"
    assert all(reason.startswith(expected) for reason in reasons), reasons


def figures(folder: Path) -> tuple[list[float], list[float]]:
    """Return the losses and gradient norms of all steps."""
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], list[float]]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_leg(Leg(1, 1, 1, 0), folder, STEPS)
    return figures(folder)


@pytest.mark.gloo
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_run_goes_on_in_another_layout(
    chain: tuple[Leg, ...], uninterrupted: tuple[list[float], list[float]], tmp_path: Path
) -> None:
    for before, after in itertools.pairwise(chain):
        assert all(ours != theirs for ours, theirs in zip(before[:4], after[:4], strict=True)), "everything changes"
    for number, leg in enumerate(chain, start=1):
        run_leg(leg, tmp_path, number * PART)
        check_words(tmp_path / "save", number * PART)
    losses, norms = figures(tmp_path)
    assert max_relative(losses, uninterrupted[0]) < BOUND
    assert max_relative(norms, uninterrupted[1]) < BOUND


def check_words(root: Path, step: int) -> None:
    """Check that the tied matrix is stored once and whole: for every kind of state, boxes cover each element once."""
    checkpoint = open_checkpoint(root)
    assert checkpoint.step == step
    entries = [entry for entry in checkpoint.manifest.tensors if entry.parameter == "embedding.word.weight"]
    assert sorted(entry.kind for entry in entries) == ["exp_avg", "exp_avg_sq", "weight"]
    for entry in entries:
        rows, width = entry.shape
        stored = [
            (box.offset[0] + row, box.offset[1] + column)
            for _, box in checkpoint.boxes()
            if (box.parameter, box.kind) == (entry.parameter, entry.kind)
            for row in range(box.lengths[0])
            for column in range(box.lengths[1])
        ]
        assert sorted(stored) == [(row, column) for row in range(rows) for column in range(width)]
    names = {entry.parameter for entry in checkpoint.manifest.tensors}
    assert not any(name.startswith("head") for name in names)
