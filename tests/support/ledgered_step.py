"""Measures the memory and the traffic of a training step of a small GPT on real ranks, with a ledger."""

from dataclasses import dataclass
from typing import Any

import torch
from support.configs import make_run
from support.flat_layout import padded_numel
from support.processes import mesh_in_worker

from megazero.activations.copy_stores import ArenaStore, HostStore
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.arena import Arena
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import HostMemoryKind
from megazero.train.build import build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

BATCH, SEQUENCE, VOCABULARY = 2, 24, 257
SETTINGS: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "seq_length": SEQUENCE,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "micro_batch_size": BATCH,
    "reduce_bucket_size": 5000,
    "mock_data": True,
}


@dataclass
class Held:
    """The bytes of one rank in its second step: the peak of every category, and the step's traffic by axis.

    elsewhere: those in host memory at the end, by kind.  numel, unit_numel, bucket_numel: the elements of all trainable
    parameters with padding, of the largest unit, and of the largest bucket.
    """

    peaks: dict[str, int]
    peak_bytes: int
    comm_bytes: dict[str, dict[str, int]]
    arena_bytes: int  # capacity of the checkpoints' arena, 0 without one
    arena_high_water: int
    outside: int  # checkpoints that the arena had no room for
    host_peak_bytes: int
    elsewhere: dict[HostMemoryKind, int]
    numel: int
    unit_numel: int
    bucket_numel: int


def ledgered_step(rank: int, tp: int, dp: int, changes: dict[str, Any]) -> Held:
    """Run two steps with `changes` over SETTINGS, and measure the second."""
    mesh = mesh_in_worker(rank, tp=tp, dp=dp, is_late=False)  # late works hold copies, which the ledger would count
    config = make_run(**{**SETTINGS, "global_batch_size": 2 * BATCH * dp, "tensor_model_parallel_size": tp, **changes})
    with Ledger(mesh.device) as ledger:
        buffers = FusedBuffers(0, mesh.device, ledger=ledger)
        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY, ledger=ledger)
        parts = step_context(config, core)
        tokens = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % VOCABULARY
        batch = StepBatch(0, [MicroBatch(index, tokens, tokens, None) for index in range(2)])
        for _ in range(2):
            mesh.meter.reset()
            ledger.reset()
            training_step(parts, batch, StepControls(1e-3, 1.0))
        step = ledger.take()
        core.engine.close()
    arena, outside = _arena(core)
    return Held(
        peaks={str(category): nbytes for category, nbytes in step.peaks.items()},
        peak_bytes=step.peak_bytes,
        comm_bytes=mesh.meter.bytes_by_axis(),
        arena_bytes=0 if arena is None else arena.statistics.capacity_bytes,
        arena_high_water=0 if arena is None else arena.statistics.high_water_bytes,
        outside=outside,
        host_peak_bytes=_host_peak(core),
        elsewhere=dict(step.elsewhere),
        numel=padded_numel(core.engine.layout, trainable=True),
        unit_numel=max(section.numel for section in core.engine.layout.sections),
        bucket_numel=max(bucket.numel for bucket in core.engine.layout.trainable_buckets),
    )


def _arena(core: RunComponents) -> tuple[Arena | None, int]:
    copies = _copy_store(core)
    device_store = copies.device_store if isinstance(copies, HostStore) else copies
    return (device_store.arena, device_store.num_outside) if isinstance(device_store, ArenaStore) else (None, 0)


def _host_peak(core: RunComponents) -> int:
    copies = _copy_store(core)
    return copies.host.peak_bytes if isinstance(copies, HostStore) else 0


def _copy_store(core: RunComponents) -> Any:
    recomputation = core.activations.recomputation
    return None if recomputation is None else recomputation.checkpoints.copies
