"""Tests of the wires that zero.Init is given: an engine takes them over, and nothing may contradict them."""

import os
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.irregular_model import alone
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.errors import ConfigError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.partitioned_init.init import Init

RANKS, WIDTH = 4, 24
STAGE_3 = {"zero_stage": 3, "reduce_bucket_size": 1000}
WEIGHTS = {"zero_quantized_weights": True}
OPTIMIZER = {"type": "AdamW", "lr": 0.01}


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


def initialize(model: nn.Module, zero: dict[str, Any], mesh: Any = None) -> DataParallelEngine:
    return megazero.initialize(model, {"zero": {**STAGE_3, **zero}, "optimizer": OPTIMIZER}, mesh=mesh)


def alone_around(model: nn.Module, zero: dict[str, Any]) -> DataParallelEngine:
    return initialize(model, zero, alone())


def group_of(rank: int, groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Return this rank's group; a collective call of all processes."""
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    return next(group for ranks, group in made.items() if rank in ranks)


# --- what an engine takes over ------------------------------------------------------------------------------------


def trained(engine: DataParallelEngine, rank: int) -> tuple[dict[str, dict[str, int]], dict[str, Tensor]]:
    """Return what a rank sends in two steps, and the weights after them."""
    engine.mesh.meter.reset()
    for step in range(2):
        batch = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        engine.backward((engine(batch) - 0.5).square().mean())
        engine.step()
    sent = engine.mesh.meter.bytes_by_axis()
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return sent, weights


def given_by(rank: int, way: str) -> tuple[dict[str, dict[str, int]], dict[str, Tensor]]:
    pairs = [[0, 1], [2, 3]]
    mesh = mesh_in_worker(rank, dp=RANKS)
    config = {"zero": {**STAGE_3, **WEIGHTS, "zero_quantized_weights_bits": 4, "zero_hpz_partition_size": 2}}
    if way == "engine":
        return trained(initialize(make_model(), config["zero"], mesh), rank)
    if way == "nothing":
        return trained(initialize(make_model(), {}, mesh), rank)
    if way == "configuration":
        with Init(mesh=mesh), Init(mesh=mesh, config_dict_or_path=config):  # the outer one takes the parameters over
            model = make_model()
        return trained(initialize(model, {}, mesh), rank)
    with Init(zero_quantized_weights=True, zero_param_parallel_group=group_of(rank, pairs)):
        model = make_model()
    return trained(initialize(model, {**WEIGHTS, "zero_quantized_weights_bits": 4}, mesh), rank)


@pytest.mark.gloo
def test_an_engine_has_the_wires_of_its_parameters() -> None:
    expected, plain = run_ranks(RANKS, given_by, "engine"), run_ranks(RANKS, given_by, "nothing")
    assert expected[0][0]["dp"]["all_gather"] < plain[0][0]["dp"]["all_gather"] // 4
    assert "dp_secondary" in expected[0][0] and "dp_secondary" not in plain[0][0]
    for way in ("configuration", "arguments"):
        for (sent, weights), (sent_expected, weights_expected) in zip(
            run_ranks(RANKS, given_by, way), expected, strict=True
        ):
            assert sent == sent_expected
            assert all(torch.equal(value, weights_expected[name]) for name, value in weights.items())


def test_settings_that_are_given_again_agree() -> None:
    config = {"zero": {**STAGE_3, **WEIGHTS, "zero_quantized_block_size": 128}}
    with Init(config_dict_or_path=config, zero_quantized_weights=True):
        model = nn.Linear(3, 3)
    assert alone_around(model, {**WEIGHTS, "zero_quantized_block_size": 128}).config.zero.zero_quantized_weights
    with Init(
        config_dict_or_path={"zero": {**STAGE_3, "zero_quantized_gradients": True, "zero_quantized_block_size": 8}}
    ):
        model = nn.Linear(3, 3)
    assert alone_around(model, {}).config.zero.zero_quantized_block_size == 256, "it is that of gradients there"


# --- what contradicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_init", "in_engine", "given"),
    [
        ({"zero_hpz_partition_size": 2}, {"zero_hpz_partition_size": 4}, "zero_hpz_partition_size 4[^\n]*Init with 2"),
        (
            {**WEIGHTS, "zero_quantized_block_size": 64},
            {**WEIGHTS, "zero_quantized_block_size": 32},
            "zero_quantized_block_size 32[^\n]*Init with 64",
        ),
        (WEIGHTS, {"zero_stage": 2}, "zero_quantized_weights True for an engine with whole parameters"),
    ],
)
def test_a_contradiction_is_refused(in_init: dict[str, Any], in_engine: dict[str, Any], given: str) -> None:
    with Init(config_dict_or_path={"zero": {**STAGE_3, **in_init}}):
        model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=given):
        alone_around(model, in_engine)


