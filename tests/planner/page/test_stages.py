"""Tests the lanes of stages, their waits and their shares on steps simulated by hand."""

import pytest

from megazero.planner.page.stages import LaneWait, drawn_stages, lanes_of, shares_of
from megazero.planner.seconds import StepTime
from megazero.planner.timeline import DeviceWork, Enter, HostWork, Send, Wait, simulate

# 2 s of products, a message of 3 s, 1 s beside it, the wait for it, 1 s behind it.
STEPS = [
    Enter("F0"),
    DeviceWork(2, products=2),
    Send(1, "dp", 3, "dp"),
    DeviceWork(1),
    Wait(1),
    Enter("B0"),
    DeviceWork(1),
]


def simulated(*stages: list[object]) -> StepTime:
    times = simulate(stages, draws=True)
    return StepTime(max(stage.end for stage in times), times)


def test_a_wait_names_the_message_that_ends_it() -> None:
    (stage,) = lanes_of(simulated(STEPS))
    assert [lane.name for lane in stage.lanes] == ["device", "dp"]
    assert [(span.name, span.start, span.end) for span in stage.lanes[0].spans] == [("F0", 0, 3), ("B0", 5, 6)]
    assert [(span.start, span.end) for span in stage.lanes[1].spans] == [(2, 5)]
    assert stage.waits == [LaneWait("dp", 3, 5)]


def test_a_message_that_has_ended_before_is_not_waited_for() -> None:
    """Its lane ends at 3 while the device works until 4, and then waits for another until 6."""
    steps = [
        Enter("F0"),
        Send(1, "tp", 3, "tp"),
        Send(2, "dp", 6, "dp"),
        DeviceWork(4),
        Wait(1),
        Wait(2),
        DeviceWork(1),
    ]
    (stage,) = lanes_of(simulated(steps))
    assert stage.waits == [LaneWait("dp", 4, 6)]


def test_a_late_host_is_part_of_the_devices_span() -> None:
    (stage,) = lanes_of(simulated([DeviceWork(1), HostWork(3, "update on the host"), DeviceWork(1, behind=1)]))
    assert [(span.start, span.end) for span in stage.lanes[0].spans] == [(0, 4)] and stage.waits == []


def test_shares_add_up_to_the_step() -> None:
    step = simulated(STEPS, [DeviceWork(1), HostWork(2, "update on the host")])
    first, second = (shares_of(stage, step.seconds) for stage in step.stages)
    assert first == pytest.approx({"products": 2 / 6, "memory": 2 / 6, "waits: dp": 2 / 6, "done before others": 0})
    assert second == pytest.approx(
        {"memory": 1 / 6, "done before others": 5 / 6, "update on the host, beside it": 2 / 6}
    )


def test_of_many_stages_the_ends_and_a_middle_one_are_drawn() -> None:
    assert [drawn_stages(count) for count in (1, 4, 64)] == [[0], [0, 1, 2, 3], [0, 1, 32, 63]]
