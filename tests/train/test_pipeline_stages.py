"""Tests of how a run is cut into stages: split, schedule, micro-batches held at once, and the lines printed."""

import pytest
from support.configs import make_run
from support.each import each

from megazero.activations.assemble import configured_plan
from megazero.parallel.layer_split import Chunk
from megazero.train.pipeline_stages import (
    activation_config,
    describe_stages,
    num_checkpoints,
    pipeline_split,
    stage_chunks,
    stage_plan,
)

BIG_VOCABULARY = {"num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 128}


def test_the_head_counts_as_layers() -> None:
    config = make_run(**BIG_VOCABULARY, pipeline_model_parallel_size=2)
    assert pipeline_split(config, 512) == (4, 4)
    assert pipeline_split(config, 12_800) == (6, 2)
    assert pipeline_split(config, 50_304) == (8, 0), "the head alone takes longer than all layers"


def test_a_given_split_is_taken() -> None:
    config = make_run(**BIG_VOCABULARY, pipeline_model_parallel_size=2, pipeline_split="3,5")
    assert pipeline_split(config, 50_304) == (3, 5)
    assert stage_chunks(config, 0, 0) == (Chunk(range(3), True, False),)
    assert stage_chunks(config, 1, 0) == (Chunk(range(3, 8), False, True),)


def test_chunks_take_turns() -> None:
    config = make_run(
        num_layers=8,
        pipeline_model_parallel_size=2,
        num_layers_per_virtual_pipeline_stage=2,
        pipeline_split="2,2,2,2",
        global_batch_size=8,
    )
    assert stage_chunks(config, 1, 0) == (Chunk(range(2, 4), False, False), Chunk(range(6, 8), False, True))
    plan = stage_plan(config, 1)
    assert (plan.schedule, plan.num_stages, plan.num_chunks, plan.stage) == ("interleaved", 2, 2, 1)


@each(
    ("schedule", "stage", "number"),
    [("1f1b", 0, 4 * 2), ("1f1b", 3, 2), ("gpipe", 0, 8 * 2), ("zero-bubble", 3, 4 * 2)],
)
def test_checkpoints_of_every_micro_batch_in_flight(schedule: str, stage: int, number: int) -> None:
    config = make_run(
        num_layers=8,
        pipeline_model_parallel_size=4,
        pipeline_split="2,2,2,2",
        pipeline_schedule=schedule,
        recompute_granularity="full",
    )
    assert num_checkpoints(config, stage, 128, 8) == number


def test_without_a_pipeline_one_micro_batch_is_in_flight() -> None:
    config = make_run(num_layers=6, recompute_granularity="full", recompute_num_layers=4)
    assert num_checkpoints(config, 0, 128, 8) == configured_plan(config.activations).num_checkpoints(6) == 2


def test_slices_are_not_cut_again() -> None:
    both = {"recompute_granularity": "full", "partition_activations": True, "sequence_parallel": True}
    assert not activation_config(make_run(**both, tensor_model_parallel_size=2)).partition_activations
    assert activation_config(make_run(**both)).partition_activations, "nothing is split over one rank"


def test_what_the_user_is_told() -> None:
    config = make_run(num_layers=5, pipeline_model_parallel_size=3, pipeline_split="2,1,2")
    assert describe_stages(config, 128) == [
        "pipeline stages, schedule 1f1b",
        "  stage 0: embedding, layers 0-1",
        "  stage 1: layer 2",
        "  stage 2: layers 3-4, final norm and head",
    ]
    assert describe_stages(make_run(), 128) == []
    many = make_run(num_layers=64, pipeline_model_parallel_size=64)
    lines = describe_stages(many, 128)
    assert len(lines) == 17 and lines[-2] == "  ..." and lines[-1].endswith("head")


def test_interleaved_stages_name_both_chunks() -> None:
    config = make_run(
        num_layers=4, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1, global_batch_size=4
    )
    assert describe_stages(config, 128)[1] == "  stage 0: embedding, layer 0 and layer 2"


@pytest.mark.parametrize("granularity", ["none", "selective"])
def test_checkpoints_of_segments_are_of_full_recomputation(granularity: str) -> None:
    moot = {"partition_activations": "auto", "checkpoint_in_cpu": True, "contiguous_checkpointing": True}
    config = make_run(recompute_granularity=granularity, logits_chunk_bytes=9, **moot)
    assert activation_config(config) == make_run(recompute_granularity=granularity, logits_chunk_bytes=9).activations
    whole = make_run(recompute_granularity="full", **moot)
    assert activation_config(whole) == whole.activations
