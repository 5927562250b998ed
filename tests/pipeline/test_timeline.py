"""Tests timelines as drawings, and the simulation against the published formulas."""

from collections.abc import Mapping

import pytest
from support.each import each
from support.schedule_drawings import computations, parse, shapes_of

from megazero.pipeline import schedule as module
from megazero.pipeline.passes import with_exchanges, with_windows
from megazero.pipeline.schedule import Kind, Shape
from megazero.pipeline.timeline import predicted_idle_share, simulate

GPIPE = """
stage 0   F0 F1 F2 F3  .  .  .  .  .  . B0 B0 B1 B1 B2 B2 B3 B3
stage 1    . F0 F1 F2 F3  .  .  . B0 B0 B1 B1 B2 B2 B3 B3  .  .
stage 2    .  . F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3  .  .  .  .
"""
ONE_FORWARD_ONE_BACKWARD = """
stage 0   F0 F1 F2  .  .  .  . B0 B0 F3 B1 B1  . B2 B2  . B3 B3
stage 1    . F0 F1  .  . B0 B0 F2 B1 B1 F3 B2 B2  . B3 B3  .  .
stage 2    .  . F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3  .  .  .  .
"""
ZERO_BUBBLE = """
stage 0   F0 F1 F2  .  . I0 W0 F3 I1 W1 I2 W2 I3 W3
stage 1    . F0 F1  . I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
stage 2    .  . F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
"""
INTERLEAVED = """
stage 0     F0   F1 F0.1 F1.1   F2 B0.1   F3 B1.1 F2.1   B0 F3.1   B1    . B2.1    . B3.1   B2   B3
stage 1      .   F0   F1 F0.1 B0.1 F1.1 B1.1   F2   B0   F3   B1 F2.1 B2.1 F3.1 B3.1   B2   B3    .
"""
EXCHANGES_TAKE_TIME = """
stage 0   F0 F1  .  .  .  .  .  . B0 B0  . B1 B1
stage 1    .  .  . F0 B0 B0 F1 B1 B1  .  .  .  .
"""


def seconds(forward: float, inputs: float, weights: float) -> Mapping[Kind, float]:
    """Return the durations of the four kinds of computation."""
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
    return dict(zip(kinds, (forward, inputs + weights, inputs, weights), strict=True))


@each(
    ("name", "shape", "drawing"),
    [
        ("gpipe", Shape(3, 4), GPIPE),
        ("1f1b", Shape(3, 4), ONE_FORWARD_ONE_BACKWARD),
        ("zero-bubble", Shape(3, 4), ZERO_BUBBLE),
        ("1f1b", Shape(1, 2), "stage 0   F0 B0 B0 F1 B1 B1"),
    ],
)
def test_drawings(name: str, shape: Shape, drawing: str) -> None:
    assert str(simulate(computations(name, shape), shape)) == drawing.strip()


def test_a_drawing_of_interleaved() -> None:
    shape = Shape(2, 4, 2)
    assert str(simulate(computations("interleaved", shape), shape, seconds(1, 0.5, 0.5))) == INTERLEAVED.strip("\n")


@pytest.mark.parametrize("drawing", [GPIPE, ONE_FORWARD_ONE_BACKWARD, ZERO_BUBBLE])
def test_the_docstring_shows_these_drawings(drawing: str) -> None:
    assert drawing.strip().replace("\n", "\n    ") in (module.__doc__ or "")


def test_exchanges_take_time() -> None:
    shape = Shape(2, 2)
    timeline = simulate(computations("1f1b", shape), shape, exchange=2)
    assert str(timeline) == EXCHANGES_TAKE_TIME.strip()
    assert timeline.makespan == 13
    assert timeline.idle_share == 14 / 26


def test_exchanges_and_windows_among_the_actions_change_nothing() -> None:
    shape = Shape(3, 6, 2)
    plain = computations("interleaved", shape)
    complete = [with_windows(with_exchanges(actions, shape, stage)) for stage, actions in enumerate(plain)]
    assert simulate(complete, shape) == simulate(plain, shape)


def test_stages_that_wait_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"wait for ever: \['B0', 'F1'\]"):
        simulate([parse("F0 B0 F1 B1"), parse("F0 F1 B0 B1")], Shape(2, 2))


def test_a_backward_before_its_own_forward() -> None:
    with pytest.raises(ValueError, match=r"wait for ever: \['B0', 'B0'\]"):
        simulate([parse("F0 B0"), parse("B0 F0")], Shape(2, 1))


@each("durations", [seconds(1, 1, 1), seconds(3, 2, 2), seconds(2, 5, 1), seconds(4, 4, 3)])
@each("name", ["gpipe", "1f1b", "zero-bubble", "interleaved"])
def test_the_simulation_agrees_with_the_formula(name: str, durations: Mapping[Kind, float]) -> None:
    """The shares are equal, as times are whole numbers and both shares are the nearest float to one fraction."""
    for shape in shapes_of(name, range(1, 7), range(1, 4), range(1, 13)):
        share = simulate(computations(name, shape), shape, durations).idle_share
        assert share == predicted_idle_share(name, shape, durations), str(shape)


@pytest.mark.parametrize("durations", [seconds(1, 1, 2), seconds(2, 4, 3), seconds(3, 1, 2)])
def test_zero_bubble_with_slow_weights_idles_no_less_than_the_formula(durations: Mapping[Kind, float]) -> None:
    for shape in shapes_of("zero-bubble", range(1, 8), range(1, 2), range(1, 16)):
        share = simulate(computations("zero-bubble", shape), shape, durations).idle_share
        assert share >= predicted_idle_share("zero-bubble", shape, durations), str(shape)


@each(
    ("name", "shape", "share"),
    [
        ("gpipe", Shape(4, 8), 3 / 11),
        ("1f1b", Shape(4, 8), 3 / 11),
        ("interleaved", Shape(4, 8, 2), 3 / 19),
        ("zero-bubble", Shape(4, 8), 3 / 27),
        ("1f1b", Shape(1, 8), 0),
    ],
)
def test_idle_shares_known_by_number(name: str, shape: Shape, share: float) -> None:
    assert predicted_idle_share(name, shape) == share
    assert simulate(computations(name, shape), shape).idle_share == share
