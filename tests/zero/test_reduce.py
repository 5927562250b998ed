"""Reduction of gradients: order of launches, constant-size buffers, what arrives where."""

import pytest
import torch
from support.irregular_model import Options, batch, full_state, loss_of, make_engine, train_engine
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.comm.interface import Work
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import AdamWSettings, FusedAdamW
from megazero.parallel.param_spec import ParamSpec, Unit
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.layout import FlatLayout, LayoutRules, Slot, build_layout
from megazero.zero.plan import resolve
from megazero.zero.reduce import most_out_at_once


class Stack(nn.Module):
    """Equal layers, the grain at which depth grows."""

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
    return buffers.num_buffers + arena.capacity_bytes // (4 * engine.layout.max_bucket_numel)


@pytest.mark.gloo
@pytest.mark.parametrize("bucket", [64, 200, 10_000])
def test_number_of_buffers_does_not_grow_with_depth(bucket: int) -> None:
    """Two open, two in flight, one more being launched beside them."""
    shallow, deep = (max(run_ranks(2, buffers_used, depth, bucket)) for depth in (2, 12))
    assert shallow == deep
    assert deep <= 5


def layout_of(units: list[list[int]], bucket: int) -> FlatLayout:
    """Units of parameters of so many elements, named after their places: "0.0", "0.1", ..."""
    names = [[f"{unit}.{place}" for place in range(len(numels))] for unit, numels in enumerate(units)]
    specs = {
        name: ParamSpec(name, (numel,), (numel,), (0,))
        for group, numels in zip(names, units, strict=True)
        for name, numel in zip(group, numels, strict=True)
    }
    placed = [Slot(spec, torch.float32, False, 0) for spec in specs.values()]
    return build_layout([Unit(str(i), tuple(group)) for i, group in enumerate(names)], placed, LayoutRules(1, bucket))


@pytest.mark.parametrize(
    ("units", "max_in_flight", "expected"),
    [
        ([[16], [16], [16]], 2, 3),  # two in flight when the third opens
        ([[16], [16], [16]], 1, 2),
        ([[16], [16], [16]], 0, 1),  # waited for at once
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
    """As that of a block's biases, which come between its matrices and lie before them."""
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
    """Gradients from the first layer to the last: more buckets are open than the arena has room for."""
    model, engine, buffers = stack_engine(rank, 5, 10_000, dp=2)
    parameters = dict(model.named_parameters())
    reducer = engine._reducer
    engine.begin_step()
    reducer.begin_micro_batch(engine.layout.trainable_buckets, is_last=True)
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
    """Announce gradients in some order; the sizes of the launched buckets tell which they were."""
    model, engine, _ = stack_engine(rank, 3, 10_000, dp=2)
    launched: list[int] = []
    reducer = engine._reducer
    inner = reducer._communicator

    class Recording:
        def reduce_scatter_into(self, output: Tensor, input: Tensor) -> Work:
            launched.append(float(input[-1] if input[-1] != 0 else input[24]))
            return inner.reduce_scatter_into(output, input)

    reducer._communicator = Recording()  # type: ignore[assignment]
    parameters = dict(model.named_parameters())
    engine.begin_step()
    reducer.begin_micro_batch(engine.layout.trainable_buckets, is_last=True)
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
    """A layer that only rank 0 used: rank 1 contributes zeros, and nobody waits for anybody."""
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
    expected = sum(float(parameter.grad.double().square().sum()) for parameter in model.parameters())  # type: ignore[union-attr]
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
    """Stage 2's shard is overwritten, not added to, by a new step's first reduction."""
    once = run_ranks(2, train_engine, Options(stage=2, dp=2, steps=3, accumulation=2))
    resident = run_ranks(2, train_engine, Options(stage=1, dp=2, steps=3, accumulation=2))
    torch.testing.assert_close(full_state(once), full_state(resident), rtol=1e-12, atol=1e-14)
