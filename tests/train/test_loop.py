"""Tests of whole runs: when they evaluate, save and stop, why they end, and what they write to files."""

import json
import math
import os
import resource
import signal
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.checkpoints import assert_equal_states, saved_states
from support.processes import run_ranks
from support.reference import Batch, History, Recipe, mean_loss, scheduled_rate
from support.reference import train as train_plainly
from support.small_runs import CPU, LENGTH, VOCAB, Told, tiny_run, train_run
from support.training import first_weights, max_relative
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megazero.checkpoint.comparison import NONE, box_differences
from megazero.checkpoint.folders import list_steps, remove_step
from megazero.checkpoint.journal import read_journal
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.runs import read_run, run_of
from megazero.data.loader import BatchLoader
from megazero.data.mock import MockSamples
from megazero.data.samples import Samples
from megazero.errors import CheckpointError, DataError, Problem, TrainingError
from megazero.parallel.launch import Launch
from megazero.signals import StopRequest
from megazero.timers import PARTS
from megazero.train.build import assemble
from megazero.train.leaving import figures_of, leave_page, run_id
from megazero.train.loop import _Loop, train
from megazero.train.start.check import check
from megazero.train.start.inputs import RunInputs
from megazero.units import format_bytes


def run(folder: Path, **settings: Any) -> Told:
    """Train a run in this process alone, with its metrics in m.jsonl and its checkpoints in save/."""
    return train_run(0, 1, {**paths(folder), **settings})


def paths(folder: Path) -> dict[str, Any]:
    return {"metrics_file": str(folder / "m.jsonl"), "save": str(folder / "save")}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]


def steps(folder: Path) -> list[dict[str, Any]]:
    return [line for line in lines(folder) if "evaluation" not in line]


def places(folder: Path) -> str:
    """ "1 2 2v 2t": steps, evaluations of validation and test, in the order they were written."""
    found = []
    for line in lines(folder):
        evaluation = line.get("evaluation")
        found.append(f"{evaluation['iteration']}{evaluation['split'][0]}" if evaluation else str(line["iteration"]))
    return " ".join(found)


def saved(folder: Path) -> list[int]:
    return [entry.step for entry in list_steps(folder / "save")]


# --- the timetable ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "written", "checkpoints", "reason"),
    [
        ({}, "1 2 3 4 5", [5], "finished 5 iterations"),
        ({"eval_iters": 1}, "1 2 3 4 5 5v 5t", [5], "finished 5 iterations"),
        ({"eval_iters": 1, "eval_interval": 2}, "1 2 2v 3 4 4v 5 5v 5t", [5], "finished 5 iterations"),
        # An evaluation that is due at the end is not done twice.
        ({"eval_iters": 1, "eval_interval": 5}, "1 2 3 4 5 5v 5t", [5], "finished 5 iterations"),
        ({"eval_iters": 1, "eval_at_start": True}, "0v 1 2 3 4 5 5v 5t", [5], "finished 5 iterations"),
        ({"save_interval": 2}, "1 2 3 4 5", [2, 4, 5], "finished 5 iterations"),
        ({"save_interval": 5}, "1 2 3 4 5", [5], "finished 5 iterations"),
        ({"exit_interval": 3}, "1 2 3", [3], "exit interval 3 reached at iteration 3"),
        ({"exit_interval": 5}, "1 2 3 4 5", [5], "finished 5 iterations"),
        (
            {"exit_interval": 4, "save_interval": 2, "eval_iters": 1, "eval_interval": 4},
            "1 2 3 4 4v",
            [2, 4],
            "exit interval 4 reached at iteration 4",
        ),
        (
            {"exit_duration_in_mins": 1e-9},
            "1",
            [1],
            "asked to stop after iteration 1 (by another rank, the clock or a file)",
        ),
        (
            {"kill_switch_path": "{folder}/save"},  # which the first checkpoint makes
            "1 2 3",
            [2, 3],
            "asked to stop after iteration 3 (by another rank, the clock or a file)",
        ),
        # A run that is asked to stop saves at once and does not evaluate, because the nodes may be taken away soon.
        (
            {"exit_duration_in_mins": 1e-9, "eval_iters": 1, "eval_interval": 1},
            "1",
            [1],
            "asked to stop after iteration 1 (by another rank, the clock or a file)",
        ),
    ],
    ids=str,
)
def test_timetable(settings: dict[str, Any], written: str, checkpoints: list[int], reason: str, tmp_path: Path) -> None:
    if "kill_switch_path" in settings:
        settings = {"save_interval": 2, "kill_switch_path": tmp_path / "save" / "latest"}
    told = run(tmp_path, **settings)
    assert told.reason == reason
    assert places(tmp_path) == written
    assert saved(tmp_path) == checkpoints
    assert told.text.splitlines()[-1] == reason
    assert told.text.count("saved checkpoint of iteration") == len(checkpoints)


def test_what_a_run_prints(tmp_path: Path) -> None:
    told = run(tmp_path, log_interval=2, train_iters=4, zero_stage=2)
    whose, first, *rest = told.text.splitlines()
    assert whose == f"{read_run(tmp_path / 'save')} begins: checkpoints in {tmp_path / 'save'}"
    assert first.startswith(
        "pipeline 1 x data 1 x tensor 1 = 1 rank on cpu | parameters on this rank: 7.2K | model states"
    )
    assert [line.split("iteration")[1].split("|")[0].strip() for line in rest if " | lm loss" in line] == [
        "1/4",
        "2/4",
        "4/4",
    ]


def test_the_reason_to_end_is_the_last_line(tmp_path: Path) -> None:
    """The line of the last steps, which is held back until the log interval, comes before the checkpoint's."""
    told = run(tmp_path, exit_interval=3)
    first, last, saved_line, reason = [line for line in told.text.splitlines() if "iteration" in line]
    assert "iteration 1/5 |" in first and "iteration 3/5 |" in last
    assert saved_line.startswith("saved checkpoint of iteration 3 to ")
    assert reason == told.text.splitlines()[-1] == "exit interval 3 reached at iteration 3"


