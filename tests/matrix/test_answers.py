"""Tests that layouts train like one process, in float64, where the loss is of answers only.

Prompts are long and answers short, so that micro-batches have all numbers of tokens that count, and some have none.
"""

import argparse
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.reference import History
from support.sidecars import byte_sidecar, write_sidecar
from support.token_files import write_corpus
from support.training import Cell, deviation, reference_history, train_cell

from megazero.data.loader import BatchLayout, build_step_batch
from megazero.data.sidecar import loss_mask_prefix
from megazero.train.start.inputs import open_inputs

BOUND = 1e-9
STEPS = 2
# The first splits a global batch into micro-batches of a sample each.
CELLS = [
    Cell(accumulation=16),
    Cell(tp=2, accumulation=4, settings={"sequence_parallel": True}),
    Cell(dp=2, stage=3, accumulation=8),
    Cell(pp=2, accumulation=4, settings={"recompute_granularity": "full"}),
    Cell(tp=2, dp=2, stage=2, accumulation=2, settings={"eod_mask_loss": True, "tokenizer_type": "ByteTokenizer"}),
]


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Every line of source text is a prompt, but for its last third, and of every third one that is no answer."""
    tokens, masks = [], []
    for index, part in enumerate(inspect.getsource(argparse).encode().split(b"\n")):
        prompt, answer = part[: 2 * len(part) // 3], part[2 * len(part) // 3 :]
        tokens.append([[*prompt, *answer]])
        masks.append([[0] * len(prompt) + [int(index % 3 > 0)] * len(answer)])
    prefix = write_corpus(tmp_path_factory.mktemp("dialogues") / "text", tokens)
    write_corpus(Path(loss_mask_prefix(prefix)), masks, code=1)
    total = sum(len(part) for document in tokens for part in document)
    sidecar = byte_sidecar(documents=len(tokens), tokens=total, text_bytes=total, append_eod=False, loss_mask=True)
    write_sidecar(prefix, sidecar)
    return prefix


def expected(prefix: str, **settings: Any) -> History:
    return reference_history(prefix, STEPS, **settings)


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_layouts_train_like_one_process(size: int, dialogues: str) -> None:
    for cell in (cell for cell in CELLS if cell.world_size == size):
        settings = {name: cell.settings[name] for name in ("eod_mask_loss", "tokenizer_type") if name in cell.settings}
        history = expected(dialogues, **settings)
        apart = deviation(train_cell(Cell(**{**vars(cell), "steps": STEPS}), dialogues), history)
        assert apart.worst < BOUND, (str(cell), apart)
    every = expected(dialogues, answer_loss_mask="off")
    assert abs(every.losses[0] / expected(dialogues).losses[0] - 1) > 1e-3, "the mask makes another loss"


def test_some_micro_batches_have_nothing_that_counts(dialogues: str) -> None:
    config = CELLS[0].config(dialogues)
    inputs = open_inputs(config.data, config.model, seed=config.training.seed, evaluates=False)
    counts = []
    for piece in build_step_batch(inputs.train, 0, BatchLayout(16, 1)).micro_batches:
        assert piece.loss_mask is not None
        counts.append(int(piece.loss_mask.sum()))
    assert 0 in counts and len(set(counts)) > 3
