"""Tests of the settings of Adam and of the learning-rate schedule."""

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.engine_sections import OptimizerConfig


def test_defaults_are_megatrons() -> None:
    optimizer = OptimizerConfig(lr=1e-3)
    assert (optimizer.adam_beta1, optimizer.adam_beta2, optimizer.adam_eps) == (0.9, 0.999, 1e-8)
    assert (optimizer.lion_beta1, optimizer.lion_beta2) == (0.95, 0.98)
    assert (optimizer.weight_decay, optimizer.clip_grad, optimizer.min_lr) == (0.01, 1.0, 0.0)
    assert (optimizer.lr_decay_style, optimizer.lr_warmup_iters, optimizer.lr_warmup_fraction) == ("linear", 0, None)


@each(
    ("name", "value"),
    [
        ("lr", 0),
        ("lr", float("nan")),
        ("min_lr", -1e-5),
        ("adam_beta2", 1.0),
        ("adam_eps", 0),
        ("clip_grad", -1),
        ("lr_warmup_fraction", 1.0),
        ("lr_decay_style", "polynomial"),
        ("optimizer", "lyon"),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        OptimizerConfig(**{"lr": 1e-3, name: value})
