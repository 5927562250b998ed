"""Tests the ZeRO settings that decide what is gathered, when, and how long it stays, in counted elements.

`test_zero_knobs.py` covers the other settings, and shows for all that they leave the training as it is.
"""

import weakref
from typing import Any, NamedTuple

import pytest
import torch
from support.irregular_model import Options, batch, engine_around, loss_of, make_engine, make_model, take_step
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.optim.inner import StepInputs
from megazero.zero.engine import Engine
from megazero.zero.parameters.unit_memory import UnitState

RANKS = 2
HUGE = 10**9
ITEMSIZE = 8  # bytes of a float64 element
WIDTH, DEPTH = 8, 4
MATRIX, BIAS = WIDTH * WIDTH, WIDTH
UNIT = 96  # elements of a layer, weight and bias, padded to a multiple of 16 x 2
PADDED_BIAS = 32


class Chain(nn.Module):
    """A chain of layers, each of which is a unit; the last one has a width of its own."""

    def __init__(self, last: int = WIDTH, depth: int = DEPTH) -> None:
        super().__init__()
        widths = [*[WIDTH] * (depth - 1), last]
        self.layers = nn.ModuleList(nn.Linear(WIDTH, width) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make_chain(
    rank: int, zero: dict[str, Any], last: int = WIDTH, precision: str = "fp64", depth: int = DEPTH
) -> tuple[Chain, Engine]:
    torch.manual_seed(5)
    model = Chain(last, depth).to({"fp64": torch.float64, "bf16": torch.bfloat16}[precision])
    settings = {"reduce_bucket_size": HUGE, **zero}
    return model, engine_around(model, mesh_in_worker(rank, dp=RANKS, is_late=False), precision=precision, **settings)


def run_pass(model: nn.Module, engine: Engine) -> None:
    """Run forward and backward of one micro-batch."""
    engine.begin_step()
    x = torch.ones(2, WIDTH, dtype=next(model.parameters()).dtype, requires_grad=True)
    engine.backward(model(x).sum(), is_last=True)


class Gathered(NamedTuple):
    """All-gathers of a step whose order of uses is recorded: calls, bytes sent, peak elements, and parameter bytes."""

    calls: int
    nbytes: int
    peak: int
    parameter_bytes: int


def count_gathers(rank: int, zero: dict[str, Any], depth: int = DEPTH) -> Gathered:
    model, engine = make_chain(rank, zero, depth=depth)
    mesh = mesh_in_worker(rank, dp=RANKS, is_late=False)
    for _ in range(3):
        mesh.meter.reset()
        run_pass(model, engine)
        take_step(engine)
    engine.ensure_parameters()
    engine.close()
    sent = mesh.meter.count("dp", "all_gather")
    assert engine.gathered_numel[0] == 0
    return Gathered(sent.calls, sent.nbytes, engine.gathered_numel[1], engine.model_state_bytes().parameters)


def gathered(depth: int = DEPTH, **zero: Any) -> Gathered:
    first, second = run_ranks(RANKS, count_gathers, zero, depth)
    assert first == second
    return first


# The last layer's backward follows its forward at once, so its unit is gathered once for both.
EACH_USE = 2 * DEPTH - 1
# So is the one before it, where a unit is gathered ahead of its use: it has that one's room.
AHEAD = EACH_USE - 1


# prefetch_bucket_size, overlap_comm

WIDE = 24
WIDE_UNIT = 224  # (8 + 1) x 24 = 216 elements, padded


def gathers_in_flight(rank: int, zero: dict[str, Any]) -> dict[str, int]:
    """Return {unit: its buckets in flight} when the first layer begins, in a pass whose order is recorded."""
    model, engine = make_chain(rank, zero, last=WIDE)
    run_pass(model, engine)
    looks: list[dict[str, int]] = []

    def look(*_: Any) -> None:
        units = engine._gather._units.values()
        looks.append({unit.name: len(unit.works) for unit in units if unit.state is UnitState.IN_FLIGHT})

    model.layers[0].register_forward_pre_hook(look)  # runs after the engine's hook
    run_pass(model, engine)
    engine.finish_reductions()
    engine.close()
    return looks[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, {"layers.1": 1, "layers.2": 1}),  # the default is the size of the largest unit, 224
        ({"prefetch_bucket_size": 0}, {}),
        ({"prefetch_bucket_size": UNIT}, {"layers.1": 1}),
        ({"prefetch_bucket_size": 2 * UNIT - 1}, {"layers.1": 1}),
        ({"prefetch_bucket_size": 2 * UNIT - 1, "allgather_bucket_size": 32}, {"layers.1": 3, "layers.2": 2}),
        ({"prefetch_bucket_size": 2 * UNIT + WIDE_UNIT}, {"layers.1": 1, "layers.2": 1, "layers.3": 1}),
        ({"overlap_comm": False}, {}),
        ({"overlap_comm": False, "prefetch_bucket_size": HUGE}, {}),
    ],
    ids=str,
)
def test_what_is_gathered_ahead(zero: dict[str, Any], expected: dict[str, int]) -> None:
    assert run_ranks(RANKS, gathers_in_flight, zero) == [expected] * RANKS


