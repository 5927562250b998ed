"""Tests of gradient reduction: the order of launches, buffers of constant size, and the sums that each rank keeps."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from support.each import each
from support.irregular_model import (
    Options,
    alone,
    batch,
    engine_around,
    full_state,
    loss_of,
    make_engine,
    train_engine,
)
from support.late_communicator import LateCommunicator
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.comm.interface import Work
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.errors import UsageError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import AdamWSettings, FusedAdamW
from megazero.parallel.param_spec import ParamSpec, Unit
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.gradients.reduce import most_out_at_once
from megazero.zero.layout import FlatLayout, LayoutRules, Slot, build_layout
from megazero.zero.plan import resolve

SIZES = {"a": 7, "b": 1, "c": 40, "d": 3, "e": 48}
MICRO_BATCHES = 3


class Vectors(nn.Module):
    """A model of one vector for each name, whose gradients are given to forward."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=torch.float64)))

    def forward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([(getattr(self, name) * gradient).sum() for name, gradient in gradients.items()]).sum()


def given(step: int, micro: int, rank: int) -> dict[str, Tensor]:
    """Return the gradients of a micro-batch on a rank: small whole numbers, without `d` in one micro-batch."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    drawn = {name: torch.randint(-8, 9, (size,), generator=generator).double() for name, size in SIZES.items()}
    return {name: value for name, value in drawn.items() if name != "d" or micro != rank}


class Reduced(NamedTuple):
    """A rank's results: (start, values) kept by name after each step, bytes sent, and most reductions at once."""

    kept: list[dict[str, list[tuple[int, Tensor]]]]
    nbytes: int
    most_in_flight: int


def reduce_vectors(rank: int, dp: int, settings: dict[str, Any]) -> Reduced:
    """Reduce the gradients of two steps of several micro-batches."""
    mesh, model = mesh_in_worker(rank, dp=dp), Vectors()
    zero = ZeroConfig(**{"reduce_bucket_size": 33, **settings})
    buffers = FusedBuffers(0, mesh.device)
    units = [Unit("one", ("a", "b", "c", "d"), (model,)), Unit("two", ("e",), (model,))]
    engine_settings = EngineSettings(zero, FusedAdamW(AdamWSettings(0.9, 0.95, 1e-8, 0.0)))
    plan = resolve(zero, PrecisionConfig(precision="fp64"))
    engine = Engine(model, units, plan, mesh=mesh, buffers=buffers, settings=engine_settings)
    buffers.resize(engine.largest_buffer_bytes)
    axis = mesh.axis("dp")._inner
    assert isinstance(axis, LateCommunicator)
    axis.most_unfinished = 0
    mesh.meter.reset()
    kept = []
    for step in range(2):
        engine.begin_step()
        for micro in range(MICRO_BATCHES):
            engine.backward(model(given(step, micro, rank)), is_last=micro == MICRO_BATCHES - 1)
        engine.finish_reductions()
        found = {name: list(engine.pieces(name, "gradient")) for name in SIZES}
        kept.append({name: [(piece.start, piece.tensor.clone()) for piece in found[name]] for name in SIZES})
    collective = "reduce_scatter" if zero.reduce_scatter else "all_reduce"
    nbytes = mesh.meter.count("dp", collective).nbytes
    engine.close()
    return Reduced(kept, nbytes, axis.most_unfinished)


def assert_kept(ranks: list[Reduced], *, divisor: float, everywhere: bool) -> None:
    """Check that each element is on one rank or everywhere, as the sum over ranks and micro-batches by the divisor."""
    for step in range(2):
        for name, size in SIZES.items():
            parts = [given(step, micro, rank) for micro in range(MICRO_BATCHES) for rank in range(len(ranks))]
            expected = torch.stack([part[name] for part in parts if name in part]).sum(0) / divisor
            copies = torch.zeros(size, dtype=torch.int64)
            for start, values in (piece for rank in ranks for piece in rank.kept[step][name]):
                assert torch.equal(values, expected[start : start + len(values)]), (step, name, start)
                copies[start : start + len(values)] += 1
            assert (copies == (len(ranks) if everywhere else 1)).all(), (step, name)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "divisor"),
    [
        ({}, 1),
        ({"reduce_bucket_size": 10_000}, 1),
        ({"overlap_comm": False}, 1),
        ({"reduce_scatter": False}, 1),
        ({"contiguous_gradients": False}, 1),
        ({"communication_data_type": "bf16"}, 1),
        ({"gradient_predivide_factor": 4.0}, 4),
        ({"prescale_gradients": True}, 2),
        ({"prescale_gradients": True, "gradient_predivide_factor": 8.0, "reduce_scatter": False}, 2),
    ],
    ids=str,
)
def test_what_is_kept_are_the_sums(stage: int, settings: dict[str, Any], divisor: float) -> None:
    ranks = run_ranks(2, reduce_vectors, 2, {"zero_stage": stage, **settings})
    assert_kept(ranks, divisor=divisor, everywhere=stage == 0)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_sums_of_four_ranks(stage: int) -> None:
    ranks = run_ranks(4, reduce_vectors, 4, {"zero_stage": stage, "prescale_gradients": True})
    assert_kept(ranks, divisor=4, everywhere=stage == 0)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "reductions"), [(1, 2), (2, 2 * MICRO_BATCHES)])
