"""Decides what recomputes and where checkpoints are kept, where a run leaves that to it ("auto"), by plans of the run.

The choices form a ladder: each rung computes, sends or copies more than the one before it, and holds less.

    nothing is recomputed
    the attention core is
    whole layers are, from checkpoints
    the same, with checkpoints in slices (Pa), or in host memory
    the same, with slices in host memory (Pa+cpu)

The rungs are run dry from the first one on, as far as the settings leave them open, until one fits the devices; of two
that do, the faster one is taken.  If none fits, that which needs least is.  The batch stays as it is given: what a
larger one would bring (ZeRO, section 8) `megazero plan --advise` finds.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megazero.config.run import RunConfig
from megazero.operating_system import memory_bytes
from megazero.parallel.launch import Launch
from megazero.planner.dry_run import DryJob
from megazero.planner.hardware import Hardware
from megazero.planner.machines import MACHINES
from megazero.planner.plan import Plan, make_plan
from megazero.planner.predict import forecast_of
from megazero.train.decisions import Decision, undecided, word_of
from megazero.units import format_bytes

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
    chosen = choose(job, hardware)
    section = chosen.plan.job.config.activations
    return Decision({name: getattr(section, name) for name in undecided(config)}, chosen.reasons)


def choose(job: DryJob, hardware: Hardware) -> Chosen:
    """Run a job dry with the values for what is "auto" that fit the hardware and are the fastest."""
    names = undecided(job.config)
    if not names:
        return Chosen(make_plan(job, hardware), ())
    reasons: list[str] = []
    tried: list[Plan] = []
    for rung in ladder(job.config, is_gpu=job.is_gpu):
        plans = [make_plan(replace(job, config=config), hardware) for config in rung]
        reasons += [_line(plan, names) for plan in plans]
        tried += plans
        if fitting := [plan for plan in plans if plan.fits]:
            best = min(fitting, key=_seconds)
            break
    else:
        best = min(tried, key=lambda plan: plan.need(*plan.binding).total)
        reasons.append(f"auto: nothing fits {hardware.name}; what needs least is taken")
    values = ", ".join(_values(best.job.config, names))
    return Chosen(best, (*reasons, f"auto: {values}, predicted {_seconds(best):.3g} s a step on {hardware.name}"))


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


def this_machine(device: torch.device, ranks_per_node: int) -> Hardware:
    """Return the machine at hand: the memory that it has, and the rates of the machine with a name that is nearest."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        near = next(machine for word, machine in _GPUS if word in found.name)
        return replace(
            MACHINES[near], name=found.name, memory_bytes=found.total_memory, devices_per_node=ranks_per_node
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
    section = config.activations
    for name in names:
        if name == "recompute_granularity" or section.recompute_granularity == "full":
            yield f"{name} {word_of(getattr(section, name))}"


def _seconds(plan: Plan) -> float:
    return forecast_of(plan).step.seconds