@pytest.mark.gloo
@pytest.mark.parametrize(("window", "together"), [(2, 1), (4, 2), (5, 3), (6, 3), (14, 7)])
def test_layers_that_are_gathered_ahead_travel_together(window: int, together: int) -> None:
    """A message has half of the prefetch window's layers, rounded up, or those that a pass has left.

    The first layer of a forward is gathered for itself; what the window and a layer have room for stays for backward.
    """
    depth = 13
    run = gathered(depth, prefetch_bucket_size=window * UNIT)
    kept = min(window + 1, depth)
    assert run.calls == 1 - (depth - 1) // -together - (depth - kept) // -together
    assert run.nbytes == ITEMSIZE * (2 * depth - kept) * UNIT * (RANKS - 1) // RANKS
    assert run.peak == kept * UNIT


# param_persistence_threshold, model_persistence_threshold


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("zero", "whole_biases"),
    [
        ({}, 0),
        ({"param_persistence_threshold": BIAS}, 0),
        ({"param_persistence_threshold": BIAS + 1}, DEPTH),
        ({"param_persistence_threshold": BIAS + 1, "model_persistence_threshold": 2 * BIAS}, 2),
        ({"param_persistence_threshold": BIAS + 1, "model_persistence_threshold": 3 * BIAS - 1}, 2),
        ({"param_persistence_threshold": MATRIX, "model_persistence_threshold": 0}, 0),
    ],
    ids=str,
)
def test_what_stays_whole_is_published_once_and_never_gathered(zero: dict[str, Any], whole_biases: int) -> None:
    """The biases of the first layers stay whole first, and a layer whose bias is whole gathers its matrix alone."""
    run = gathered(**zero)
    sizes = [MATRIX] * whole_biases + [UNIT] * (DEPTH - whole_biases)
    elements = 2 * sum(sizes) - sum(sizes[-2:]) + whole_biases * PADDED_BIAS
    assert run.nbytes == ITEMSIZE * elements * (RANKS - 1) // RANKS
    assert run.calls == AHEAD + whole_biases
    assert run.parameter_bytes == ITEMSIZE * (sum(sizes) // RANKS + whole_biases * PADDED_BIAS)


@pytest.mark.gloo
def test_a_model_that_is_whole_is_only_published() -> None:
    run = gathered(param_persistence_threshold=MATRIX + 1)
    assert run == Gathered(DEPTH, ITEMSIZE * DEPTH * UNIT // RANKS, 0, ITEMSIZE * DEPTH * UNIT)


# max_reuse_distance


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("distance", "kept"),
    [(0, 1), (2 * UNIT - 1, 1), (2 * UNIT, 2), (4 * UNIT - 1, 2), (4 * UNIT, 3), (6 * UNIT, 4), (HUGE, 4)],
)
def test_what_is_needed_again_soon_is_not_gathered_again(distance: int, kept: int) -> None:
    """The distance between a layer's forward and backward is that of both passes through every later layer."""
    run = gathered(max_reuse_distance=distance, prefetch_bucket_size=0)
    assert run.calls == 2 * DEPTH - kept
    assert run.peak == kept * UNIT


# max_live_parameters


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("limit", "calls", "units"),
    [
        # Not even the layer in use fits, so nothing is kept, not even the last layer for its backward.
        (0, 2 * DEPTH, 1),
        (UNIT, EACH_USE, 1),
        (2 * UNIT, 2 * DEPTH - 2, 2),
        (3 * UNIT, 2 * DEPTH - 3, 3),
        (4 * UNIT, DEPTH, 4),
    ],
)
def test_the_limit_of_live_parameters_bounds_what_is_kept(limit: int, calls: int, units: int) -> None:
    run = gathered(max_live_parameters=limit, max_reuse_distance=HUGE, prefetch_bucket_size=0)
    assert (run.calls, run.peak) == (calls, units * UNIT)


@pytest.mark.gloo
@pytest.mark.parametrize(("limit", "units"), [(0, 1), (2 * UNIT - 1, 1), (2 * UNIT, 2), (3 * UNIT, 3), (HUGE, 4)])
def test_the_limit_of_live_parameters_bounds_what_is_gathered_ahead(limit: int, units: int) -> None:
    run = gathered(max_live_parameters=limit, prefetch_bucket_size=HUGE)
    assert run.peak == units * UNIT


# memory_efficient_linear


def bytes_between_forward_and_backward(rank: int, efficient: bool) -> tuple[int, int]:
    """Return the bytes of storages that forwards computed with, alive before backward and alive after it."""
    model, engine = make_chain(rank, {"memory_efficient_linear": efficient})
    used: list[weakref.ref[torch.UntypedStorage]] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda layer, _: used.append(weakref.ref(layer.weight.untyped_storage())))

    def alive() -> int:
        there = [storage for reference in used if (storage := reference()) is not None]
        return sum(storage.nbytes() for storage in there)

    engine.begin_step()
    loss = model(torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)).sum()
    before = alive()
    engine.backward(loss, is_last=True)
    del loss
    engine.finish_reductions()
    after = alive()
    engine.close()
    return before, after