def test_arguments_contradict_the_configuration_beside_them() -> None:
    with pytest.raises(ConfigError, match="zero_quantized_weights True for an engine with whole parameters"):
        Init(zero_quantized_weights=True, config={"zero": {"zero_stage": 2}})


def test_two_inits_contradict_each_other() -> None:
    parts = []
    for size in (2, 4):
        with Init(config_dict_or_path={"zero": {**STAGE_3, "zero_hpz_partition_size": size}}):
            parts.append(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size \d, and another with \d"):
        alone_around(nn.Sequential(*parts), {})


def test_wires_keep_the_rules_of_a_configuration() -> None:
    """A size that the engine's shard groups do not allow is refused there, as if its own configuration had it."""
    with Init(config_dict_or_path={"zero": {**STAGE_3, "zero_hpz_partition_size": 2}}):
        model = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match=r"zero\.zero_hpz_partition_size 2 with shard groups of 1"):
        alone_around(model, {})


# --- the group -------------------------------------------------------------------------------------------------------


def refused(rank: int, groups: list[list[int]], config: dict[str, Any] | None) -> str:
    with pytest.raises(ConfigError) as error:
        Init(zero_param_parallel_group=group_of(rank, groups), config_dict_or_path=config)
    return str(error.value)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("groups", "given", "legal"),
    [
        ([[0, 2], [1, 3]], "ranks [0, 2] on rank 0", "ranks [0, 1] on rank 0"),
        ([[0, 1, 2], [3]], "ranks [0, 1, 2] on rank 0", "ranks [0, 1] or [0, 1, 2, 3] on rank 0"),
        ([[0, 1], [2], [3]], "ranks [2] on rank 2", "ranks [2, 3] on rank 2"),
        ([[0], [1], [2], [3]], "ranks [0] on rank 0", "ranks [0, 1] on rank 0"),
    ],
)
def test_a_group_that_is_no_secondary_one_is_refused_on_every_rank(
    groups: list[list[int]], given: str, legal: str
) -> None:
    for message in run_ranks(RANKS, refused, groups, None):
        assert f"zero_param_parallel_group of {given}" in message
        assert legal in message


@pytest.mark.gloo
def test_a_group_contradicts_a_configuration() -> None:
    config = {"zero": {**STAGE_3, "zero_hpz_partition_size": 4}}
    for message in run_ranks(RANKS, refused, [[0, 1], [2, 3]], config):
        assert re.search("zero_hpz_partition_size 4[^\n]*Init with 2", message)


def by_itself(rank: int) -> tuple[int, str]:
    """Return the number of partitions over a process that is its own group, and the error of a longer group there."""
    lone = group_of(rank, [[0], [1]])
    pair = dist.new_group([0, 1])
    partitions = Init(data_parallel_group=lone, zero_param_parallel_group=lone).num_partitions
    with pytest.raises(ConfigError) as error:
        Init(data_parallel_group=lone, zero_param_parallel_group=pair)
    return partitions, str(error.value)


@pytest.mark.gloo
def test_the_group_of_a_lone_process() -> None:
    for rank, (partitions, message) in enumerate(run_ranks(2, by_itself)):
        assert partitions == 1
        assert f"a group of ranks [{rank}] on rank {rank}" in message


def over_other_processes(rank: int) -> str:
    """Make an Init whose data-parallel group is not the engine's; return the error of the engine."""
    mine = group_of(rank, [[0, 2], [1, 3]])
    with Init(data_parallel_group=mine, zero_param_parallel_group=mine):
        model = make_model()
    job = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": RANKS}
    with patch.dict(os.environ, {name: str(value) for name, value in job.items()}), pytest.raises(ConfigError) as error:
        initialize(model, {}, mesh_in_worker(rank, dp=RANKS))
    return str(error.value)


@pytest.mark.gloo
def test_a_group_is_one_of_the_engines_processes_too() -> None:
    for message in run_ranks(RANKS, over_other_processes):
        assert "zero_param_parallel_group of ranks [0, 2] on rank 0" in message
