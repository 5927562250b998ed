"""Tests of the program that puts published files through both doors: what it takes, and what it records."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from published import expand, main, page, processes_of, read_config

FILES = {
    "one+fine/zero.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}',
    "one+fine/again/zero.json": '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}',
    "two+auto/ds.json": '{"zero_optimization": {"stage": 0}, "fp16": {"enabled": true, "auto_cast": true}}',
    "two+auto/TEMPLATE.json": '{"train_batch_size": GLOBAL, "zero_optimization": {"stage": 1}}',
    "two+auto/package.json": '{"name": "another kind of file"}',
    "three+far/zero3.json": '{"zero_optimization": {"stage": 3, "legacy_stage1": true}}',
}
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
source /no/such/settings
set -e
cd /no/such/folder
cat <<EOT > config.json
{"zero_optimization": {"stage": $1}, "train_micro_batch_size_per_gpu": 2}
EOT
DATA=<Specify path>/text_document
run="deepspeed --num_nodes $SLURM_NNODES --num_gpus 4 x/pretrain_gpt.py --data-path $DATA --fp16
  --deepspeed_config config.json"
eval $run
"""


def write(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_what_became_of_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "files")
    assert main([str(tmp_path / "files"), "--records", str(tmp_path / "records")]) == 0
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    outcomes = {(one["repository"], one["door"]): one["outcome"] for one in records}
    assert len(records) == 6 and outcomes == {
        ("one/fine", "run"): "noticed",
        ("one/fine", "library"): "noticed",
        ("two/auto", "run"): "noticed",
        ("two/auto", "library"): "refused",
        ("three/far", "run"): "refused",
        ("three/far", "library"): "refused",
    }
    shown = "\n".join(page(records))
    assert "| DeepSpeed | run | 3 | 3 | 0 | 2 | 1 |" in shown and str(tmp_path) not in shown
    assert (
        "| `zero_optimization.legacy_stage1` | refused: there is one implementation of every ZeRO stage | 1 | 1 |"
        in shown
    )
    assert "| files of | door |" in capsys.readouterr().out


def test_the_processes_that_a_batch_makes(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert processes_of({**sizes, "gradient_accumulation_steps": 2}) == 8
    assert processes_of(sizes) == 16 and processes_of({**sizes, "train_batch_size": "auto"}) == 1
    assert processes_of({**sizes, "train_batch_size": 63}) == 1
    assert read_config(tmp_path / "nothing.json") is None


def can_expand() -> bool:
    programs = all(shutil.which(name) for name in ("unshare", "setpriv", "chroot"))
    return programs and os.geteuid() == 0 and not subprocess.run(["unshare", "--mount", "--net", "true"]).returncode


def test_a_script_is_expanded_and_nothing_is_written(tmp_path: Path) -> None:
    if not can_expand():
        pytest.skip("scripts are expanded on Linux by root, in namespaces of their own")
    script = tmp_path / "repository" / "train.sh"
    script.parent.mkdir()
    script.write_text(SCRIPT.replace("$1", "3", 1) + "touch touched\n")
    (call,) = expand(script, script.parent)
    assert call.processes == 8 and call.config is not None
    assert json.loads(call.config)["zero_optimization"] == {"stage": 3}
    assert " ".join(call.words) == "--data-path PLACE/text_document --fp16 --deepspeed_config config.json"
    assert [path.name for path in script.parent.iterdir()] == ["train.sh"]
