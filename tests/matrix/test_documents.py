"""Tests that small layouts train like one process, in float64, when documents are kept apart inside samples.

The twin reads every document on its own. Here a document is a line of source text: some are empty but for their end,
some go on into the next sample, and some samples lie within one. The layouts are a pairwise cover.
"""

import argparse
import functools
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.layouts import GLOBAL_BATCH, Layout, legal_layouts, pairs_in, pairwise_cover
from support.reference import History
from support.token_files import write_corpus
from support.training import Cell, deviation, reference_history, train_cell

BOUND = 1e-9
STEPS = 2
END = 256
APART: dict[str, Any] = {
    "reset_position_ids": True,
    "reset_attention_mask": True,
    "eod_mask_loss": True,
    "tokenizer_type": "ByteTokenizer",
}
GRID = {
    "tp": (1, 2),
    "pp": (1, 2),
    "dp": (1, 2),
    "accumulation": (1, 2),
    "chunks": (1, 2),
    "schedule": ("1f1b", "interleaved", "zero-bubble"),
    "stage": (0, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "partitions_checkpoints": (False, True),
}
COPIED = {"partition_activations": True, "contiguous_checkpointing": True, "checkpoint_in_cpu": True}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = inspect.getsource(argparse).encode()
    return write_corpus(tmp_path_factory.mktemp("lines") / "text", [[[*line, END]] for line in text.split(b"\n")])


@pytest.fixture(scope="module")
def alone(lines: str) -> History:
    return reference_history(lines, STEPS, num_layers=4, global_batch_size=GLOBAL_BATCH, **APART)


@functools.cache
def all_layouts() -> tuple[Layout, ...]:
    return tuple(legal_layouts(GRID, most_processes=4))


@functools.cache
def cover() -> list[Layout]:
    return pairwise_cover(all_layouts())


def cell_of(layout: Layout, **settings: Any) -> Cell:
    cell = layout.cell(steps=STEPS)
    return replace(cell, settings={**cell.settings, **APART, **settings})


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_layouts_train_like_one_process(size: int, lines: str, alone: History) -> None:
    cells = [cell_of(layout) for layout in cover() if layout.world_size == size]
    if size == 2:
        cells.append(cell_of(Layout(tp=2, accumulation=2, recompute="full"), **COPIED))
    for cell in cells:
        apart = deviation(train_cell(cell, lines), alone)
        assert apart.worst < BOUND, (str(cell), apart)


@pytest.mark.gloo
@pytest.mark.parametrize("left_out", ["reset_position_ids", "reset_attention_mask"])
def test_either_alone_is_another_run(left_out: str, lines: str, alone: History) -> None:
    cell = cell_of(Layout(accumulation=4), **{left_out: False})
    assert deviation([*train_cell(cell, lines)], alone).losses > 1e6 * BOUND


def test_every_pair_of_choices_is_in_the_cover() -> None:
    assert all(layout.num_layers == 4 for layout in cover()), "one reference serves all"
    assert pairs_in(map(vars, cover())) == pairs_in(map(vars, all_layouts()))
    for name, values in GRID.items():
        assert {getattr(layout, name) for layout in cover()} == set(values)


def test_the_text_has_what_can_go_wrong(lines: str) -> None:
    tokens = Path(f"{lines}.bin").read_bytes()
    assert tokens.count(b"\x00\x01\x00\x01") > 10, "ends in a row"
    assert max(map(len, inspect.getsource(argparse).split("\n"))) > 48, "samples within a document"
