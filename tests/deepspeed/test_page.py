"""The program of docs/deepspeed.md runs as it stands there, and the names that the page lists exist."""

import re
import shlex
from pathlib import Path

import pytest
from support.launch import torchrun
from support.pages import block_with
from support.source_tree import ROOT
from support.warm_python import warm_python

import megazero.deepspeed as deepspeed
from megazero.deepspeed.deepspeed_engine import DeepSpeedEngine
from megazero.library.data_parallel_engine import DataParallelEngine

PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
# Attributes that an engine has once it is made.
SET = set(
    re.findall(r"self\.(\w+)(?:, self\.(?:\w+))* = ", (ROOT / "megazero/deepspeed/deepspeed_engine.py").read_text())
)
SET |= {"global_steps", "global_samples", "skipped_steps", "world_size", "mp_world_size"}


@pytest.mark.gloo
def test_the_program_of_the_page_trains(tmp_path: Path) -> None:
    block = block_with("docs/deepspeed.md", "cat >runs/ds_program.py")
    (tmp_path / "runs").mkdir()
    for name, text in block.files().items():
        (tmp_path / name).write_text(text)
    words = shlex.split(block.lines()[-1])
    assert words[:4] == ["torchrun", "--standalone", "--nproc-per-node", "2"]
    path, arguments = tmp_path / words[4], words[5:]
    with torchrun(arguments, ranks=2, folder=tmp_path, path=path, python=warm_python()) as program:
        done = program.wait()
    assert done.code == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+),", done.stdout)]
    assert len(losses) == 8 and losses[-1] < losses[0] / 2
    assert sorted(re.findall(r"rank (\d): step 64 of epoch 8", done.stdout)) == ["0", "1"]


def test_the_page_lists_what_is_there() -> None:
    table = PAGE.partition("The engine:")[2].partition("Further attributes")[0]
    known = {*dir(DeepSpeedEngine), *dir(DataParallelEngine), *SET}
    assert set(re.findall(r"`(\w+)[`(]", table)) - known - {"engine", "loss"} == set()
    top = PAGE.partition("## What is there")[2].partition("The engine:")[0]
    for name in ("initialize", "init_distributed", "comm", "add_config_arguments", "get_accelerator", "ops"):
        assert f"`{name}" in top and getattr(deepspeed, name) is not None
