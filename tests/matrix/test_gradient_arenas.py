"""Tests that gradients of every stage lie in arenas, in no more memory than a pool of buffers takes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from support.configs import make_run
from support.processes import mesh_in_worker, run_ranks
from support.training import SETTINGS
from torch import Tensor

from megazero.comm.interface import Work
from megazero.comm.mesh import Mesh
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.train.build import build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

STAGES = (0, 1, 2, 3)


class Seen(NamedTuple):
    """Figures of one rank after two steps of two micro-batches each.

    sent: for every tensor that was reduced, the arena it lay in ("kept", "buckets", or ""). kept: whether reduced
    gradients, and `.grad` where it is set after backward, lie in the arena of kept ones.
    """

    sent: list[str]
    kept: set[bool]
    arenas: dict[str, tuple[int, int, int]]  # capacity, high water, failed requests
    kept_bytes: int
    pool_bytes: int
    largest_bucket: int


class Recording:
    """A communicator that notes in which arena each tensor that it reduces lies."""

    def __init__(self, inner: Any, core: RunComponents) -> None:
        self._inner = inner
        self._reducer = core.engine._reducer
        self._kept = core.engine._shards.gradient_arena
        self.sent: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_reduce(self, tensor: Tensor) -> Work:
        self._note(tensor)
        return self._inner.all_reduce(tensor)

    def reduce_scatter_into(self, output: Tensor, input: Tensor, key: int | None = None) -> Work:
        self._note(input)
        assert output.untyped_storage()._cdata == input.untyped_storage()._cdata
        return self._inner.reduce_scatter_into(output, input, key)

    def reduce_scatter_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[int] | None = None
    ) -> Work:
        for each in inputs:
            self._note(each)
        return self._inner.reduce_scatter_coalesced(outputs, inputs, keys)

    def _note(self, tensor: Tensor) -> None:
        arenas = {"kept": self._kept, "buckets": self._reducer.bucket_arena}
        places = [name for name, arena in arenas.items() if arena is not None and arena.contains(tensor)]
        self.sent.append("".join(places))


@contextmanager
def lending(mesh: Mesh, buffers: FusedBuffers) -> Iterator[None]:
    """Make the mesh of all tests lease from these buffers for gloo's reductions while the context lasts."""
    innermost: Any = mesh.axis("dp")
    while hasattr(innermost, "_inner"):
        innermost = innermost._inner
    before = getattr(innermost, "_scratch", None)
    innermost._scratch = buffers
    yield
    innermost._scratch = before


def two_steps(rank: int, tp: int, dp: int, settings: dict[str, Any], pool_only: bool = False) -> Seen:
    """Take two steps and return their figures; pool_only: buckets are leased from the pool, as without an arena."""
    sizes = {"micro_batch_size": 2, "global_batch_size": 4 * dp, "reduce_bucket_size": 5000}
    changes = {**sizes, "precision": "fp32", "mock_data": True, "tensor_model_parallel_size": tp, **settings}
    config = make_run(**SETTINGS | changes)
    mesh = mesh_in_worker(rank, tp=tp, dp=dp, is_late=False)
    buffers = FusedBuffers(0, mesh.device)
    core = build_components(config, mesh, buffers, vocab_size=257)
    engine, reducer = core.engine, core.engine._reducer
    recording = Recording(reducer._communicator, core)
    reducer._communicator = recording
    if pool_only:
        reducer.scratch = reducer._store._buffers = buffers
    parts = step_context(config, core)
    tokens = torch.arange(48).view(2, 24) % 257
    batch = StepBatch(0, [MicroBatch(index, tokens, tokens, None) for index in range(2)])
    with lending(mesh, buffers):
        for _ in range(2):
            training_step(parts, batch, StepControls(1e-3, 1.0))
    shards = engine._shards
    views = [shards.reduced_gradient(bucket, shards.owned(bucket)) for bucket in engine.layout.trainable_buckets]
    views += [parameter.grad for parameter in core.model.parameters() if parameter.grad is not None]
    kept = {shards.gradient_arena is not None and shards.gradient_arena.contains(view) for view in views}
    arenas = {
        name: (seen.capacity_bytes, seen.high_water_bytes, seen.failed_requests)
        for name, seen in engine.gradient_arenas.items()
    }
    engine.close()
    wire = engine.layout.max_reduced_numel * engine.plan.gradient_wire.itemsize
    return Seen(recording.sent, kept, arenas, engine.model_state_bytes().gradients, buffers.total_bytes, wire)


