"""Tests schedules as drawings, and that torch.distributed.pipelining has the same order."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.each import each
from support.schedule_drawings import computations, draw, parse_stages, shapes_of
from torch.distributed.pipelining import schedules as oracle

from megazero.pipeline.schedule import Action, Kind, Shape, forward_only, schedule

NAMES = ("gpipe", "1f1b", "zero-bubble", "interleaved")

GPIPE = """
stage 0   F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 1   F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 2   F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
stage 3   F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
"""
ONE_FORWARD_ONE_BACKWARD = """
stage 0   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
stage 1   F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
stage 2   F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
stage 3   F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7
"""
FEWER_MICRO_BATCHES_THAN_STAGES = """
stage 0   F0 F1 B0 B1
stage 1   F0 F1 B0 B1
stage 2   F0 F1 B0 B1
stage 3   F0 B0 F1 B1
"""
ZERO_BUBBLE = """
stage 0   F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
stage 1   F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
stage 2   F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
stage 3   F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
"""
INTERLEAVED = """
stage 0   F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3
stage 1   F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3
"""


@each(
    ("name", "shape", "drawing"),
    [
        ("gpipe", Shape(4, 8), GPIPE),
        ("1f1b", Shape(4, 8), ONE_FORWARD_ONE_BACKWARD),
        ("1f1b", Shape(4, 2), FEWER_MICRO_BATCHES_THAN_STAGES),
        ("zero-bubble", Shape(4, 6), ZERO_BUBBLE),
        ("interleaved", Shape(2, 4, 2), INTERLEAVED),
        ("gpipe", Shape(1, 3), "stage 0 F0 F1 F2 B0 B1 B2"),
        ("1f1b", Shape(1, 3), "stage 0 F0 B0 F1 B1 F2 B2"),
        ("zero-bubble", Shape(1, 2), "stage 0 F0 I0 W0 F1 I1 W1"),
    ],
)
def test_drawings(name: str, shape: Shape, drawing: str) -> None:
    assert computations(name, shape) == parse_stages(drawing)


def test_forward_only_takes_p_micro_batches_through_a_chunk_and_the_rest_likewise() -> None:
    drawing = "F0 F1 F0.1 F1.1 F2 F3 F2.1 F3.1 F4 F4.1"
    assert [draw(forward_only(Shape(2, 5, 2), stage)) for stage in (0, 1)] == [drawing, drawing]
    assert draw(forward_only(Shape(3, 4), 2)) == "F0 F1 F2 F3"


def test_an_action_is_drawn_as_letter_number_and_chunk() -> None:
    actions = [
        (Kind.FORWARD, 12),
        (Kind.BACKWARD, 0, 0),
        (Kind.SEND_GRADIENT, 3, 2),
        (Kind.GATHER, -1),
        (Kind.GATHER, -1, 1),
    ]
    assert [str(Action(*action)) for action in actions] == ["F12", "B0", "sb3.2", "G", "G.1"]


@each("name", NAMES)
def test_gradients_are_added_up_in_the_order_of_the_micro_batches(name: str) -> None:
    for shape in shapes_of(name, range(1, 6), range(1, 4), range(1, 13)):
        for actions in computations(name, shape):
            for chunk in range(shape.num_chunks):
                for kind in {action.kind for action in actions} - {Kind.FORWARD}:
                    order = [action.micro_batch for action in actions if action[0::2] == (kind, chunk)]
                    assert order == list(range(shape.num_micro_batches)), f"{name} {shape} {kind}"


def test_zero_bubble_is_1f1b_with_the_weights_set_aside() -> None:
    for shape in shapes_of("zero-bubble", range(1, 7), range(1, 2), range(1, 13)):
        for split, whole in zip(computations("zero-bubble", shape), computations("1f1b", shape), strict=True):
            critical = [action for action in split if action.kind is not Kind.WEIGHT_GRADIENT]
            assert draw(tuple(critical)).replace("I", "B") == draw(whole)


def test_places_in_the_model() -> None:
    shape = Shape(num_stages=3, num_micro_batches=1, num_chunks=2)
    places = [(stage, chunk) for chunk in range(2) for stage in range(3)]
    assert [shape.global_chunk(*place) for place in places] == [0, 1, 2, 3, 4, 5]
    assert [place for place in places if shape.is_first(*place)] == [(0, 0)]
    assert [place for place in places if shape.is_last(*place)] == [(2, 1)]


@each(
    ("name", "shape", "text"),
    [
        ("interleaved", (2, 3, 2), "groups of 2 .* 3 is no multiple"),
        ("interleaved", (2, 4), "between chunks"),
        ("1f1b", (2, 4, 2), "one chunk"),
        ("gpipe", (2, 4, 2), "one chunk"),
        ("zero-bubble", (2, 4, 2), "one chunk"),
        ("1f1b", (2, 0), "below 1"),
        ("interleaved", (1, 4, 2), "uncut"),
    ],
)
def test_shapes_that_a_schedule_cannot_do(name: str, shape: tuple[int, ...], text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        schedule(name, Shape(*shape), 0)


def test_a_stage_that_is_not_there() -> None:
    with pytest.raises(AssertionError, match="no stage 2 among 2"):
        schedule("1f1b", Shape(2, 4), 2)


THEIR_KINDS = {
    oracle._ComputationType.FORWARD: Kind.FORWARD,
    oracle._ComputationType.FULL_BACKWARD: Kind.BACKWARD,
    oracle._ComputationType.BACKWARD_INPUT: Kind.INPUT_GRADIENT,
    oracle._ComputationType.BACKWARD_WEIGHT: Kind.WEIGHT_GRADIENT,
}


def theirs(shape: Shape, actions: list[Any]) -> str:
    """Draw torch's computations as megazero's; torch numbers stages instead of chunks, and pads with None."""
    ours = [
        Action(THEIR_KINDS[action.computation_type], action.microbatch_index, action.stage_index // shape.num_stages)
        for action in actions
        if action is not None and action.computation_type in THEIR_KINDS
    ]
    return draw(tuple(ours))


@pytest.mark.parametrize(("name", "their_class"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_torch_has_the_same_order_with_one_chunk(name: str, their_class: str) -> None:
    for shape in [Shape(1, 3), Shape(2, 2), Shape(2, 5), Shape(4, 4), Shape(4, 8), Shape(5, 11)]:
        blank = SimpleNamespace(_num_stages=shape.num_stages, _n_microbatches=shape.num_micro_batches)
        order = getattr(oracle, their_class)._get_pipeline_order(blank)
        for stage, actions in enumerate(computations(name, shape)):
            # Torch's table of 1f1b counts the last stage's forwards from 1, though it runs them from 0.
            first = int(name == "1f1b" and stage == shape.num_stages - 1)
            shifted = [a._replace(micro_batch=a.micro_batch + first * (a.kind is Kind.FORWARD)) for a in actions]
            assert draw(tuple(shifted)) == theirs(shape, order[stage]), f"{shape}, stage {stage}"


@pytest.mark.parametrize(
    ("name", "their_class", "shapes"),
    [
        (
            "interleaved",
            "ScheduleInterleaved1F1B",
            [(2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 4, 2), (4, 16, 4), (8, 24, 2)],
        ),
        ("zero-bubble", "ScheduleInterleavedZeroBubble", [(1, 3), (2, 2), (2, 5), (4, 4), (4, 9), (6, 12)]),
    ],
)
def test_torch_has_the_same_order_in_its_interleaved_family(
    name: str, their_class: str, shapes: list[tuple[int, ...]]
) -> None:
    for shape in (Shape(*numbers) for numbers in shapes):
        group = shape.num_stages if name == "interleaved" else shape.num_micro_batches
        blank = SimpleNamespace(
            n_local_stages=shape.num_chunks,
            microbatches_per_round=group,
            pp_group_size=shape.num_stages,
            _n_microbatches=shape.num_micro_batches,
        )
        for stage, actions in enumerate(computations(name, shape)):
            order = getattr(oracle, their_class)._calculate_single_rank_operations(blank, stage)
            assert draw(actions) == theirs(shape, order), f"{shape}, stage {stage}"
