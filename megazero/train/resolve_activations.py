"""Resolve the activation switches that are "auto": which checkpoints are partitioned, and which go to the host.

This happens after the checks and before the model is made: process groups exist, so bandwidths can be measured, and
volumes follow from the shapes (ZeRO, section 8).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from megazero.activations.assemble import configured_plan
from megazero.activations.decision import CheckpointSizes
from megazero.activations.resolve_auto import resolve_switches
from megazero.comm.mesh import Mesh
from megazero.config import derived
from megazero.config.engine_sections import ActivationConfig
from megazero.config.run import RunConfig
from megazero.model.gpt import GPT
from megazero.parallel.layer_split import Chunk
from megazero.parallel.topology import SHARDS
from megazero.pipeline.passes import num_windows
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions
from megazero.train.pipeline_stages import activation_config, stage_chunks, stage_plan
from megazero.zero.plan import ZeroPlan, data_parallel_bytes, resolve

_CPU = torch.device("cpu")


def resolve_activations(
    config: RunConfig, mesh: Mesh, *, vocab_size: int, padded_vocab_size: int
) -> tuple[ActivationConfig, tuple[str, ...]]:
    """Return the activation section without "auto", and a line that explains each decision; a collective call."""
    section = activation_config(config)
    if "auto" not in (section.partition_activations, section.checkpoint_in_cpu):
        return section, ()
    num_micro_batches = derived.num_micro_batches(config, mesh.topology.world_size)
    plan = resolve(config.zero, config.precision)
    tp = TensorParallel(mesh.axis("tp"), RandomRegions(0, 0, _CPU), plan.parameter.dtype, torch.device("meta"))
    chunks = stage_chunks(config, mesh.coordinate("pp"), padded_vocab_size)
    model = GPT(  # on the meta device
        config.model, vocab_size=vocab_size, tp=tp, padded_vocab_size=padded_vocab_size, chunks=chunks
    )
    decision = resolve_switches(
        mesh,
        _checkpoints(config, plan, chunks),
        num_micro_batches=num_micro_batches,
        data_parallel_bytes=_data_parallel_bytes(config, mesh, model, num_micro_batches),
        partition=section.partition_activations,
        in_cpu=section.checkpoint_in_cpu,
    )
    resolved = replace(section, partition_activations=decision.partition, checkpoint_in_cpu=decision.in_cpu)
    return resolved, decision.reasons


def _data_parallel_bytes(config: RunConfig, mesh: Mesh, model: GPT, num_micro_batches: int) -> int:
    """Return the bytes that this rank sends in a step over the data-parallel axis, for all its chunks."""
    plan, stage = resolve(config.zero, config.precision), stage_plan(config, mesh.coordinate("pp"))
    actions = stage.step(num_micro_batches).actions
    total = 0
    for part in range(len(model.chunks)):
        names = [name for unit in model.units() if unit.part == part for name in unit.parameters]
        numel = sum(model.get_parameter(name).numel() for name in names)
        gathers = num_windows(actions, part) if stage.retains_gathered else None
        total += data_parallel_bytes(plan, numel, mesh.topology.size(SHARDS), num_micro_batches, num_gathers=gathers)
    return total


def _checkpoints(config: RunConfig, plan: ZeroPlan, chunks: Sequence[Chunk]) -> CheckpointSizes:
    """Return the sizes of the checkpoints that one micro-batch leaves on this rank."""
    return CheckpointSizes(
        number=sum(configured_plan(config.activations).num_checkpoints(len(chunk.layers)) for chunk in chunks),
        micro_batch_size=config.training.micro_batch_size,
        seq_length=config.model.seq_length,
        hidden_size=config.model.hidden_size,
        itemsize=plan.parameter.itemsize,
    )