WIRES = [{"precision": "fp32"}, {"precision": "bf16", "communication_data_type": "fp32"}, {"precision": "bf16"}]


@pytest.mark.gloo
@pytest.mark.parametrize("settings", WIRES, ids=["fp32", "bf16-on-fp32-wire", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_gradient_and_every_bucket_lies_in_an_arena(stage: int, settings: dict[str, Any]) -> None:
    for seen in run_ranks(2, two_steps, 1, 2, {"zero_stage": stage, **settings}):
        leases = stage >= 2 or "communication_data_type" in settings
        assert seen.sent and set(seen.sent) == {"buckets" if leases else "kept"}
        assert seen.kept == {True}
        assert seen.arenas["kept"] == (seen.kept_bytes, seen.kept_bytes, 0), "exactly as large as what is kept"
        assert ("buckets" in seen.arenas) == leases
        if leases:
            capacity, most, fell_back = seen.arenas["buckets"]
            assert fell_back == 0 and capacity == most
            assert capacity % seen.largest_bucket == 0 and capacity <= 5 * seen.largest_bucket


SMALL_BUCKETS = {"reduce_bucket_size": 2000, "precision": "bf16", "communication_data_type": "fp32"}
SMALL_GATHERS = {"allgather_bucket_size": 600}
NO_OVERLAP = {"overlap_comm": False, "precision": "bf16"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("stage", "tp", "dp", "settings"),
    [
        *((stage, 1, 2, {}) for stage in STAGES),
        *((stage, 1, 2, SMALL_BUCKETS) for stage in (1, 3)),
        (2, 1, 2, SMALL_GATHERS),
        *((stage, 1, 1, NO_OVERLAP) for stage in (0, 2)),  # without gloo's own leases
        (3, 2, 2, {}),
    ],
    ids=str,
)
def test_arenas_and_pool_are_no_larger_than_the_pool_alone(
    stage: int, tp: int, dp: int, settings: dict[str, Any]
) -> None:
    changes = {"zero_stage": stage, **settings}
    with_arena = run_ranks(tp * dp, two_steps, tp, dp, changes)
    without = run_ranks(tp * dp, two_steps, tp, dp, changes, True)
    for ours, plain in zip(with_arena, without, strict=True):
        capacity, _, fell_back = ours.arenas.get("buckets", (0, 0, 0))
        assert ours.pool_bytes + capacity <= plain.pool_bytes
        assert fell_back == 0
        assert set(plain.sent) != {"buckets"}


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("settings", [{}, {"contiguous_gradients": False}])
def test_smaller_gathers_take_no_more_memory(stage: int, settings: dict[str, Any]) -> None:
    small, plain = (
        run_ranks(2, two_steps, 1, 2, {"zero_stage": stage, **settings, **more})[0] for more in (SMALL_GATHERS, {})
    )
    assert len(small.sent) > 7 * len(plain.sent), "the buckets, of which a reduction has several"
    assert small.largest_bucket <= 5000 * 4
    for seen in (small, plain):  # the two that gloo receives in, and where buckets are leased two open and two sent
        in_arena = 4 if stage > 1 and not settings else 0
        assert seen.pool_bytes == (4 if settings else 2) * seen.largest_bucket
        assert seen.arenas.get("buckets", (0, 0, 0))[0] == in_arena * seen.largest_bucket


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_without_contiguous_gradients_there_is_no_arena(stage: int) -> None:
    for seen in run_ranks(2, two_steps, 1, 2, {"zero_stage": stage, "contiguous_gradients": False}):
        assert seen.arenas == {} and set(seen.sent) == {""} and seen.kept == {False}