def test_a_run_leaves_a_page(tmp_path: Path) -> None:
    """It shows the steps of all starts, the layout, the settings, and the end of the last start."""
    told = run(tmp_path, exit_interval=3)
    assert told.text.splitlines()[-2] == f"the run as a page: {tmp_path / 'save' / 'run.html'}"
    assert figures_of(tmp_path / "save") == tmp_path / "m.jsonl"
    run(tmp_path, exit_interval=4, load=str(tmp_path / "save"), eval_iters=1)
    page = (tmp_path / "save" / "run.html").read_text()
    assert "exit interval 4 reached at iteration 4." in page and ", 2 times" in page
    assert "1 rank, which has the whole model and every sample" in page
    assert "eval_iters: 1" in page and "setting eval_iters | from 0 | to 1" in page
    assert page.count("<svg") == 8 and "<script" not in page and "http://" not in page.replace("http://www.w3.org", "")


def test_a_page_has_curves_without_a_metrics_file(tmp_path: Path) -> None:
    """One of another run, or one that begins later, is not taken for the run's; of curves, steps are never repeated."""
    run(tmp_path, metrics_file=None, exit_interval=3, log_interval=2, save_interval=2)
    remove_step(tmp_path / "save" / "step_0000003")
    (tmp_path / "save" / "latest").unlink()
    run(tmp_path, exit_interval=4, log_interval=3, load=str(tmp_path / "save"), eval_iters=1)
    assert [line["iteration"] for line in steps(tmp_path)] == [3, 4]
    curves = [json.loads(line) for line in (tmp_path / "save" / "curves.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in curves] == [1, 2, 2, 3, 4, 4]
    assert [line.get("steps") for line in curves] == [1, 1, None, 1, 1, None]
    (rank,) = curves[-1]["ranks"]
    assert rank["peak_memory_bytes"] > 0 and rank["model_state_bytes"]["parameters"] > 0
    assert {line["run"] for line in [*curves, *lines(tmp_path)]} == {run_id(tmp_path / "save")}
    assert figures_of(tmp_path / "save") == tmp_path / "save" / "curves.jsonl"
    assert (tmp_path / "save" / "run.html").read_text().count("<svg") == 8


def test_a_run_that_saves_elsewhere_takes_its_curves_along(tmp_path: Path) -> None:
    """Its page has all of its steps; a run that begins there, from the weights alone, has its own."""
    told = {"metrics_file": None, "log_interval": 1, "save_interval": 2}
    run(tmp_path, exit_interval=3, **told)
    first = (tmp_path / "save" / "curves.jsonl").read_text().splitlines()
    load = str(tmp_path / "save" / "step_0000002")
    for name, settings, iterations in (
        ("second", {}, [1, 2, 2, 3, 4, 4]),
        ("third", {"finetune": True}, [1, 2, 2, 3, 4, 4]),
    ):
        run(tmp_path, load=load, save=str(tmp_path / name), exit_interval=4, **told, **settings)
        curves = (tmp_path / name / "curves.jsonl").read_text().splitlines()
        assert [json.loads(line)["iteration"] for line in curves] == iterations
        assert (curves[:3] == first[:3]) is not bool(settings)
        assert {json.loads(line)["run"] for line in curves} == {run_id(tmp_path / name)}
    assert (tmp_path / "save" / "curves.jsonl").read_text().splitlines() == first
    assert run_id(tmp_path / "second") == run_id(tmp_path / "save") != run_id(tmp_path / "third")


def test_a_run_that_saves_nothing_says_that_it_leaves_no_page(tmp_path: Path) -> None:
    *_, line, reason = run(tmp_path, train_iters=1, save=None).text.splitlines()
    assert (line, reason) == (
        "no checkpoint and no page of this run: they are kept below --save DIR",
        "finished 1 iterations",
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "m.jsonl"]


def test_a_run_that_fails_leaves_a_page_too(tmp_path: Path) -> None:
    with pytest.raises(TrainingError):
        run(tmp_path, lr=1e30, check_for_nan_in_loss_and_grad=True)
    assert "loss and gradient norm are finite" in (tmp_path / "save" / "run.html").read_text()


def test_a_page_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "save" / "run.html").mkdir(parents=True)
    told = run(tmp_path, train_iters=1)
    *_, line, reason = told.text.splitlines()
    assert line.startswith(f"no {tmp_path / 'save' / 'run.html'}: ") and reason == "finished 1 iterations"
    run(tmp_path, train_iters=1, metrics_file=str(tmp_path / "steps"), save=str(tmp_path / "other"))
    (tmp_path / "steps").unlink()
    (tmp_path / "other" / "curves.jsonl").write_text(
        '{"iteration": 1, "step_seconds": 1}\n{"iteration": 1, "loss": "?"}\n'
    )
    assert leave_page(tmp_path / "other").startswith(f"no {tmp_path / 'other' / 'run.html'}: ")


def test_tensorboard_below_save(tmp_path: Path) -> None:
    run(tmp_path, tensorboard=True, train_iters=1)
    board = EventAccumulator(str(tmp_path / "save" / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss/train")] == [1]
    layout, configuration = (
        board.Tensors(f"run/{name}/text_summary")[0].tensor_proto.string_val[0].decode()
        for name in ("layout", "configuration")
    )
    assert layout == "    1 rank, which has the whole model and every sample"
    assert "\n    train_iters: 1\n" in configuration and "\n    tensorboard: true" in configuration


def test_statistics_are_those_of_what_is_saved(tmp_path: Path) -> None:
    """They come with the console's lines, whatever the interval of TensorBoard's other points."""
    flags = ("log_params_norm", "log_num_zeros_in_grad", "log_optimizer_states_to_tensorboard")
    settings = {"log_interval": 3, "tensorboard": True, "tensorboard_log_interval": 4, "zero_stage": 3}
    told = run(tmp_path, precision="bf16", **settings, **dict.fromkeys(flags, True))
    taken = {line["iteration"]: line["statistics"] for line in steps(tmp_path) if "statistics" in line}
    assert list(taken) == [1, 3, 5]
    states, last = saved_states(open_checkpoint(tmp_path / "save")), taken[5]
    orders = {"l1": 1.0, "l2": 2.0, "abs_max": math.inf}
    for name, kind in {"weight": "weight", "momentum": "exp_avg", "variance": "exp_avg_sq"}.items():
        full = torch.cat([value.double().flatten() for (_, its), value in states.items() if its == kind])
        for title, values in {name: full, **({"variance_sqrt": full.sqrt()} if name == "variance" else {})}.items():
            expected = {f"{title}_{end}": torch.linalg.vector_norm(values, p).item() for end, p in orders.items()}
            assert {each: last[each] for each in expected} == pytest.approx(expected, rel=1e-6)
    assert len(last) == 12 + 2 and last["params_norm"] == last["weight_l2"]
    fields = f"| num zeros: {last['num_zeros']:.0f} | params norm: {last['params_norm']:.3f} |"
    assert fields in next(line for line in told.text.splitlines() if "iteration 5/5 |" in line)
    board = EventAccumulator(str(tmp_path / "save" / "tensorboard")).Reload()
    tags = {"params_norm": "params-norm", "num_zeros": "num-zeros"}
    for name, value in last.items():
        points = board.Scalars(f"optimizer/{tags.get(name, name)}")
        assert [point.step for point in points] == [1, 3, 5] and points[-1].value == pytest.approx(value)


def test_times_of_parts_come_at_log_intervals(tmp_path: Path) -> None:
    """An evaluation between two steps is no part of either."""
    written = {"log_timers_to_tensorboard": True, "eval_iters": 20, "eval_interval": 1}
    told = run(tmp_path, log_interval=2, timing_log_level=2, zero_stage=3, **written)
    lines = told.text.splitlines()
    heading = "milliseconds a step, over {}, minimum and maximum of all ranks:"
    assert [line for line in lines if line.startswith("milliseconds")] == [
        heading.format(steps) for steps in ("2 steps", "2 steps", "1 step")
    ]
    times = {line["iteration"]: line["timers"] for line in steps(tmp_path) if "timers" in line}
    assert list(times) == [2, 4, 5]
    assert [line["iteration"] for line in steps(tmp_path) if "ranks" in line] == [1, 2, 4, 5]
    between_stages = ("forward-recv", "forward-send", "backward-recv", "backward-send")
    of_others = ("checkpoint-forward", "checkpoint-recompute", "backward-input-compute", "backward-weight-compute")
    assert list(times[5]) == [name for name in PARTS if name not in (*between_stages, *of_others, "params-publish")]
    last = {name: of_ranks["max"] for name, of_ranks in times[5].items()}
    assert last["forward-compute"] + last["backward-compute"] < last["forward-backward"]
    assert sum(last[name] for name in ("forward-backward", "all-grads-sync", "optimizer")) < last["step"]
    assert [line.split()[0] for line in lines if line.startswith("    ")] == [*times[2], *times[4], *times[5]]


def test_an_optimizer_without_a_variance_leaves_it_out(tmp_path: Path) -> None:
    told = run(tmp_path, optimizer="sgd", log_optimizer_states_to_tensorboard=True, train_iters=1)
    notice = "--log-optimizer-states-to-tensorboard: SGD keeps no variance, whose figures are left out"
    assert notice in told.text.splitlines()
    ends = ("abs_max", "l1", "l2")
    (line,) = steps(tmp_path)
    assert sorted(line["statistics"]) == [f"{name}_{end}" for name in ("momentum", "weight") for end in ends]
    quiet = run(tmp_path / "quiet", log_num_zeros_in_grad=True, train_iters=1)
    assert "keeps no" not in quiet.text and list(steps(tmp_path / "quiet")[0]["statistics"]) == ["num_zeros"]


def test_the_last_evaluation_has_late_updates_whether_they_are_saved_or_not(tmp_path: Path) -> None:
    late = {"zero_stage": 2, "offload_optimizer": "cpu", "delayed_parameter_update": True, "eval_iters": 1}
    late |= {"delayed_parameter_update_start": 0, "lr_decay_style": "constant", "eval_interval": 5}
    more = {"unsaved": {"save": None}, "saved": {}, "longer": {"save": None, "train_iters": 6}}
    losses = {}
    for name, settings in more.items():
        run(tmp_path / name, **{**late, **settings})
        found = [line["evaluation"] for line in lines(tmp_path / name) if "evaluation" in line]
        losses[name] = [each["loss"] for each in found if each["iteration"] == 5]
    assert losses["unsaved"] == losses["saved"] and len(losses["saved"]) == 2
    assert losses["longer"][0] != losses["saved"][0], "step 6 begins with the weights that are evaluated"


def test_evaluating_changes_nothing_of_the_training(tmp_path: Path) -> None:
    dropout = {"hidden_dropout": 0.2, "attention_dropout": 0.2}
    for name, settings in {"quiet": {}, "loud": {"eval_iters": 1, "eval_interval": 1, "eval_at_start": True}}.items():
        run(tmp_path / name, **dropout, **settings)
    quiet, loud = steps(tmp_path / "quiet"), steps(tmp_path / "loud")
    assert [(line["loss"], line["grad_norm"]) for line in quiet] == [(line["loss"], line["grad_norm"]) for line in loud]


def test_a_run_that_went_away_and_came_back_is_the_run_that_stayed(tmp_path: Path) -> None:
    """A resumed run equals an uninterrupted one to the bit, in dropout, learning rate and metrics file too."""
    settings: dict[str, Any] = {
        "hidden_dropout": 0.2,
        "precision": "bf16",
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 1,
    }
    run(tmp_path / "stayed", **settings)
    run(tmp_path / "left", **settings, exit_interval=3)
    told = run(tmp_path / "left", **settings, load=str(tmp_path / "left" / "save"))
    assert "resumed at iteration 3, 6 samples consumed" in told.text
    assert places(tmp_path / "left") == places(tmp_path / "stayed") == "1 2 3 4 5"
    for key in ("loss", "grad_norm", "lr", "consumed_samples"):
        assert [line[key] for line in steps(tmp_path / "left")] == [line[key] for line in steps(tmp_path / "stayed")]
    one, other = (open_checkpoint(tmp_path / name / "save") for name in ("left", "stayed"))
    assert {**one.progress, "run": None} == {**other.progress, "run": None}  # two runs
    assert_equal_states(one, other)


@pytest.mark.parametrize(("damage", "own"), [("data", True), ("data", False), ("manifest", True)])
def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(tmp_path: Path, damage: str, own: bool) -> None:
    """It is the run that stayed, to the bit; only in its own folder are damaged checkpoints renamed."""
    settings = {"hidden_dropout": 0.2, "save_interval": 2}
    run(tmp_path / "stayed", **settings)
    run(tmp_path / "left", **settings, exit_interval=4)
    root = tmp_path / "left" / "save"
    flipped = root / "step_0000004" / {"data": "rank_00000.safetensors", "manifest": "manifest.json"}[damage]
    content = flipped.read_bytes()
    flipped.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(CheckpointError, match=rf"{flipped.name}(.|\n)*--load {root}/step_0000002, which is "):
        run(tmp_path / "left", **settings, load=str(root), strict_load=True)
    if not own:
        run(tmp_path / "left", **settings, load=str(root), save=str(tmp_path / "other"))
        assert saved(tmp_path / "left") == [2, 4] and [entry.step for entry in list_steps(tmp_path / "other")] == [4, 5]
        return
    told = run(tmp_path / "left", **settings, load=str(root))
    assert f"WARNING: {root / 'step_0000004'} is damaged: " in told.text and flipped.name in told.text
    assert f"WARNING: step_0000004 is set aside as {root / 'damaged_step_0000004'}" in told.text
    assert "resumed at iteration 2, 4 samples consumed" in told.text
    (fallback,) = (entry["report"] for entry in read_journal(root) if entry["event"] == "fallback")
    assert "step_0000004 is damaged" in fallback[0] and "set aside" in fallback[-1]
    assert places(tmp_path / "left") == "1 2 3 4 5" and saved(tmp_path / "left") == [2, 4, 5]
    one, other = (open_checkpoint(tmp_path / name / "save") for name in ("left", "stayed"))
    assert {**one.progress, "run": None} == {**other.progress, "run": None}
    assert_equal_states(one, other)


def test_a_run_keeps_its_id_and_a_journal(tmp_path: Path) -> None:
    """Starts of one command line are one run, whose changed settings are written down; finetuning is another run."""
    command = {"exit_interval": 2, "load": str(tmp_path / "save")}
    run(tmp_path, **command)
    first = read_run(tmp_path / "save")
    run(tmp_path, **command)
    run(tmp_path, **command, lr=5e-3, override_opt_param_scheduler=True)
    assert first is not None and read_run(tmp_path / "save") == first
    assert {run_of(each.path) for each in list_steps(tmp_path / "save")} == {first}
    entries = [{**entry} for entry in read_journal(tmp_path / "save")]
    assert (
        " ".join(entry["event"] for entry in entries) == "start save stop start save stop start change change save stop"
    )
    starts = [entry for entry in entries if entry["event"] == "start"]
    assert [(entry["run"], entry["iteration"]) for entry in starts] == [(first.id, 0), (first.id, 2), (first.id, 4)]
    assert [entry["checkpoint"] for entry in starts[:2]] == [None, str(tmp_path / "save" / "step_0000002")]
    facts = {"host": first.host, "world_size": 1, "torch": torch.__version__, "finetune": False}
    assert facts.items() <= starts[0].items() and "tensor 1 = 1 rank on cpu" in starts[0]["layout"]
    changes = {entry["setting"]: (entry["from"], entry["to"]) for entry in entries if entry["event"] == "change"}
    assert changes == {"lr": (1e-2, 5e-3), "override_opt_param_scheduler": (False, True)}
    stops = [entry["reason"] for entry in entries if entry["event"] == "stop"]
    assert stops[1:] == ["exit interval 2 reached at iteration 4", "finished 5 iterations"]
    run(tmp_path, load=str(tmp_path / "save"), finetune=True, save=str(tmp_path / "tuned"))
    tuned = read_run(tmp_path / "tuned")
    assert tuned is not None and tuned.id != first.id


def test_a_length_in_samples_is_kept_with_another_global_batch(tmp_path: Path) -> None:
    """A run of 12 samples, after 3 steps of 2, has 6 left for one whole step of 4; steps of 4 alone would be 3."""
    length = {"train_iters": None, "train_samples": 12}
    run(tmp_path, **length, exit_interval=3)
    told = run(tmp_path, **length, load=str(tmp_path / "save"), micro_batch_size=4, global_batch_size=4)
    assert told.reason == "finished 4 iterations"
    assert [line["consumed_samples"] for line in steps(tmp_path)] == [2, 4, 6, 10]
    assert "iteration 4/4" in told.text


def test_a_growing_batch_goes_on_where_it_was_with_another_micro_batch(tmp_path: Path) -> None:
    """Steps of 2, 2, 4 and 6 samples, then those of 6 that fit; figures and rates follow each step's own size."""
    ramp = {"train_iters": None, "train_samples": 27, "rampup_batch_size": ["2", "2", "8"], "global_batch_size": 6}
    ramp |= {"lr_decay_style": "linear", "lr_warmup_samples": 4, "eval_iters": 1, "log_interval": 1}
    ramp |= {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 9.0}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told = run(whole, **ramp)
    assert told.reason == "finished 6 iterations" and "iteration 6/6" in told.text
    assert "global batch size: 2 from sample 0 on, 4 from sample 4 on, 6 from sample 8 on" in told.text
    run(parts, **ramp, exit_interval=2)
    run(parts, **ramp, load=str(parts / "save"), micro_batch_size=1)
    reports = [line for line in told.text.splitlines() if "| global batch size: " in line]
    printed = [line.split("| global batch size: ")[1].split()[0] for line in reports]
    assert printed == ["2", "2", "4", "6", "6", "6"]
    consumed = [2, 4, 8, 14, 20, 26]
    rates = [0.0, 0.5, 1.0, 19 / 23, 13 / 23, 7 / 23]
    for folder in (whole, parts):
        assert [line["consumed_samples"] for line in steps(folder)] == consumed
        assert [line["lr"] for line in steps(folder)] == pytest.approx([1e-2 * rate for rate in rates], rel=1e-12)
    one, other = ([line["loss"] for line in lines(folder) if "loss" in line] for folder in (whole, parts))
    assert one == pytest.approx(other, rel=1e-9)
    assert open_checkpoint(parts / "save").progress["update_samples"] == 26


def test_rows_are_cut_as_the_schedule_says_and_a_run_goes_on_with_its_lengths_and_rates(tmp_path: Path) -> None:
    """Rows of 2, 4, 6 and 8 tokens, 2 of them a step; the run, warm-up and decay are given in tokens."""
    cut = {"curriculum_learning": True, "curriculum_min_seqlen": 2, "curriculum_seqlen_step": 2, "curriculum_steps": 5}
    cut |= {"train_iters": None, "train_tokens": 75, "lr_decay_style": "linear", "log_interval": 1, "eval_iters": 1}
    cut |= {"lr_warmup_tokens": 10, "lr_decay_tokens": 70}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    told = run(whole, **cut)
    run(parts, **cut, exit_interval=3)
    run(parts, **cut, load=str(parts / "save"))
    lengths = [2, 4, 4, 6, 8, 8]  # floor(step / 5 x 6 + 2), down to an even number
    tokens = [sum(2 * length for length in lengths[:step]) for step in range(7)]
    assert told.reason == "finished 6 iterations" and tokens[6] <= 75 < tokens[6] + 16
    assert (
        "curriculum: rows of 2 from step 1 on, 4 from step 2 on, 6 from step 4 on, 8 from step 5 on tokens" in told.text
    )
    reports = [line for line in told.text.splitlines() if "| sequence length: " in line]
    assert [int(line.split("| sequence length: ")[1].split()[0]) for line in reports] == lengths
    rates = [done / 10 if done <= 10 else (70 - done) / 60 for done in tokens[:6]]
    for folder in (whole, parts):
        assert [line["seq_length"] for line in steps(folder)] == lengths
        assert [line["consumed_samples"] for line in steps(folder)] == [2, 4, 6, 8, 10, 12]
        assert [line["lr"] for line in steps(folder)] == pytest.approx([1e-2 * rate for rate in rates], rel=1e-12)
    one, other = ([line["loss"] for line in lines(folder) if "loss" in line] for folder in (whole, parts))
    assert one == pytest.approx(other, rel=1e-9)
    assert open_checkpoint(parts / "save").progress["consumed_tokens"] == tokens[6]


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path) -> None:
    run(tmp_path)
    before = (tmp_path / "m.jsonl").read_text()
    told = run(tmp_path, load=str(tmp_path / "save"))
    assert told.reason == "finished 5 iterations"
    assert (tmp_path / "m.jsonl").read_text() == before
    assert "saved checkpoint" not in told.text
    # Another folder does not have this checkpoint yet, so that it is saved there.
    run(tmp_path, load=str(tmp_path / "save"), save=str(tmp_path / "other" / "save"))
    assert saved(tmp_path / "other") == [5]


# --- runs with no future ----------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_stops_the_run_without_saving_it(tmp_path: Path) -> None:
    """A learning rate of 1e30 spoils the weights in the first step, so that the loss of the second is not finite."""
    with pytest.raises(TrainingError, match="loss and gradient norm are finite") as caught:
        run(tmp_path, precision="fp32", lr=1e30, save_interval=1, weight_decay=0.0)
    assert "iteration 2: loss" in caught.value.problems[0].given
    assert [*read_journal(tmp_path / "save")][-1]["reason"].startswith("TrainingError: iteration 2: loss")
    assert saved(tmp_path) == [1]
    last = steps(tmp_path)[-1]
    assert last["iteration"] == 2 and None in (last["loss"], last["grad_norm"]), "the step is written down, as null"


@dataclass(frozen=True)
class Damaged:
    """Samples whose reading raises a DataError."""

    seq_length: int = LENGTH

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> NDArray[np.int64]:
        raise DataError(Problem(f"sample {k}", "tokens are in the vocabulary"))


@pytest.mark.parametrize(
    ("settings", "split", "checkpoints"),
    [({}, "test", [5]), ({"eval_interval": 2, "save_interval": 2}, "valid", [2])],
    ids=str,
)
def test_an_evaluation_that_fails_costs_no_training(
    settings: dict[str, Any], split: str, checkpoints: list[int], tmp_path: Path
) -> None:
    settings = {**settings, "eval_iters": 1, "save": str(tmp_path / "save")}
    inputs = with_held_out(check(tiny_run(**settings), Launch(0, 1, 0)), split, Damaged())
    with pytest.raises(DataError):
        train_run(0, 1, settings, inputs)
    assert saved(tmp_path) == checkpoints


def test_an_exhausted_loss_scale_saves_says_why_and_stops(tmp_path: Path) -> None:
    scale = 2.0**60
    settings = {"precision": "fp16", "initial_loss_scale": scale, "min_loss_scale": scale, "train_iters": 9}
    with pytest.raises(TrainingError, match="3 steps in a row overflowed") as caught:
        run(tmp_path, **settings, max_skipped_steps_at_min_loss_scale=3)
    assert caught.value.exit_code == 3
    assert saved(tmp_path) == [3]
    checkpoint = open_checkpoint(tmp_path / "save")
    assert (checkpoint.progress["iteration"], checkpoint.progress["optimizer_steps"]) == (3, 0)
    for name, value in first_weights(tiny_run(**settings)).items():
        # A master weight starts with the value of its fp16 working weight.
        assert torch.equal(checkpoint.read_full(name, "weight"), value.half().float()), name
    for line in steps(tmp_path):
        assert line["skipped"] and line["grad_norm"] is None and line["loss_scale"] == scale
        assert line["overflow_parameter"] in caught.value.problems[0].given
    assert len(steps(tmp_path)) == 3


def test_steps_that_are_not_finite_are_skipped_and_counted(tmp_path: Path) -> None:
    """The first update makes weights so large that all further gradients are infinite; these leave them alone."""
    settings = {"precision": "fp32", "lr": 1e30, "check_grad_overflow": True, "train_iters": 9}
    with pytest.raises(TrainingError, match="2 steps in a row overflowed"):
        run(tmp_path, **settings, max_skipped_steps_at_min_loss_scale=2)
    assert [line["skipped"] for line in steps(tmp_path)] == [False, True, True] and saved(tmp_path) == [3]
    assert open_checkpoint(tmp_path / "save").progress["optimizer_steps"] == 1


def test_a_loss_scale_that_can_fall_goes_on(tmp_path: Path) -> None:
    """After overflows from 2^40 down training goes on; skipped steps do not advance the learning rate."""
    told = run(
        tmp_path,
        precision="fp16",
        initial_loss_scale=2.0**40,
        min_loss_scale=1.0,
        hysteresis=1,
        train_iters=40,
        lr_warmup_iters=4,
        lr_decay_style="constant",
    )
    assert told.reason == "finished 40 iterations"
    found = steps(tmp_path)
    skipped = [line["skipped"] for line in found]
    first = skipped.index(False)
    assert 0 < first < 39 and skipped[:first] == [True] * first
    assert [line["loss_scale"] for line in found[: first + 1]] == [2.0 ** (40 - n) for n in range(first + 1)]
    assert [line["lr"] for line in found[: first + 1]] == [0.0] * (first + 1)
    taken = [line for line in found if not line["skipped"]]
    assert [line["lr"] for line in taken[:5]] == [1e-2 * n / 4 for n in range(5)]
    assert f"iteration 1 skipped: {found[0]['overflow_parameter']} overflowed first" in told.text
    assert open_checkpoint(tmp_path / "save").progress["optimizer_steps"] == len(taken)


def test_an_error_closes_files_hooks_and_handlers(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = tiny_run(precision="fp32", lr=1e30, weight_decay=0.0, tensorboard_dir=str(tmp_path), num_workers=2)
    launch = Launch(0, 1, 0)
    broken = assemble(config, launch, CPU, check(config, launch))
    with pytest.raises(TrainingError):
        train(broken)
    assert signal.getsignal(signal.SIGTERM) == before
    assert not any(module._forward_pre_hooks for module in broken.context.engine.model.modules())
    with pytest.raises(AssertionError, match="the loader is closed"):
        next(broken.loader)
    (events,) = tmp_path.glob("events.*")
    assert events.stat().st_size > 500, "points held back are written"


@pytest.mark.parametrize("settings", [{}, {"exit_interval": 3}, {"exit_interval": 3, "save": True}], ids=str)
def test_figures_that_are_read_a_step_late_all_arrive(settings: dict[str, Any], tmp_path: Path) -> None:
    """Figures that are read a step late, as on a GPU after the launch of the next step, are all written."""
    if settings.get("save"):
        settings = {**settings, "save": str(tmp_path / "save")}
    config, launch = tiny_run(**settings, metrics_file=str(tmp_path / "m.jsonl")), Launch(0, 1, 0)
    late = assemble(config, launch, CPU, inputs := check(config, launch))
    loader = BatchLoader(inputs.train, late.loader._layout, prefetch=0, clock=count().__next__)  # 1 s per read
    with StopRequest() as stop:
        loop = _Loop(replace(late, loader=loader), stop)
        loop._max_pending = 1
        loop.run_to_end()
    late.context.engine.close()
    assert places(tmp_path) == ("1 2 3" if settings else "1 2 3 4 5")
    assert [line["data_wait_seconds"] for line in steps(tmp_path)] == [1] * len(steps(tmp_path))


# --- signals ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interrupted:
    """Samples that send this process a signal while sample `at` is read."""

    source: Samples
    at: int
    number: signal.Signals

    @property
    def seq_length(self) -> int:
        return self.source.seq_length

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> NDArray[np.int64]:
        if k == self.at:
            os.kill(os.getpid(), self.number)
        return self.source.sample(k)


@dataclass(frozen=True)
class Touching(Samples):
    """Samples of which one makes the files that are named for it."""

    source: Samples
    files: dict[int, Path]

    @property
    def seq_length(self) -> int:
        return self.source.seq_length

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> NDArray[np.int64]:
        if k in self.files:
            self.files[k].touch()
        return self.source.sample(k)


def triggered_run(rank: int, folder: Path, settings: dict[str, Any]) -> Told:
    """Train on two ranks with one sample a step each; rank 0 touches triggers while it reads steps 2, 3 and 5."""
    inputs = check(tiny_run(**settings), Launch(rank, 2, rank))
    files = {2: folder / "save", 4: folder / "save", 8: folder / "exit"}
    return train_run(rank, 2, settings, replace(inputs, train=Touching(inputs.train, files)))


@pytest.mark.gloo
@pytest.mark.parametrize("saves", [True, False])
def test_files_trigger_saves_and_the_end(saves: bool, tmp_path: Path) -> None:
    triggers = tmp_path / "triggers"
    triggers.mkdir()
    settings: dict[str, Any] = {"micro_batch_size": 1, "train_iters": 50, "trigger_path": str(triggers)}
    settings |= {"save": str(tmp_path / "save")} if saves else {}
    zero, one = run_ranks(2, triggered_run, triggers, settings)
    assert zero.reason == one.reason == "asked to stop after iteration 5 (by another rank, the clock or a file)"
    assert saved(tmp_path) == ([2, 3, 5] if saves else [])
    assert zero.text.count("without --save nothing is kept") == (0 if saves else 2)
    assert [path.name for path in triggers.iterdir()] == ["exit"]


def interrupted_run(rank: int, settings: dict[str, Any], at: int, number: signal.Signals) -> Told:
    """Train on two data-parallel ranks with one sample a step each; only the reader of sample `at` gets the signal."""
    inputs = check(tiny_run(**settings), Launch(rank, 2, rank))
    return train_run(rank, 2, settings, replace(inputs, train=Interrupted(inputs.train, at, number)))


@pytest.mark.gloo
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_stops_all_after_the_same_step(number: signal.Signals, tmp_path: Path) -> None:
    settings = {"micro_batch_size": 1, "train_iters": 50, "save": str(tmp_path / "save"), "zero_stage": 2}
    # Step 3 has samples 4 and 5, of which rank 1 reads sample 5.
    zero, one = run_ranks(2, interrupted_run, settings, 5, number)
    assert one.reason == f"asked to stop after iteration 3 ({number.name})"
    assert zero.reason == "asked to stop after iteration 3 (by another rank, the clock or a file)"
    assert saved(tmp_path) == [3]
    assert zero.text.count("saved checkpoint of iteration 3") == 1 and one.text == ""


def interrupted_evaluation(rank: int, size: int, settings: dict[str, Any], split: str, at: int) -> Told:
    """Train with one sample a rank and step; only the reader of sample `at` of the split gets a signal."""
    inputs = check(tiny_run(**settings), Launch(rank, size, rank))
    source = Interrupted(inputs.held_out[split].samples, at, signal.SIGTERM)
    return train_run(rank, size, settings, with_held_out(inputs, split, source))


def with_held_out(inputs: RunInputs, split: str, source: Samples) -> RunInputs:
    """Return the inputs with other samples of "valid" or "test"."""
    held_out = dict(inputs.held_out)
    held_out[split] = replace(held_out[split], samples=source)
    return replace(inputs, held_out=held_out)


@pytest.mark.gloo
def test_a_signal_to_one_rank_cuts_an_evaluation_short_on_all(tmp_path: Path) -> None:
    """The validation in which rank 1 gets the signal is left out of the metrics file, and what follows is the same."""
    settings = {"micro_batch_size": 1, "train_iters": 4, "eval_iters": 50, "eval_interval": 2, **paths(tmp_path)}
    # Batch 1 has samples 2 and 3, of which rank 1 reads sample 3; a wish is exchanged before the next batch.
    zero, one = run_ranks(2, interrupted_evaluation, 2, settings, "valid", 3)
    assert one.reason == "asked to stop after iteration 2 (SIGTERM)"
    assert zero.reason == "asked to stop after iteration 2 (by another rank, the clock or a file)"
    assert "validation at iteration 2 cut short by the request to stop: no loss is reported" in zero.text
    assert (saved(tmp_path), places(tmp_path)) == ([2], "1 2")


@pytest.mark.parametrize(
    ("split", "at", "more", "written", "checkpoints", "reason"),
    [
        ("valid", 0, {"eval_at_start": True}, "", [0], "asked to stop after iteration 0 (SIGTERM)"),
        ("valid", 0, {}, "1 2 3 4", [4], "finished 4 iterations"),
        ("test", 2, {}, "1 2 3 4 4v", [4], "finished 4 iterations"),
        ("test", 5, {}, "1 2 3 4 4v 4t", [4], "finished 4 iterations"),
    ],
    ids=str,
)
def test_a_signal_in_an_evaluation_loses_nothing(
    split: str, at: int, more: dict[str, Any], written: str, checkpoints: list[int], reason: str, tmp_path: Path
) -> None:
    """The run is saved as it is, and the same command line goes on with it and evaluates after all."""
    settings = {"micro_batch_size": 1, "train_iters": 4, "eval_iters": 6, **more, **paths(tmp_path)}
    settings["load"] = settings["save"]
    assert interrupted_evaluation(0, 1, settings, split, at).reason == reason
    assert (saved(tmp_path), places(tmp_path)) == (checkpoints, written)
    assert train_run(0, 1, settings).reason == "finished 4 iterations"
    assert places(tmp_path).split()[-2:] == ["4v", "4t"] and saved(tmp_path)[-1] == 4


# --- what is written to the metrics file ------------------------------------------------------------------------------

METRICS: dict[str, Any] = {
    "log_interval": 1,
    "tensor_model_parallel_size": 2,
    "zero_stage": 2,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 1,
    "min_lr": 1e-3,
    "clip_grad": 0.5,
    "eval_iters": 2,
    "eval_interval": 2,
}
STEP_FIELDS = {
    "run",
    "iteration",
    "consumed_samples",
    "loss",
    "grad_norm",
    "lr",
    "loss_scale",
    "skipped",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "data_wait_seconds",
    "ranks",
}


def batch(samples: MockSamples, first: int, size: int) -> Batch:
    rows = torch.from_numpy(np.stack([samples.sample(k) for k in range(first, first + size)]))
    return Batch(rows[:, :-1], rows[:, 1:])


def rate(step: int) -> float:
    return scheduled_rate(step, peak=1e-2, final=1e-3, warmup=1, decay_steps=4, style="cosine")


def plain_history(steps_taken: int) -> History:
    samples = MockSamples(VOCAB, LENGTH, 1234)
    batches = [batch(samples, 8 * step, 8) for step in range(steps_taken)]
    return train_plainly(first_weights(tiny_run()), batches, Recipe(rate, weight_decay=0.01, max_norm=0.5))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on 2 x 2 real ranks, of two nodes; return the folder with the metrics file and rank 0's lines."""
    folder = tmp_path_factory.mktemp("metrics")
    told = run_ranks(4, train_run_on_four, {**METRICS, "metrics_file": str(folder / "m.jsonl")})
    (folder / "told").write_text(told[0])
    return folder


def train_run_on_four(rank: int, settings: dict[str, Any]) -> str:
    return train_run(rank, 4, settings, ranks_per_node=(2, 2)).text


@pytest.mark.gloo
def test_a_line_a_step_with_these_fields(written: Path) -> None:
    assert places(written) == "1 2 2v 3 4 4v 4t"
    for number, line in enumerate(steps(written), start=1):
        assert set(line) == STEP_FIELDS
        assert 0 < line["data_wait_seconds"] < line["step_seconds"], "nothing is read ahead: reading is waiting"
        assert (line["iteration"], line["consumed_samples"]) == (number, 8 * number)
        assert (line["loss_scale"], line["skipped"], line["lr"]) == (
            1.0,
            False,
            pytest.approx(rate(number - 1), rel=1e-12),
        )
        tokens = 8 * LENGTH
        assert line["tokens_per_second"] * line["step_seconds"] == pytest.approx(tokens)
        # FLOPs per token: 6 per weight, for 2 blocks of 12 x 16^2 weights and 29 rows of 16, and 12 s h per block.
        flops = 6 * (2 * 12 * 16 * 16 + 29 * 16) + 12 * 2 * LENGTH * 16
        assert line["tflops_per_device"] * line["step_seconds"] == pytest.approx(tokens * flops / 4 / 1e12)


@pytest.mark.gloo
def test_losses_and_norms_at_full_precision_are_the_plain_twins(written: Path) -> None:
    expected, found = plain_history(4), steps(written)
    assert max_relative([line["loss"] for line in found], expected.losses) < 1e-9
    assert max_relative([line["grad_norm"] for line in found], expected.grad_norms) < 1e-9
    assert min(expected.grad_norms) > 0.5, "the norm is the one before clipping"


@pytest.mark.gloo
def test_evaluation_lines(written: Path) -> None:
    found = [line["evaluation"] for line in lines(written) if "evaluation" in line]
    # Validation takes the same first samples of its own stream each time, after two steps and after four.
    held_out = {"validation": MockSamples(VOCAB, LENGTH, 1235), "test": MockSamples(VOCAB, LENGTH, 1236)}
    for line in found:
        weights = plain_history(line["iteration"]).weights
        expected = mean_loss(weights, batch(held_out[line["split"]], 0, 16)).item()
        assert line["loss"] == pytest.approx(expected, rel=1e-9)
        assert line["perplexity"] == pytest.approx(math.exp(expected), rel=1e-9)
        assert (line["consumed_samples"], line["bits_per_byte"]) == (8 * line["iteration"], None)


@pytest.mark.gloo
def test_every_ranks_memory_and_traffic(written: Path) -> None:
    for line in steps(written):
        assert [rank["rank"] for rank in line["ranks"]] == [0, 1, 2, 3]
        for rank in line["ranks"]:
            assert set(rank) == {
                "rank",
                "peak_memory_bytes",
                "model_state_bytes",
                "comm_bytes",
                "bytes_across_nodes",
                "data_wait_seconds",
            }
            assert rank["data_wait_seconds"] > 0
            assert rank["peak_memory_bytes"] > 10 * 2**20
            states = rank["model_state_bytes"]
            assert set(states) == {"parameters", "gradients", "master", "moments"}
            # fp64, ZeRO stage 2 over two ranks: p bytes of parameters, p/2 of gradients, no master, 2 moments of p/2.
            parameters = states["parameters"]
            assert parameters > 0 and parameters % 16 == 0
            assert (states["gradients"], states["master"], states["moments"]) == (parameters // 2, 0, parameters)
            traffic = rank["comm_bytes"]
            # Each of two ranks sends half of all gradients in each of two micro-batches, half of all parameters once.
            assert traffic["dp"] == {"reduce_scatter": parameters, "all_gather": parameters // 2}
            assert set(traffic["tp"]) == {"all_reduce"} and traffic["tp"]["all_reduce"] > 0
            assert traffic["world"] == {"scalars": 2 * 4 * 8 * 3 // 4}
            # The data-parallel axis is across the nodes; the ring of all ranks leaves a node behind its second rank.
            in_ring = {"world": traffic["world"]} if rank["rank"] in (1, 3) else {}
            assert rank["bytes_across_nodes"] == {"dp": traffic["dp"], **in_ring}


@pytest.mark.gloo
def test_the_console_has_the_traffic_of_a_job_on_several_nodes(written: Path) -> None:
    sent = steps(written)[0]["ranks"][0]["comm_bytes"]
    on_dp, on_tp = (format_bytes(sum(sent[axis].values())) for axis in ("dp", "tp"))
    told = [line for line in (written / "told").read_text().splitlines() if line.startswith("sent by this rank")]
    expected = f"dp {on_dp} ({on_dp} to other nodes), tp {on_tp} (0 B to other nodes), world 48 B (0 B to other nodes)"
    assert told == [f"sent by this rank in the first step: {expected}"]


@pytest.mark.gloo
def test_ranks_hold_the_whole_model_between_them(written: Path) -> None:
    """A rank holds half of the sharded parameters, all replicated ones and at most 31 elements of padding a bucket."""
    sizes = {name: value.numel() for name, value in first_weights(tiny_run()).items()}
    cut = ("word.weight", "qkv", "mlp.up", "projection.weight", "down.weight")
    sharded = sum(numel for name, numel in sizes.items() if any(part in name for part in cut))
    each = sharded / 2 + (sum(sizes.values()) - sharded)
    for rank in steps(written)[0]["ranks"]:
        parameters = rank["model_state_bytes"]["parameters"] / 8
        assert each <= parameters <= each + 0.5 * 16 + 5 * 31, "five units, one of them with half a row of padding"


# --- saving beside training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "keep_last": 2}, {"exit_interval": 4}], ids=str)
def test_a_run_saves_the_same_beside_training(settings: dict[str, Any], tmp_path: Path) -> None:
    """Every checkpoint is that of a run which waits, to the bit, and a run goes on from it."""
    told = run(tmp_path / "beside", save_interval=2, async_save=True, **settings)
    run(tmp_path / "waits", save_interval=2, **settings)
    assert saved(tmp_path / "beside") == saved(tmp_path / "waits")
    assert told.text.count("saved checkpoint of iteration") == 2 + ("exit_interval" not in settings)
    assert "training waited" in told.text
    for entry in list_steps(tmp_path / "waits" / "save"):
        one, other = (open_checkpoint(tmp_path / name / "save" / entry.path.name) for name in ("beside", "waits"))
        assert {**one.progress, "run": None} == {**other.progress, "run": None}
        assert {found for _, found in box_differences(one, other)} == {NONE}
    events = [entry["iteration"] for entry in read_journal(tmp_path / "beside" / "save") if entry["event"] == "save"]
    assert events == ([2, 4] if "exit_interval" in settings else [2, 4, 5])


def full_disk_run(rank: int, settings: dict[str, Any]) -> str:
    """Train on two ranks, the second of which cannot write more than 50 bytes to a file; return the error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50 if rank else soft, hard))
    try:
        train_run(rank, 2, settings)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""


@pytest.mark.gloo
def test_a_save_beside_training_that_fails_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    """Before the next save, which would find the failure too."""
    settings = {"micro_batch_size": 1, "train_iters": 500, "save": str(tmp_path / "save"), "zero_stage": 2}
    errors = run_ranks(2, full_disk_run, {**settings, "save_interval": 40, "async_save": True})
    assert errors[0] == errors[1] and "rank 1: " in errors[0] and "File too large" in errors[0]
    assert saved(tmp_path) == [] and not list((tmp_path / "save").glob(".s*"))
    assert [entry["event"] for entry in read_journal(tmp_path / "save")][-1] == "stop"
    assert [entry for entry in read_journal(tmp_path / "save") if entry.get("iteration", 0) >= 80] == []
