"""Tests that the runtime runs any list of actions in its order and marks the backward that is a chunk's last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from support.schedule_drawings import parse

from megazero.pipeline.passes import final_backwards
from megazero.pipeline.runtime import execute
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StepActions


class Drawing:
    """Callbacks that record their calls as a drawing; `!` marks the last backward of a chunk."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def forward(self, action: Action) -> None:
        self._draw(Kind.FORWARD, action)

    def backward(self, action: Action, *, is_last: bool) -> None:
        self._draw(Kind.BACKWARD, action, is_last=is_last)

    def input_gradient(self, action: Action) -> None:
        self._draw(Kind.INPUT_GRADIENT, action)

    def weight_gradient(self, action: Action, *, is_last: bool) -> None:
        self._draw(Kind.WEIGHT_GRADIENT, action, is_last=is_last)

    def receive(self, action: Action) -> None:
        assert action.kind in (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)
        self.done.append(str(action))

    def send(self, action: Action) -> None:
        assert action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
        self.done.append(str(action))

    def retain(self, chunk: int) -> None:
        self.done.append(str(Action(Kind.GATHER, -1, chunk)))

    def release(self, chunk: int) -> None:
        self.done.append(str(Action(Kind.RELEASE, -1, chunk)))

    def _draw(self, kind: Kind, action: Action, *, is_last: bool = False) -> None:
        assert action.kind is kind
        self.done.append(f"{action}{'!' if is_last else ''}")


def run(actions: tuple[Action, ...]) -> str:
    callbacks = Drawing()
    execute(StepActions(actions, final_backwards(actions), {}), callbacks)
    return " ".join(callbacks.done)


@each(
    ("schedule", "done"),
    [
        ("", ""),
        ("F0 B0", "F0 B0!"),
        ("F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2!"),
        ("F0 F1 B1 B0 F2", "F0 F1 B1 B0! F2"),
        ("F0 F0.1 B0.1 F1 B0 B1", "F0 F0.1 B0.1! F1 B0 B1!"),
        ("F0 I0 F1 I1 W0 W1", "F0 I0 F1 I1 W0 W1!"),
        ("G rf0 F0 sf0 rb0 B0 sb0 R", "G rf0 F0 sf0 rb0 B0! sb0 R"),
        ("G.1 F3.1 R.1", "G.1 F3.1 R.1"),
    ],
)
def test_actions_reach_the_callbacks_in_order(schedule: str, done: str) -> None:
    assert run(parse(schedule)) == done


@given(st.lists(st.tuples(st.sampled_from("FB"), st.integers(0, 20), st.integers(0, 2)), max_size=30, unique=True))
def test_only_the_last_backward_of_a_chunk_is_the_last(words: list[tuple[str, int, int]]) -> None:
    actions = tuple(Action(Kind(kind), micro_batch, chunk) for kind, micro_batch, chunk in words)
    expected = [str(action) for action in actions]
    for chunk in range(3):
        backwards = [i for i, action in enumerate(actions) if action.kind is Kind.BACKWARD and action.chunk == chunk]
        if backwards:
            expected[backwards[-1]] += "!"
    assert run(actions) == " ".join(expected)


def test_an_error_of_a_callback_ends_the_run() -> None:
    class Broken(Drawing):
        def backward(self, action: Action, *, is_last: bool) -> None:
            raise ArithmeticError("backward")

    callbacks = Broken()
    with pytest.raises(ArithmeticError):
        execute(StepActions(parse("F0 B0 F1"), frozenset(), {}), callbacks)
    assert callbacks.done == ["F0"]
