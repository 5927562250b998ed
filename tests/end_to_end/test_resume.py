"""Tests that a resumed run equals an uninterrupted one: bit by bit in the same layout, up to rounding in another.

All runs go through the functions that pretrain_gpt.py calls after joining, with dropout on where the layout stays.
"""

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import saved_states
from support.configs import make_run
from support.launch import read_steps
from support.processes import run_ranks

from megazero.checkpoint.reader import open_checkpoint
from megazero.parallel.launch import Launch
from megazero.train.build import assemble
from megazero.train.loop import train
from megazero.train.start.check import check

HALF, WHOLE = 2, 4
FP16_HALF, FP16_WHOLE = 5, 10  # gradients are to overflow in both halves

SETTINGS: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "make_vocab_size_divisible_by": 1,
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "train_iters": WHOLE,
    "eval_iters": 1,
    "eval_interval": 2,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "lr_warmup_iters": 3,
    "lr_decay_style": "cosine",
    "min_lr": 1e-5,
    "log_interval": 100,
}
# The scale grows after every second good step, so that gradients overflow again and again.
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "fp16": {"initial_loss_scale": 2.0**18, "loss_scale_window": 2, "hysteresis": 2, "train_iters": FP16_WHOLE},
}


def train_one_after_another(rank: int, world_size: int, runs: list[dict[str, Any]]) -> list[str]:
    """Train the runs in turn on this rank and return the reason why each of them ended."""
    reasons = []
    for settings in runs:
        config, launch = make_run(**SETTINGS | settings), Launch(rank, world_size, rank)
        with contextlib.redirect_stdout(io.StringIO()):
            reasons.append(train(assemble(config, launch, torch.device("cpu"), check(config, launch))))
    return reasons


def train_on(world_size: int, *runs: dict[str, Any]) -> list[str]:
    """Train the runs in turn on ranks of a job of that size and return the reasons that rank 0 gives."""
    reasons: list[str] = run_ranks(world_size, train_one_after_another, world_size, list(runs))[0]
    return reasons


def files(folder: Path) -> dict[str, Any]:
    return {"save": folder, "load": folder, "metrics_file": folder.with_suffix(".jsonl")}


def figures(metrics_file: Path) -> list[tuple[Any, ...]]:
    """Return the figures of every step that must not depend on an interruption."""
    names = ("consumed_samples", "loss", "grad_norm", "lr", "loss_scale", "skipped")
    return [(iteration, *(step[name] for name in names)) for iteration, step in read_steps(metrics_file).items()]


# Where states live is not saved: a half with them in host memory goes on from one without, and the other way.
HOMES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "fp32": ({}, {"offload_optimizer": "cpu"}),
    "bf16": ({"offload_optimizer": "cpu"}, {}),
    "fp16": ({}, {"offload_optimizer": "cpu", "offload_param": "cpu"}),
}


@pytest.mark.gloo
@pytest.mark.parametrize(("precision", "stage", "tp", "dp"), [("fp32", 1, 1, 2), ("bf16", 2, 2, 2), ("fp16", 3, 1, 2)])
def test_resuming_is_bitwise(tmp_path: Path, precision: str, stage: int, tp: int, dp: int) -> None:
    first, second = HOMES[precision]
    common = {"tensor_model_parallel_size": tp, "zero_stage": stage, "precision": precision, **PRECISIONS[precision]}
    through, halves = files(tmp_path / "through"), files(tmp_path / "halves")
    half, whole = (FP16_HALF, FP16_WHOLE) if precision == "fp16" else (HALF, WHOLE)
    reasons = train_on(
        tp * dp,
        {**common, **through},
        {**common, **halves, **first, "exit_interval": half},
        {**common, **halves, **second},
    )
    finished = f"finished {whole} iterations"
    assert reasons == [finished, f"exit interval {half} reached at iteration {half}", finished]

    steps = figures(through["metrics_file"])
    assert len(steps) == whole
    assert figures(halves["metrics_file"]) == steps
    if precision == "fp16":
        assert any(step[-1] for step in steps[:half]) and any(step[-1] for step in steps[half:]), "no overflow"
        assert len({step[-2] for step in steps}) > 2, "the loss scale did not move"

    expected, resumed = (open_checkpoint(each["save"]) for each in (through, halves))
    assert expected.step == resumed.step == whole
    assert {**resumed.progress, "run": None} == {**expected.progress, "run": None}  # two runs
    ours, theirs = saved_states(resumed), saved_states(expected)
    assert ours.keys() == theirs.keys()
    kinds = {"weight", "exp_avg", "exp_avg_sq"}
    assert kinds <= {kind for _, kind in ours}
    assert [key for key, value in theirs.items() if not torch.equal(ours[key], value)] == []


@pytest.mark.gloo
def test_another_layout_goes_on_from_the_same_files(tmp_path: Path) -> None:
    common = {"precision": "fp64", "hidden_dropout": 0.0, "attention_dropout": 0.0, "eval_iters": 0}
    layout = {"tensor_model_parallel_size": 2, "zero_stage": 2}
    saved = {"save": tmp_path / "saved", "metrics_file": tmp_path / "through.jsonl"}
    stop = {"exit_interval": HALF}
    train_on(4, {**common, **layout, **saved, **stop}, {**common, **layout, "metrics_file": saved["metrics_file"]})
    expected = figures(saved["metrics_file"])[HALF:]
    assert len(expected) == WHOLE - HALF

    others = {"tp4": (4, 4, 0), "dp4": (4, 1, 1), "one": (1, 1, 0), "partitioned": (4, 2, 3)}
    for name, (world_size, tensor_size, stage) in others.items():
        metrics_file = tmp_path / f"{name}.jsonl"
        settings = {"tensor_model_parallel_size": tensor_size, "zero_stage": stage, "load": saved["save"]}
        train_on(world_size, {**common, **settings, "metrics_file": metrics_file})
        for step, reference in zip(figures(metrics_file), expected, strict=True):
            assert step == pytest.approx(reference, rel=1e-9), name
