"""Steps of --skip-train-iteration-range use up their samples and change nothing, beside the plain reference."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import run_ranks
from support.reference import Batch, History, Recipe, scheduled_rate
from support.reference import train as train_plainly
from support.small_runs import LENGTH, VOCAB, Told, tiny_run, train_run
from support.training import first_weights, max_relative

from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.journal import read_journal
from megazero.checkpoint.reader import open_checkpoint
from megazero.data.mock import MockSamples

RATES: dict[str, Any] = {"lr_decay_style": "linear", "lr_warmup_iters": 2, "lr_decay_iters": 7}
SKIPPED = {"skip_train_iteration_range": ["3-4", "6", "8-9"]}
TRAINED = (1, 2, 5, 7, 10, 11)


def run(folder: Path, *, size: int = 1, **settings: Any) -> Told:
    """Train a run of 11 steps, with its metrics in m.jsonl and its checkpoints in save/; return what rank 0 told."""
    places = {"metrics_file": str(folder / "m.jsonl"), "save": str(folder / "save"), "train_iters": 11}
    given = {**places, **RATES, **settings}
    return train_run(0, 1, given) if size == 1 else run_ranks(size, train_on_rank, size, given)[0]


def train_on_rank(rank: int, size: int, settings: dict[str, Any]) -> Told:
    return train_run(rank, size, settings)


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
    return [line for line in lines if "evaluation" not in line]


def evaluated(folder: Path) -> list[tuple[int, int]]:
    """Return the iteration and the samples consumed of every evaluation of validation."""
    found = [json.loads(line).get("evaluation") for line in (folder / "m.jsonl").read_text().splitlines()]
    return [(each["iteration"], each["consumed_samples"]) for each in found if each and each["split"] == "validation"]


def plainly(spans: Iterable[tuple[int, int]]) -> History:
    """Return the history of one update on each span of samples, with rates that only updates advance."""
    samples = MockSamples(VOCAB, LENGTH, 1234)
    rows = [torch.from_numpy(np.stack([samples.sample(k) for k in range(*span)])) for span in spans]

    def rate(update: int) -> float:
        return scheduled_rate(update, peak=1e-2, warmup=2, decay_steps=7, style="linear")

    batches = [Batch(each[:, :-1], each[:, 1:]) for each in rows]
    return train_plainly(first_weights(tiny_run()), batches, Recipe(rate))


def assert_is(folder: Path, expected: History, trained: tuple[int, ...], batch: int) -> None:
    found = steps(folder)
    assert [line["iteration"] for line in found] == [*trained]
    assert [line["consumed_samples"] for line in found] == [batch * step for step in trained]
    assert max_relative([line["loss"] for line in found], expected.losses) < 1e-9
    assert max_relative([line["grad_norm"] for line in found], expected.grad_norms) < 1e-9
    checkpoint = open_checkpoint(folder / "save")
    for name, weight in expected.weights.items():
        assert torch.allclose(checkpoint.read_full(name, "weight"), weight, rtol=1e-9, atol=1e-9), name
    progress = {"iteration": 11, "consumed_samples": 11 * batch, "consumed_tokens": 11 * batch * LENGTH}
    updates = {"optimizer_steps": len(trained), "update_samples": batch * len(trained)}
    assert {**progress, **updates}.items() <= checkpoint.progress.items()


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}),
        (1, {"num_workers": 2}),
        (2, {"zero_stage": 3, "num_workers": 1}),
        (2, {"pipeline_model_parallel_size": 2, "zero_stage": 1}),
    ],
    ids=str,
)
def test_a_run_is_the_one_that_never_had_their_batches(size: int, layout: dict[str, Any], tmp_path: Path) -> None:
    """The rate goes on where it stood, and the lines of the first and the last step are there."""
    told = run(tmp_path, size=size, **layout, **SKIPPED)
    batch = 2 * size // layout.get("pipeline_model_parallel_size", 1)
    assert_is(tmp_path, plainly((batch * (step - 1), batch * step) for step in TRAINED), TRAINED, batch)
    rates = [0.0, 0.5, 1.0, 0.8, 0.6, 0.4]
    assert [line["lr"] for line in steps(tmp_path)] == pytest.approx([1e-2 * each for each in rates], rel=1e-12)
    lines = [line for line in told.text.splitlines() if "not train" in line]
    where = "samples are passed over (--skip-train-iteration-range)"
    assert lines == [
        f"iterations 3 to 4 do not train, {2 * batch} {where}",
        f"iteration 6 does not train, {batch} {where}",
        f"iterations 8 to 9 do not train, {2 * batch} {where}",
    ]
    passed = [event for event in read_journal(tmp_path / "save") if event["event"] == "pass over"]
    assert [(event["first"], event["last"], event["samples"]) for event in passed] == [
        (3, 4, 2 * batch),
        (6, 6, batch),
        (8, 9, 2 * batch),
    ]


@pytest.mark.parametrize(
    ("stop", "before", "trained"),
    [
        (2, SKIPPED, TRAINED),  # right in front of a range
        (5, SKIPPED, TRAINED),
        (7, SKIPPED, TRAINED),
        (3, {}, (1, 2, 3, 5, 7, 10, 11)),  # inside a range, which is new at the restart
        (8, {}, (1, 2, 3, 4, 5, 6, 7, 8, 10, 11)),
        (9, {}, (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)),
    ],
    ids=str,
)
def test_a_run_goes_on_in_front_of_a_range_and_inside_one(
    stop: int, before: dict[str, Any], trained: tuple[int, ...], tmp_path: Path
) -> None:
    run(tmp_path, exit_interval=stop, **before)
    told = run(tmp_path, load=str(tmp_path / "save"), num_workers=2, log_interval=4, **SKIPPED)
    assert_is(tmp_path, plainly((2 * step - 2, 2 * step) for step in trained), trained, 2)
    first = next(step for step in trained if step > stop)
    assert f"iteration {first:2d}/11" in told.text, "the first step that trains has a line of its own"
    gathered = [line["iteration"] for line in steps(tmp_path) if "ranks" in line]
    assert gathered[-1] == 11 and first in gathered


def test_nothing_that_is_due_at_them_is_done(tmp_path: Path) -> None:
    """Neither checkpoint, evaluation nor exit: the weights are those of the step before."""
    given = {"eval_iters": 1, "eval_interval": 2, "save_interval": 3, "exit_interval": 9}
    told = run(tmp_path, **given, **SKIPPED)
    assert told.reason == "finished 11 iterations"
    assert evaluated(tmp_path) == [(2, 4), (10, 20), (11, 22)]
    assert [entry.step for entry in list_steps(tmp_path / "save")] == [11]


def test_batches_that_grow_and_rows_that_are_cut_go_on_by_position(tmp_path: Path) -> None:
    """Steps of 2, 2, 4 and 6 samples, with rows of 2, 4, 4, 6 and 8 tokens, of which the third does not train."""
    ramp = {"rampup_batch_size": ["2", "2", "8"], "global_batch_size": 6, "train_iters": 6}
    ramp |= {"curriculum_learning": True, "curriculum_min_seqlen": 2, "curriculum_seqlen_step": 2}
    ramp |= {"curriculum_steps": 5, "lr_warmup_iters": 0, "lr_decay_iters": None, "lr_decay_tokens": 172}
    run(tmp_path, **ramp, skip_train_iteration_range="3")
    assert [line["consumed_samples"] for line in steps(tmp_path)] == [2, 4, 14, 20, 26]
    assert [line["seq_length"] for line in steps(tmp_path)] == [2, 4, 6, 8, 8]
    tokens = [0, 4, 12, 48, 96]  # of the updates before each
    assert [line["lr"] for line in steps(tmp_path)] == pytest.approx([1e-2 * (1 - each / 172) for each in tokens])
    progress = open_checkpoint(tmp_path / "save").progress
    assert (progress["consumed_tokens"], progress["update_tokens"]) == (144 + 16, 144)


def test_the_first_steps_may_be_among_them(tmp_path: Path) -> None:
    told = run(tmp_path, skip_train_iteration_range="1-7", log_interval=100)
    trained = (8, 9, 10, 11)
    assert_is(tmp_path, plainly((2 * step - 2, 2 * step) for step in trained), trained, 2)
    assert "iteration  8/11" in told.text and "iteration 11/11" in told.text
