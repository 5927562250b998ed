"""Tests of the parallel settings: degrees, schedule, rank order, backend and device."""

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.fields import describe
from megazero.config.run import ParallelConfig
from megazero.parallel.topology import Topology, parse_order


def test_defaults() -> None:
    parallel = ParallelConfig()
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (1, 1)
    assert parallel.num_layers_per_virtual_pipeline_stage is None and parallel.pipeline_split is None
    assert (parallel.pipeline_schedule, parallel.rank_order) == ("auto", "pp-dp-tp")
    assert not parallel.sequence_parallel and not parallel.allow_tensor_parallel_across_nodes
    assert (parallel.distributed_backend, parallel.device) == ("auto", "auto")
    assert parallel.cpu_threads is None


@each(
    ("name", "value"),
    [
        ("tensor_model_parallel_size", 0),
        ("pipeline_model_parallel_size", 0),
        ("num_layers_per_virtual_pipeline_stage", 0),
        ("pipeline_schedule", "dualpipe"),
        ("rank_order", "tp-dp"),
        ("distributed_backend", "mpi"),
        ("device", "tpu"),
        ("cpu_threads", 0),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ParallelConfig(**{name: value})


def test_every_rank_order_is_one_of_the_topology() -> None:
    (orders,) = [info.choices for info in describe("parallel", ParallelConfig) if info.name == "rank_order"]
    assert len({Topology(order=parse_order(text)).order for text in orders}) == len(orders) == 6
