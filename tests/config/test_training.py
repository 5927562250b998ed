"""Tests of the training settings: batch, length, evaluation, exits and compilation."""

import pytest
from pydantic import ValidationError

from megazero.config.run import TrainingConfig


def test_defaults_are_megatrons() -> None:
    training = TrainingConfig(micro_batch_size=4)
    assert (training.seed, training.eval_iters, training.eval_interval) == (1234, 100, 1000)
    assert training.global_batch_size is None and training.train_iters is None and training.train_samples is None
    assert training.exit_interval is None and training.exit_duration_in_mins is None
    assert training.exit_status_when_stopped is None
    assert training.compile == "auto"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_batch_size", 0),
        ("train_iters", 0),
        ("seed", -1),
        ("seed", 2**32),
        ("exit_duration_in_mins", 0),
        ("exit_status_when_stopped", 0),
        ("exit_status_when_stopped", 3),
        ("exit_status_when_stopped", 126),
    ],
)
def test_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=name):
        TrainingConfig(**{"micro_batch_size": 4, name: value})


@pytest.mark.parametrize("choice", ["auto", "on", "max", "off"])
def test_compile_is_a_choice_of_four(choice: str) -> None:
    assert TrainingConfig(micro_batch_size=4, compile=choice).compile == choice


@pytest.mark.parametrize("choice", [True, False, "yes", "inductor", ""])
def test_anything_else_is_no_choice(choice: object) -> None:
    with pytest.raises(ValidationError, match="compile"):
        TrainingConfig(micro_batch_size=4, compile=choice)
