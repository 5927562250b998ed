"""Degrees, backend and device."""

import pytest
from pydantic import ValidationError

from megazero.config.parallel import ParallelConfig


def test_defaults() -> None:
    parallel = ParallelConfig()
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (1, 1)
    assert (parallel.distributed_backend, parallel.device, parallel.distributed_timeout_minutes) == ("auto", "auto", 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_model_parallel_size", 0),
        ("pipeline_model_parallel_size", 2),
        ("distributed_backend", "mpi"),
        ("device", "tpu"),
        ("distributed_timeout_minutes", 0),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ParallelConfig(**{name: value})  # type: ignore[arg-type]