def test_bytes_on_the_wire_are_of_its_number_format(stage: int, reductions: int) -> None:
    """Half of the 64 + 64 elements (51 and 48, padded) is sent to the other rank in the given number format."""
    for name, itemsize in (("fp64", 8), ("fp32", 4), ("bf16", 2)):
        found = run_ranks(2, reduce_vectors, 2, {"zero_stage": stage, "communication_data_type": name})
        assert {rank.nbytes for rank in found} == {reductions * 64 * itemsize}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2])
def test_two_reductions_run_beside_backward(stage: int) -> None:
    several = run_ranks(2, reduce_vectors, 2, {"zero_stage": stage})
    assert [rank.most_in_flight for rank in several] == [2, 2]
    one_by_one = run_ranks(2, reduce_vectors, 2, {"zero_stage": stage, "overlap_comm": False})
    assert [rank.most_in_flight for rank in one_by_one] == [1, 1]


class Stack(nn.Module):
    """A stack of equal layers, of variable depth."""

    def __init__(self, depth: int, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def stack_engine(rank: int, depth: int, bucket: int, dp: int) -> tuple[Stack, Engine, FusedBuffers]:
    mesh = mesh_in_worker(rank, dp=dp)
    torch.manual_seed(3)
    model = Stack(depth)
    units = [Unit(f"{i}", (f"layers.{i}.weight", f"layers.{i}.bias"), (layer,)) for i, layer in enumerate(model.layers)]
    zero = ZeroConfig(zero_stage=2, reduce_bucket_size=bucket)
    plan = resolve(zero, PrecisionConfig())
    buffers = FusedBuffers(0, mesh.device)
    settings = EngineSettings(zero, FusedAdamW(AdamWSettings(0.9, 0.95, 1e-8, 0.0)))
    engine = Engine(model, units, plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    return model, engine, buffers


def buffers_used(rank: int, depth: int, bucket: int) -> int:
    model, engine, buffers = stack_engine(rank, depth, bucket, dp=2)
    for _ in range(2):
        engine.begin_step()
        for micro in range(3):
            x = torch.ones(4, 24) * (rank + micro)
            engine.backward(model(x).sum(), is_last=micro == 2)
            assert all(parameter.grad is None for parameter in model.parameters()), "gradients are dropped"
        engine.finish_reductions()
    engine.close()
    arena = engine.gradient_arenas["buckets"]
    return buffers.num_buffers + arena.capacity_bytes // (4 * engine.layout.max_reduced_numel)


@pytest.mark.gloo
@pytest.mark.parametrize("bucket", [64, 200, 10_000])
def test_number_of_buffers_does_not_grow_with_depth(bucket: int) -> None:
    """The most buffers at once are five at any depth: two open, two in flight, and one being launched."""
    shallow, deep = (max(run_ranks(2, buffers_used, depth, bucket)) for depth in (2, 12))
    assert shallow == deep
    assert deep <= 5


def layout_of(units: list[list[int]], bucket: int) -> FlatLayout:
    """Build the layout of units with parameters of so many elements, named after their places: "0.0", "0.1", ..."""
    names = [[f"{unit}.{place}" for place in range(len(numels))] for unit, numels in enumerate(units)]
    specs = {
        name: ParamSpec(name, (numel,), (numel,), (0,))
        for group, numels in zip(names, units, strict=True)
        for name, numel in zip(group, numels, strict=True)
    }
    placed = [Slot(spec, torch.float32, False, 0) for spec in specs.values()]
    return build_layout([Unit(str(i), tuple(group)) for i, group in enumerate(names)], placed, LayoutRules(1, bucket))


@each(
    ("units", "max_in_flight", "expected"),
    [
        ([[16], [16], [16]], 2, 3),  # two in flight when the third opens
        ([[16], [16], [16]], 1, 2),
        ([[16], [16], [16]], 0, 1),  # each is waited for at once
        ([[48]], 2, 3),
        ([[16]], 2, 2),  # one in flight from the micro-batch before
        ([[8, 32, 24], [16]], 2, 3),
    ],
)
def test_how_many_buckets_are_out_at_once(units: list[list[int]], max_in_flight: int, expected: int) -> None:
    layout = layout_of(units, 16)
    names = [f"{unit}.{place}" for unit, numels in enumerate(units) for place in range(len(numels))]
    assert most_out_at_once(layout, names, max_in_flight) == expected


def test_a_bucket_that_begins_early_stays_open() -> None:
    """A bucket stays open until its last gradient, as that of biases does, which come between those of matrices."""
    layout = layout_of([[4, 4, 40, 48]], 16)
    assert most_out_at_once(layout, ["0.2", "0.0", "0.3", "0.1"], 2) == 4
    assert most_out_at_once(layout, ["0.0", "0.1", "0.2", "0.3"], 2) == 3


def test_in_another_order_more_buckets_are_open() -> None:
    layout = layout_of([[16], [16], [16], [16]], 16)
    names = [f"{unit}.0" for unit in range(4)]
    assert most_out_at_once(layout, names, 2) == 3
    assert most_out_at_once(layout, names[::-1], 2) == 6, "none is sent before the last one in the model has come"
    assert most_out_at_once(layout, [], 2) == 0


def arrive_in_order(rank: int) -> tuple[int, list[float]]:
    """Give gradients from the first layer to the last, so that more buckets are open than the arena has room for."""
    model, engine, buffers = stack_engine(rank, 5, 10_000, dp=2)
    parameters = dict(model.named_parameters())
    reducer = engine._reducer
    engine.begin_step()
    reducer.begin_micro_batch(engine.layout.reductions, is_last=True)
    for number, name in enumerate(parameters):
        parameters[name].grad = torch.full_like(parameters[name], float(number + rank))
        reducer.gradient_ready(name)
    reducer.end_micro_batch()
    engine.finish_reductions()
    found = [float(piece.tensor[0]) for name in parameters for piece in engine.pieces(name, "gradient")]
    fell_back, arena = engine.gradient_arenas["buckets"].failed_requests, engine.gradient_arenas["buckets"]
    engine.close()
    assert arena.live_bytes == 0 and buffers.num_buffers == fell_back
    return fell_back, found


@pytest.mark.gloo
def test_what_the_arena_has_no_room_for_comes_from_the_pool() -> None:
    results = run_ranks(2, arrive_in_order)
    assert [fell_back for fell_back, _ in results] == [2, 2], "five open, room for three"
    sums = {value for _, found in results for value in found}
    assert sums == {2.0 * number + 1 for number in range(10)}


def launch_order(rank: int, order: tuple[str, ...]) -> list[int]:
    """Announce gradients in some order; return the buckets in the order of their launch, identified by their values."""
    model, engine, _ = stack_engine(rank, 3, 10_000, dp=2)
    launched: list[int] = []
    reducer = engine._reducer
    inner = reducer._communicator

    class Recording:
        def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
            launched.append(float(input[-1] if input[-1] != 0 else input[24]))
            return inner.reduce_scatter_into(output, input, key)

    reducer._communicator = Recording()
    parameters = dict(model.named_parameters())
    engine.begin_step()
    reducer.begin_micro_batch(engine.layout.reductions, is_last=True)
    for name in order:
        parameters[name].grad = torch.full_like(parameters[name], float(name.split(".")[1]) + 1)
        reducer.gradient_ready(name)
    reducer.end_micro_batch()
    engine.finish_reductions()
    engine.close()
    return launched


@pytest.mark.gloo
def test_buckets_are_launched_in_one_order_whatever_arrives_first() -> None:
    names = [f"layers.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")]
    for order in (names, names[::-1], names[3:] + names[:3]):
        assert run_ranks(2, launch_order, tuple(order)) == [[3.0, 2.0, 1.0]] * 2


def unequal_use(rank: int) -> list[float]:
    """Use a layer on rank 0 only: rank 1 contributes zeros, and no rank waits for ever; return the squared norm."""
    model, engine, _ = stack_engine(rank, 2, 100, dp=2)
    engine.begin_step()
    x = torch.ones(1, 24)
    loss = model(x).sum() if rank == 0 else model.layers[1](x).sum()
    engine.backward(loss, is_last=True)
    engine.finish_reductions()
    norm = engine.local_norms().square.clone()
    mesh_in_worker(rank, dp=2).world.all_reduce_scalars(norm).wait()
    engine.close()
    return [float(norm)]


@pytest.mark.gloo
def test_a_parameter_unused_on_one_rank() -> None:
    torch.manual_seed(3)
    model = Stack(2)
    x = torch.ones(1, 24)
    (model(x).sum() + model.layers[1](x).sum()).backward()
    expected = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())
    first, second = run_ranks(2, unequal_use)
    assert first == second
    assert first[0] == pytest.approx(expected, rel=1e-5)


