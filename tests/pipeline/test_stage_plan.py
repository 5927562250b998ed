"""Tests a stage's plan: its actions, and the points at which its messages are proven to have been received."""

from collections import deque

from support.each import each
from support.schedule_drawings import draw, parse_stages, shapes_of

from megazero.pipeline.passes import with_exchanges
from megazero.pipeline.schedule import Action, Kind, Shape, forward_only, schedule
from megazero.pipeline.stage_plan import Receipts, StagePlan, proven_receipts

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def test_a_stage_alone_accumulates() -> None:
    step = StagePlan().step(3)
    assert draw(step.actions) == "F0 B0 F1 B1 F2 B2"
    assert (draw(tuple(step.finals)), step.receipts) == ("B2", {})
    assert draw(StagePlan().evaluation(2).actions) == "F0 F1"


def test_windows_where_parameters_are_kept() -> None:
    assert draw(StagePlan(retains_gathered=True).step(2).actions) == "G F0 B0 F1 B1 R"
    assert draw(StagePlan(retains_gathered=True).evaluation(2).actions) == "F0 F1", "an evaluation gathers once anyway"


def test_a_step_is_made_once() -> None:
    plan = StagePlan("1f1b", 4, 1, 2)
    assert plan.step(8) is plan.step(8)
    assert plan == StagePlan("1f1b", 4, 1, 2) and plan.step(8) is not plan.step(4)


def test_what_a_message_proves() -> None:
    """The gradient of micro-batch 0 comes when the other one of two stages has received two activations."""
    stages = parse_stages(
        """
        stage 0   F0 sf0 F1 sf1 rb0 B0 F2 sf2 rb1 B1 rb2 B2
        stage 1   rf0 F0 B0 sb0 rf1 rf2 F1 F2 B1 sb1 B2 sb2
        """
    )
    shape = Shape(2, 3)
    found = proven_receipts(stages[0], {1: stages[1]}, shape, 0)
    assert {str(action): taken for action, taken in found.items()} == {
        "rb0": Receipts(1, 0),
        "rb1": Receipts(3, 0),
        "rb2": Receipts(3, 0),
    }
    found = proven_receipts(stages[1], {0: stages[0]}, shape, 1)
    assert {str(action): taken for action, taken in found.items()} == {
        "rf0": Receipts(0, 0),
        "rf1": Receipts(0, 0),
        "rf2": Receipts(0, 1),
    }


@each("name", SCHEDULES)
def test_what_is_proved_has_happened_however_slow_others_are(name: str) -> None:
    """A proof holds although one stage is as far as it can get and the others no further than it forces them to be."""
    for shape in shapes_of(name, range(2, 6), range(1, 4), range(1, 11)):
        stages = [with_exchanges(schedule(name, shape, stage), shape, stage) for stage in range(shape.num_stages)]
        for stage in range(shape.num_stages):
            _check_proofs(stages, shape, stage)


def _check_proofs(stages: list[tuple[Action, ...]], shape: Shape, stage: int) -> None:
    p = shape.num_stages
    around = {(stage + 1) % p: stages[(stage + 1) % p], (stage - 1) % p: stages[(stage - 1) % p]}
    found = proven_receipts(stages[stage], around, shape, stage)
    assert set(found) == {action for action in stages[stage] if action.kind.value in ("rf", "rb")}
    world = _Lazy(stages, shape)
    for action in stages[stage]:
        if action.kind.value in ("rf", "rb"):
            taken = world.force_message(stage, action)
            assert found[action] == taken, (shape, stage, str(action))


class _Lazy:
    """Stages that only do what a message needs, with a count of the messages of a stage that they have received."""

    def __init__(self, stages: list[tuple[Action, ...]], shape: Shape) -> None:
        self._stages = [deque(actions) for actions in stages]
        self._shape = shape
        self._sent: dict[tuple[str, int], int] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._forced: dict[tuple[str, int], int] = {}

    def force_message(self, stage: int, receive: Action) -> Receipts:
        """Make the message's sender go on until it has sent the next message of this kind to `stage`."""
        p, kind = self._shape.num_stages, "sf" if receive.kind is Kind.RECEIVE_ACTIVATION else "sb"
        sender = (stage - 1) % p if kind == "sf" else (stage + 1) % p
        number = self._forced[kind, stage] = self._forced.get((kind, stage), 0) + 1
        while self._sent.get((kind, sender), 0) < number:
            self._do(sender)
        receivers = {"sf": (stage + 1) % p, "sb": (stage - 1) % p}
        return Receipts(*(self._taken.get((k, r), 0) if r == sender else 0 for k, r in receivers.items()))

    def _do(self, stage: int) -> None:
        """Do the next action of a stage, without a check for its input: the stage that sends it is far enough."""
        action = self._stages[stage].popleft()
        if action.kind.value in ("sf", "sb"):
            self._sent[action.kind.value, stage] = self._sent.get((action.kind.value, stage), 0) + 1
        elif action.kind is Kind.FORWARD and not self._shape.is_first(stage, action.chunk):
            self._taken["sf", stage] = self._taken.get(("sf", stage), 0) + 1
        elif action.kind.value in "BI" and not self._shape.is_last(stage, action.chunk):
            self._taken["sb", stage] = self._taken.get(("sb", stage), 0) + 1


def test_an_evaluation_proves_nothing_but_what_wraps_around() -> None:
    shape = Shape(3, 4)
    actions = [with_exchanges(forward_only(shape, stage), shape, stage) for stage in range(3)]
    assert set(proven_receipts(actions[1], {0: actions[0], 2: actions[2]}, shape, 1).values()) == {Receipts(0, 0)}
