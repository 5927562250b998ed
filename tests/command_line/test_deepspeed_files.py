"""Tests that `--deepspeed-config` gives a run the settings that DeepSpeed's documentation promises."""

import json
from pathlib import Path
from typing import Any

from support.deepspeed_files import FILES, found_settings
from support.each import each

from megazero.command_line.parse import parse
from megazero.config.run import RunConfig

BASE = "--preset gpt2-124m --train-iters 100 --mock-data --recompute-granularity full"


def run(line: str, content: dict[str, Any] | None = None, folder: Path | None = None) -> RunConfig:
    """Return the configuration of a run with these flags and, if there is a content, that DeepSpeed configuration."""
    if folder is not None:
        (folder / "ds.json").write_text(json.dumps(content))
        line = f"--deepspeed-config {folder / 'ds.json'} {line}"
    return parse(f"{BASE} {line}".split(), world_size=8).config


@each("case", FILES)
def test_a_file_stands_for_its_settings(case: str, tmp_path: Path) -> None:
    content, settings = FILES[case]
    config = run("--micro-batch-size 2 --lr 1e-3 --tensor-model-parallel-size 2", content, tmp_path)
    assert found_settings(config, settings) == settings


def test_a_files_batch_optimizer_and_schedule_are_those_of_flags(tmp_path: Path) -> None:
    """A run with a file has the same configuration as one with flags alone that mean the same."""
    content = {
        "train_batch_size": 96,
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.25,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 2e-4, "betas": [0.8, 0.85], "eps": 1e-7, "weight_decay": 0.05, "adam_w_mode": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_type": "linear",
                "warmup_min_lr": 0,
                "warmup_max_lr": 2e-4,
                "warmup_num_steps": 5,
                "total_num_steps": 80,
            },
        },
    }
    flags = (
        "--global-batch-size 96 --micro-batch-size 3 --clip-grad 0.25 --lr 2e-4 --adam-beta1 0.8 --adam-beta2 0.85"
        " --adam-eps 1e-7 --weight-decay 0.05 --lr-decay-style linear --lr-warmup-iters 5 --lr-decay-iters 80"
    )
    assert run("", content, tmp_path) == run(flags)


def test_a_schedule_without_parameters_has_deepspeeds(tmp_path: Path) -> None:
    """DeepSpeed documents a warm-up of 1000 steps to a rate of 0.001."""
    content = {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}}
    flags = "--micro-batch-size 2 --train-iters 2000"
    warmup = "--lr 1e-3 --lr-decay-style constant --lr-warmup-iters 1000"
    assert run(flags, content, tmp_path) == run(f"{flags} {warmup}")
