"""Tests that adapters beside frozen weights train like one process, in float64, in a pairwise cover of layouts.

In the twin an adapted layer is one matrix, W + (alpha / r) B A, and torch finds the gradients of A and B.  The first
step has a rate of zero and the gradient of A is zero until B is not, so that there are four steps.
"""

import functools
from typing import Any

import pytest
import torch
from support.families import FAMILIES
from support.layouts import GLOBAL_BATCH, Layout, legal_layouts, pairs_in, pairwise_cover
from support.reference import History
from support.training import Cell, deviation, reference_history, train_cell

from megazero.config import derived

BOUND = 1e-9
STEPS = 4
LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 5.0, "lora_random_base": True}
# Of every kind of layer some have no adapter.
SOME: dict[str, Any] = {**LORA, "lora_targets": ("linear_proj", "linear_fc1")}
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
    "home": ("device", "host"),
}


@functools.cache
def all_layouts() -> tuple[Layout, ...]:
    return tuple(legal_layouts(GRID, most_processes=4))


@functools.cache
def cover() -> list[Layout]:
    return pairwise_cover(all_layouts())


@functools.cache
def alone(corpus: str, family: str = "gpt2", layers: int = 4, **settings: Any) -> History:
    return reference_history(
        corpus, STEPS, num_layers=layers, global_batch_size=GLOBAL_BATCH, **FAMILIES[family], **settings
    )


@pytest.mark.gloo
@pytest.mark.parametrize("size", [1, 2, 4])
def test_layouts_train_like_one_process(size: int, corpus: str) -> None:
    for layout in (layout for layout in cover() if layout.world_size == size):
        found = deviation(train_cell(layout.cell(steps=STEPS).with_settings(LORA), corpus), alone(corpus, **LORA))
        assert found.worst < BOUND, (str(layout), found)


@pytest.mark.gloo
def test_grouped_queries_and_some_layers(corpus: str) -> None:
    """Two heads of keys and values are as many as ranks, or fewer; each rank holds a part of their adapter, or all."""
    for layout in (
        Layout(tp=4, sequence_parallel=True, recompute="selective"),
        Layout(tp=2, pp=2, accumulation=3, schedule="zero-bubble", stage=1),
    ):
        cell = layout.cell(steps=STEPS).with_settings({**FAMILIES["llama3"], **LORA})
        found = deviation(train_cell(cell, corpus), alone(corpus, "llama3", **LORA))
        assert found.worst < BOUND, (str(layout), found)
    some = Layout(tp=2, stage=2, recompute="full").cell(steps=STEPS).with_settings(SOME)
    found = deviation(
        train_cell(some, corpus), reference_history(corpus, STEPS, num_layers=4, global_batch_size=GLOBAL_BATCH, **SOME)
    )
    assert found.worst < BOUND, found


@pytest.mark.gloo
@pytest.mark.parametrize("split", ["0,3", "3,0"])
def test_a_stage_may_have_nothing_to_train(split: str, corpus: str) -> None:
    """Embedding and head are frozen, and alone on the first or the last stage."""
    expected = reference_history(corpus, STEPS, **LORA)
    cell = Cell(pp=2, accumulation=4, stage=1, steps=STEPS, settings={**LORA, "pipeline_split": split})
    assert deviation(train_cell(cell, corpus), expected).worst < BOUND
    others = cell.with_settings({"optimizer": "nadam"})
    assert all(loss > 0 for outcome in train_cell(others, corpus) for loss in outcome.losses)


@pytest.mark.gloo
def test_adapters_alone_have_gradients_masters_and_moments(corpus: str) -> None:
    """In bf16 a rank of two has 2 bytes of every frozen parameter, or half of them, and states of adapters alone."""
    for stage in (0, 1, 2, 3):
        cell = Cell(dp=2, stage=stage, precision="bf16", steps=2, settings=LORA)
        model = cell.config(corpus).model
        trained, whole = derived.num_adapter_parameters(model), derived.num_parameters(model, 257)
        states = [outcome.model_state_bytes for outcome in train_cell(cell, corpus)]
        part = 2 if stage else 1
        padding = 1.02
        for found in states:
            assert trained / part <= found["master"] / 4 <= padding * trained / part
            assert trained / part <= found["moments"] / 8 <= padding * trained / part
            assert found["gradients"] <= 4 * padding * trained
            kept = whole / (2 if stage == 3 else 1)
            assert kept <= found["parameters"] / 2 <= padding * kept


@pytest.mark.gloo
def test_frozen_weights_may_be_stored_as_integers(corpus: str) -> None:
    settings = {**LORA, "zero_quantized_nontrainable_weights": True}
    cell = Cell(dp=2, stage=3, precision="bf16", steps=STEPS)
    plain, encoded = (train_cell(cell.with_settings(each), corpus)[0] for each in (LORA, settings))
    assert encoded.model_state_bytes["parameters"] < 0.6 * plain.model_state_bytes["parameters"]
    torch.testing.assert_close(torch.tensor(encoded.losses), torch.tensor(plain.losses), rtol=0.01, atol=0.0)
    assert encoded.losses != plain.losses


def test_every_pair_of_choices_is_in_the_cover() -> None:
    assert all(layout.num_layers == 4 for layout in cover()), "one reference serves all"
    assert pairs_in(map(vars, cover())) == pairs_in(map(vars, all_layouts()))