def without_overlap_nothing_is_in_flight(rank: int) -> int:
    model, engine, _ = make_engine(rank, Options(stage=2, dp=2, overlap=False))
    engine.begin_step()
    engine.backward(loss_of(model, *batch(0)), is_last=True)
    pending = len(engine._reducer._in_flight)
    engine.finish_reductions()
    engine.close()
    return pending


@pytest.mark.gloo
def test_overlap_can_be_switched_off() -> None:
    assert run_ranks(2, without_overlap_nothing_is_in_flight) == [0, 0]


@pytest.mark.gloo
def test_a_step_forgets_the_gradients_of_the_last() -> None:
    """A new step's first reduction overwrites stage 2's shard and does not add to it."""
    once = run_ranks(2, train_engine, Options(stage=2, dp=2, steps=3, accumulation=2))
    resident = run_ranks(2, train_engine, Options(stage=1, dp=2, steps=3, accumulation=2))
    torch.testing.assert_close(full_state(once), full_state(resident), rtol=1e-12, atol=1e-14)


def stored_in_backward(rank: int) -> tuple[int, int]:
    """Return the bytes that have begun to leave for host memory when backward ends, and all that must."""
    model, engine, _ = make_engine(rank, Options(stage=2, zero=(("offload_optimizer", "cpu"),)))
    engine.begin_step()
    engine.backward(loss_of(model, *batch(rank)), is_last=True)
    stored = engine.mesh.meter.bytes_by_axis()["host"]["store"]
    numel = sum(bucket.numel for bucket in engine.layout.trainable_buckets)
    engine.finish_reductions()
    engine.close()
    return stored, 8 * numel


