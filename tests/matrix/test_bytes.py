"""Compares model states and traffic of real runs with the paper's formulas (ZeRO, sections 3.1, 5 and 7)."""

import pytest
from support.training import GLOBAL_BATCH, SETTINGS, Cell, Outcome, train_cell

from megazero.zero.plan import data_parallel_bytes, resolve

# Bytes of an element (p, g, k): working parameter, gradient, and k = master plus moments, listed as its two parts.
SIZES = {"bf16": (2, 2, 4, 8), "fp32": (4, 4, 0, 8), "fp64": (8, 8, 0, 16)}
LAYOUTS = ((1, 1), (1, 2), (2, 2), (1, 4))


# In these cells every pair of layout, stage and accumulation occurs, and every pair of stage and precision.
CELLS = [
    Cell(tp=tp, dp=dp, stage=stage, accumulation=(1, 2)[(number + stage) % 2], precision=precision, steps=2)
    for number, (tp, dp) in enumerate(LAYOUTS)
    for stage in (0, 1, 2, 3)
    for place, precision in enumerate(SIZES)
    if place == (number + stage) % 3
]


@pytest.mark.gloo
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_counted_bytes_equal_the_formulas(cell: Cell, corpus: str) -> None:
    for outcome in train_cell(cell, corpus):
        padded, used = outcome.layout
        assert used == parameters_on_a_rank(cell.tp)
        units = 2 + int(SETTINGS["num_layers"]) + 1
        assert used <= padded < used + units * cell.dp * 16, "padding is less than one quantum a unit"
        check_states(cell, outcome, padded)
        check_traffic(cell, outcome, padded)


def check_states(cell: Cell, outcome: Outcome, padded: int) -> None:
    """Check the bytes of an element: p + g + k, p + g + k/Nd, p + (g + k)/Nd, (p + g + k)/Nd in stages 0, 1, 2, 3."""
    p, g, master, moments = SIZES[cell.precision]
    owned = padded if cell.stage == 0 else padded // cell.dp
    gradients = padded // cell.dp if cell.stage >= 2 else padded
    assert outcome.model_state_bytes == {
        "parameters": p * (padded // cell.dp if cell.stage == 3 else padded),
        "gradients": g * gradients,
        "master": master * owned,
        "moments": moments * owned,
    }


def check_traffic(cell: Cell, outcome: Outcome, padded: int) -> None:
    """Check the elements sent over the data-parallel axis, in units of (Nd - 1) / Nd, with m micro-batches.

    They are 2 Psi in stages 0 and 1, and (m + 1) Psi in stage 2; stage 3 sends m Psi of gradients, and parameters m
    times as often as `gathered` counts.
    """
    p, g, _, _ = SIZES[cell.precision]
    counted = outcome.comm_bytes.get("dp", {})
    reductions = cell.accumulation if cell.stage >= 2 else 1
    share = padded * (cell.dp - 1) // cell.dp
    gathered_itemsize = g if cell.stage == 0 else p  # stage 0 gathers gradients, the others parameters
    assert counted["reduce_scatter"] == reductions * share * g
    if cell.stage == 3:
        whole = sum(times * outcome.unit_numel[unit] for unit, times in gathered().items())
        assert whole <= 2 * padded, "the paper's bound: 3 Psi with the gradients"
        assert counted["all_gather"] == cell.accumulation * whole * (cell.dp - 1) // cell.dp * p
    else:
        assert counted.get("all_gather", 0) == share * gathered_itemsize
    assert set(counted) <= {"all_gather", "reduce_scatter"}
    config = cell.config("unused")
    formula = data_parallel_bytes(resolve(config.zero, config.precision), padded, cell.dp, cell.accumulation)
    if cell.stage == 3:
        assert sum(counted.values()) <= formula, "the formula counts no unit that stays between forward and backward"
    else:
        assert sum(counted.values()) == formula
    assert outcome.comm_bytes["world"] == {"scalars": 2 * 4 * 8 * (cell.world_size - 1) // cell.world_size}
    check_tensor_parallel_traffic(cell, outcome)


def gathered() -> dict[str, int]:
    """Return how often each unit is gathered in a micro-batch.

    Blocks are gathered for forward and for backward, but for the last one, which stays with the final norm; the
    position table for forward alone, since nothing in backward reads it; the tied matrix for the embedding and for the
    head, whose gradients are made in forward.
    """
    last = int(SETTINGS["num_layers"]) - 1
    blocks = {f"layers.{index}": 2 for index in range(last)}
    return {"embedding.word": 2, "embedding.position": 1, "final_norm": 1, **blocks, f"layers.{last}": 1}


def check_tensor_parallel_traffic(cell: Cell, outcome: Outcome) -> None:
    """Check 4 all-reduces of b s h per block and micro-batch, 1 for the embedding, 1 for the head's gradient."""
    samples = GLOBAL_BATCH // cell.dp
    tokens = samples * int(SETTINGS["seq_length"])
    activations = tokens * int(SETTINGS["hidden_size"]) * SIZES[cell.precision][0]
    all_reduces = (4 * int(SETTINGS["num_layers"]) + 2) * activations
    softmax_itemsize = 8 if cell.precision == "fp64" else 4
    loss = 3 * tokens * softmax_itemsize  # maximum, sum of exponentials, target logit
    expected = 2 * (all_reduces + loss) * (cell.tp - 1) // cell.tp
    assert sum(outcome.comm_bytes["tp"].values()) == expected


def parameters_on_a_rank(tp: int) -> int:
    """Return Psi by hand: about 12 h^2 / t + 13 h per block, with vocabulary rows padded to a multiple of t."""
    h, layers, s = (int(SETTINGS[name]) for name in ("hidden_size", "num_layers", "seq_length"))
    rows = -(-int(SETTINGS["vocab_size"]) // tp)
    sharded = (12 * h * h + 7 * h) // tp  # qkv 3h^2 + 3h, projection h^2, up 4h^2 + 4h, down 4h^2
    replicated = 2 * 2 * h + 2 * h  # two norms, two row-parallel biases
    return layers * (sharded + replicated) + rows * h + s * h + 2 * h
