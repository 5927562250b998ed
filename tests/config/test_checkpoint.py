"""Tests of the checkpoint settings."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from support.configs import make_run

from megazero.config.run import CheckpointConfig


def test_nothing_is_saved_or_loaded_by_default() -> None:
    checkpoint = CheckpointConfig()
    assert (checkpoint.save, checkpoint.load, checkpoint.save_interval) == (None, None, None)
    assert not (checkpoint.no_save_optim or checkpoint.no_load_optim or checkpoint.finetune)


def test_folders_become_paths() -> None:
    assert make_run(save="runs/a").checkpoint.save == Path("runs/a")


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="save_interval"):
        CheckpointConfig(save_interval=0)
