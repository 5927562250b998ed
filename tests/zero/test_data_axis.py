"""Tests of shard groups, hops and secondary partitions in runs: layouts train as one plain process does, in float64."""

from pathlib import Path

import pytest
from support.reference import History
from support.training import Cell, deviation, reference_history, train_cell, write_text_corpus

BOUND = 1e-9


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_text_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def reference(corpus: str) -> History:
    return reference_history(corpus)


# Shard groups of one and of two ranks, by either setting, in every stage and with everything that meets them.
REPLICATED = [
    Cell(tp=1, dp=4, stage=1, accumulation=2, settings={"mics_shard_size": 2}),
    Cell(tp=1, dp=4, stage=2, accumulation=2, settings={"num_distributed_optimizer_instances": 2}),
    Cell(tp=1, dp=4, stage=3, accumulation=2, settings={"mics_shard_size": 2, "prescale_gradients": True}),
    Cell(tp=1, dp=2, stage=3, settings={"mics_shard_size": 1}),
    Cell(tp=2, dp=2, stage=3, settings={"mics_shard_size": 1, "sequence_parallel": True}),
    Cell(tp=1, pp=2, dp=2, stage=2, accumulation=4, settings={"mics_shard_size": 1}),
    Cell(tp=1, dp=4, stage=2, accumulation=2, settings={"mics_shard_size": 2, "offload_optimizer": "cpu"}),
    Cell(tp=1, dp=4, stage=2, accumulation=2, settings={"mics_shard_size": 2, "allgather_bucket_size": 2900}),
    Cell(tp=1, dp=4, stage=3, settings={"mics_shard_size": 2, "offload_param": "cpu", "reduce_scatter": False}),
]


@pytest.mark.gloo
@pytest.mark.parametrize("cell", REPLICATED, ids=str)
def test_replicated_shard_groups_train_like_one_process(cell: Cell, corpus: str, reference: History) -> None:
    assert deviation(train_cell(cell, corpus), reference).worst < BOUND


HOPS, GATHERS = {"hierarchical_collectives": True}, {"mics_hierarchical_params_gather": True}
SECONDARY = {"zero_hpz_partition_size": 4}
# Gathers and sums in two hops, and secondary partitions, which are exact.
NEAR = [
    Cell(tp=1, dp=4, stage=1, accumulation=2, settings=HOPS, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=2, accumulation=2, settings={**HOPS, "allgather_bucket_size": 2900}, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=3, settings=HOPS, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=0, settings=HOPS, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=3, settings={**GATHERS, "max_live_parameters": 0}, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=3, settings=HOPS, nodes=(3, 1)),
    Cell(tp=1, dp=4, stage=2, settings={"hierarchical_collectives": "auto"}, nodes=(2, 2)),
    Cell(tp=1, dp=4, stage=3, accumulation=2, settings={"zero_hpz_partition_size": 2}),
    Cell(tp=1, dp=4, stage=3, settings={**SECONDARY, "max_live_parameters": 0, "offload_param": "cpu"}),
    Cell(tp=1, dp=4, stage=3, settings={**HOPS, "zero_hpz_partition_size": 2, "mics_shard_size": 2}, nodes=(1, 3)),
    Cell(tp=2, dp=2, stage=3, settings={"zero_hpz_partition_size": 2, "sequence_parallel": True}),
    Cell(tp=1, pp=2, dp=2, stage=3, accumulation=2, settings={"zero_hpz_partition_size": 2}),
]


@pytest.mark.gloo
@pytest.mark.parametrize("cell", NEAR, ids=str)
def test_hops_and_secondary_partitions_train_like_one_process(cell: Cell, corpus: str, reference: History) -> None:
    assert deviation(train_cell(cell, corpus), reference).worst < BOUND
