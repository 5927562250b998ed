"""ZeRO's settings."""

import pytest
from pydantic import ValidationError

from megazero.config.zero import ZeroConfig


def test_stages_0_to_2_are_legal() -> None:
    assert [ZeroConfig(zero_stage=stage).zero_stage for stage in (0, 1, 2)] == [0, 1, 2]
    assert ZeroConfig() == ZeroConfig(zero_stage=1, reduce_bucket_size=2**24, overlap_comm=True)


@pytest.mark.parametrize(("name", "value"), [("zero_stage", 3), ("zero_stage", -1), ("reduce_bucket_size", 0)])
def test_out_of_range_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=name):
        ZeroConfig(**{name: value})  # type: ignore[arg-type]
