"""Tests of runs with adapters: they begin beside a base's weights, go on bitwise, and refuse what has no base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import run_ranks
from support.small_runs import Told, tiny_run, train_run
from torch import Tensor

from megazero.checkpoint.reader import Checkpoint, open_checkpoint
from megazero.config import derived
from megazero.errors import CheckpointError, ConfigError, UserError
from megazero.parallel.launch import Launch
from megazero.train.build import check_checkpoint
from megazero.train.start.check import check
from megazero.train.start.outline import outline

CORPUS: dict[str, Any] = {"mock_data": True, "global_batch_size": 4, "micro_batch_size": 2}
LORA: dict[str, Any] = {**CORPUS, "lora_rank": 2, "lora_alpha": 3.0}
STATES = ("weight", "exp_avg", "exp_avg_sq")


def weights(root: Path, step: int) -> dict[str, Tensor]:
    found = open_checkpoint(root, step=step)
    return {name: found.read_full(name) for name in found.parameters}


def begin(rank: int, size: int, folder: str, **settings: Any) -> list[Told]:
    """Train a base, then adapters beside it: in one go, and with a stop after two steps."""
    base, whole, half = (Path(folder) / name for name in ("base", "whole", "half"))
    tell = [train_run(rank, size, {**CORPUS, "train_iters": 2, "save": base})]
    first = {**LORA, **settings, "load": base, "finetune": True}
    tell.append(train_run(rank, size, {**first, "train_iters": 4, "save": whole}))
    tell.append(train_run(rank, size, {**first, "train_iters": 4, "exit_interval": 2, "save": half}))
    tell.append(train_run(rank, size, {**LORA, **settings, "train_iters": 4, "load": half, "save": half}))
    return tell


@pytest.mark.gloo
def test_a_run_begins_beside_a_base_and_goes_on_bitwise(tmp_path: Path) -> None:
    """Of the base nothing changes; adapters begin anew there, and a run that goes on takes them with their moments."""
    run_ranks(2, _begin_in_stage_3, str(tmp_path))
    base = weights(tmp_path / "base", 2)
    found = open_checkpoint(tmp_path / "whole", step=4)
    assert _states(found) == _states(open_checkpoint(tmp_path / "half", step=4))
    for name, saved in found.parameters.items():
        is_trained = ".adapter." in name
        assert set(saved.kinds) == (set(STATES) if is_trained else {"weight"})
        assert is_trained or torch.equal(found.read_full(name), base[name])
    total = sum(_numel(saved.full_shape) for saved in found.parameters.values())
    assert total == derived.num_parameters(tiny_run(**LORA, lora_random_base=True).model, 29)
    first = weights(tmp_path / "half", 2)
    moved = [name for name in base if ".adapter." not in name and not torch.equal(first[name], base[name])]
    assert moved == []
    assert any(bool(value.any()) for name, value in first.items() if name.endswith("lora_B.weight"))
    # The same run on one process.
    one = {"lora_dropout": 0.2, "load": tmp_path / "half" / "step_0000002", "save": tmp_path / "one"}
    train_run(0, 1, {**LORA, **one, "train_iters": 4})
    for name, value in weights(tmp_path / "one", 4).items():
        torch.testing.assert_close(value, found.read_full(name), rtol=1e-9, atol=1e-12)


def _begin_in_stage_3(rank: int, folder: str) -> list[Told]:
    return begin(rank, 2, folder, zero_stage=3, lora_dropout=0.2)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _states(checkpoint: Checkpoint) -> dict[tuple[str, str], list[float]]:
    return {
        (name, kind): checkpoint.read_full(name, kind).flatten().tolist()
        for name, saved in checkpoint.parameters.items()
        for kind in saved.kinds
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, and adapters beside it."""
    folder = tmp_path_factory.mktemp("saved")
    train_run(0, 1, {**CORPUS, "train_iters": 1, "save": folder / "base"})
    train_run(0, 1, {**LORA, "train_iters": 1, "load": folder / "base", "finetune": True, "save": folder / "adapted"})
    return folder


def refusal(**settings: Any) -> UserError:
    config = tiny_run(**settings)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        check_checkpoint(config, check(config, Launch(0, 1, 0)), 1)
    return caught.value


def test_adapters_need_a_base(saved: Path, tmp_path: Path) -> None:
    assert "--load BASE --finetune, or --lora-random-base" in str(refusal(**LORA))
    empty = {"load": tmp_path / "new", "save": tmp_path / "new"}
    assert "which has no checkpoint" in str(refusal(**LORA, **empty))
    assert "--lora-rank 0, or" in str(refusal(**LORA, load=saved / "base")), "a run that goes on has its adapters"
    told = train_run(0, 1, {**LORA, "train_iters": 1, "lora_random_base": True})
    assert "trained" not in told.reason


def test_adapters_are_those_of_the_checkpoint(saved: Path) -> None:
    adapted = {"load": saved / "adapted"}
    for goes_on in ({}, {"finetune": True}):
        assert "--lora-rank 2, or" in str(refusal(**{**LORA, "lora_rank": 4}, **adapted, **goes_on))
        assert "--lora-alpha 3.0, or" in str(refusal(**{**LORA, "lora_alpha": 4.0}, **adapted, **goes_on))
        assert "--lora-rank 2, or" in str(refusal(**CORPUS, **adapted, **goes_on))
        targets = str(refusal(**LORA, lora_targets=("linear_fc2",), **adapted, **goes_on))
        assert "--lora-targets linear_qkv linear_proj linear_fc1 linear_fc2, or" in targets


@each(
    ("settings", "message"),
    [
        ({"lora_targets": ("linear_qkv", "qkv")}, "--lora-targets linear_qkv qkv"),
        ({"lora_targets": ("linear_fc1", "linear_fc1")}, "each named once"),
        ({"decoupled_lr": 0.1}, "--decoupled-lr 0.1 with --lora-rank 2"),
        ({"param_groups": ("final_norm=lr:0.1",)}, "final_norm"),
    ],
)
def test_what_has_no_effect_beside_frozen_weights_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_run(0, 1, {**LORA, **settings, "lora_random_base": True})
    assert message in str(caught.value)


def test_the_outline_tells_what_is_trained() -> None:
    config = tiny_run(**LORA, lora_random_base=True)
    told = "\n".join(outline(config, 1, check(config, Launch(0, 1, 0)), source=None))
    # Of each of 2 layers: (16 + 48) + (16 + 16) + (16 + 64) + (64 + 16), by the rank.
    assert f"{2 * 2 * 256:,} of them in adapters of rank 2, which alone are trained" in told
