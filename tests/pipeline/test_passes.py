"""Tests exchanges, windows and counts, and that schedules of many stages, chunks and micro-batches fit together."""

import random

import pytest
from support.each import each
from support.schedule_drawings import computations, draw, parse, parse_stages, shapes_of
from support.valid_schedules import validate

from megazero.pipeline.passes import (
    final_backwards,
    most_in_flight,
    most_in_flight_total,
    num_windows,
    with_exchanges,
    with_windows,
)
from megazero.pipeline.schedule import Action, Kind, Shape, forward_only

NAMES = ("gpipe", "1f1b", "zero-bubble", "interleaved")
RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)

EXCHANGES = """
stage 0   F0 sf0 F1 sf1 rb0 F2 sf2 rb1 B0 rb2 B1 B2
stage 1   rf0 rf1 F0 sf0 rb0 F1 sf1 rf2 B0 sb0 rb1 F2 sf2 rb2 B1 sb1 B2 sb2
stage 2   rf0 F0 rf1 B0 sb0 F1 rf2 B1 sb1 F2 B2 sb2
"""
INTERLEAVED = """
stage 0   F0 sf0 rf0.1 F1 sf1 rf1.1 F0.1 sf0.1 rb0.1 F1.1 sf1.1 rb1.1 B0.1 sb0.1 rb0 B1.1 sb1.1 rb1 B0 B1
stage 1   rf0 rf1 F0 sf0 rf0.1 F1 sf1 F0.1 rf1.1 B0.1 sb0.1 F1.1 rb0 B1.1 sb1.1 rb1 B0 sb0 B1 sb1
"""
ZERO_BUBBLE = """
stage 0   F0 sf0 rb0 F1 sf1 I0 rb1 W0 I1 W1
stage 1   rf0 F0 rf1 I0 sb0 F1 I1 sb1 W0 W1
"""


def complete(name: str, shape: Shape) -> list[tuple[Action, ...]]:
    """Return all stages' actions as the runtime gets them."""
    stages = enumerate(computations(name, shape))
    return [with_windows(with_exchanges(actions, shape, stage)) for stage, actions in stages]


def with_exchanges_everywhere(drawing: str, shape: Shape) -> list[tuple[Action, ...]]:
    return [with_exchanges(actions, shape, stage) for stage, actions in enumerate(parse_stages(drawing))]


@each(
    ("name", "shape", "drawing"),
    [
        ("1f1b", Shape(3, 3), EXCHANGES),
        ("interleaved", Shape(2, 2, 2), INTERLEAVED),
        ("zero-bubble", Shape(2, 2), ZERO_BUBBLE),
        ("1f1b", Shape(1, 2), "stage 0 F0 B0 F1 B1"),
    ],
)
def test_drawings_of_exchanges(name: str, shape: Shape, drawing: str) -> None:
    stages = enumerate(computations(name, shape))
    assert [with_exchanges(actions, shape, stage) for stage, actions in stages] == parse_stages(drawing)


def test_exchanges_of_an_evaluation() -> None:
    shape = Shape(2, 3)
    drawn = [draw(with_exchanges(forward_only(shape, stage), shape, stage)) for stage in range(2)]
    assert drawn == ["F0 sf0 F1 sf1 F2 sf2", "rf0 rf1 F0 rf2 F1 F2"]
    assert with_exchanges((), shape, 0) == ()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_schedule_fits_together(name: str, num_stages: int) -> None:
    for shape in shapes_of(name, range(num_stages, num_stages + 1), range(1, 5), range(1, 25)):
        validate(complete(name, shape), shape)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_every_evaluation_fits_together(num_stages: int) -> None:
    for num_chunks in range(1, 5 if num_stages > 1 else 2):
        for shape in (Shape(num_stages, m, num_chunks) for m in (1, 2, 3, 5, 8, 13, 24)):
            stages = range(num_stages)
            validate([with_exchanges(forward_only(shape, s), shape, s) for s in stages], shape, trains=False)


@each("name", NAMES)
def test_receives_are_posted_exactly_one_computation_ahead(name: str) -> None:
    for shape in shapes_of(name, range(2, 5), range(1, 4), range(1, 9)):
        for stage, actions in enumerate(computations(name, shape)):
            posted = with_exchanges(actions, shape, stage)
            for position, action in enumerate(posted):
                if action.kind in RECEIVES:
                    behind = [a for a in posted[position:] if a.kind.is_computation]
                    ahead = next(i for i, a in enumerate(behind) if a[1:] == action[1:] and is_user(a, action))
                    assert ahead == 1 or (ahead == 0 and behind[0] == actions[0]), f"{name} {shape} {action}"


def is_user(computation: Action, receive: Action) -> bool:
    """Return True if the computation is of the kind that the receive is for."""
    is_forward = receive.kind is Kind.RECEIVE_ACTIVATION
    return computation.kind in ((Kind.FORWARD,) if is_forward else (Kind.BACKWARD, Kind.INPUT_GRADIENT))


