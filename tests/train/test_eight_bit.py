"""Runs with moments in 8 bits: stages are one, a resumed run is the run that stayed, and slices are other blocks.

Stages are compared over steps of one micro-batch: gradients of several are added in another order in stages 2 and 3.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import saved_states
from support.processes import run_ranks
from support.small_runs import train_run

from megazero.checkpoint.reader import open_checkpoint

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the kernels are those of bitsandbytes")

STEPS = 4
LR = 0.01


def settings_of(folder: Path, **more: Any) -> dict[str, Any]:
    lengths = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": STEPS, "lr_decay_iters": 9}
    optimizer = {"optimizer": "adamw8bit", "lr": LR, "weight_decay": 0.1, "adam_beta2": 0.95}
    return {"mock_data": True, "save": str(folder), "precision": "fp32", **lengths, **optimizer, **more}


def whole_run(rank: int, size: int, settings: dict[str, Any]) -> str:
    return train_run(rank, size, settings).text


def check_equal(one: Path, other: Path) -> None:
    found, expected = saved_states(open_checkpoint(one)), saved_states(open_checkpoint(other))
    assert {kind for _, kind in found} == {"weight", "exp_avg", "exp_avg_sq"} and found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def check_close(one: Path, other: Path) -> None:
    """Check that weights are as far apart as 2 % of what training may have moved them, on average.

    Single ones are further: where a second moment is rounded to 0, a step is longer.
    """
    found, expected = saved_states(open_checkpoint(one)), saved_states(open_checkpoint(other))
    for (name, kind), value in expected.items():
        if kind == "weight" and not name.endswith("qkv.bias"):  # the gradient of a key's bias is rounding only
            assert float((found[name, kind] - value).abs().mean()) < 0.02 * LR * STEPS, name


def test_all_stages_of_one_process_are_one(tmp_path: Path) -> None:
    for stage in range(4):
        whole_run(0, 1, settings_of(tmp_path / str(stage), zero_stage=stage, micro_batch_size=4))
        check_equal(tmp_path / str(stage), tmp_path / "0")


@pytest.mark.gloo
def test_all_stages_of_two_processes_are_one(tmp_path: Path) -> None:
    for stage in range(4):
        run_ranks(2, whole_run, 2, settings_of(tmp_path / str(stage), zero_stage=stage, micro_batch_size=2))
        check_equal(tmp_path / str(stage), tmp_path / "0")
    whole_run(0, 1, settings_of(tmp_path / "alone"))
    check_close(tmp_path / "0", tmp_path / "alone")


@pytest.mark.gloo
@pytest.mark.parametrize(("dp", "tp", "stage"), [(1, 1, 0), (2, 1, 3), (1, 2, 1)])
def test_a_resumed_run_is_the_run_that_stayed(dp: int, tp: int, stage: int, tmp_path: Path) -> None:
    layout = {"tensor_model_parallel_size": tp, "zero_stage": stage}
    run_ranks(dp * tp, whole_run, dp * tp, settings_of(tmp_path / "stayed", **layout))
    run_ranks(dp * tp, whole_run, dp * tp, settings_of(tmp_path / "left", **layout, exit_interval=2))
    run_ranks(dp * tp, whole_run, dp * tp, settings_of(tmp_path / "left", **layout, load=str(tmp_path / "left")))
    check_equal(tmp_path / "left", tmp_path / "stayed")


@pytest.mark.gloo
def test_slices_of_matrices_are_other_blocks(tmp_path: Path) -> None:
    """Tensor parallelism cuts blocks: weights are close, also where a run goes on at another size, not equal."""
    whole_run(0, 1, settings_of(tmp_path / "one"))
    run_ranks(2, whole_run, 2, settings_of(tmp_path / "two", tensor_model_parallel_size=2))
    check_close(tmp_path / "two", tmp_path / "one")
    run_ranks(2, whole_run, 2, settings_of(tmp_path / "left", tensor_model_parallel_size=2, exit_interval=2))
    whole_run(0, 1, settings_of(tmp_path / "left", load=str(tmp_path / "left")))
    check_close(tmp_path / "left", tmp_path / "one")


@pytest.mark.gloo
@pytest.mark.parametrize("more", [{"precision": "bf16"}, {"precision": "fp16"}, {"bf16_master_weights": True}])
def test_formats_pipelines_and_host_memory(more: dict[str, Any], tmp_path: Path) -> None:
    """Every format of weights trains in two pipeline stages, with the states in host memory, as in one process."""
    more = {"precision": "bf16", **more}
    layout = {"pipeline_model_parallel_size": 2, "zero_stage": 1, "offload_optimizer": "cpu"}
    run_ranks(4, whole_run, 4, settings_of(tmp_path / "four", **layout, **more))
    whole_run(0, 1, settings_of(tmp_path / "one", **more))
    check_close(tmp_path / "four", tmp_path / "one")


def test_adamw_goes_on_from_moments_in_8_bits(tmp_path: Path) -> None:
    whole_run(0, 1, settings_of(tmp_path, exit_interval=2))
    whole_run(0, 1, settings_of(tmp_path, load=str(tmp_path), optimizer="adam"))
    whole_run(0, 1, settings_of(tmp_path / "wide", optimizer="adam"))
    check_close(tmp_path, tmp_path / "wide")
