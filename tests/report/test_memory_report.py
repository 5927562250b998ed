"""Tests of the lines that a run prints about the memory of activations, buffers and arenas."""

import re
from typing import Any

import pytest
from support.processes import run_ranks
from support.small_runs import Told, train_run

FULL: dict[str, Any] = {"recompute_granularity": "full", "micro_batch_size": 2}
SIZE = re.compile(r"\d+(\.\d)? (B|KiB|MiB)")


def said(told: Told) -> list[str]:
    """Return the lines about memory in order, with each size replaced by `#`."""
    starts = ("activations:", "gradient arena", "activation checkpoint")
    return [SIZE.sub("#", line) for line in told.text.splitlines() if line.startswith(starts)]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "retained until backward"),
        ({"recompute_granularity": "selective"}, "retained until backward, the attention core's recomputed"),
        (FULL, "recomputed from 2 activation checkpoints, each stored on the device"),
        ({**FULL, "recompute_num_layers": 2}, "recomputed from 1 activation checkpoints, each stored on the device"),
        (
            {**FULL, "partition_activations": True},
            "recomputed from 2 activation checkpoints, 1/2 of each stored on the device",
        ),
    ],
)
def test_the_choice_is_said_first(settings: dict[str, Any], expected: str) -> None:
    told = run_ranks(2, train_run, 2, {**settings, "tensor_model_parallel_size": 2})[0]
    assert f"activations: {expected} | logits in chunks of at most # | constant-size buffers of #" in said(told)


@pytest.mark.gloo
def test_a_mask_is_said_with_its_size() -> None:
    """The reported size of an attention mask is that of 2 samples x 8 x 8 elements of 8 bytes."""
    settings = {"reset_attention_mask": True, "vocab_size": 257, "tokenizer_type": "ByteTokenizer"}
    text = run_ranks(1, train_run, 1, settings)[0].text
    assert "retained until backward | an attention mask of 1.0 KiB for every micro-batch in flight | logits" in text


@pytest.mark.gloo
def test_arenas_and_the_host_are_told_of_at_the_end() -> None:
    settings = {**FULL, "zero_stage": 2, "checkpoint_in_cpu": True, "contiguous_checkpointing": True}
    lines = said(run_ranks(2, train_run, 2, settings)[0])
    arena = "#, high water #, largest free block #, fragmentation 0.00, 0 compactions"
    assert lines[1:] == [
        f"gradient arena, kept: {arena}",
        f"gradient arena, buckets: {arena}",
        "activation checkpoints in host memory: at most #, # sent, # fetched",
        f"activation checkpoint arena: {arena}, 0 activation checkpoints outside",
    ]


@pytest.mark.gloo
def test_profiling_shows_on_the_steps_line() -> None:
    text = run_ranks(2, train_run, 2, {**FULL, "profile_backward": True})[0].text
    assert re.search(r"checkpoint-forward \(ms\): \d+\.\d \| checkpoint-recompute \(ms\): \d+\.\d \| ETA", text)
    assert "checkpoint-forward" not in run_ranks(2, train_run, 2, FULL)[0].text