@each(
    ("drawing", "text"),
    [
        ("stage 0 F0 F1 B0\nstage 1 F0 F1 B0 B1", "rb left out or too much.*\\(1, 0\\)"),
        ("stage 0 F0 F1 B0 B1\nstage 1 F0 B0", "wait for ever: stage 0 at B1"),
        ("stage 0 F0 F1 B0 B1\nstage 1 F0 F1 B1 B0", "stage 0 at B0: gets what was sent for micro-batch 1"),
        ("stage 0 F1 F0 B0 B1\nstage 1 F0 F1 B0 B1", "stage 1 at F0: gets what was sent for micro-batch 1"),
        ("stage 0 F0 F1 B1 B0\nstage 1 F0 F1 B1 B0", r"adds up \[1, 0\]"),
        ("stage 0 F0 B0 F1 B1\nstage 1 F0 F1 B0 B1", "wait for ever: stage 0 at B0, stage 1 at F1"),
        ("stage 0 F0 F1 B0 B1\nstage 1 F0 B0 F1 F1 B1", "stage 1 at rf1: a second time"),
        ("stage 0 B0 F0 F1 B1\nstage 1 F0 F1 B0 B1", "stage 0 at B0: F is not done"),
        ("stage 0 F0 F1 I0 I1 W0 W1\nstage 1 F0 F1 W0 I0 I1 W1", "stage 1 at W0: I is not done"),
        ("stage 0 F0 F1 I0 I1 W0\nstage 1 F0 F1 I0 I1 W0 W1", r"chunk 0 adds up \[0\]"),
        ("stage 0 F0 F1 I0 I1 W0 W1\nstage 1 F0 F1 I0 W0 I1", r"chunk 1 adds up \[0\]"),
        ("stage 0 F0 F1 B0 B1 F2 B2\nstage 1 F0 F1 B0 B1 F2 B2", "too much.*\\(2, 0\\)"),
        ("stage 0 F0 F1 B0 B1", "1 stages' actions"),
    ],
)
def test_wrong_computations_are_found(drawing: str, text: str) -> None:
    shape = Shape(2, 2)
    with pytest.raises(ValueError, match=text):
        validate(with_exchanges_everywhere(drawing, shape), shape)


