"""Tests of pretrain_gpt.py from its command line on one process: what it prints, writes and resumes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support import broken_files
from support.launch import SMALL_RUN, command_line, read_steps, run_here, set_launcher
from support.source_tree import ROOT
from support.token_files import write_corpus

from megazero.checkpoint.reader import open_checkpoint
from megazero.command_line.parse import from_yaml
from megazero.data.position import Stretch
from megazero.owner import Owner

Capture = pytest.CaptureFixture[str]
# What training scripts import from below deepspeed.runtime; it is there without
# `install_as_deepspeed`.
DEEPSPEEDS = """
from megazero.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, GatheredParameters, Init
from megazero.deepspeed.runtime.engine import DeepSpeedEngine
from megazero.deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR
from megazero.deepspeed.runtime.utils import clip_grad_norm_, move_to_device, see_memory_usage, set_random_seed
from megazero.deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live
from megazero.deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from megazero.deepspeed.runtime.zero.config import ZeroStageEnum
from megazero.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from megazero.deepspeed.runtime.zero.tiling import TiledLinear
from megazero.deepspeed.runtime.dataloader import RepeatingLoader
from megazero.deepspeed.runtime.activation_checkpointing import checkpointing
from megazero.deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from megazero.deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology, ProcessTopology
from megazero.deepspeed.pipe import PipelineModule
import megazero.deepspeed.runtime.activation_checkpointing.checkpointing as same
import megazero.deepspeed.utils
assert same is checkpointing and megazero.deepspeed.utils.RepeatingLoader is RepeatingLoader
assert ZeroStageEnum.weights == 3 and OffloadDeviceEnum("cpu") is OffloadDeviceEnum.cpu
kinds = ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
assert list(OffloadStateTypeEnum) == kinds and OffloadStateTypeEnum.lp_grads.value == "lp_grads"
"""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment of a program that is started by hand, without a launcher."""
    set_launcher(monkeypatch)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)


def flags(folder: Path, **more: str | None) -> list[str]:
    """Return the flags of the smallest run, with its files in `folder`; `more` holds further flags."""
    files = {"--save": f"{folder / 'saved'}", "--load": f"{folder / 'saved'}", "--metrics-file": f"{folder / 'steps'}"}
    changes = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return command_line({**SMALL_RUN, **files, "--log-interval": "2", **changes})


def test_a_run_reports_evaluates_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    broken_files.corpus(tmp_path)
    corpus = {"mock_data": None, "data_path": f"{tmp_path / 'text'}", "split": "80,10,10"}
    board = {"tensorboard_dir": f"{tmp_path / 'board'}", "eval_iters": "1", "eval_interval": "2"}
    assert run_here(flags(tmp_path, **corpus, **board), monkeypatch) == 0
    assert not dist.is_initialized()

    printed, complaints = capsys.readouterr()
    assert complaints == ""
    assert printed.splitlines()[-1] == "finished 4 iterations"
    assert re.findall(r"iteration +(\d+)/4 ", printed) == ["1", "2", "4"]
    assert list(read_steps(tmp_path / "steps")) == [1, 2, 3, 4]
    records = [json.loads(line) for line in (tmp_path / "steps").read_text().splitlines()]
    evaluations = [record["evaluation"] for record in records if "evaluation" in record]
    assert [(each["iteration"], each["split"]) for each in evaluations] == [
        (2, "validation"),
        (4, "validation"),
        (4, "test"),
    ]
    assert [path for path in (tmp_path / "board").iterdir() if "tfevents" in path.name]
    checkpoint = open_checkpoint(tmp_path / "saved")
    assert checkpoint.step == 4
    assert from_yaml(checkpoint.config_yaml).data.split == "80,10,10"


def test_a_run_is_taken_up_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for train_iters in ("2", "4"):
        assert run_here(flags(tmp_path, train_iters=train_iters), monkeypatch) == 0
    assert "resumed at iteration 2, 16 samples consumed\n" in capsys.readouterr().out
    resumed = read_steps(tmp_path / "steps")
    through = tmp_path / "through"
    through.mkdir()
    assert run_here(flags(through), monkeypatch) == 0
    expected = read_steps(through / "steps")
    assert [step["loss"] for step in resumed.values()] == [step["loss"] for step in expected.values()]


