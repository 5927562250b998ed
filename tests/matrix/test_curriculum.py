"""Tests that layouts train like one process, in float64, when every step's rows are cut to a length of its own.

The twin cuts its rows itself, in the plainest way; some runs keep documents apart and leave their ends out of the loss.
"""

import argparse
import inspect
from typing import Any

import pytest
from support.token_files import write_corpus
from support.training import Cell, deviation, reference_history, train_cell

STEPS = 3
CUT = {
    "curriculum_learning": True,
    "curriculum_schedule": "fixed_discrete",
    "curriculum_seqlens": ("8", "16", "24"),
    "curriculum_last_steps": ("1", "2"),
}
APART: dict[str, Any] = {
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "tokenizer_type": "ByteTokenizer",
}
STORED = {"partition_activations": True, "contiguous_checkpointing": True, "checkpoint_in_cpu": True}


def lengths(step: int) -> int:
    return (8, 16, 24)[step]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = inspect.getsource(argparse).encode()
    return write_corpus(tmp_path_factory.mktemp("lines") / "text", [[[*line, 256]] for line in text.split(b"\n")])


@pytest.mark.gloo
def test_layouts_train_like_one_process_that_cuts_its_rows(lines: str) -> None:
    one = reference_history(lines, STEPS, cut=lengths, num_layers=2, **APART)
    whole = reference_history(lines, STEPS, num_layers=2, **APART)
    assert abs(one.losses[0] - whole.losses[0]) > 1e-6, "cut rows have other losses"
    settings = {"num_layers": 2, **APART, **CUT}
    cells = [
        Cell(dp=2, stage=3, accumulation=2, settings=settings),
        Cell(tp=2, accumulation=4, settings={**settings, "sequence_parallel": True, "recompute_granularity": "full"}),
        Cell(tp=2, stage=1, settings={**settings, **STORED, "recompute_granularity": "full"}),
        Cell(pp=2, accumulation=4, settings={**settings, "pipeline_schedule": "zero-bubble"}),
    ]
    for cell in cells:
        found = deviation(train_cell(cell, lines), one)
        assert found.worst < 1e-9, (str(cell), found)
