"""From the configuration to what carries it out on one rank, when switches that were on "auto" have been settled."""

from dataclasses import dataclass

import torch

from megazero.activations.checkpoints import Checkpoints
from megazero.activations.places import InArena, OnDevice, OnHost, Places
from megazero.activations.recompute import RandomSource, Recomputation, Stopwatch
from megazero.activations.recompute_plan import LOGITS_CHUNK_BYTES, ActivationPlan
from megazero.comm.interface import Communicator
from megazero.config.engine_sections import ActivationConfig
from megazero.memory.host import HostMemory
from megazero.memory.ledger_interface import AnyLedger

# Of checkpoints that are in host memory, so many are on the device at once: one in use, one being gathered, one coming.
_ON_THEIR_WAY = 3


@dataclass(frozen=True)
class RankParts:
    """What recomputation must know of a rank: tensor-parallel axis, device, random states, ledger and timers."""

    tensor_parallel: Communicator
    device: torch.device
    random: RandomSource
    ledger: AnyLedger
    stopwatch: Stopwatch


def choices(config: ActivationConfig, device_type: str = "cpu") -> ActivationPlan:
    """What is recomputed, without anybody to do it."""
    return ActivationPlan(
        granularity=config.recompute_granularity,
        method=config.recompute_method or "uniform",
        num_layers=config.recompute_num_layers or 1,
        logits_chunk_bytes=config.logits_chunk_bytes or LOGITS_CHUNK_BYTES[device_type],
    )


def activation_plan(config: ActivationConfig, num_checkpoints: int, rank: RankParts) -> ActivationPlan:
    """The plan for a model that holds so many checkpoints at once, at the most."""
    plan = choices(config, rank.device.type)
    if plan.granularity == "none":
        return plan
    return plan.carried_out_by(recomputation(config, rank, number=num_checkpoints))


def describe(config: ActivationConfig, num_checkpoints: int, tensor_parallel_size: int) -> str:
    """What becomes of activations, as a phrase; checkpoints: as many as are held at once, at the most."""
    if config.recompute_granularity == "none":
        return "activations: kept until backward"
    if config.recompute_granularity == "selective":
        return "activations: kept until backward, the attention core's recomputed"
    part = f"1/{tensor_parallel_size} of each" if config.partition_activations else "each"
    where = "in host memory" if config.checkpoint_in_cpu else "on the device"
    arena = ", in one arena" if config.contiguous_checkpointing else ""
    return f"activations: recomputed from {num_checkpoints} checkpoints, {part} kept {where}{arena}"


def recomputation(config: ActivationConfig, rank: RankParts, *, number: int | None) -> Recomputation:
    """What runs and recomputes functions; `number` of checkpoints at once, None of a model that isn't known."""
    checkpoints = Checkpoints(
        slices=rank.tensor_parallel if config.partition_activations else None,
        trusts=number is not None,
        places=_places(config, rank, number=config.number_checkpoints or number),
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


def _places(config: ActivationConfig, rank: RankParts, *, number: int | None) -> Places | None:
    """Where copies are kept, if any are."""
    device, ledger, in_cpu = rank.device, rank.ledger, config.checkpoint_in_cpu
    arena = InArena(_ON_THEIR_WAY if in_cpu else number, device, ledger=ledger)
    if in_cpu:
        rooms = arena if config.contiguous_checkpointing else OnDevice(device, ledger=ledger)
        return OnHost(HostMemory(device, ledger=ledger), rooms)
    return arena if config.contiguous_checkpointing else None
