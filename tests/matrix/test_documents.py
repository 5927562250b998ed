"""Tests that small layouts train like one process, in float64, when documents are kept apart inside samples.

The twin reads every document on its own. Here a document is a line of source text: some are empty but for their end,
some go on into the next sample, and some samples lie within one. The layouts are a pairwise cover.
"""

import argparse
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.layouts import GLOBAL_BATCH, Layout, legal_layouts, pairs, pairwise_cover
from support.processes import run_ranks
from support.reference import History
from support.token_files import write_corpus
from support.training import Cell, Outcome, deviation, reference_history, train_on_rank

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
    "accumulation": (1, 4),
    "chunks": (1, 2),
    "schedule": ("1f1b", "interleaved", "zero-bubble"),
    "stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "recompute": ("none", "selective", "full"),
    "partitions_checkpoints": (False, True),
}
LAYOUTS = tuple(legal_layouts(GRID, most_processes=4))
COVER = pairwise_cover(LAYOUTS)
COPIED = {"partition_activations": True, "contiguous_checkpointing": True, "checkpoint_in_cpu": True}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    text = inspect.getsource(argparse).encode()
    return write_corpus(tmp_path_factory.mktemp("lines") / "text", [[[*line, END]] for line in text.split(b"\n")])


@pytest.fixture(scope="module")
def alone(lines: str) -> History:
    return reference_history(lines, STEPS, num_layers=4, global_batch_size=GLOBAL_BATCH, **APART)


def cell_of(layout: Layout, **settings: Any) -> Cell:
    cell = layout.cell(steps=STEPS)
    return replace(cell, settings={**cell.settings, **APART, **settings})


def train_in_turn(rank: int, cells: list[Cell], prefix: str) -> list[Outcome]:
    return [train_on_rank(rank, cell, prefix) for cell in cells]


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_layouts_train_like_one_process(size: int, lines: str, alone: History) -> None:
    """All layouts of one size are trained in turn by the same processes."""
    layouts = [layout for layout in COVER if layout.world_size == size]
    cells = [cell_of(layout) for layout in layouts]
    if size == 2:
        cells.append(cell_of(Layout(tp=2, accumulation=4, recompute="full"), **COPIED))
    found = run_ranks(size, train_in_turn, cells, lines)
    for place, cell in enumerate(cells):
        apart = deviation([outcomes[place] for outcomes in found], alone)
        assert apart.worst < BOUND, (str(cell), apart)


@pytest.mark.gloo
@pytest.mark.parametrize("left_out", ["reset_position_ids", "reset_attention_mask"])
def test_either_alone_is_another_run(left_out: str, lines: str, alone: History) -> None:
    cell = cell_of(Layout(accumulation=4), **{left_out: False})
    assert deviation([*run_ranks(1, train_on_rank, cell, lines)], alone).losses > 1e6 * BOUND


def test_every_pair_of_choices_is_in_the_cover() -> None:
    assert all(layout.num_layers == 4 for layout in COVER), "one reference serves all"
    assert frozenset().union(*map(pairs, COVER)) == frozenset().union(*map(pairs, LAYOUTS))
    for name, values in GRID.items():
        assert {getattr(layout, name) for layout in COVER} == set(values)


def test_the_text_has_what_can_go_wrong(lines: str) -> None:
    tokens = Path(f"{lines}.bin").read_bytes()
    assert tokens.count(b"\x00\x01\x00\x01") > 10, "ends in a row"
    assert max(map(len, inspect.getsource(argparse).split("\n"))) > 48, "samples within a document"
