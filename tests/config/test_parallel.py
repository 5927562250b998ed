"""Tests of the parallel settings: degrees, schedule, rank order, backend and device."""

import pytest
from pydantic import ValidationError

from megazero.config import derived
from megazero.config.fields import describe
from megazero.config.run import ParallelConfig
from megazero.parallel.topology import Topology, parse_order


def test_defaults() -> None:
    parallel = ParallelConfig()
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (1, 1)
    assert parallel.num_layers_per_virtual_pipeline_stage is None and parallel.pipeline_split is None
    assert (parallel.pipeline_schedule, parallel.rank_order) == ("auto", "pp-dp-tp")
    assert not parallel.sequence_parallel and not parallel.allow_tensor_parallel_across_nodes
    assert (parallel.distributed_backend, parallel.device, parallel.distributed_timeout_minutes) == ("auto", "auto", 10)
    assert parallel.cpu_threads is None
    assert (derived.collective_limit_minutes(parallel), derived.join_limit_minutes(parallel)) == (10, 10)


def test_a_short_limit_of_collectives_leaves_processes_time_to_join() -> None:
    """The two limits are separate; Megatron-LM's limit after joining takes precedence for collectives."""
    short = ParallelConfig(distributed_timeout_minutes=0.5)
    assert (derived.collective_limit_minutes(short), derived.join_limit_minutes(short)) == (0.5, 10)
    both = ParallelConfig(distributed_timeout_minutes=20, distributed_timeout_seconds_after_init=90)
    assert (derived.collective_limit_minutes(both), derived.join_limit_minutes(both)) == (1.5, 20)
    assert derived.join_limit_minutes(ParallelConfig(distributed_join_timeout_minutes=2)) == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_model_parallel_size", 0),
        ("pipeline_model_parallel_size", 0),
        ("num_layers_per_virtual_pipeline_stage", 0),
        ("pipeline_schedule", "dualpipe"),
        ("rank_order", "tp-dp"),
        ("distributed_backend", "mpi"),
        ("device", "tpu"),
        ("distributed_timeout_minutes", 0),
        ("distributed_join_timeout_minutes", 0),
        ("distributed_timeout_seconds_after_init", -1),
        ("cpu_threads", 0),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ParallelConfig(**{name: value})


def test_every_rank_order_is_one_of_the_topology() -> None:
    (orders,) = [info.choices for info in describe("parallel", ParallelConfig) if info.name == "rank_order"]
    assert len({Topology(order=parse_order(text)).order for text in orders}) == len(orders) == 6
