"""Build what carries out activation recomputation on one rank, from a configuration without "auto"."""

from dataclasses import dataclass

import torch

from megazero.activations.checkpoints import ActivationCheckpoints
from megazero.activations.copy_stores import ArenaStore, CopyStore, DeviceStore, HostStore
from megazero.activations.recompute import RandomSource, Recomputation, Stopwatch
from megazero.activations.recompute_plan import LOGITS_CHUNK_BYTES, ActivationPlan
from megazero.comm.interface import Communicator
from megazero.config.engine_sections import ActivationConfig
from megazero.memory.host import HostMemory
from megazero.memory.ledger_interface import AnyLedger

# Checkpoints in host memory that are on the device at once: one in use, one being gathered, one being copied back.
_NUM_RETURNING = 3


@dataclass(frozen=True)
class RankParts:
    """The parts of a rank that recomputation uses: tensor-parallel axis, device, random states, ledger and timers."""

    tensor_parallel: Communicator
    device: torch.device
    random: RandomSource
    ledger: AnyLedger
    stopwatch: Stopwatch


def configured_plan(config: ActivationConfig, device_type: str = "cpu") -> ActivationPlan:
    """Return the configured plan without a `Recomputation` to carry it out; a dry run needs no more."""
    granularity = config.recompute_granularity
    assert granularity != "auto", "a start decides before anything is made"
    return ActivationPlan(
        granularity=granularity,
        method=config.recompute_method or "uniform",
        num_layers=config.recompute_num_layers or 1,
        logits_chunk_bytes=config.logits_chunk_bytes or LOGITS_CHUNK_BYTES[device_type],
    )


def activation_plan(config: ActivationConfig, num_checkpoints: int, rank: RankParts) -> ActivationPlan:
    """Return the plan of a model that holds at most `num_checkpoints` activation checkpoints at once."""
    plan = configured_plan(config, rank.device.type)
    if plan.granularity == "none":
        return plan
    return plan.with_recomputation(recomputation(config, rank, number=num_checkpoints))


def describe(config: ActivationConfig, num_checkpoints: int, tensor_parallel_size: int) -> str:
    """Describe in a phrase what is retained for backward; num_checkpoints: the most that are held at once."""
    if config.recompute_granularity == "none":
        return "activations: retained until backward"
    if config.recompute_granularity == "selective":
        return "activations: retained until backward, the attention core's recomputed"
    part = f"1/{tensor_parallel_size} of each" if config.partition_activations else "each"
    where = "in host memory" if config.checkpoint_in_cpu else "on the device"
    arena = ", in one arena" if config.contiguous_checkpointing else ""
    return f"activations: recomputed from {num_checkpoints} activation checkpoints, {part} stored {where}{arena}"


def recomputation(config: ActivationConfig, rank: RankParts, *, number: int | None) -> Recomputation:
    """Build the recomputation of one rank; number: the most activation checkpoints at once, None for a user's model."""
    checkpoints = ActivationCheckpoints(
        partition_over=rank.tensor_parallel if config.partition_activations else None,
        is_replicated=number is not None,
        copies=_copy_store(config, rank, number=config.number_checkpoints or number),
        device=rank.device,
        ledger=rank.ledger,
    )
    waits = config.synchronize_each_layer and rank.device.type == "cuda"
    return Recomputation(
        random=rank.random,
        checkpoints=checkpoints,
        ledger=rank.ledger,
        stopwatch=rank.stopwatch if config.profile_backward else None,
        synchronizes=rank.device if waits else None,
    )


def _copy_store(config: ActivationConfig, rank: RankParts, *, number: int | None) -> CopyStore | None:
    """Return the store for copies of activation checkpoints; None where no copies are made."""
    device, ledger, in_cpu = rank.device, rank.ledger, config.checkpoint_in_cpu
    arena = ArenaStore(_NUM_RETURNING if in_cpu else number, device, ledger=ledger)
    if in_cpu:
        device_store = arena if config.contiguous_checkpointing else DeviceStore(device, ledger=ledger)
        return HostStore(HostMemory(device, ledger=ledger), device_store)
    return arena if config.contiguous_checkpointing else None
