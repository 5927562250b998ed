"""Each rule about pipelines and split sequences is broken by its own row; the values it names as legal satisfy it."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.configs import SMALL, make_run
from support.each import each

from megazero.config.derived import given_split
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.errors import Problem
from megazero.rules import pipeline as pipeline_rules
from megazero.rules.run import advice, check

# Two pipeline stages of six layers, one data-parallel copy; four micro-batches.
TWO = {"num_layers": 12, "pipeline_model_parallel_size": 2, "global_batch_size": 8}
VIRTUAL = "--num-layers-per-virtual-pipeline-stage"


def only(world_size: int = 2, **settings: Any) -> Problem:
    found = check(make_run(**settings), world_size)
    assert len(found) == 1, found
    return found[0]


@each(
    ("world_size", "settings"),
    [
        (2, TWO),
        (8, {**TWO, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (2, {**TWO, "pipeline_schedule": "gpipe"}),
        (2, {**TWO, "pipeline_schedule": "zero-bubble"}),
        (2, {**TWO, "num_layers_per_virtual_pipeline_stage": 1}),
        (2, {**TWO, "num_layers_per_virtual_pipeline_stage": 3, "pipeline_schedule": "interleaved"}),
        (2, {**TWO, "num_layers_per_virtual_pipeline_stage": 3, "pipeline_split": "4,5,3,0"}),
        (2, {**TWO, "pipeline_split": "0, 12"}),
        (2, {**TWO, "pipeline_split": "12,0", "recompute_granularity": "full", "recompute_num_layers": 12}),
        (4, {**TWO, "num_layers": 2, "pipeline_model_parallel_size": 4, "pipeline_split": "0,1,1,0"}),
        (2, {**TWO, "global_batch_size": None}),
        (1, {"pipeline_schedule": "gpipe"}),
        (1, {"pipeline_schedule": "1f1b", "rank_order": "tp-pp-dp", "allow_tensor_parallel_across_nodes": True}),
        (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "seq_length": 15}),
    ],
)
def test_legal(world_size: int, settings: dict[str, Any]) -> None:
    assert check(make_run(**settings), world_size) == ()


@each(
    ("settings", "given", "flags"),
    [
        ({"num_layers_per_virtual_pipeline_stage": 1}, f"{VIRTUAL} 1", VIRTUAL),
        ({"pipeline_schedule": "interleaved"}, "--pipeline-schedule interleaved", "--pipeline-schedule"),
        ({"pipeline_schedule": "zero-bubble"}, "--pipeline-schedule zero-bubble", "--pipeline-schedule"),
        ({"pipeline_split": "2"}, "--pipeline-split 2", "--pipeline-split"),
        (
            {"pipeline_split": "2", "num_layers_per_virtual_pipeline_stage": 1},
            f"{VIRTUAL} 1 --pipeline-split 2",
            f"{VIRTUAL}, --pipeline-split",
        ),
    ],
)
def test_settings_of_a_pipeline_without_one(settings: dict[str, Any], given: str, flags: str) -> None:
    problem = only(1, **settings)
    assert problem.given == f"{given} with --pipeline-model-parallel-size 1"
    assert "at least 2 pipeline stages" in problem.rule
    assert problem.legal == f"--pipeline-model-parallel-size 2, or leave out {flags}"


@each(
    ("layers", "length", "legal"),
    [
        (12, 4, f"{VIRTUAL} 3, --num-layers 16, --num-layers 24, or leave out {VIRTUAL}"),
        (12, 6, f"{VIRTUAL} 3, --num-layers 24, --num-layers 36, or leave out {VIRTUAL}"),
        (12, 50, f"{VIRTUAL} 3, --num-layers 200, --num-layers 300, or leave out {VIRTUAL}"),
        (24, 5, f"{VIRTUAL} 4, {VIRTUAL} 6, --num-layers 20, --num-layers 30, or leave out {VIRTUAL}"),
        (13, 3, f"--num-layers 12, --num-layers 18, or leave out {VIRTUAL}"),
        (2, 1, f"--num-layers 4, --num-layers 6, or leave out {VIRTUAL}"),
    ],
)
def test_a_stage_has_whole_chunks(layers: int, length: int, legal: str) -> None:
    problem = only(**{**TWO, "num_layers": layers}, num_layers_per_virtual_pipeline_stage=length)
    assert problem.given == f"{VIRTUAL} {length} with --num-layers {layers} --pipeline-model-parallel-size 2"
    assert "a whole number of chunks, at least 2" in problem.rule
    assert problem.legal == legal


def test_turns_need_several_chunks() -> None:
    problem = only(**TWO, pipeline_schedule="interleaved")
    assert problem.given == f"--pipeline-schedule interleaved without {VIRTUAL}"
    assert "several chunks" in problem.rule
    assert problem.legal == f"{VIRTUAL} 3, --pipeline-schedule 1f1b"
    odd = only(**{**TWO, "num_layers": 13}, pipeline_schedule="interleaved")
    assert odd.legal == "--pipeline-schedule 1f1b"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_several_chunks_need_turns(schedule: str) -> None:
    problem = only(**TWO, pipeline_schedule=schedule, num_layers_per_virtual_pipeline_stage=2)
    assert problem.given == f"--pipeline-schedule {schedule} with {VIRTUAL} 2"
    assert "here 3, the schedule is the interleaved one" in problem.rule
    assert problem.legal == f"--pipeline-schedule interleaved, or leave out {VIRTUAL}"


@pytest.mark.parametrize(
    ("world_size", "batch", "given", "legal"),
    [
        (2, 6, "--global-batch-size 6, which is 3 micro-batches", "--global-batch-size 4, --global-batch-size 8"),
        (2, None, "--global-batch-size 2, which is 1 micro-batch", "--global-batch-size 4"),
        (4, 20, "--global-batch-size 20, which is 5 micro-batches", "--global-batch-size 16, --global-batch-size 24"),
    ],
)
def test_turns_take_as_many_micro_batches_as_there_are_stages(
    world_size: int, batch: int | None, given: str, legal: str
) -> None:
    chunks = {**TWO, "num_layers_per_virtual_pipeline_stage": 3, "global_batch_size": batch}
    problem = only(world_size, **chunks)
    assert problem.given == f"{given}, with --pipeline-model-parallel-size 2"
    assert "in turns of 2" in problem.rule and problem.legal == legal


def test_chunks_and_turns_are_told_at_once() -> None:
    """A chunk length that leaves a rest and micro-batches that do not fill the turns are reported together."""
    settings = {**TWO, "num_layers_per_virtual_pipeline_stage": 4, "global_batch_size": 2}
    chunks, turns = check(make_run(**settings), 2)
    assert chunks.legal.startswith(f"{VIRTUAL} 3, ") and turns.legal == "--global-batch-size 4"
    assert turns.given == "--global-batch-size 2, which is 1 micro-batch, with --pipeline-model-parallel-size 2"
    mended = {**settings, "num_layers_per_virtual_pipeline_stage": 3, "global_batch_size": 4}
    assert check(make_run(**mended), 2) == ()
    asked = {**TWO, "pipeline_schedule": "interleaved", "global_batch_size": 2}
    assert [problem.given for problem in check(make_run(**asked), 2)] == [
        f"--pipeline-schedule interleaved without {VIRTUAL}",
        turns.given,
    ]


def test_turns() -> None:
    assert pipeline_rules.turns(make_run(**TWO)) == 1
    assert pipeline_rules.turns(make_run(**TWO, num_layers_per_virtual_pipeline_stage=5)) == 2
    assert pipeline_rules.turns(make_run(**TWO, pipeline_schedule="interleaved")) == 2
    assert pipeline_rules.turns(make_run(num_layers_per_virtual_pipeline_stage=5)) == 1


def test_too_many_stages_for_layers_and_job() -> None:
    """The value that both rules name as legal satisfies both."""
    layout = {"num_layers": 8, "pipeline_model_parallel_size": 16}
    job, layers = check(make_run(**layout), 8)
    assert job.given == "8 processes with --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16"
    assert layers.given == "--pipeline-model-parallel-size 16 --num-layers 8"
    assert job.legal == layers.legal == "--pipeline-model-parallel-size 8"
    assert check(make_run(**{**layout, "pipeline_model_parallel_size": 8}), 8) == ()


def test_inner_stages_have_layers() -> None:
    layout = {**TWO, "num_layers": 3, "pipeline_model_parallel_size": 8}
    problem = only(8, **layout)
    assert problem.given == "--pipeline-model-parallel-size 8 --num-layers 3"
    assert "only the first, with the embedding, and the last, with the head" in problem.rule
    assert problem.legal == "--pipeline-model-parallel-size 4, --num-layers 6"
    assert check(make_run(**{**layout, "num_layers": 6}), 8) == ()
    assert check(make_run(**{**layout, "pipeline_model_parallel_size": 4}), 8) == ()


@each(
    ("layout", "split", "found", "count", "legal"),
    [
        ({}, "6,5", "6,5 (2 chunks, 11 layers)", "2 whole numbers", "6,6"),
        ({}, "4,4,4", "4,4,4 (3 chunks, 12 layers)", "2 whole numbers", "6,6"),
        ({}, "6;6", "6;6", "2 whole numbers", "6,6"),
        ({}, "13,-1", "13,-1", "2 whole numbers", "6,6"),
        ({}, "12,", "12,", "2 whole numbers", "6,6"),
        (
            {"num_layers_per_virtual_pipeline_stage": 3},
            "6,0,6,0",
            "6,0,6,0 (4 chunks, 12 layers)",
            "4 whole numbers",
            "3,3,3,3",
        ),
        ({"pipeline_model_parallel_size": 4, "num_layers": 3}, "1,1,1", "1,1,1 (3 chunks, 3 layers)", "4", "1,1,1,0"),
        ({"pipeline_model_parallel_size": 4, "num_layers": 2}, "1,1", "1,1 (2 chunks, 2 layers)", "4", "0,1,1,0"),
        ({"pipeline_model_parallel_size": 4, "num_layers": 6}, "6", "6 (1 chunk, 6 layers)", "4", "2,2,1,1"),
    ],
)
def test_a_split_has_all_layers(layout: dict[str, Any], split: str, found: str, count: str, legal: str) -> None:
    problem = only(4, **{**TWO, **layout, "pipeline_split": split})
    assert problem.given == f"--pipeline-split {found}"
    assert f"a split is {count}" in problem.rule and "only the first and the last may be 0" in problem.rule
    assert problem.legal == f"--pipeline-split {legal}, or leave out --pipeline-split"
    assert check(make_run(**{**TWO, **layout, "pipeline_split": legal}), 4) == ()


def test_tokens_are_split_evenly() -> None:
    odd = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "micro_batch_size": 3, "seq_length": 10}
    problem = only(4, **odd)
    assert problem.given == (
        "--sequence-parallel with --tensor-model-parallel-size 4, --micro-batch-size 3 and --seq-length 10"
    )
    assert "3 x 10 tokens" in problem.rule
    assert problem.legal == "--micro-batch-size 2, --micro-batch-size 4, --seq-length 8, --seq-length 12"
    assert check(make_run(**{**odd, "sequence_parallel": False}), 4) == ()


@each(
    ("settings", "legal"),
    [
        ({"global_batch_size": 9}, "--seq-length 8, --seq-length 12"),
        ({"global_batch_size": 18}, "--micro-batch-size 2, --micro-batch-size 6, --seq-length 8, --seq-length 12"),
        ({"max_position_embeddings": 11}, "--micro-batch-size 2, --micro-batch-size 4, --seq-length 8"),
        ({"global_batch_size": 9, "max_position_embeddings": 11}, "--seq-length 8"),
        (
            {"global_batch_size": 3, "seq_length": 1, "max_position_embeddings": 1},
            "--micro-batch-size 4, --seq-length 4",  # no value satisfies both rules, so one that satisfies this rule
        ),
        (
            {
                "num_layers": 4,
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 1,
                "global_batch_size": 36,
            },
            "--micro-batch-size 2, --micro-batch-size 6, --seq-length 8, --seq-length 12",
        ),
    ],
)
def test_what_splits_evenly_fits_batch_and_positions(settings: dict[str, Any], legal: str) -> None:
    odd = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "micro_batch_size": 3, "seq_length": 10}
    assert only(8 if "num_layers" in settings else 4, **{**odd, **settings}).legal == legal


def test_an_unknown_batch_filters_nothing() -> None:
    said = {"tensor_model_parallel_size": 4, "sequence_parallel": True, "micro_batch_size": 3, "seq_length": 10}
    settings = {**SMALL, **said, "global_batch_size": "nine", "max_position_embeddings": "ten"}
    outcome = validate({name: RawValue(name, value, name) for name, value in settings.items()})
    (problem,) = check(outcome.partial, 4)
    assert problem.legal == "--micro-batch-size 2, --micro-batch-size 4, --seq-length 8, --seq-length 12"


@settings(max_examples=100)
@given(
    layers=st.integers(1, 40),
    stages=st.integers(1, 6),
    tensor=st.sampled_from([1, 2, 4]),
    length=st.none() | st.integers(1, 8),
    schedule=st.sampled_from(["auto", "gpipe", "1f1b", "interleaved", "zero-bubble"]),
    split=st.none() | st.lists(st.integers(0, 9), min_size=1, max_size=8).map(lambda row: ",".join(map(str, row))),
    micro=st.integers(1, 5),
    steps=st.integers(1, 9),
    seq=st.integers(1, 30),
)
def test_what_a_rule_calls_legal_mends_it(
    *,
    layers: int,
    stages: int,
    tensor: int,
    length: int | None,
    schedule: str,
    split: str | None,
    micro: int,
    steps: int,
    seq: int,
) -> None:
    """The remedies of a broken rule satisfy it, and where no rule is broken a given split can be carried out."""
    said = {
        "num_layers": layers,
        "pipeline_model_parallel_size": stages,
        "tensor_model_parallel_size": tensor,
        "num_layers_per_virtual_pipeline_stage": length,
        "pipeline_schedule": schedule,
        "pipeline_split": split,
        "micro_batch_size": micro,
        "global_batch_size": micro * steps,
        "sequence_parallel": True,
        "seq_length": seq,
    }
    world_size = stages * tensor
    run = make_run(**said)
    for rule in pipeline_rules.RULES:
        for problem in rule(run, world_size):
            assert problem.given and problem.rule
            for remedy in problem.legal.split(", "):
                assert remedies_mend(rule, remedy, said, world_size), (problem, remedy)
    found = given_split(run) if not check(run, world_size) else None
    if found is not None:
        assert sum(found) == layers and min(found) >= 0 and all(found[1:-1])


def remedies_mend(rule: Any, remedy: str, said: dict[str, Any], world_size: int) -> bool:
    """Return True if the rule finds no problem once the remedy is applied."""
    if rule is pipeline_rules.pipeline_settings_need_a_pipeline:
        return True  # several settings may have to be left out at once; the table above tests them
    if remedy.startswith("or leave out "):
        changed = {**said, name_of(remedy.removeprefix("or leave out ")): None}
    else:
        flag, value = remedy.split()
        changed = {**said, name_of(flag): int(value) if value.isdecimal() else value}
    # Another size of the pipeline is another number of processes, too.
    stages = changed["pipeline_model_parallel_size"]
    return not list(rule(make_run(**changed), max(world_size, stages * said["tensor_model_parallel_size"])))


def name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def test_advice() -> None:
    pipeline = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zero-bubble"}
    (late,) = advice(make_run(**pipeline, recompute_granularity="full"), 2)
    assert late.startswith("--pipeline-schedule zero-bubble with --recompute-granularity full: later pipeline stages")
    assert advice(make_run(**pipeline, recompute_granularity="selective"), 2) == ()