@pytest.mark.gloo
def test_the_buckets_of_one_rank_leave_for_host_memory_at_once() -> None:
    ((stored, whole),) = run_ranks(1, stored_in_backward)
    assert stored == whole > 0


def begun_in_backward(engine: Engine, names: Collection[str], before: Callable[[], None]) -> int:
    """Return the reductions that a backward launches which gives these parameters gradients.

    before: called when autograd begins to walk the graph.
    """
    engine.begin_step()
    engine.begin_backward(is_last=True)
    loss = engine.model({name: torch.ones(SIZES[name], dtype=torch.float64) for name in names})
    loss.register_hook(lambda _gradient: before())
    engine.mesh.meter.reset()
    torch.autograd.backward(loss)
    return engine.mesh.meter.count("dp", "reduce_scatter").calls


def end(engine: Engine) -> None:
    engine.end_backward()
    engine.finish_reductions()


@pytest.fixture
def vectors() -> Iterator[Engine]:
    engine = engine_around(Vectors(), alone(), zero_stage=2, reduce_bucket_size=33)
    yield engine
    engine.close()


def test_what_a_graph_does_not_reach_is_not_waited_for(vectors: Engine) -> None:
    """`e` is last in the model, so first in the order of reductions: unless it is found, none is launched before it."""
    everything = len(vectors.layout.reductions)
    found = []
    for names in ("abcd", "abcd", "abcde", "abce", "abcd"):
        found.append(begun_in_backward(vectors, names, vectors.find_unused))
        end(vectors)
    assert found[0] == found[4] == 0 and found[1] == found[2] == everything > 1
    assert 0 < found[3] < everything  # `d` had a gradient in the pass before


def test_a_gradient_behind_its_reduction_is_refused(vectors: Engine) -> None:
    begun_in_backward(vectors, "abcd", vectors.find_unused)
    end(vectors)
    begun_in_backward(vectors, "abcd", vectors.find_unused)
    vectors.model.e.grad = torch.ones_like(vectors.model.e)
    with pytest.raises(UsageError, match="a gradient of e by a backward within backward"):
        vectors._reducer.gradient_ready("e")


def test_a_leaf_module_is_not_waited_for_in_any_pass(vectors: Engine) -> None:
    everything = len(vectors.layout.reductions)
    for names in ("abcd", "abcde", "abcd"):
        assert begun_in_backward(vectors, names, lambda: vectors._reducer.enter_leaf(["e"])) == everything
        end(vectors)


def test_unused_parameters_that_are_not_ignored_are_named() -> None:
    engine = engine_around(Vectors(), alone(), zero_stage=2, ignore_unused_parameters=False)
    begun_in_backward(engine, "abcde", engine.find_unused)
    end(engine)
    for _ in range(2):
        begun_in_backward(engine, "abcd", engine.find_unused)
        with pytest.raises(UsageError, match="no gradient for e"):
            end(engine)
        engine.reset_step()
    engine.close()
