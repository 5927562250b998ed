"""What is saved and taken."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from megazero.config.run import CheckpointConfig


def test_nothing_is_saved_or_loaded_by_default() -> None:
    checkpoint = CheckpointConfig()
    assert (checkpoint.save, checkpoint.load, checkpoint.save_interval) == (None, None, None)
    assert not (checkpoint.no_save_optim or checkpoint.no_load_optim or checkpoint.finetune)


def test_folders_become_paths() -> None:
    assert CheckpointConfig(save="runs/a").save == Path("runs/a")  # type: ignore[arg-type]


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ValidationError, match="save_interval"):
        CheckpointConfig(save_interval=0)
