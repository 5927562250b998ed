"""Tests the families of models in a pairwise cover of layouts against the plain reference in float64."""

from collections.abc import Mapping
from typing import Any

import pytest
from support.families import FAMILIES
from support.layouts import GLOBAL_BATCH, Layout
from support.reference import History
from support.training import deviation, reference_history, train_cell

BOUND = 1e-9
STEPS = 2
# Grouped queries have 2 groups, or 1 (falcon), or 6 (nope): fewer than ranks, as many, and more.
LAYOUTS: Mapping[str, tuple[Layout, ...]] = {
    "llama2": (
        Layout(dp=2, stage=3),
        Layout(tp=2, dp=2, stage=2, sequence_parallel=True, recompute="full", partitions_checkpoints=True),
    ),
    "llama3": (
        Layout(tp=4, dp=2, stage=3, sequence_parallel=True, recompute="selective"),
        Layout(tp=2, pp=2, accumulation=3, schedule="zero-bubble", stage=1),
        Layout(tp=4, pp=2, accumulation=3, schedule="zero-bubble", sequence_parallel=True),
    ),
    "qwen2": (Layout(tp=4, dp=1, stage=1), Layout(dp=2, stage=3, home="host", recompute="full")),
    "qwen3": (
        Layout(tp=2, dp=2, stage=3, sequence_parallel=True),
        Layout(tp=4, recompute="selective"),
    ),
    "bloom": (
        Layout(tp=2, dp=2, stage=3, recompute="full"),
        Layout(tp=2, pp=2, accumulation=4, chunks=2, stage=1, sequence_parallel=True),
    ),
    "falcon": (
        Layout(tp=2, dp=2, stage=2, home="host"),
        Layout(tp=2, pp=2, accumulation=3, schedule="1f1b", sequence_parallel=True, recompute="selective"),
    ),
    "nope": (Layout(tp=3, dp=2, stage=3), Layout(tp=4, dp=1, sequence_parallel=True)),
}


def _reference(corpus: str, layers: int, family: str) -> History:
    return reference_history(corpus, STEPS, num_layers=layers, global_batch_size=GLOBAL_BATCH, **FAMILIES[family])


@pytest.mark.gloo
@pytest.mark.parametrize("family", LAYOUTS)
def test_families_train_like_one_process(family: str, corpus: str) -> None:
    for layout in LAYOUTS[family]:
        settings: dict[str, Any] = {**FAMILIES[family]}
        if family == "nope" and layout.tp == 4:
            settings["num_query_groups"] = 4
        reference = reference_history(
            corpus, STEPS, num_layers=layout.num_layers, global_batch_size=GLOBAL_BATCH, **settings
        )
        assert max(reference.grad_norms) > 0.5, "clipping is meant to be active"
        found = deviation(train_cell(layout.cell(steps=STEPS).with_settings(settings), corpus), reference)
        assert found.worst < BOUND, (str(layout), found)
