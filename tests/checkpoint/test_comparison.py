"""Tests of the differences between two checkpoints, whatever their layouts."""

from pathlib import Path

import torch
from support.sharded_state import Layout, make_state, write_checkpoint

from megazero.checkpoint.comparison import (
    NONE,
    ValueDifference,
    box_differences,
    difference,
    metadata_differences,
    schema_differences,
)
from megazero.checkpoint.reader import open_checkpoint

NAN = float("nan")


def test_difference_counts_elements_and_takes_nan_for_equal_to_nan() -> None:
    a, b = torch.tensor([1.0, 2.0, NAN, 4.0]), torch.tensor([1.0, 2.5, NAN, 1.0])
    assert difference(a, b) == ValueDifference(2, 3.0)
    assert difference(a, a) == NONE
    count, largest = difference(a, torch.tensor([NAN, 2.0, NAN, 4.0]))
    assert count == 1 and largest != largest
    assert ValueDifference(1, 2.0).joined(ValueDifference(3, 1.0)) == ValueDifference(4, 2.0)
    assert ValueDifference(1, NAN).joined(NONE).largest != 0.0


def test_other_layouts_of_one_state_are_equal(tmp_path: Path) -> None:
    a = open_checkpoint(write_checkpoint(tmp_path / "a", make_state(), Layout(2, 2, seed=1)))
    b = open_checkpoint(write_checkpoint(tmp_path / "b", make_state(), Layout(3, 1)))
    assert list(metadata_differences(a, b)) == list(schema_differences(a, b)) == []
    assert {found for _, found in box_differences(a, b)} == {NONE}


def test_every_difference_is_told(tmp_path: Path) -> None:
    state = make_state(kinds=("weight",))
    changed = {key: full.clone() for key, full in state.items()}
    changed["proj.weight", "weight"][2, 3] += 0.5
    changed["wte.weight", "weight"] = changed["wte.weight", "weight"].double()
    del changed["scalar", "weight"]
    changed["scalar", "exp_avg"] = torch.tensor(1.0)
    a = open_checkpoint(write_checkpoint(tmp_path / "a", state, Layout(2, 2), step=10))
    b = open_checkpoint(write_checkpoint(tmp_path / "b", changed, Layout(1, 3), step=20))
    counters = [f"progress, {name}: 10 against 20" for name in ("consumed_samples", "iteration", "optimizer_steps")]
    assert list(metadata_differences(a, b)) == ["step: 10 against 20", *counters]
    assert list(schema_differences(a, b)) == [
        f"scalar, exp_avg: only in {b.folder}",
        f"scalar, weight: only in {a.folder}",
        "wte.weight, weight: F32 against F64",
    ]
    (found,) = [(key, found) for key, found in box_differences(a, b) if found.num_elements]
    assert found[0] == ("proj.weight", "weight")
    assert found[1].num_elements == 1 and abs(found[1].largest - 0.5) < 1e-6
