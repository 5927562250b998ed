"""Compares the counted traffic of pipelines in real runs with formulas that are written out here.

n = b s tokens of h elements make N bytes; p pipeline stages with v chunks each, m micro-batches, t = tp, d = dp. All
runs are in float64, so every element has 8 bytes. A bucket is larger than any unit here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.training import GLOBAL_BATCH, SETTINGS, Cell, Outcome, train_cell

from megazero.zero.plan import data_parallel_bytes, resolve

BYTES = 8
H, S, LAYERS, VOCABULARY = (int(SETTINGS[name]) for name in ("hidden_size", "seq_length", "num_layers", "vocab_size"))
ONE_BUCKET = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
TURNS = {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
SPLIT = {"sequence_parallel": True}


def cell(**choices: Any) -> Cell:
    """Return a cell of two steps; layers are split as evenly as they can be, whatever the head costs."""
    settings = {**ONE_BUCKET, **choices.pop("settings", {})}
    return Cell(**{"steps": 2, **choices}, settings=settings)


Train = Callable[[Cell], list[Outcome]]


@pytest.fixture(scope="module")
def train(corpus: str) -> Train:
    """Return a function that trains a cell, once however many tests read its traffic."""
    found: dict[str, list[Outcome]] = {}

    def outcomes(cell: Cell) -> list[Outcome]:
        if str(cell) not in found:
            found[str(cell)] = train_cell(cell, corpus)
        return found[str(cell)]

    return outcomes


def tokens(cell: Cell) -> int:
    """Return n, the number of tokens of a micro-batch."""
    return GLOBAL_BATCH // (cell.dp * cell.accumulation) * S


def chunks(cell: Cell) -> int:
    """Return v, the number of chunks of a pipeline stage."""
    return 2 if "num_layers_per_virtual_pipeline_stage" in cell.settings else 1


def stage_of(cell: Cell, rank: int) -> int:
    return rank // (cell.dp * cell.tp)


# --- pipeline --------------------------------------------------------------------------------------------------------

PIPELINES = [
    cell(pp=2, accumulation=4),
    cell(pp=3, accumulation=2, settings={"pipeline_schedule": "gpipe"}),
    cell(pp=4, accumulation=4, settings={"num_layers": 6, "pipeline_schedule": "zero-bubble"}),
    cell(pp=2, accumulation=4, settings=TURNS),
    cell(pp=4, accumulation=4, settings={"num_layers": 8, "num_layers_per_virtual_pipeline_stage": 1}),
    cell(pp=2, dp=2, accumulation=4, stage=2),
    cell(pp=2, tp=2, accumulation=4, settings={**TURNS, **SPLIT}),
    cell(pp=2, tp=2, accumulation=1),
]


@pytest.mark.gloo
@pytest.mark.parametrize("cell", PIPELINES, ids=str)
def test_a_message_for_every_cut_micro_batch_and_direction(cell: Cell, train: Train) -> None:
    """Each way m (v p - 1) messages are sent; the model's first chunk sends no gradient, its last no activation."""
    outcomes = train(cell)
    p, v, m = cell.pp, chunks(cell), cell.accumulation
    message = tokens(cell) * H * BYTES // (cell.tp if "sequence_parallel" in cell.settings else 1)
    for rank, outcome in enumerate(outcomes):
        stage = stage_of(cell, rank)
        activations, gradients = m * (v - (stage == p - 1)), m * (v - (stage == 0))
        assert outcome.comm_bytes["pp"] == {"send": (activations + gradients) * message}
    both_ways = sum(outcome.comm_bytes["pp"]["send"] for outcome in outcomes)
    assert both_ways == cell.tp * cell.dp * 2 * m * (v * p - 1) * message


