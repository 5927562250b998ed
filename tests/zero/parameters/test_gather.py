"""Tests of the order of gathering: what is gathered, in flight, kept and released at every moment of a pass.

The model is a stack of layers, each a unit of 32 elements.  Strings list the events in order: "f0" when layer 0
computes in forward, "b0" when a gradient reaches its output, "+0" when its gather is launched, "-0" when it is
released.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.each import each
from support.irregular_model import alone, engine_around, owned_gradient, released_memory_is_nan, take_step
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.config.engine_sections import ZeroConfig
from megazero.errors import UsageError
from megazero.zero.engine import Engine
from megazero.zero.parameters.gather import ParameterGather
from megazero.zero.parameters.unit_memory import GatheredUnit, UnitBuckets

WIDTH = 4
NUMEL = 32  # elements of a unit: 4 x 4 and 4, padded to two quanta of 16


class Stack(nn.Module):
    """A stack of layers that runs in the order given by `route`."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.route: Sequence[int] = range(depth)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.route:
            x = torch.tanh(self.layers[index](x))
        return x


class Pair(nn.Module):
    """A module of two layers that is one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Diary:
    """A stack under an engine of one rank, with a record of its events."""

    def __init__(self, depth: int = 3, *, change: Callable[[Stack], Any] | None = None, **zero: Any) -> None:
        torch.manual_seed(1)
        self.model = Stack(depth)
        if change is not None:
            change(self.model)
        self.model.double()
        self.engine = engine_around(self.model, alone(), **zero)
        self.gather = self.engine._gather
        self.events: list[str] = []
        self.in_flight: list[str] = []  # the states of all units at each computation
        self._watch_launches()
        self._watch_releases()
        for index, layer in enumerate(self.model.layers):
            layer.register_forward_pre_hook(self._note(f"f{index}"))
            layer.register_full_backward_pre_hook(self._note(f"b{index}"))

    def units(self) -> dict[str, GatheredUnit]:
        return {name.removeprefix("layers."): unit for name, unit in self.gather._units.items()}

    def states(self) -> str:
        """Return one letter for each unit's state: p(artitioned), i(n flight), w(hole)."""
        return "".join(unit.state.name[0].lower() for unit in self.units().values())

    def step(self, route: Sequence[int] | None = None) -> str:
        """Run a pass forward and backward; return its events."""
        self.events.clear()
        self.model.route = range(len(self.model.layers)) if route is None else route
        self.engine.begin_step()
        x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        self.engine.backward(self.model(x).sum(), is_last=True)
        return " ".join(self.events)

    def evaluate(self, route: Sequence[int] | None = None) -> str:
        self.events.clear()
        self.model.route = range(len(self.model.layers)) if route is None else route
        with torch.no_grad():
            self.model(torch.ones(2, WIDTH, dtype=torch.float64))
        return " ".join(self.events)

    def _watch_launches(self) -> None:
        original = self.gather.memory.launch

        def launch(*groups: UnitBuckets) -> None:
            begin = [unit.name.removeprefix("layers.") for unit, *_ in groups if not unit.works]
            self.events += ["+" + ",".join(begin)] if begin else []
            original(*groups)

        self.gather.memory.launch = launch

    def _watch_releases(self) -> None:
        original = self.gather.memory.release

        def release(unit: GatheredUnit) -> None:
            self.events.append("-" + unit.name.removeprefix("layers."))
            original(unit)

        self.gather.memory.release = release

    def _note(self, event: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self.events.append(event)
            self.in_flight.append(event + ":" + self.states())

        return note


def test_a_pass_without_looking_ahead() -> None:
    """Without prefetch each unit is gathered for its own computation, and at no other time."""
    diary = Diary(prefetch_bucket_size=0)
    assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 -2 b2 +2 -2 b1 +1 -1 b0 +0 -0"
    # In the second pass the record shows that layer 2 is needed next when its forward ends.
    assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 b2 -2 b1 +1 -1 b0 +0 -0"
    assert diary.engine.gathered_numel == (0, NUMEL)


AHEAD = {
    # prefetch_bucket_size: the events of the second pass, and every unit's state at each computation
    NUMEL - 1: (
        "+0 f0 -0 +1 f1 -1 +2 f2 b2 -2 b1 +1 -1 b0 +0 -0",
        "f0:wpp f1:pwp f2:ppw b2:ppw b1:ppp b0:ppp",
    ),
    NUMEL: (
        "+0 +1 f0 -0 +2 f1 f2 b2 -2 b1 +0 -1 b0 -0",
        "f0:wip f1:pwi f2:pww b2:pww b1:pwp b0:ipp",
    ),
    2 * NUMEL: (
        "+0 +1 +2 f0 f1 f2 b2 -2 b1 -1 b0 -0",
        "f0:wii f1:wwi f2:www b2:www b1:wwp b0:wpp",
    ),
    10**6: (
        "+0 +1,2 f0 f1 f2 b2 -2 b1 -1 b0 -0",
        "f0:wii f1:wwi f2:www b2:www b1:wwp b0:wpp",
    ),
}


@each("window", AHEAD)
def test_what_is_gathered_ahead(window: int) -> None:
    """Uses of gathered units count towards the prefetch window, and the window ends with the pass.

    What the window has room for stays gathered from forward to backward.
    """
    diary = Diary(prefetch_bucket_size=window)
    first = diary.step()
    assert first == "+0 f0 -0 +1 f1 -1 +2 f2 -2 b2 +2 -2 b1 +1 -1 b0 +0 -0", "nothing is known yet"
    diary.in_flight.clear()
    events, states = AHEAD[window]
    assert diary.step() == events
    assert " ".join(diary.in_flight) == states
    assert diary.step() == events, "the record stays"
    assert diary.engine.gathered_numel[0] == 0


def test_small_units_are_gathered_together_ahead_of_their_use() -> None:
    """A message has half of the prefetch window, here two layers, and begins before less than that is ahead.

    The last layer of a forward, or a backward, is a message of its own where their number is odd.
    """
    diary = Diary(8, prefetch_bucket_size=4 * NUMEL)
    diary.step()
    expected = (
        "+0 +1,2 +3,4 f0 -0 f1 -1 +5,6 f2 -2 f3 f4 +7 f5 f6 f7 b7 -7 b6 -6 b5 +2,1 -5 b4 -4 b3 -3 b2 +0 -2 b1 -1 b0 -0"
    )
    assert diary.step() == diary.step() == expected
    assert diary.engine.gathered_numel == (0, 5 * NUMEL), "a use, and the window"


def test_a_message_of_several_units_has_no_more_than_one_gather_may() -> None:
    diary = Diary(8, prefetch_bucket_size=6 * NUMEL, allgather_bucket_size=2 * NUMEL)
    diary.step()
    assert diary.step().startswith("+0 +1,2 +3,4 +5,6 f0"), "not three, which are half of the window"


@pytest.mark.parametrize("most", [NUMEL, 3 * NUMEL, 5 * NUMEL])
def test_small_units_are_gathered_together_within_the_limit_of_live_parameters(most: int) -> None:
    """What the limit leaves beside the unit in use counts as the window."""
    diary = Diary(8, prefetch_bucket_size=10**6, max_live_parameters=most)
    diary.step()
    begins = {NUMEL: "+0 f0 -0 +1 f1 -1", 3 * NUMEL: "+0 +1 +2 f0 -0 +3 f1", 5 * NUMEL: "+0 +1,2 +3,4 f0 -0 f1 -1 +5,6"}
    assert diary.step().startswith(begins[most])
    assert diary.engine.gathered_numel == (0, most)


def test_what_is_gathered_together_and_not_used_is_released() -> None:
    diary = Diary(8, prefetch_bucket_size=4 * NUMEL)
    diary.step()
    found = diary.step([0, 3, 2, 7])
    assert found.startswith("+0 +1,2 +3,4 f0 -0 f3 -3 f2 -2 +7 f7"), "in another order, and without the first of two"
    assert diary.engine.gathered_numel[0] == 0 and diary.states() == "p" * 8


def test_room_is_found_anew_at_every_use() -> None:
    """Layer 0 stays until its second use, one layer away, and not until its third one, in backward."""
    diary = Diary(prefetch_bucket_size=NUMEL)
    route = [0, 1, 0, 2, 1, 2]
    diary.step(route)
    found = diary.step(route)
    assert found == "+0 +1 f0 f1 -1 +2 f0 -0 +1 f2 f1 f2 b2 b1 b2 -1 +0 -2 b0 +1 b1 -1 b0 -0"


def test_as_much_as_the_largest_unit_is_gathered_ahead_unless_told() -> None:
    told, untold = Diary(prefetch_bucket_size=NUMEL), Diary()
    assert [told.step() for _ in range(2)] == [untold.step() for _ in range(2)]


def test_nothing_is_gathered_ahead_without_overlap() -> None:
    told, untold = Diary(prefetch_bucket_size=0), Diary(overlap_comm=False, prefetch_bucket_size=10**6)
    assert [told.step() for _ in range(2)] == [untold.step() for _ in range(2)]


def test_part_of_a_unit_is_gathered_ahead() -> None:
    """The prefetch window is a number of elements, here that of one of a unit's two buckets."""
    diary = Diary(prefetch_bucket_size=16, reduce_bucket_size=16)
    diary.step()
    launched: list[dict[str, int]] = []
    for layer in diary.model.layers:
        layer.register_forward_pre_hook(
            lambda *_: launched.append({name: len(unit.works) for name, unit in diary.units().items()})
        )
    diary.step()
    assert launched == [{"0": 0, "1": 1, "2": 0}, {"0": 0, "1": 0, "2": 1}, {"0": 0, "1": 0, "2": 0}]


KEPT = {
    # max_reuse_distance: the events of the second pass.  When its forward ends, layer 2 is 0 elements from its next
    # use, layer 1 64 (two uses of layer 2), and layer 0 128.
    0: "+0 f0 -0 +1 f1 -1 +2 f2 b2 -2 b1 +1 -1 b0 +0 -0",
    2 * NUMEL - 1: "+0 f0 -0 +1 f1 -1 +2 f2 b2 -2 b1 +1 -1 b0 +0 -0",
    2 * NUMEL: "+0 f0 -0 +1 f1 +2 f2 b2 -2 b1 -1 b0 +0 -0",
    4 * NUMEL: "+0 f0 +1 f1 +2 f2 b2 -2 b1 -1 b0 -0",
}


@each("distance", KEPT)
def test_what_is_kept_for_its_next_use(distance: int) -> None:
    diary = Diary(prefetch_bucket_size=0, max_reuse_distance=distance)
    diary.step()
    assert diary.step() == KEPT[distance]
    assert diary.engine.gathered_numel == (0, NUMEL * max(1, min(distance // (2 * NUMEL) + 1, 3)))


@pytest.mark.parametrize("limit", [0, NUMEL, 2 * NUMEL, 3 * NUMEL])
def test_the_limit_of_live_parameters(limit: int) -> None:
    """Beyond the limit only units in use stay gathered, here one layer at a time."""
    for zero in ({"prefetch_bucket_size": 10**6}, {"prefetch_bucket_size": 0}, {"prefetch_bucket_size": NUMEL}):
        diary = Diary(4, max_live_parameters=limit, max_reuse_distance=10**6, **zero)
        for _ in range(3):
            diary.step()
        live, peak = diary.engine.gathered_numel
        assert live == 0 and peak == max(limit, NUMEL)


def test_what_was_used_longest_ago_makes_room() -> None:
    diary = Diary(4, prefetch_bucket_size=0, max_reuse_distance=10**6, max_live_parameters=2 * NUMEL)
    diary.step()
    assert diary.step() == "+0 f0 +1 f1 -0 +2 f2 -1 +3 f3 b3 -3 b2 -2 b1 +1 -1 b0 +0 -0"
    for _ in range(2):
        again = diary.step([0, 1, 0, 2])
    assert again.startswith("+0 f0 +1 f1 f0 -1 +2 f2"), "layer 0 was gathered first and used later"


def test_what_is_kept_is_gathered_once_in_several_passes() -> None:
    diary = Diary(prefetch_bucket_size=0)
    diary.engine.retain_part(0)
    assert diary.step() == "+0 f0 +1 f1 +2 f2 b2 b1 b0"
    assert diary.step() == "f0 f1 f2 b2 b1 b0"
    assert diary.evaluate() == "f0 f1 f2"
    diary.events.clear()
    diary.engine.release_part(0)
    assert sorted(diary.events) == ["-0", "-1", "-2"] and diary.states() == "ppp"
    assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 b2 -2 b1 +1 -1 b0 +0 -0", "as without it"


def test_what_is_kept_stays_within_the_limit() -> None:
    diary = Diary(4, prefetch_bucket_size=0, max_live_parameters=2 * NUMEL)
    diary.engine.retain_part(0)
    for _ in range(3):
        diary.step()
    live, peak = diary.engine.gathered_numel
    assert live <= peak == 2 * NUMEL
    diary.engine.release_part(0)
    assert diary.engine.gathered_numel[0] == 0


@pytest.mark.parametrize("limit", [0, NUMEL - 1])
def test_nothing_is_kept_that_only_its_use_let_past_the_limit(limit: int) -> None:
    """A layer larger than the limit is still gathered, and released after each use, even at the end of a pass."""
    diary = Diary(prefetch_bucket_size=0, max_live_parameters=limit)
    diary.engine.retain_part(0)
    for _ in range(2):
        assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 -2 b2 +2 -2 b1 +1 -1 b0 +0 -0"
        assert diary.states() == "ppp"
        assert diary.evaluate() == "+0 f0 -0 +1 f1 -1 +2 f2 -2"


def test_what_is_kept_goes_when_a_step_is_abandoned() -> None:
    diary = Diary(prefetch_bucket_size=0)
    diary.engine.retain_part(0)
    diary.step()
    diary.engine.reset_step()
    assert diary.states() == "ppp"
    assert "-0" in diary.step(), "nothing is kept any more"


def test_a_skipped_layer_ends_looking_ahead_for_one_pass() -> None:
    diary = Diary()
    diary.step()
    # Layer 1 is gathered in vain; after the pass deviates from the record, each unit is gathered only at its use.
    assert diary.step([0, 2]) == "+0 +1 f0 -0 +2 f2 -2 b2 +2 -2 b0 +0 -0 -1"
    assert diary.step([0, 2]) == "+0 +2 f0 f2 b2 -2 b0 -0", "the new order is known now"
    assert diary.engine.gathered_numel[0] == 0


def test_another_order_and_another_number_of_calls() -> None:
    diary = Diary(prefetch_bucket_size=0)
    for route in ([0, 1, 2], [2, 0], [1, 1, 0], [0], [2, 2, 2]):
        expected = "".join(f"+{i} f{i} -{i} " for i in route)
        assert diary.step(route).startswith(expected.rstrip()), (
            "a unit that is needed next is kept only when that is known"
        )
        diary.step(route)
    assert diary.step([2, 2, 2]) == "+2 f2 f2 f2 b2 b2 b2 -2", "one layer three times: gathered once"


def test_evaluation_has_a_record_of_its_own() -> None:
    diary = Diary()
    diary.step()
    assert diary.evaluate() == "+0 f0 -0 +1 f1 -1 +2 f2 -2"
    assert diary.evaluate() == "+0 +1 f0 -0 +2 f1 -1 f2 -2", "each unit once; the last one is not kept for a backward"
    assert diary.step() == AHEAD[NUMEL][0], "training goes on as before"


def test_everything_is_released_after_an_evaluation() -> None:
    """After an evaluation everything is released, even units that were prefetched in vain."""
    diary = Diary(prefetch_bucket_size=10**6, max_reuse_distance=10**6)
    for route in ([0, 1, 2], [0, 1, 2], [0, 2], [2], [0, 1, 2, 0, 1, 2], [0]):
        diary.evaluate(route)
        assert diary.engine.gathered_numel[0] == 0
        assert diary.states() == "ppp"


def test_a_forward_that_is_never_followed_by_a_backward() -> None:
    """Forwards without a backward, as of an evaluation without no_grad, leave nothing gathered after the next pass."""
    diary = Diary()
    diary.step()
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for _ in range(3):
        diary.model(x)
    diary.step()
    assert diary.engine.gathered_numel[0] == 0
    diary.step()
    assert diary.step() == AHEAD[NUMEL][0], "after a pass without forgotten forwards the record is right again"


def test_nothing_is_kept_over_an_update() -> None:
    """An update releases all units, even those of a forward without backward, which would keep old values."""
    diary = Diary(max_reuse_distance=10**6)
    diary.step()
    diary.step()
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    before = diary.model(x)
    assert "w" in diary.states()
    take_step(diary.engine)
    assert diary.states() == "ppp"
    with torch.no_grad():
        assert not torch.equal(diary.model(x), before)


def test_what_autograd_has_saved_may_stay_in_memory() -> None:
    """Released units are not gathered again for backward if memory_efficient_linear is false."""
    diary = Diary(memory_efficient_linear=False, prefetch_bucket_size=0)
    for _ in range(2):
        assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 -2 b2 b1 b0"


def test_frozen_units_are_released_when_backward_has_passed() -> None:
    """Frozen units have no gradients that mark the end of their use, and are released when backward has passed them."""
    diary = Diary(prefetch_bucket_size=0, change=lambda model: model.layers[1].requires_grad_(False))
    assert diary.step() == "+0 f0 -0 +1 f1 -1 +2 f2 -2 b2 +2 -2 b1 +1 b0 -1 +0 -0"
    assert diary.engine.gathered_numel == (0, NUMEL)


def test_a_unit_of_several_layers_stays_until_all_of_it_is_done() -> None:
    """A unit's first gradient comes long before its last, and with a frozen layer the last is not its last use."""

    def deepen(model: Stack) -> None:
        model.layers[1] = Pair()

    def deepen_and_freeze(model: Stack) -> None:
        deepen(model)
        model.layers[1].first.requires_grad_(False)

    deep = Diary(prefetch_bucket_size=0, change=deepen)
    for _ in range(3):
        assert deep.step().endswith(" b1 +1 -1 b0 +0 -0")
    frozen = Diary(prefetch_bucket_size=0, change=deepen_and_freeze)
    for _ in range(3):
        assert frozen.step().endswith(" b1 +1 b0 -1 +0 -0")


def test_what_is_held_may_not_change() -> None:
    diary = Diary()
    gather: ParameterGather = diary.gather
    gather.pin_for_user("layers.0", "a test")
    assert gather.unit_of("layers.0.bias") == "layers.0" and gather.unit_of("nobody") is None
    held = gather.memory.unit_of(diary.model.layers[0].weight)
    assert held is not None and held.name == "layers.0"
    assert gather.memory.unit_of(torch.ones(2)) is None
    with pytest.raises(UsageError, match=r"a walk while layers\.0 is gathered"):
        gather.check_unpinned("a walk")
    gather.unpin("layers.0")
    gather.check_unpinned("a walk")
    assert diary.states()[0] == "p" and gather.memory.live_numel == 0


routes = st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5)
settings_of_zero = st.fixed_dictionaries(
    {
        "prefetch_bucket_size": st.sampled_from([None, 0, 16, 40, 100, 10**6]),
        "max_reuse_distance": st.sampled_from([0, 40, 100, 10**6]),
        "max_live_parameters": st.sampled_from([0, 40, 70, 10**9]),
        "reduce_bucket_size": st.sampled_from([16, 1000]),
        "memory_efficient_linear": st.booleans(),
    }
)


LEAVES_THE_RECORD = {
    "prefetch_bucket_size": None,
    "max_reuse_distance": 0,
    "max_live_parameters": 10**9,
    "reduce_bucket_size": 16,
    "memory_efficient_linear": True,
}


TURNS = {**LEAVES_THE_RECORD, "prefetch_bucket_size": 0, "max_live_parameters": 70}


def loss_of_pass(model: Stack, route: Sequence[int], step: int) -> Tensor:
    model.route = route
    x = torch.linspace(-1, 1, 2 * WIDTH, dtype=torch.float64).view(2, WIDTH).roll(step).requires_grad_()
    return (model(x) * (step + 1)).sum()


def plain_gradients(routes: Sequence[Sequence[int]], ranks: int = 1) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Stack(4).double()
    for step, route in enumerate(routes):
        for rank in range(ranks):
            loss_of_pass(model, route, step + 10 * rank).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def gradients(engine: Engine, model: Stack, routes: Sequence[Sequence[int]], rank: int = 0) -> dict[str, Tensor]:
    """Take a step with a pass for each route, after which no unit stays gathered; return this rank's gradients."""
    engine.begin_step()
    for step, route in enumerate(routes):
        engine.backward(loss_of_pass(model, route, step + 10 * rank), is_last=step + 1 == len(routes))
        assert engine.gathered_numel[0] == 0
    engine.finish_reductions()
    return {name: owned_gradient(engine, name, p.numel()).view(p.shape) for name, p in model.named_parameters()}


@settings(max_examples=60)
@given(routes, settings_of_zero)
@example([[0, 1], [0, 2]], LEAVES_THE_RECORD)  # unit 0 stays for a backward, unit 1 is gathered ahead, and 2 is used
@example([[2, 0, 2], [2, 0, 2]], TURNS)  # backward uses 2 and 0 in turns, and each comes again right after the other
def test_any_control_flow_trains_like_plain_torch(routes: list[list[int]], zero: dict[str, Any]) -> None:
    with released_memory_is_nan():
        diary = Diary(4, **zero)
        found = gradients(diary.engine, diary.model, routes)
    torch.testing.assert_close(found, plain_gradients(routes), rtol=1e-12, atol=1e-14)
    window = NUMEL if zero["prefetch_bucket_size"] is None else zero["prefetch_bucket_size"]
    if not zero["max_reuse_distance"]:
        assert diary.engine.gathered_numel[1] <= NUMEL + math.ceil(window / NUMEL) * NUMEL, "a use and what is ahead"


def most_units_of_a_message(rank: int, zero: dict[str, Any]) -> int:
    """Return the most units that begin with one message, in passes whose order is recorded."""
    mesh = mesh_in_worker(rank, dp=2, zero=ZeroConfig(zero_stage=3, **zero))
    engine = engine_around(Stack(4), mesh, precision="fp32", prefetch_bucket_size=10**6, **zero)
    found: list[int] = []
    launch = engine._gather.memory.launch

    def noting(*groups: UnitBuckets) -> None:
        found.append(len({unit.name for unit, *_ in groups}))
        launch(*groups)

    engine._gather.memory.launch = noting
    for _ in range(2):
        engine.begin_step()
        engine.backward(engine.model(torch.ones(2, WIDTH)).sum(), is_last=True)
        engine.finish_reductions()
    engine.close()
    return max(found)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("zero", "most"),
    [({}, 3), ({"zero_quantized_weights": True}, 3), ({"zero_quantized_nontrainable_weights": True}, 1)],
)
def test_gathers_that_take_a_buffer_each_are_not_joined(zero: dict[str, Any], most: int) -> None:
    assert run_ranks(2, most_units_of_a_message, zero) == [most] * 2


ROUTES = ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 1, 0], [2], [], [0, 2, 0, 2], [0, 2, 0, 2])


def on_two_ranks(rank: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Stack(4).double()
    engine = engine_around(model, mesh_in_worker(rank, dp=2), **zero)
    with released_memory_is_nan():
        found = gradients(engine, model, ROUTES, rank)
    engine.close()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"prefetch_bucket_size": 10**6, "max_reuse_distance": 80, "reduce_bucket_size": 1},
        {"prefetch_bucket_size": 3 * NUMEL},
    ],
)
def test_ranks_meet_whatever_is_gathered_ahead(zero: dict[str, Any]) -> None:
    found = run_ranks(2, on_two_ranks, zero)
    summed = {name: found[0][name] + found[1][name] for name in found[0]}
    torch.testing.assert_close(summed, plain_gradients(ROUTES, ranks=2), rtol=1e-12, atol=1e-14)