@each(
    ("drawing", "text"),
    [
        ("stage 0 F0 rb0 B0\nstage 1 rf0 F0 B0 sb0", "wait for ever: stage 0 at B0, stage 1 at F0"),
        ("stage 0 F0 sf0 B0\nstage 1 rf0 F0 B0 sb0", "stage 0 at B0: rb0 is not posted"),
        ("stage 0 sf0 F0 rb0 B0\nstage 1 rf0 F0 B0 sb0", "stage 0 at sf0: sends what is not computed"),
        ("stage 0 F0 sf0 sf0 rb0 B0\nstage 1 rf0 F0 B0 sb0", "stage 0 at sf0: a second time"),
        ("stage 0 F0 sf0 rb0 B0 sb0\nstage 1 rf0 F0 B0 sb0", "sb left out or too much.*\\(0, 0\\)"),
        ("stage 0 F0 sf0 rb0 B0\nstage 1 rf0 F0 sf0 B0 sb0", "sf left out or too much.*\\(0, 1\\)"),
        ("stage 0 F0 sf0 rb0 B0 rb1\nstage 1 rf0 F0 B0 sb0", "rb left out or too much.*\\(1, 0\\)"),
        ("stage 0 G F0 R sf0 rb0 B0\nstage 1 rf0 F0 B0 sb0", "stage 0, action 5, B0: chunk 0 is not gathered"),
        ("stage 0 G F0 sf0 rb0 B0\nstage 1 rf0 F0 B0 sb0", "stage 0 never releases"),
        ("stage 0 G G F0 sf0 rb0 B0 R\nstage 1 rf0 F0 B0 sb0", "gathered already"),
        ("stage 0 G F0 sf0 rb0 B0 R\nstage 1 R rf0 F0 B0 sb0", "stage 1, action 0, R: chunk 0 is not gathered"),
    ],
)
def test_wrong_exchanges_and_windows_are_found(drawing: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        validate(parse_stages(drawing), Shape(2, 1))


def test_a_backward_beside_the_half_of_one_is_found() -> None:
    with pytest.raises(ValueError, match="an I without its W"):
        validate([parse("F0 I0 B0")], Shape(1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_can_be_left_out(name: str) -> None:
    """The simulation notices if any action is left out."""
    shape = Shape(2, 4, 2 if name == "interleaved" else 1)
    stages = complete(name, shape)
    for stage, actions in enumerate(stages):
        for position in range(len(actions)):
            broken = [*stages[:stage], actions[:position] + actions[position + 1 :], *stages[stage + 1 :]]
            with pytest.raises(ValueError):
                validate(broken, shape)


@each("kinds", [RECEIVES[:1], RECEIVES[1:], SENDS[:1], SENDS[1:]])
def test_messages_cannot_change_places(kinds: tuple[Kind, ...]) -> None:
    """Two messages of one channel in another order on one side are found by the validation."""
    shape = Shape(3, 6, 2)
    stages = complete("interleaved", shape)
    for seed in range(20):
        chance = random.Random(seed)
        actions = list(stages[1])
        first, second = chance.sample([i for i, action in enumerate(actions) if action.kind in kinds], 2)
        actions[first], actions[second] = actions[second], actions[first]
        with pytest.raises(ValueError):
            validate([stages[0], actions, stages[2]], shape)


@each(
    ("actions", "drawing"),
    [
        ("F0 B0 F1 B1", "G F0 B0 F1 B1 R"),
        ("F0 F1 I0 W0 I1 W1", "G F0 F1 I0 W0 I1 W1 R"),
        ("F0 F0.1 B0.1 B0", "G F0 R G.1 F0.1 B0.1 R.1 G B0 R"),
        ("F0 F0.1 F1 F1.1 F1.2 F2", "G F0 G.1 F0.1 F1 R F1.1 R.1 G.2 F1.2 R.2 G F2 R"),
        ("rf0 rf1 F0 sf0 rb0 F1 sf1 rb0.1 B0.1 sb0.1", "rf0 rf1 G F0 sf0 rb0 F1 R sf1 rb0.1 G.1 B0.1 R.1 sb0.1"),
        ("", ""),
    ],
)
def test_drawings_of_windows(actions: str, drawing: str) -> None:
    assert draw(with_windows(parse(actions))) == drawing
    for chunk in range(3):
        gathers = [action for action in parse(drawing) if action == Action(Kind.GATHER, -1, chunk)]
        assert num_windows(parse(actions), chunk) == len(gathers)


def test_the_window_drawing_of_the_docstring() -> None:
    windows = draw(with_windows(computations("interleaved", Shape(2, 4, 2))[0]))
    assert windows in " ".join((with_windows.__doc__ or "").split())


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_gathered_seldom_and_two_chunks_at_once(name: str) -> None:
    for shape in shapes_of(name, range(1, 7), range(1, 5), range(1, 25)):
        groups = shape.num_micro_batches // shape.num_stages
        for actions in computations(name, shape):
            open_chunks: set[int] = set()
            for action in with_windows(actions):
                if action.kind is Kind.GATHER:
                    open_chunks.add(action.chunk)
                elif action.kind is Kind.RELEASE:
                    open_chunks.remove(action.chunk)
                assert len(open_chunks) <= 2
            for chunk in range(shape.num_chunks):
                most = 2 * groups if name == "interleaved" else 1
                assert 1 <= num_windows(actions, chunk) <= most, f"{shape}, chunk {chunk}"


def test_forwards_and_backwards_of_a_chunk_may_meet_in_one_window() -> None:
    shape = Shape(4, 8, 2)
    stages = computations("interleaved", shape)
    counts = [[num_windows(actions, chunk) for chunk in range(2)] for actions in stages]
    assert counts == [[4, 3], [4, 1], [3, 2], [3, 2]]


@each(
    ("actions", "by_chunk", "total"),
    [
        ("F0 B0 F1 B1", {0: 1}, 1),
        ("F0 F1 F2 B0 B1 B2", {0: 3}, 3),
        ("F0 I0 F1 I1 W0 F2 I2 W1 W2", {0: 2}, 2),
        ("F0 F1 F0.1 B0.1 B0 F1.1 B1.1 B1", {0: 2, 1: 1}, 3),
        ("F0 F0.1 F1 F1.1", {0: 0, 1: 0}, 0),
        ("", {}, 0),
    ],
)
def test_in_flight(actions: str, by_chunk: dict[int, int], total: int) -> None:
    assert most_in_flight(parse(actions)) == by_chunk
    assert most_in_flight_total(parse(actions)) == total


@pytest.mark.parametrize("name", NAMES)
def test_in_flight_of_schedules(name: str) -> None:
    for shape in shapes_of(name, range(1, 9), range(1, 5), range(1, 25)):
        p, m, v = shape.num_stages, shape.num_micro_batches, shape.num_chunks
        for stage, actions in enumerate(computations(name, shape)):
            expected = {
                "gpipe": m,
                "1f1b": min(m, p - stage),
                "zero-bubble": min(m, p),
                "interleaved": min(v * m, (v - 1) * p + 2 * (p - 1 - stage) + 1),
            }
            assert most_in_flight_total(actions) == expected[name], f"{shape}, stage {stage}"
            assert max(most_in_flight(actions).values()) <= expected[name]


@each(
    ("actions", "finals"),
    [
        ("F0 B0 F1 B1", "B1"),
        ("F0 I0 F1 I1 W0 W1", "W1"),
        ("F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1", "B1 B1.1"),
        ("rf0 F0 sf0 rb0 B0 sb0", "B0"),
        ("F0 F1", ""),
    ],
)
def test_the_last_backward_of_every_chunk(actions: str, finals: str) -> None:
    assert final_backwards(parse(actions)) == set(parse(finals))
