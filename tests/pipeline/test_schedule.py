"""Schedules as drawings."""

import pytest

from megazero.pipeline.schedule import Action, Kind, one_stage


@pytest.mark.parametrize(
    ("num_micro_batches", "drawing"),
    [(0, ""), (1, "F0 B0"), (2, "F0 B0 F1 B1"), (4, "F0 B0 F1 B1 F2 B2 F3 B3")],
)
def test_one_stage(num_micro_batches: int, drawing: str) -> None:
    assert " ".join(map(str, one_stage(num_micro_batches))) == drawing


def test_an_action_is_drawn_as_letter_and_number() -> None:
    assert [str(Action(Kind.FORWARD, 12)), str(Action(Kind.BACKWARD, 0))] == ["F12", "B0"]
