"""The memory and time of a job on a machine: its ranks that differ, run dry, against the memory that there is."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megazero.comm.mesh import CONTROL
from megazero.comm.metered import Count
from megazero.memory.ledger_figures import CATEGORIES
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.rank import DryJob, PartRecord, PlannedJob, RankRecord, differing_ranks, run_rank
from megazero.planner.hardware import Hardware
from megazero.planner.trace import JobTrace, Part

# Collectives whose ranks send to their neighbour alone, as NCCL's do.
_RINGS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")


class Need(NamedTuple):
    """The device memory that a part of a rank needs, in bytes.

    tensors: the most that is alive at once.  segments: what the allocator needs for them (`dry/allocator.py`).
    constants: context, workspaces and communicators, as the hardware states them.
    """

    tensors: int
    segments: int
    constants: int

    @property
    def total(self) -> int:
        return self.segments + self.constants


@dataclass(frozen=True, eq=False)
class JobPlan:
    """A job of either door that has been run dry, and the machine that it is for.

    ranks: those of the first, a middle and the last pipeline stage.  seconds: what running them dry has taken.
    """

    job: PlannedJob
    hardware: Hardware
    ranks: tuple[RankRecord, ...]
    seconds: float

    @property
    def trace(self) -> JobTrace:
        """The events of the ranks, from which the time of a step follows."""
        return JobTrace(
            world_size=self.job.world_size,
            stages=self.job.topology.pp,
            micro_batches=self.job.num_micro_batches,
            tokens=self.job.tokens,
            ranks=tuple(rank.trace for rank in self.ranks),
        )

    @property
    def binding(self) -> tuple[RankRecord, Part]:
        """The rank and the part of it that need most of a device."""
        every = [(rank, part) for rank in self.ranks for part in rank.parts]
        return max(every, key=lambda pair: self.need(*pair).total)

    @property
    def fits(self) -> bool:
        """True if every device, and every node's host memory, has room for its ranks."""
        return self.missing_bytes <= 0 and self.missing_host_bytes <= 0

    @property
    def missing_bytes(self) -> int:
        """The bytes that the fullest device lacks; negative if some are left."""
        return self.need(*self.binding).total - self.hardware.memory_bytes

    @property
    def missing_host_bytes(self) -> int:
        """The bytes that a node's host memory lacks; 0 where its size is not stated."""
        has = self.hardware.host_memory_bytes
        return self.host_bytes - has if has else 0

    @property
    def host_bytes(self) -> int:
        """The bytes of a node's ranks in host memory, as many as the fullest of them has."""
        own = (sum(part.host.values()) for rank in self.ranks for part in rank.parts.values())
        return max(own) * max(self.job.nodes.ranks_per_node)

    @property
    def file_bytes(self) -> int:
        """The bytes of a node's states in files, as many for each rank as the fullest has."""
        return max(rank.file_bytes for rank in self.ranks) * max(self.job.nodes.ranks_per_node)

    def need(self, rank: RankRecord, part: Part) -> Need:
        """Return the device memory that a part of a rank needs."""
        record = rank.parts[part]
        return Need(record.memory.peak_bytes, record.needed, sum(constants(self.hardware, rank).values()))

    def to_json(self) -> dict[str, Any]:
        """Return everything that is in the plan, in bytes."""
        binding, part = self.binding
        return {
            "hardware": self.hardware.name,
            "world_size": self.job.world_size,
            "nodes": self.job.nodes.count,
            "layout": {axis: self.job.topology.size(axis) for axis in ("tp", "pp", "dp")},
            "fits": self.fits,
            "device_bytes": self.hardware.memory_bytes,
            "missing_bytes": max(self.missing_bytes, 0),
            "host_bytes_of_a_node": self.host_bytes,
            "missing_host_bytes": max(self.missing_host_bytes, 0),
            "file_bytes_of_a_node": self.file_bytes,
            "binding": {"rank": binding.trace.rank, "part": part},
            "ranks": [_rank_to_json(self, rank) for rank in self.ranks],
        }


@dataclass(frozen=True, eq=False)
class Plan(JobPlan):
    """A run that has been run dry."""

    job: DryJob


