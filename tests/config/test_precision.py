"""Tests of the precision settings: number formats and the loss scale."""

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.engine_sections import PrecisionConfig


def test_defaults_are_megatrons() -> None:
    precision = PrecisionConfig()
    assert (precision.precision, precision.loss_scale, precision.initial_loss_scale) == ("fp32", None, 2**32)
    assert (precision.min_loss_scale, precision.loss_scale_window, precision.hysteresis) == (1.0, 1000, 2)
    assert not precision.accumulate_allreduce_grads_in_fp32 and not precision.consecutive_hysteresis
    assert precision.fp8_format is None


@each(
    ("name", "value"),
    [
        ("precision", "fp8"),
        ("fp8_format", "e5m2"),
        ("loss_scale", 0),
        ("initial_loss_scale", float("inf")),
        ("hysteresis", 0),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        PrecisionConfig(**{name: value})
