"""A plan as a page of text."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import MappingProxyType

import megazero
from megazero.comm.interface import FILE, HOST
from megazero.memory.ledger_figures import CATEGORIES
from megazero.planner.dry.rank import PartRecord, RankRecord
from megazero.planner.job_plan import JobPlan, between_nodes, constants, phase_at_peak
from megazero.planner.trace import Part
from megazero.units import format_bytes

_WIDTH = 34
AXES = MappingProxyType({HOST: "host memory", FILE: "file"})
_PACKAGE = Path(megazero.__file__).parent.parent


def lines(plan: JobPlan) -> Iterator[str]:
    """Yield the lines of a plan: memory, where it is fullest, traffic, and whether it fits."""
    fullest = [(rank, _fullest_part(plan, rank)) for rank in plan.ranks]
    yield from _memory(plan, fullest)
    yield from _moments(fullest)
    yield from _parts(plan)
    yield from _host(plan)
    yield from _traffic(plan)
    yield ""
    yield from verdict(plan)


def verdict(plan: JobPlan) -> Iterator[str]:
    """Yield whether the plan fits, and what binds."""
    rank, part = plan.binding
    has, needs = plan.hardware.memory_bytes, plan.need(rank, part).total
    place = f"{part} of rank {rank.trace.rank}"
    if plan.missing_bytes > 0:
        yield f"does not fit: {place} needs {format_bytes(needs)} of a device's {format_bytes(has)}"
        shares = sorted(rank.parts[part].memory.at_peak.items(), key=lambda item: -item[1])[:3]
        yield "  most is taken by " + ", ".join(f"{_name(name)} {format_bytes(nbytes)}" for name, nbytes in shares)
    elif plan.missing_host_bytes > 0:
        has = plan.hardware.host_memory_bytes
        yield f"does not fit: a node's ranks need {format_bytes(plan.host_bytes)} of its {format_bytes(has)} of memory"
    else:
        left = f"{format_bytes(-plan.missing_bytes)} are left"
        yield f"fits: {place} needs most, {format_bytes(needs)} of {format_bytes(has)}; {left}"


def _fullest_part(plan: JobPlan, rank: RankRecord) -> Part:
    return max(rank.parts, key=lambda part: plan.need(rank, part).total)


def _memory(plan: JobPlan, fullest: Sequence[tuple[RankRecord, Part]]) -> Iterator[str]:
    """Yield the table of a device's memory at its peak, a column for each rank."""
    records = [rank.parts[part] for rank, part in fullest]
    names = [f"rank {rank.trace.rank}, stage {rank.trace.coordinates['pp']}" for rank, _ in fullest]
    yield _row("a device's memory at its peak", names)
    for category in CATEGORIES:
        found = [record.memory.at_peak[category] for record in records]
        if any(found):
            yield _row(f"  {_name(category)}", map(format_bytes, found))
    needs = [plan.need(*pair) for pair in fullest]
    yield _row("  all tensors", [format_bytes(need.tensors) for need in needs])
    beyond = [need.segments - need.tensors for need in needs]
    if any(beyond):
        yield _row("  rounding and fragments", map(format_bytes, beyond))
    stated = [constants(plan.hardware, rank) for rank, _ in fullest]
    for name in stated[0]:
        if any(each[name] for each in stated):
            yield _row(f"  {name}, stated", [format_bytes(each[name]) for each in stated])
    yield _row("  in all", [format_bytes(need.total) for need in needs])


def _moments(fullest: Sequence[tuple[RankRecord, Part]]) -> Iterator[str]:
    """Yield where in the step each rank's peak is."""
    for rank, part in fullest:
        record = rank.parts[part]
        phase = phase_at_peak(record)
        words = [part, phase, f"at {record.unit}" if record.unit else "", line_of(record)]
        yield f"  peak of rank {rank.trace.rank}: {', '.join(word for word in words if word)}"


def line_of(record: PartRecord) -> str:
    """Return the file and the number of the line that a part had come to at its peak; "" if none is known."""
    if record.line is None:
        return ""
    path = Path(record.line.file)
    name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path
    return f"{name}:{record.line.line}"


def _parts(plan: JobPlan) -> Iterator[str]:
    yield ""
    yield _row("needed in each part", [f"rank {rank.trace.rank}" for rank in plan.ranks])
    for part in plan.ranks[0].parts:
        yield _row(f"  {part}", [format_bytes(plan.need(rank, part).total) for rank in plan.ranks])


def _host(plan: JobPlan) -> Iterator[str]:
    most = max((part for rank in plan.ranks for part in rank.parts.values()), key=lambda p: sum(p.host.values()))
    if sum(most.host.values()):
        yield ""
        yield _row("host memory of a rank", [format_bytes(sum(most.host.values()))])
        has = plan.hardware.host_memory_bytes
        of = f"{format_bytes(plan.host_bytes)} of {format_bytes(has)}" if has else format_bytes(plan.host_bytes)
        yield _row("  of a node's ranks", [of])
    if plan.file_bytes:
        yield _row("files of a node's ranks", [format_bytes(plan.file_bytes)])


def _traffic(plan: JobPlan) -> Iterator[str]:
    """Yield what the rank that sends most sends in a steady step, by axis and collective."""
    sending = max(plan.ranks, key=lambda rank: _sent(rank.parts["steady step"]))
    traffic = sending.parts["steady step"].traffic
    if not traffic:
        return
    yield ""
    yield _row(f"sent in a step by rank {sending.trace.rank}", ("messages", "bytes", "between nodes"))
    sums = [0, 0, 0]
    for axis, row in traffic.items():
        for name, count in row.items():
            cells = (count.calls, count.nbytes, between_nodes(sending, axis, name, count))
            if count.nbytes:
                shown = (f"{cells[0]:,}", *map(format_bytes, cells[1:]))
                yield _row(f"  {AXES.get(axis, axis)} {name.replace('_', '-')}", shown)
            if axis not in AXES and count.nbytes:
                sums = [one + other for one, other in zip(sums, cells, strict=True)]
    yield _row("  to other ranks in all", (f"{sums[0]:,}", *map(format_bytes, sums[1:])))


def _sent(part: PartRecord) -> int:
    return sum(count.nbytes for row in part.traffic.values() for count in row.values())


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<{_WIDTH}}" + "".join(f"{cell:>18}" for cell in cells)


def _name(category: str) -> str:
    return category.replace("_", " ")
