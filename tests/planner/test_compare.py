"""Tests the comparison of a run's steps with their prediction, by hand."""

from typing import Any

import pytest

from megazero.errors import DataError
from megazero.planner.compare import compared, lines
from megazero.planner.seconds import StepTime
from megazero.planner.timeline import DeviceWork, Enter, Send, Wait, simulate

STEP = StepTime(
    10.0,
    simulate(
        [
            [
                *(
                    Enter("F0"),
                    DeviceWork(1),
                    Enter("B0"),
                    DeviceWork(2),
                    Enter("F1"),
                    DeviceWork(1),
                    Enter("B1"),
                    DeviceWork(2),
                ),
                *(Send(0, "pp", 1, "pipeline"), Wait(0), Enter("update"), DeviceWork(3)),
            ]
        ]
    ),
)


def record(seconds: float, **more: Any) -> dict[str, Any]:
    return {"iteration": 1, "step_seconds": seconds, **more}


def test_the_median_step_counts_without_the_first_two() -> None:
    records = [record(99), record(88), record(7), record(8), {"evaluation": {}}, record(12)]
    (row,) = compared(STEP, records, origin="m.jsonl")
    assert (row.name, row.predicted, row.measured, row.error) == ("step", 10, 8, 0.25)
    text = "\n".join(lines([row]))
    assert "10,000.0 ms" in text and "8,000.0 ms" in text and "+25.0 %" in text
    assert "--timing-log-level 2" in text
    assert compared(STEP, records[:1], origin="m.jsonl")[0].measured == 99


def test_parts_are_compared_in_either_form_of_the_file() -> None:
    timers = {
        "forward-compute": {"max": 4.0, "min": 1.0},
        "backward-compute": [3.0, 5.0],
        "grad-norm": {"max": 0.5},
        "optimizer": {"max": 1.5},
        "batch-generator": {"max": 9.0},
    }
    records = [record(9)] * 2 + [record(10, timers=timers, pipeline_idle_share=0.2)]
    rows = {row.name: (row.predicted, row.measured) for row in compared(STEP, records, origin="m.jsonl")}
    assert rows == {
        "step": (10, 10),
        "forward": (2, 4),
        "backward": (4, 5),
        "update": (3, 2),
        "waits for other stages": (0.1, 0.2),
    }


def test_a_file_without_steps_is_refused() -> None:
    with pytest.raises(DataError, match="no step is recorded"):
        compared(STEP, [{"evaluation": {}}], origin="m.jsonl")
