"""Tests that no schedule hangs where each rank's group does one thing after the other, as an NCCL communicator does.

A message is transferred once both sides have come to it. A rank's computations run in their own order, and each of its
groups in its own; an exchange is posted behind the computation before it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from support.each import each

from megazero.comm.mesh import channel_key
from megazero.pipeline.exchange import Route, routes
from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.stage_plan import StagePlan

_INPUT = {
    Kind.FORWARD: Kind.RECEIVE_ACTIVATION,
    Kind.BACKWARD: Kind.RECEIVE_GRADIENT,
    Kind.INPUT_GRADIENT: Kind.RECEIVE_GRADIENT,
}
_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
KeyOf = Callable[[Route, int], str]


class Posted(NamedTuple):
    """An exchange: (sender, receiver, channel, count on that way), and the computations that come before it."""

    message: tuple[int, int, str, int]
    behind: int
    action: Action


class World:
    """A simulation of the queues of every stage."""

    def __init__(self, plan: StagePlan, num_micro_batches: int, *, trains: bool, key_of: KeyOf) -> None:
        stages = [StagePlan(plan.schedule, plan.num_stages, plan.num_chunks, stage) for stage in range(plan.num_stages)]
        steps = [stage.step(num_micro_batches) if trains else stage.evaluation(num_micro_batches) for stage in stages]
        self.computations = [[a for a in step.actions if a.kind.is_computation] for step in steps]
        self.done = [0] * plan.num_stages
        self.arrived: set[tuple[int, Action]] = set()
        self.queues: dict[tuple[int, str], deque[Posted]] = defaultdict(deque)
        for stage, step in enumerate(steps):
            self._post(stage, plan.num_stages, step.actions, key_of)

    def _post(self, stage: int, num_stages: int, actions: tuple[Action, ...], key_of: KeyOf) -> None:
        count: dict[tuple[int, int, str], int] = defaultdict(int)
        behind = 0
        for action in actions:
            if action.kind.is_computation:
                behind += 1
                continue
            route = routes(stage, num_stages)[action.kind]
            key = key_of(route, num_stages)
            ends = (stage, route.stage) if action.kind in _SENDS else (route.stage, stage)
            way = (*ends, channel_key(route.key, route.link, num_stages))
            self.queues[stage, key].append(Posted((*way, count[way]), behind, action))
            count[way] += 1

    def run(self) -> bool:
        """Return True if all computations and exchanges come to their end."""
        while self._compute() | self._hand_over():
            pass
        return all(done == len(todo) for done, todo in zip(self.done, self.computations, strict=True)) and not any(
            self.queues.values()
        )

    def _compute(self) -> bool:
        before = list(self.done)
        for stage, todo in enumerate(self.computations):
            while self.done[stage] < len(todo) and self._has_input(stage, todo[self.done[stage]]):
                self.done[stage] += 1
        return self.done != before

    def _has_input(self, stage: int, action: Action) -> bool:
        receive = action._replace(kind=_INPUT[action.kind]) if action.kind in _INPUT else None
        is_posted = any(posted.action == receive for posted in self._posted(stage))
        return not is_posted or (stage, receive) in self.arrived

    def _posted(self, stage: int) -> Iterator[Posted]:
        for (owner, _), queue in self.queues.items():
            if owner == stage:
                yield from queue

    def _hand_over(self) -> bool:
        heads: dict[tuple[int, int, str, int], list[tuple[int, str]]] = defaultdict(list)
        for (stage, key), queue in self.queues.items():
            if queue and queue[0].behind <= self.done[stage]:
                heads[queue[0].message].append((stage, key))
        met = [pair for pair in heads.values() if len(pair) == 2]
        for pair in met:
            for stage, key in pair:
                posted = self.queues[stage, key].popleft()
                self.arrived.add((stage, posted.action))
        return bool(met)


def ours(route: Route, num_stages: int) -> str:
    return channel_key(route.key, route.link, num_stages)


CASES = [
    *(StagePlan(name, p) for name in ("gpipe", "1f1b", "zero-bubble") for p in range(2, 6)),
    *(StagePlan("interleaved", p, v) for p in range(2, 6) for v in (2, 3)),
]


@each("trains", [True, False])
@each("plan", CASES, ids=lambda plan: f"{plan.schedule} {plan.num_stages} {plan.num_chunks}")
def test_nothing_hangs(plan: StagePlan, trains: bool) -> None:
    step = plan.num_stages if plan.schedule == "interleaved" else 1
    for number in range(step, 2 * plan.num_stages + 1, step):
        assert World(plan, number, trains=trains, key_of=ours).run(), number


def test_one_group_for_both_links_of_a_stage_would_hang() -> None:
    plan = StagePlan("interleaved", 3, 2)
    assert not World(plan, 6, trains=True, key_of=lambda route, _: route.key).run()