@pytest.mark.gloo
@pytest.mark.parametrize(
    "cell",
    [
        cell(pp=2, accumulation=2, stage=0),
        cell(pp=3, accumulation=4, stage=1),
        cell(pp=2, dp=2, accumulation=4, stage=0),
        cell(pp=2, dp=2, accumulation=4, stage=1),
        cell(pp=2, dp=2, accumulation=2, stage=2, settings={"pipeline_schedule": "zero-bubble"}),
        cell(pp=2, dp=2, accumulation=2, stage=3),
        cell(pp=2, tp=2, dp=2, accumulation=1, stage=2, settings=SPLIT),
        cell(pp=2, dp=2, accumulation=4, stage=2, settings=TURNS),
    ],
    ids=str,
)
def test_the_ends_sum_the_word_embedding_once(cell: Cell, train: Train) -> None:
    """The two ends all-reduce the part of the matrix that a rank owns: twice half of its bytes, whatever m is."""
    rows = -(-VOCABULARY // cell.tp)
    for rank, outcome in enumerate(train(cell)):
        copies = 1 if cell.stage == 0 else cell.dp
        part = outcome.unit_numel.get("embedding.word", 0) // copies
        here = part * (rank // cell.tp % cell.dp if copies > 1 else 0)
        owned = max(0, min(part, rows * H - here))  # without padding
        expected = {"all_reduce": owned * BYTES} if stage_of(cell, rank) in (0, cell.pp - 1) else None
        assert outcome.comm_bytes.get("ends") == expected


# --- data parallel ---------------------------------------------------------------------------------------------------


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "layout",
    [
        cell(pp=2, dp=2, accumulation=4),
        cell(pp=2, dp=2, accumulation=4, settings=TURNS),
        cell(pp=2, dp=2, accumulation=2, settings={"pipeline_schedule": "zero-bubble"}),
    ],
    ids=str,
)
def test_data_parallel_traffic_is_of_a_stages_own_parameters(layout: Cell, stage: int, train: Train) -> None:
    """The traffic is (2 or m + 1) Psi (d - 1) / d, where Psi counts the pipeline stage's own parameters."""
    cell = replace(layout, stage=stage)
    config = cell.config("unused")
    outcomes = train(cell)
    for outcome in outcomes:
        padded, _ = outcome.layout
        times = 2 if stage < 2 else cell.accumulation + 1
        expected = times * padded * (cell.dp - 1) // cell.dp * BYTES
        assert sum(outcome.comm_bytes["dp"].values()) == expected
        plan = resolve(config.zero, config.precision)
        assert expected == data_parallel_bytes(plan, padded, cell.dp, cell.accumulation)
    layers = int(config.model.num_layers)
    psi = [outcome.layout[1] for outcome in outcomes[:: cell.dp]]
    matrix = VOCABULARY * H
    assert sum(psi) == layers * (12 * H * H + 13 * H) + 2 * matrix + S * H + 2 * H, "the tied matrix is there twice"


# By pipeline stage and local chunk: the number of windows for p = 2, v = 2, m = 4, and of those with a forward.
#   stage 0   F0 F1 | F0.1 F1.1 | F2 B0.1 F3 | B1.1 F2.1 | B0 F3.1 B1 | B2.1 B3.1 | B2 B3
#   stage 1   F0 F1 | F0.1 B0.1 F1.1 B1.1 | F2 B0 F3 B1 | F2.1 B2.1 F3.1 B3.1 | B2 B3
# A chunk that is used again after at most one computation of the other chunk stays gathered in between.
WINDOWS = {(0, 0): (4, 2), (0, 1): (1, 1), (1, 0): (3, 2), (1, 1): (2, 2)}


@pytest.mark.gloo
@pytest.mark.parametrize("takes_turns", [False, True])
def test_stage_3_gathers_once_a_window(takes_turns: bool, train: Train) -> None:
    """A unit is gathered once a window, for forward and backward; embedding and head for forward alone."""
    m, settings = 4, {"zero3_reshard_after": "window", **(TURNS if takes_turns else {"num_layers": 4})}
    cell_ = cell(pp=2, dp=2, accumulation=m, stage=3, settings=settings)
    for rank, outcome in enumerate(train(cell_)):
        stage, numel = stage_of(cell_, rank), 0
        for unit, padded in outcome.unit_numel.items():
            windows, with_forward = WINDOWS[stage, chunk_of(unit, stage)] if takes_turns else (1, 1)
            numel += padded * (with_forward if unit.startswith("embedding") else windows)
        assert outcome.comm_bytes["dp"]["all_gather"] == numel * BYTES // 2
        assert outcome.comm_bytes["dp"]["reduce_scatter"] == m * outcome.layout[0] * BYTES // 2


@pytest.mark.gloo
@pytest.mark.parametrize("settings", [{"num_layers": 4}, TURNS, {**TURNS, "num_layers": 6}], ids=str)
def test_stage_3_without_windows_holds_two_units(settings: dict[str, Any], train: Train) -> None:
    """A unit is gathered for every forward and backward, but not again if it has room until its next use.

    The last stage alternates forwards and backwards as an uncut model does, so the count is exact there: the last layer
    and the final norm stay from forward to backward.
    """
    m = 4
    cell_ = cell(pp=2, dp=2, accumulation=m, stage=3, settings=settings)
    for rank, outcome in enumerate(train(cell_)):
        units = outcome.unit_numel
        most = sum(padded * m * (1 if unit.startswith("embedding") else 2) for unit, padded in units.items())
        gathered = outcome.comm_bytes["dp"]["all_gather"]
        assert sum(units.values()) * BYTES // 2 < gathered <= most * BYTES // 2
        if chunks(cell_) == 1 and stage_of(cell_, rank) == 1:
            assert gathered == (most - m * (units["layers.3"] + units["final_norm"])) * BYTES // 2
        left, peak = outcome.gathered_numel
        assert left == 0 and peak <= 2 * max(units.values()), "one in use, one ahead"
        assert outcome.comm_bytes["dp"]["reduce_scatter"] == m * outcome.layout[0] * BYTES // 2


def chunk_of(unit: str, stage: int) -> int:
    """Return the local chunk of a unit: a pipeline stage has every second of four layers, the last one the head."""
    if unit.startswith("layers."):
        return int(unit.split(".")[1]) // 2
    return stage


# --- tensor parallel -------------------------------------------------------------------------------------------------

# Gathers and reduce-scatters by layer and micro-batch, in units of N. A column-parallel layer gathers its input, and
# again for its weight's gradient; a row-parallel one gathers its output's gradient. A backward that is cut in two
# gathers that gradient twice.
GATHERED = {"1f1b": 2 * 2 + 2 * 1, "zero-bubble": 2 * 2 + 2 * 2}
SCATTERED = 2 * 1 + 2 * 1


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("tp", "pp", "schedule"),
    [(2, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "1f1b"), (2, 2, "zero-bubble")],
)
def test_a_split_sequence_is_gathered_and_scattered(tp: int, pp: int, schedule: str, train: Train) -> None:
    """Each sends (t - 1) / t of N; the embedding scatters in forward and gathers in backward, the head the reverse."""
    settings = {**SPLIT, "num_layers": 4, "pipeline_split": "3,1" if pp == 2 else None, "pipeline_schedule": schedule}
    cell_ = cell(tp=tp, pp=pp, accumulation=2, settings=settings)
    outcomes = train(cell_)
    m, n = cell_.accumulation, tokens(cell_)
    for rank, outcome in enumerate(outcomes):
        stage = stage_of(cell_, rank)
        is_first, is_last = stage == 0, stage == pp - 1
        layers = 4 if pp == 1 else (3, 1)[stage]
        ends = is_first + is_last
        unit = n * H * BYTES * (tp - 1) // tp
        sums = layers * (2 * 2 + 2) * H + is_first * S * H + is_last * 2 * H  # norms, row-parallel biases, positions
        losses = is_last * m * 3 * n  # maximum, sum of exponentials, the label's logit
        assert outcome.comm_bytes["tp"] == {
            "all_gather": m * (layers * GATHERED[schedule] + ends) * unit,
            "reduce_scatter": m * (layers * SCATTERED + ends) * unit,
            "all_reduce": 2 * (sums + losses) * BYTES * (tp - 1) // tp,
        }


@pytest.mark.gloo
def test_without_it_a_stage_all_reduces_what_its_own_layers_need(train: Train) -> None:
    """A layer and micro-batch takes 4 all-reduces of N, the embedding 1, and the head's input gradient 1."""
    cell_ = cell(tp=2, pp=2, accumulation=2, settings={"num_layers": 4, "pipeline_split": "3,1"})
    for rank, outcome in enumerate(train(cell_)):
        stage, m, n = stage_of(cell_, rank), cell_.accumulation, tokens(cell_)
        numel = m * n * H * (4 * (3, 1)[stage] + 1) + (m * 3 * n if stage == 1 else 0)
        assert outcome.comm_bytes["tp"] == {"all_reduce": 2 * numel * BYTES // 2}
