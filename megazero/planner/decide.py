"""Decides what recomputes and where checkpoints and states are kept, where a run leaves that to its plan ("auto").

The choices of what recomputes form a ladder: each rung computes, sends or copies more than the one before it, and holds
less.

    nothing is recomputed
    the attention core is
    whole layers are, from checkpoints
    the same, with checkpoints in slices (Pa), or in host memory
    the same, with slices in host memory (Pa+cpu)

Beside it, optimizer states and then parameters too may be in host memory, each of which holds less on the device as
well.  The rungs are run dry from the first one on, as far as the settings leave them open, until one fits the devices
with as little as possible elsewhere; where that is not nothing, each further rung is tried with fewer states elsewhere.
So every choice that fits and from which nothing can be taken away is tried, and the fastest of them is taken.  If none
fits, that which needs least is.  The batch stays as it is given: what a larger one would bring (ZeRO, section 8)
`megazero plan --advise` finds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch

from megazero.config.named import undecided, value_in, with_values
from megazero.config.run import RunConfig
from megazero.operating_system import memory_bytes
from megazero.parallel.launch import Launch
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware
from megazero.planner.hops import with_hops
from megazero.planner.job_plan import DryRuns, Plan
from megazero.planner.machines import MACHINES
from megazero.planner.predict import forecast_of
from megazero.train.decisions import Decision, word_of
from megazero.units import format_bytes

_OF_CHECKPOINTS = ("partition_activations", "checkpoint_in_cpu")
# Of a GPU's name, and the machine whose rates it has.
_GPUS = (("H200", "h200"), ("H100", "dgx-h100"), ("B200", "gb200"), ("V100", "dgx2-v100"), ("", "dgx-a100"))


class Chosen(NamedTuple):
    """The plan of the settings that are chosen, and the lines that say why; none if there was nothing to choose."""

    plan: Plan
    reasons: tuple[str, ...]


def decide_by_plan(config: RunConfig, vocab_size: int, device: torch.device, launch: Launch) -> Decision:
    """Return what is best for a run on the machine at hand."""
    hardware = this_machine(device, max(launch.nodes.ranks_per_node))
    job = DryJob(config, vocab_size, launch.nodes, is_gpu=device.type == "cuda")
    chosen = choose(with_hops(job, hardware)[0], hardware)
    return Decision({name: value_in(chosen.plan.job.config, name) for name in undecided(config)}, chosen.reasons)


def choose(job: DryJob, hardware: Hardware, runs: DryRuns | None = None) -> Chosen:
    """Run a job dry with the values for what is "auto" that fit the hardware and are the fastest.

    runs: the dry runs so far.
    """
    shared = DryRuns() if runs is None else runs
    names = undecided(job.config)
    if not names:
        return Chosen(shared.plan(job, hardware), ())
    tried = _tried(job, hardware, shared)
    reasons = [_line(plan, names) for plan in tried]
    if fitting := [plan for plan in tried if plan.fits]:
        best = min(fitting, key=_seconds)
    else:
        best = min(tried, key=lambda plan: plan.need(*plan.binding).total)
        reasons.append(f"auto: nothing fits {hardware.name}; what needs least is taken")
    values = ", ".join(_values(best.job.config, names))
    return Chosen(best, (*reasons, f"auto: {values}, predicted {_seconds(best):.3g} s a step on {hardware.name}"))


def _tried(job: DryJob, hardware: Hardware, runs: DryRuns) -> list[Plan]:
    """Return plans of the choices that were run dry."""
    rungs = list(ladder(job.config, is_gpu=job.is_gpu))
    places = homes(job.config, is_gpu=job.is_gpu)
    tried: list[Plan] = []

    def run_dry(rung: int, place: int) -> Room:
        configs = (with_values(config, places[place]) for config in rungs[rung])
        plans = [runs.plan(replace(job, config=config), hardware) for config in configs]
        tried.extend(plans)
        if any(plan.fits for plan in plans):
            return Room.ENOUGH
        return Room.LACKS_HOST if all(plan.missing_host_bytes > 0 for plan in plans) else Room.LACKS_DEVICE

    walk(len(rungs), len(places), run_dry)
    return tried


class Room(Enum):
    """The room that memory has for a job: enough, or else the host lacks some, or a device."""

    ENOUGH = "enough"
    LACKS_HOST = "lacks host"
    LACKS_DEVICE = "lacks device"


def walk(rungs: int, places: int, run_dry: Callable[[int, int], Room]) -> None:
    """Run choices dry until all are among them that fit, and of which nothing can be taken away.

    A choice is a rung and a place, by their numbers: with either of them a device holds less, and with places the host
    more.  So at most as many are run as there are of both together.
    """
    first = run_dry(0, 0)
    if first is Room.ENOUGH:
        return
    rung, place = 0, places - 1
    while rung < rungs and place >= 0:
        room = first if rung == place == 0 else run_dry(rung, place)
        if room is Room.ENOUGH or (room is Room.LACKS_HOST and place > 0):
            place -= 1
        else:
            rung += 1


def ladder(config: RunConfig, *, is_gpu: bool) -> Iterator[list[RunConfig]]:
    """Yield the configurations of every rung, as far as the settings leave it open."""
    section, parallel = config.activations, config.parallel
    granularity = section.recompute_granularity
    can_cut = parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel
    cut = _open(section.partition_activations, can_cut)
    in_cpu = _open(section.checkpoint_in_cpu, is_gpu)  # what a CPU computes with is host memory already
    rungs: list[list[Mapping[str, Any]]] = [
        [{"recompute_granularity": name, "partition_activations": cut[0], "checkpoint_in_cpu": in_cpu[0]}]
        for name in ("none", "selective", "full")
        if granularity in (name, "auto")
    ]
    if granularity in ("full", "auto"):
        full = {"recompute_granularity": "full"}
        both: list[Mapping[str, Any]] = [
            {**full, "partition_activations": slices, "checkpoint_in_cpu": away} for slices in cut for away in in_cpu
        ]
        rungs += [both[1:-1], both[-1:]] if len(both) > 2 else [both[1:]]
    for rung in filter(None, rungs):
        yield [replace(config, activations=replace(section, **values)) for values in rung]


def homes(config: RunConfig, *, is_gpu: bool) -> list[dict[str, str]]:
    """Return the places of states that the settings leave open, each with more in host memory than the one before it.

    What a CPU computes with is host memory already.
    """
    opened = [name for name in ("offload_optimizer", "offload_param") if value_in(config, name) == "auto"]
    away = range(len(opened) + 1 if is_gpu else 1)
    return [{name: "cpu" if at < count else "none" for at, name in enumerate(opened)} for count in away]


def this_machine(device: torch.device, ranks_per_node: int) -> Hardware:
    """Return the machine at hand: the memory that it has, and the rates of the machine with a name that is nearest."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        near = next(machine for word, machine in _GPUS if word in found.name)
        return replace(
            MACHINES[near],
            name=found.name,
            memory_bytes=found.total_memory,
            host_memory_bytes=memory_bytes() or MACHINES[near].host_memory_bytes,
            devices_per_node=ranks_per_node,
        )
    machine = MACHINES["cpu"]
    nbytes = memory_bytes() or machine.host_memory_bytes
    return replace(
        machine,
        name="this machine",
        memory_bytes=nbytes // ranks_per_node,
        host_memory_bytes=nbytes,
        devices_per_node=ranks_per_node,
    )


def _open(given: bool | str, is_possible: bool) -> list[bool]:
    """Return the values that a switch may have."""
    if given != "auto":
        return [given is True]
    return [False, True] if is_possible else [False]


def _line(plan: Plan, names: tuple[str, ...]) -> str:
    needs, has = plan.need(*plan.binding).total, plan.hardware.memory_bytes
    host = "" if plan.missing_host_bytes <= 0 else ", and more host memory than there is"
    values = ", ".join(_values(plan.job.config, names))
    return f"auto: {values} needs {format_bytes(needs)} of a device's {format_bytes(has)}{host}"


def _values(config: RunConfig, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the settings with their values; of checkpoints only where there are some."""
    of_checkpoints = () if config.activations.recompute_granularity == "full" else _OF_CHECKPOINTS
    yield from (f"{name} {word_of(value_in(config, name))}" for name in names if name not in of_checkpoints)


def _seconds(plan: Plan) -> float:
    return forecast_of(plan).step.seconds
