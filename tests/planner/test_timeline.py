"""Tests the simulation against timelines drawn by hand, and against the pipeline's own formulas."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.pipeline import schedule as module
from megazero.pipeline.passes import with_exchanges
from megazero.pipeline.schedule import Kind, Shape
from megazero.pipeline.timeline import EQUAL_PARTS, predicted_idle_share
from megazero.planner.timeline import (
    Deadlock,
    DeviceWork,
    Enter,
    HostWork,
    LaneSpan,
    Send,
    Step,
    Wait,
    merged,
    simulate,
)


def compute(seconds: float) -> DeviceWork:
    return DeviceWork(seconds, products=seconds)


def test_a_bucket_is_sent_beside_backward_and_its_end_waits() -> None:
    """Two buckets of 3 beside a backward of 2 + 2; the second begins behind the first.

    device  |-2-|-2-|wait   |-1-|
    dp          |--3--|--3--|
    """
    steps = [compute(2), Send(1, "dp", 3, "dp"), compute(2), Send(2, "dp", 3, "dp"), Wait(1), Wait(2), compute(1)]
    (times,) = simulate([steps])
    assert times.end == 9  # 2 + 3 + 3, then 1
    assert times.waits["dp"] == 4  # from 4 to 8
    assert times.busy == {"products": 5, "memory": 0}
    assert times.sent["dp"] == 6


def test_an_exposed_gather_and_one_that_is_prefetched() -> None:
    exposed: list[Step] = []
    prefetched: list[Step] = [Send(0, "dp", 3, "gather")]
    for unit in range(4):
        exposed += [Send(unit, "dp", 3, "gather"), Wait(unit), compute(5)]
        prefetched += [Wait(unit), Send(unit + 1, "dp", 3, "gather"), compute(5)]
    (alone,) = simulate([exposed])
    (ahead,) = simulate([prefetched])
    assert (alone.end, alone.waits["gather"]) == (32, 12)
    assert (ahead.end, ahead.waits["gather"]) == (23, 3)


def test_channels_run_beside_each_other_and_one_in_order() -> None:
    (one,) = simulate([[Send(0, "a", 3, "x"), Send(1, "a", 3, "x"), Wait(0), Wait(1)]])
    (two,) = simulate([[Send(0, "a", 3, "x"), Send(1, "b", 3, "x"), Wait(0), Wait(1)]])
    assert (one.end, two.end) == (6, 3)


def test_what_is_beside_a_message_is_delayed_by_a_part_of_it() -> None:
    steps = [Send(0, "dp", 4, "dp"), compute(10), Wait(0), compute(1)]
    (free,) = simulate([steps])
    (costly,) = simulate([steps], overlap_cost=0.25)
    assert (free.end, costly.end) == (11, 12)  # a quarter of the 4 that were hidden
    (exposed,) = simulate([[Send(0, "dp", 4, "dp"), Wait(0)]], overlap_cost=0.25)
    assert exposed.end == 4


@each(("seconds", "end"), [(1.0, 4), (2.8, 4), (3.0, 4), (3.5, 4.5), (4.0, 5)])
def test_work_that_is_shorter_than_a_message_goes_on_behind_it(seconds: float, end: float) -> None:
    """While 4 s of a message last, 3 s of work are done beside it at a cost of a quarter; the rest comes behind."""
    (found,) = simulate([[Send(0, "dp", 4, "dp"), compute(seconds), Wait(0)]], overlap_cost=0.25)
    assert found.end == pytest.approx(end)
    (shared,) = simulate([[Send(0, "dp", 4, "dp"), compute(seconds), Wait(0)]], overlap_cost=1.0)
    assert shared.end == pytest.approx(4 + seconds)


def test_a_host_that_issues_slower_than_the_device_runs() -> None:
    slow_host = merged([(1.0, 3.0, False)] * 4)
    assert slow_host == DeviceWork(4, 12, 13, 0)
    (times,) = simulate([[slow_host, slow_host]])
    assert (times.end, times.waits["host"]) == (25, 17)
    (ahead,) = simulate([[compute(100), slow_host]])
    assert ahead.end == 104
    (on_a_cpu,) = simulate([[slow_host, slow_host]], asynchronous=False)
    assert on_a_cpu.end == 32  # one after the other


def test_a_device_that_waits_lets_the_host_go_on_and_a_host_that_waits_does_not() -> None:
    behind = merged([(1.0, 2.0, False)] * 2)
    (device,) = simulate([[Send(0, "dp", 10, "dp"), Wait(0), behind]])
    (host,) = simulate([[Send(0, "dp", 10, "dp"), Wait(0, by_host=True), behind]])
    assert (device.end, host.end) == (12, 15)


def test_work_of_the_host_runs_beside_the_device() -> None:
    (times,) = simulate([[compute(5), HostWork(3, "update on the host"), DeviceWork(1, 0, 0)]])
    assert times.end == 6
    (on_a_cpu,) = simulate([[compute(5), HostWork(3, "update on the host"), DeviceWork(1, 0, 0)]], asynchronous=False)
    assert on_a_cpu.end == 9


def test_merged_kernels_take_as_long_as_one_by_one() -> None:
    kernels = [(1.0, 2.0, True), (5.0, 1.0, False), (0.5, 2.0, False), (0.5, 4.0, True)]
    for lead in (0.0, 3.0, 30.0):
        (alone,) = simulate([[compute(lead), *(merged([kernel]) for kernel in kernels)]])
        (together,) = simulate([[compute(lead), merged(kernels)]])
        assert alone.end == together.end
        assert alone.busy == together.busy


def pipeline(name: str, shape: Shape, exchange: float = 0.0) -> list[list[Step]]:
    """Return the steps of every stage of a schedule whose computations take `EQUAL_PARTS`."""
    letters = {Kind.RECEIVE_ACTIVATION: Kind.SEND_ACTIVATION, Kind.RECEIVE_GRADIENT: Kind.SEND_GRADIENT}
    stages: list[list[Step]] = []
    for stage in range(shape.num_stages):
        steps: list[Step] = []
        posted: dict[tuple[Kind, int, int], int] = {}
        counts: dict[tuple[str, int, int], int] = {}
        for action in with_exchanges(module.schedule(name, shape, stage), shape, stage):
            number = len(steps)
            if action.kind in letters or action.kind in letters.values():
                is_receive = action.kind in letters
                step = 1 if letters.get(action.kind, action.kind) is Kind.SEND_ACTIVATION else -1
                other = (stage - step if is_receive else stage + step) % shape.num_stages
                pair = (other, stage) if is_receive else (stage, other)
                what = letters.get(action.kind, action.kind).value
                count = counts[what, *pair] = counts.get((what, *pair), 0) + 1
                key = (what, pair, count)
                posted[action.kind, action.micro_batch, action.chunk] = number
                steps.append(
                    Send(number, f"{what} {pair}", exchange, "pipeline", 0.0, key, 2, needs_device=not is_receive)
                )
                continue
            needs = Kind.RECEIVE_ACTIVATION if action.kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
            found = posted.get((needs, action.micro_batch, action.chunk))
            if found is not None and action.kind is not Kind.WEIGHT_GRADIENT:
                steps.append(Wait(found))
            steps += [Enter(str(action)), compute(EQUAL_PARTS[action.kind])]
        stages.append(steps)
    return stages


def test_two_stages_under_1f1b_as_they_are_drawn() -> None:
    """Two stages, three micro-batches, each exchange takes half a column.

    stage 0  F0 F1 . . . B0 B0 F2 B1 B1 . . B2 B2
    stage 1  .. F0 B0 B0 F1 B1 B1 ...
    """
    first, second = simulate(pipeline("1f1b", Shape(2, 3), exchange=0.5), draws=True)
    assert [str(span.name) for span in second.spans if span.lane == "device"] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert [(span.name, span.start, span.end) for span in first.spans if span.lane == "device"] == [
        ("F0", 0, 1),
        ("F1", 1, 2),
        ("B0", 5, 7),
        ("F2", 7, 8),
        ("B1", 8, 10),
        ("B2", 12, 14),
    ]
    assert LaneSpan("device", "F0", 1.5, 2.5) in second.spans
    assert first.waits["pipeline"] == 5
    assert first.parts["B1"] == 2  # without the wait for the gradient of the last micro-batch


@each(
    ("name", "shape"),
    [
        ("gpipe", Shape(4, 6)),
        ("1f1b", Shape(4, 6)),
        ("1f1b", Shape(2, 1)),
        ("zero-bubble", Shape(3, 5)),
        ("interleaved", Shape(2, 4, 2)),
        ("interleaved", Shape(3, 6, 3)),
        ("1f1b", Shape(1, 3)),
    ],
)
def test_idle_shares_are_those_of_the_formulas(name: str, shape: Shape) -> None:
    stages = simulate(pipeline(name, shape))
    end = max(stage.end for stage in stages)
    idle = 1 - sum(stage.busy_seconds for stage in stages) / end / len(stages)
    assert idle == pytest.approx(predicted_idle_share(name, shape))


def test_a_collective_of_several_stages_begins_when_the_last_has_come() -> None:
    stages = [[compute(seconds), Send(0, "world", 1, "world", key="norm", ends=2), Wait(0)] for seconds in (2, 7)]
    first, second = simulate(stages)
    assert (first.end, second.end) == (8, 8)
    assert (first.waits["world"], second.waits["world"]) == (6, 1)


def test_stages_that_wait_for_each_other_for_ever_are_refused() -> None:
    def stage(mine: str, theirs: str) -> Sequence[Step]:
        receive = Send(0, theirs, 1, "pipeline", key=theirs, ends=2, needs_device=False)
        return [receive, Wait(0), Send(1, mine, 1, "pipeline", key=mine, ends=2)]

    with pytest.raises(Deadlock, match="stage 0 at step 1, stage 1 at step 1"):
        simulate([stage("a", "b"), stage("b", "a")])


_SECONDS = st.floats(0, 10)
_STEPS = st.lists(st.tuples(_SECONDS, _SECONDS, st.sampled_from("ab")), min_size=1, max_size=8)


@given(_STEPS, st.booleans(), st.integers(0, 7), _SECONDS)
def test_more_work_or_longer_messages_never_end_a_step_earlier(
    drawn: list[tuple[float, float, str]], asynchronous: bool, place: int, more: float
) -> None:
    def end(extra_work: float, extra_message: float) -> float:
        steps: list[Step] = []
        for number, (work, message, channel) in enumerate(drawn):
            hit = number == place % len(drawn)
            steps += [compute(work + extra_work * hit), Send(number, channel, message + extra_message * hit, "x", 0.1)]
            if number:
                steps.append(Wait(number - 1))
        steps.append(Wait(len(drawn) - 1))
        return simulate([steps], asynchronous=asynchronous)[0].end

    least = end(0, 0)
    assert least <= end(more, 0) + 1e-9
    assert least <= end(0, more) + 1e-9
    # Never sooner than all work, and than all messages of a channel.
    assert least >= sum(work for work, _, _ in drawn) - 1e-9
    for name in "ab":
        assert least >= sum(message for _, message, channel in drawn if channel == name) - 1e-9


@given(st.integers(1, 5), st.integers(1, 8), st.floats(0, 3))
def test_an_exchange_that_takes_longer_never_ends_a_pipeline_earlier(
    stages: int, batches: int, exchange: float
) -> None:
    fast, slow = (
        max(stage.end for stage in simulate(pipeline("1f1b", Shape(stages, batches), seconds)))
        for seconds in (exchange, exchange + 0.5)
    )
    assert fast <= slow
