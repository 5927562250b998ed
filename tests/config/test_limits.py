"""Tests of the time limits that a run and the library share: of joining, and of collectives."""

import pytest
from pydantic import ValidationError

from megazero.config import derived
from megazero.config.engine_sections import LimitConfig


def test_a_short_limit_of_collectives_leaves_processes_time_to_join() -> None:
    """The two limits are separate; Megatron-LM's limit after joining takes precedence for collectives."""
    limits = LimitConfig()
    assert (derived.collective_limit_minutes(limits), derived.join_limit_minutes(limits)) == (10, 10)
    short = LimitConfig(distributed_timeout_minutes=0.5)
    assert (derived.collective_limit_minutes(short), derived.join_limit_minutes(short)) == (0.5, 10)
    both = LimitConfig(distributed_timeout_minutes=20, distributed_timeout_seconds_after_init=90)
    assert (derived.collective_limit_minutes(both), derived.join_limit_minutes(both)) == (1.5, 20)
    assert derived.join_limit_minutes(LimitConfig(distributed_join_timeout_minutes=2)) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributed_timeout_minutes", 0),
        ("distributed_join_timeout_minutes", 0),
        ("distributed_timeout_seconds_after_init", -1),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        LimitConfig(**{name: value})
