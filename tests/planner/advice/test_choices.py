"""Tests the layouts that an advisor tries: words of a run are kept, and those of layouts read as they were meant."""

import shlex

import pytest
from support.each import each

from megazero.errors import ConfigError
from megazero.parallel.nodes import Nodes
from megazero.planner.advice.choices import LayoutChoice, choices, configured, flags, legal, read
from megazero.rules import run as rules

WORDS = (
    "--preset gpt2-124m --lr 1e-4 --train-iters 10 --model-parallel-size 2 --zero-stage 3 --recompute-granularity full"
    " --recompute-method uniform --no-overlap-comm --batch-size 2 --global-batch-size 48 --fp16 --seed 7"
)
NODES = Nodes((8, 8))


def test_words_of_the_layout_are_left_out_and_all_others_kept() -> None:
    run = read(shlex.split(WORDS), 16)
    kept = " ".join(run.kept)
    assert "--preset gpt2-124m" in kept and "--seed 7" in kept and "--fp16" in kept and "--mock-data" in kept
    assert not any(word in kept for word in ("parallel-size", "zero", "recompute", "batch", "overlap"))
    assert run.left_out == ("--no-overlap-comm", "--recompute-method")
    assert run.samples == 48
    assert run.given == LayoutChoice(2, zero_stage=3, recompute_granularity="full", micro_batch_size=2)


def test_a_global_batch_that_is_not_given_is_that_of_the_given_layout() -> None:
    words = WORDS.replace("--global-batch-size 48", "")
    assert read(shlex.split(words), 16).samples == 2 * 16 // 2


def test_every_legal_layout_is_read_as_it_was_meant() -> None:
    run = read(shlex.split(WORDS), 16)
    found = list(choices(run, NODES))
    assert len(found) == len(set(found)) > 1000
    refused = 0
    for choice in found[:: len(found) // 60]:
        wanted = legal(run, choice, NODES)
        if wanted is None:
            refused += 1
            continue
        assert configured(wanted.config, choice, 48) == wanted.config
        assert not rules.check(wanted.config, 16)
    assert refused < 20


@each(
    "choice",
    [
        LayoutChoice(4, 2, sequence_parallel=True, zero_stage=2, micro_batch_size=3),
        LayoutChoice(1, 4, pipeline_schedule="zero-bubble", zero_stage=0, micro_batch_size=4),
        LayoutChoice(2, 2, 3, sequence_parallel=True, micro_batch_size=1, recompute_granularity="selective"),
        LayoutChoice(
            zero_stage=3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True
        ),
        LayoutChoice(zero_stage=3, mics_shard_size=8, offload_optimizer="cpu", offload_param="cpu"),
    ],
)
def test_kinds_of_layouts_are_among_them(choice: LayoutChoice) -> None:
    run = read(shlex.split(WORDS), 16)
    assert choice in set(choices(run, NODES))
    assert legal(run, choice, NODES) is not None


def test_refused_layouts_are_none() -> None:
    run = read(shlex.split(WORDS), 16)
    assert legal(run, LayoutChoice(5), NODES) is None
    assert legal(run, LayoutChoice(16, sequence_parallel=True), NODES) is None  # 12 heads, and across nodes


def test_words_of_a_layout() -> None:
    run = read(shlex.split(WORDS), 16)
    words = flags(run, LayoutChoice(2, 2, sequence_parallel=True, micro_batch_size=2))
    assert words[len(run.kept) :] == (
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel"),
        *("--micro-batch-size", "2", "--global-batch-size", "48"),
    )


def test_changes_and_a_short_name() -> None:
    first = LayoutChoice(2, sequence_parallel=True, micro_batch_size=4)
    assert first.changes(LayoutChoice(1, micro_batch_size=4)) == 1  # a split sequence follows
    assert first._replace(offload_optimizer="cpu").changes(LayoutChoice()) == 3
    assert first.describe() == "t2 p1 z1 m4" and not first.rounds
    assert LayoutChoice(pipeline_schedule="zero-bubble", zero_quantized_weights=True).rounds


def test_what_an_advisor_cannot_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="an advisor chooses what such a file states"):
        read([*shlex.split(WORDS), "--deepspeed-config", "ds.json"], 16)
    with pytest.raises(ConfigError, match="--zero-stag"):
        read([*shlex.split(WORDS), "--zero-stag", "2"], 16)