@pytest.mark.gloo
def test_what_autograd_saves_of_a_unit_leaves_memory_unless_told() -> None:
    assert run_ranks(RANKS, bytes_between_forward_and_backward, True) == [(0, 0)] * RANKS
    kept = ITEMSIZE * DEPTH * UNIT
    assert run_ranks(RANKS, bytes_between_forward_and_backward, False) == [(kept, 0)] * RANKS


@pytest.mark.gloo
def test_what_stays_in_memory_is_not_gathered_for_backward() -> None:
    assert gathered(memory_efficient_linear=True).calls == AHEAD
    assert gathered(memory_efficient_linear=False).calls == DEPTH


# sub_group_size


class Updates(NamedTuple):
    """The elements of each run that the optimizer got in one step, and the bytes that the largest buffer must have."""

    numels: list[int]
    largest_buffer_bytes: int


def count_updates(rank: int, zero: dict[str, Any]) -> Updates:
    model, engine = make_chain(rank, zero, precision="bf16")
    optimizer, numels = engine.settings.optimizer, list[int]()
    update = optimizer.update

    def counted(index: int, run: Any, step: Tensor, inputs: StepInputs, **rest: Any) -> None:
        numels.append(run.master.numel())
        update(index, run, step, inputs, **rest)

    optimizer.update = counted
    run_pass(model, engine)
    take_step(engine)
    engine.ensure_parameters()
    engine.close()
    return Updates(numels, engine.largest_buffer_bytes)


@pytest.mark.gloo
def test_the_optimizer_updates_at_most_a_sub_group_at_once() -> None:
    """Runs are as long as buckets in stage 0; biases come first, and the padding belongs to the matrix.

    A sub-group has elements of several runs.
    """
    whole, cut = (run_ranks(RANKS, count_updates, {"zero_stage": 0, "sub_group_size": size})[0] for size in (10**9, 20))
    assert whole.numels == [BIAS, UNIT - BIAS] * DEPTH
    assert cut.numels == [BIAS, 20 - BIAS, 20, 20, 20, 8 + BIAS] * DEPTH
    assert whole.largest_buffer_bytes == 4 * (UNIT - BIAS), "float32 gradients of the largest run"
    assert cut.largest_buffer_bytes == 2 * UNIT, "a bucket in bfloat16"


# contiguous_gradients

GRADIENTS = 7  # parameters that are trained and that this model's loss depends on


class Arrivals(NamedTuple):
    """Counts taken whenever a gradient has come: gradients alive outside buckets, and open buckets.

    left: gradients alive when the step's reductions are done. gradient_bytes: bytes of persistent gradients.
    """

    alive: list[int]
    open: list[int]
    left: int
    gradient_bytes: int


def watch_gradients(rank: int, stage: int, contiguous: bool) -> Arrivals:
    """Run two micro-batches of one unit in one bucket, which ends with backward, since it holds an unused parameter."""
    zero = (("contiguous_gradients", contiguous),)
    model, engine, _ = make_engine(rank, Options(stage, RANKS, bucket=HUGE, units=False, zero=zero))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alive, buckets = list[int](), list[int]()

    def look(*_: Any) -> None:
        alive.append(sum(parameter.grad is not None for parameter in trained))
        buckets.append(len(getattr(engine._reducer._store, "_open", ())))

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(look)
    engine.begin_step()
    for micro in range(2):
        engine.backward(loss_of(model, *batch(micro)), is_last=micro == 1)
    engine.finish_reductions()
    left = sum(parameter.grad is not None for parameter in trained)
    engine.close()
    return Arrivals(alive, buckets, left, engine.model_state_bytes().gradients)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [2, 3])
def test_leased_gradients_go_into_their_bucket_at_once_or_all_together(stage: int) -> None:
    at_once, together = (run_ranks(RANKS, watch_gradients, stage, value)[0] for value in (True, False))
    count = list(range(1, GRADIENTS + 1))
    assert (at_once.alive, at_once.open, at_once.left) == ([0] * 2 * GRADIENTS, [1] * 2 * GRADIENTS, 0)
    assert (together.alive, together.open, together.left) == (count * 2, [0] * 2 * GRADIENTS, 0)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1])
def test_resident_gradients_are_flat_or_autograds_own(stage: int) -> None:
    """Gradients that autograd made stay for the second micro-batch and go when their bucket is complete."""
    flat, own = (run_ranks(RANKS, watch_gradients, stage, value)[0] for value in (True, False))
    numel = sum(parameter.numel() for parameter in make_model().parameters() if parameter.requires_grad)
    padded = ITEMSIZE * (numel + -numel % 32)
    assert flat.gradient_bytes == padded
    assert own.gradient_bytes == (padded if stage == 0 else padded // RANKS)
    count = list(range(1, GRADIENTS + 1))
    unused = 2
    assert flat.alive == [GRADIENTS + unused] * 2 * GRADIENTS
    assert own.alive == count + [GRADIENTS] * GRADIENTS
    assert own.left == 0
