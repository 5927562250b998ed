"""The runtime runs any list of actions in its order and says which backward is the last."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megazero.pipeline.runtime import execute
from megazero.pipeline.schedule import Action, Kind


class Drawing:
    """Callbacks that draw what they are asked to do; `!` marks the last backward."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def forward(self, micro_batch: int) -> None:
        self.done.append(f"F{micro_batch}")

    def backward(self, micro_batch: int, *, is_last: bool) -> None:
        self.done.append(f"B{micro_batch}" + ("!" if is_last else ""))


def run(drawing: str) -> str:
    callbacks = Drawing()
    execute([Action(Kind(word[0]), int(word[1:])) for word in drawing.split()], callbacks)
    return " ".join(callbacks.done)


@pytest.mark.parametrize(
    ("schedule", "done"),
    [
        ("", ""),
        ("F0 B0", "F0 B0!"),
        ("F0 B0 F1 B1 F2 B2", "F0 B0 F1 B1 F2 B2!"),
        ("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2!"),
        ("F0 F1 B1 B0 F2", "F0 F1 B1 B0! F2"),
        ("F3 F4", "F3 F4"),
    ],
)
def test_actions_reach_the_callbacks_in_order(schedule: str, done: str) -> None:
    assert run(schedule) == done


@given(st.lists(st.tuples(st.sampled_from("FB"), st.integers(0, 20)), max_size=30))
def test_only_the_last_backward_is_the_last(actions: list[tuple[str, int]]) -> None:
    expected = [f"{kind}{micro_batch}" for kind, micro_batch in actions]
    backwards = [index for index, (kind, _) in enumerate(actions) if kind == "B"]
    if backwards:
        expected[backwards[-1]] += "!"
    assert run(" ".join(f"{kind}{micro_batch}" for kind, micro_batch in actions)) == " ".join(expected)


def test_an_error_of_a_callback_ends_the_run() -> None:
    class Broken(Drawing):
        def backward(self, micro_batch: int, *, is_last: bool) -> None:
            raise ArithmeticError("backward")

    callbacks = Broken()
    with pytest.raises(ArithmeticError):
        execute([Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0), Action(Kind.FORWARD, 1)], callbacks)
    assert callbacks.done == ["F0"]