def make_plan(
    job: DryJob, hardware: Hardware, *, parts: Sequence[Part] | None = None, operators: Operators | None = None
) -> Plan:
    """Run the ranks of a job that differ dry.

    parts: of them; by default all that the run has.  operators: those that plans like this one have found so far.
    """
    found = Operators() if operators is None else operators
    began = time.perf_counter()
    chosen = tuple(parts_of(job) if parts is None else parts)
    ranks = tuple(run_rank(job, rank, chosen, found) for rank in differing_ranks(job))
    return Plan(job, hardware, ranks, time.perf_counter() - began)


@dataclass
class DryRuns:
    """Plans of jobs, each of which is run dry once.

    operators: those that they have called.  plans: by job and parts.
    """

    operators: Operators = field(default_factory=Operators)
    plans: dict[tuple[DryJob, tuple[Part, ...]], Plan] = field(default_factory=dict)

    def plan(self, job: DryJob, hardware: Hardware, *, parts: Sequence[Part] | None = None) -> Plan:
        """Return the plan of a job, as `make_plan` does; on another machine it is the same dry run."""
        key = job, tuple(parts_of(job) if parts is None else parts)
        if key not in self.plans:
            self.plans[key] = make_plan(job, hardware, parts=key[1], operators=self.operators)
        return replace(self.plans[key], hardware=hardware)


def parts_of(job: DryJob) -> Iterator[Part]:
    """Yield the parts that a run has."""
    yield from ("start-up", "first step", "steady step")
    if job.config.training.eval_iters:
        yield "evaluation"
    if job.config.checkpoint.save is not None:
        yield "save"


def constants(hardware: Hardware, rank: RankRecord) -> dict[str, int]:
    """Return the bytes of a device that no tensor accounts for, by what has them."""
    groups = sum(channel.size > 1 and key != CONTROL for key, channel in rank.trace.channels.items())
    return {
        "context": hardware.context_bytes,
        "workspaces": hardware.workspace_bytes,
        "communicators": hardware.communicator_bytes * groups,
    }


def _rank_to_json(plan: JobPlan, rank: RankRecord) -> dict[str, Any]:
    return {
        "rank": rank.trace.rank,
        "coordinates": dict(rank.trace.coordinates),
        "parameters": rank.numel,
        "constants": constants(plan.hardware, rank),
        "parts": {name: _part_to_json(rank, plan.need(rank, name), part) for name, part in rank.parts.items()},
    }


def _part_to_json(rank: RankRecord, need: Need, part: PartRecord) -> dict[str, Any]:
    line = part.line
    return {
        "peak_bytes": need.tensors,
        "at_peak": {name: part.memory.at_peak[name] for name in CATEGORIES},
        "peaks": {name: part.memory.peaks[name] for name in CATEGORIES},
        "peak_phase": phase_at_peak(part),
        "peak_module": part.unit,
        "peak_line": None if line is None else f"{line.file}:{line.line}",
        "needed_bytes": need.segments,
        "reserved_bytes": part.reserved,
        "total_bytes": need.total,
        "host": dict(part.host),
        "traffic": {
            axis: {
                name: {
                    "messages": count.calls,
                    "bytes": count.nbytes,
                    "between_nodes": between_nodes(rank, axis, name, count),
                }
                for name, count in row.items()
            }
            for axis, row in part.traffic.items()
        },
    }


def phase_at_peak(part: PartRecord) -> str:
    """Return the phase of the step in which most was alive; "" outside of one."""
    at = part.memory.peak_operation
    marks: Sequence[Any] = [mark for mark in part.memory.timeline.phases if mark.operation < max(at, 1)]
    return str(marks[-1].phase) if marks else ""


def between_nodes(rank: RankRecord, axis: str, name: str, count: Count) -> int:
    """Return the bytes of a count that cross from one node to another, where its group's traffic does.

    Of a ring over several nodes only the ranks at a node's edge send to another node, and they send there all that
    they send; a count's own `across` is that of its rank alone.
    """
    crosses = any(len(set(each.nodes)) > 1 for each in rank.trace.channels.values() if each.axis == axis)
    return count.nbytes if crosses and name in _RINGS else count.across