def test_a_run_goes_on_with_other_corpora_length_and_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Its place in the corpora is in its checkpoints; what it has read of them is not read again."""
    first, second = (
        write_corpus(tmp_path / name, [[[(step * token) % 100 for token in range(3000)]]])
        for name, step in (("first", 1), ("second", 3))
    )
    length = {"mock_data": None, "max_position_embeddings": "16", "split": "1"}
    assert run_here(flags(tmp_path, **length, data_path=first), monkeypatch) == 0
    assert open_checkpoint(tmp_path / "saved").progress["corpora"]["start"] == 0
    others = {"data_path": f"0.5 {first} 0.5 {second}", "seq_length": "8", "global_batch_size": "16"}
    assert run_here(flags(tmp_path, **length, **others, train_iters="6"), monkeypatch) == 0
    assert (
        "another mixture from sample 32 on, of 8 tokens in place of 16: 1 of 2 corpora go on where they were left,"
        " 1 begin; 0 are read no more\n" in capsys.readouterr().out
    )
    checkpoint = open_checkpoint(tmp_path / "saved")
    place = Stretch.from_json(checkpoint.progress["corpora"])
    assert (place.start, place.seq_length, checkpoint.progress["consumed_samples"]) == (32, 8, 64)
    assert sorted(reading[2:] for reading in place.readings.values()) == [(8, 0, 0, 0), (16, 0, 32, 0)]
    assert run_here(flags(tmp_path, **length, **others, seed="9"), monkeypatch) == 2
    assert "--seed 9" in capsys.readouterr().err


def test_a_finished_run_has_nothing_left_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for _ in range(2):
        assert run_here(flags(tmp_path), monkeypatch) == 0
    assert capsys.readouterr().out.endswith("finished 4 iterations\n")
    assert list(read_steps(tmp_path / "steps")) == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "saved").glob("step_*")] == ["step_0000004"]


def test_a_stopped_run_can_be_told_from_a_finished_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped run has the exit status of the setting; without the setting both exit with 0."""
    told = {"exit_status_when_stopped": "75"}
    assert run_here(flags(tmp_path, exit_interval="1"), monkeypatch) == 0
    assert run_here(flags(tmp_path, exit_interval="2", **told), monkeypatch) == 75
    assert run_here(flags(tmp_path, exit_duration_in_mins="1e-9", **told), monkeypatch) == 75
    assert run_here(flags(tmp_path, exit_interval="4", **told), monkeypatch) == 0  # the last step of the run
    assert list(read_steps(tmp_path / "steps")) == [1, 2, 3, 4]
    assert run_here(flags(tmp_path, **told), monkeypatch) == 0


def test_flags_without_effect_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run_here(flags(tmp_path, use_flash_attn="", train_iters="1"), monkeypatch) == 0
    assert capsys.readouterr().out.startswith("--use-flash-attn: accepted, without effect")


def test_threads_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    before = torch.get_num_threads()
    try:
        assert run_here(flags(tmp_path, cpu_threads="3", train_iters="1"), monkeypatch) == 0
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert capsys.readouterr().out.startswith("CPU threads a process: 3 | ")


def test_help_needs_no_settings(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert run_here(["--help"], monkeypatch) == 0
    assert "--tensor-model-parallel-size" in capsys.readouterr().out


def test_a_loss_scale_at_its_end_stops_the_run_and_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    scale = {"fp16": "", "loss_scale": "1e30", "max_skipped_steps_at_min_loss_scale": "2"}
    assert run_here(flags(tmp_path, **scale), monkeypatch) == 3
    told = capsys.readouterr().err
    assert told.startswith("training stopped: 2 steps in a row overflowed at loss scale 1e+30")
    assert "--lr" in told and "Traceback" not in told
    assert [step["skipped"] for step in read_steps(tmp_path / "steps").values()] == [True, True]
    assert open_checkpoint(tmp_path / "saved").progress["optimizer_steps"] == 0


def test_what_compiles_nothing_does_not_import_the_compiler(tmp_path: Path) -> None:
    """A run that trains and saves, and the library, import no torch._dynamo, half of the time of a start.

    Nothing has been imported before the paths of DeepSpeed's programs, which are there without more.
    """
    program = (
        f"{DEEPSPEEDS}\nimport atexit, runpy, sys, megazero.library.step.passes\ndel sys.argv[0]\n"
        "atexit.register(lambda: print('imported:', *sys.modules))\n"
        "runpy.run_path(sys.argv[0], None, '__main__')"
    )
    command = [sys.executable, "-c", program, str(ROOT / "pretrain_gpt.py"), *flags(tmp_path, train_iters="1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told, _, imported = done.stdout.rpartition("imported: ")
    assert "finished 1 iteration" in told
    assert "megazero.zero.engine" in imported.split() and "torch._dynamo" not in imported.split()


def test_a_second_job_in_the_same_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "saved").mkdir()
    elsewhere = replace(Owner.of_this_process(), machine="0" * 8, boot="0" * 8)
    held = {"owner": elsewhere.tag, "host": "node07", "pid": 4711, "since": "today", "id": "0" * 16}
    (tmp_path / "saved" / ".lock").write_text(json.dumps(held))
    assert run_here(flags(tmp_path), monkeypatch) == 2
    message = capsys.readouterr().err
    assert "saved/.lock is held by process 4711 on node07, since today" in message
    assert f"if that job has ended, remove {tmp_path}/saved/.lock" in message
    assert [path.name for path in (tmp_path / "saved").iterdir()] == [".lock"]


def test_a_run_keeps_the_newest_and_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"save_interval": "1", "keep_last": "1", "keep_every": "2", "train_iters": "5"}
    assert run_here(flags(tmp_path, **settings), monkeypatch) == 0
    names = ["config.yaml", "curves.jsonl", "journal.jsonl", "latest", "run.html", "run.json"]
    names += [f"step_000000{step}" for step in (2, 4, 5)]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names


def test_a_run_without_room_for_a_checkpoint_ends_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=5, f_frsize=1024, f_blocks=9))
    assert run_here(flags(tmp_path), monkeypatch) == 2
    printed, message = capsys.readouterr()
    assert re.search(r"--save .*saved: 5\.0 KiB free\n.*a checkpoint of this run takes \d+\.\d KiB\n", message)
    assert "iteration" not in printed
    assert list((tmp_path / "saved").iterdir()) == []
