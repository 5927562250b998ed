"""Advice as a page of text, at most 100 columns wide."""

import shlex
from collections.abc import Iterator, Sequence

from megazero.planner.advice.advise import Advice
from megazero.planner.advice.choices import flags
from megazero.planner.advice.search import Found, Search
from megazero.planner.hardware import Hardware
from megazero.units import counted, format_bytes

_WIDTH = 100
_LEGEND = (
    "t: tensor parallel, p: pipeline stages (/layers of a chunk; zb: zero-bubble), z: ZeRO stage,",
    "m: micro-batch; full, selective: recomputed; host, host-params: optimizer states, parameters in",
    "host memory; mics: ranks of a shard group; hpz: of a secondary partition; qw, qg: weights,",
    "gradients sent as integers, which rounds them (*)",
)


def lines(advice: Advice) -> Iterator[str]:
    """Yield the lines of advice."""
    search, hardware = advice.search, advice.search.hardware
    yield f"for {hardware.name}, {advice.nodes.describe()}, global batch {search.run.samples}"
    if search.run.left_out:
        yield from _wrapped(["left out, as the advisor chooses their like:", *search.run.left_out], "  ")
    yield (
        f"{advice.layouts:,} layouts; the least memory of {advice.in_memory:,} fits;"
        f" {counted(search.runs, 'layout')} run dry"
    )
    if advice.outcome.left:
        yield f"  {advice.outcome.left:,} that might be faster than the last below were not run dry"
    yield ""
    yield from _fastest(advice) if advice.fits else _nothing(advice)


def _fastest(advice: Advice) -> Iterator[str]:
    search = advice.search
    yield f"    {'layout':<34}{'nodes':>6}{'step':>9}{'tokens/s':>11}{'MFU':>7}{'memory':>10}  binds"
    for number, found in enumerate(advice.outcome.found, start=1):
        yield _row(f"{number:>2}", found)
    yield from (f"    {line}" for line in _LEGEND)
    yield ""
    for gain in advice.gains:
        share = 100 * (1 - gain.seconds / advice.outcome.found[0].measured.seconds)
        yield f"with {gain.changed}: {_seconds(gain.seconds)}, {share:.0f} % less ({gain.found.choice.describe()})"
    if advice.smallest is not None:
        small = advice.smallest
        yield (
            f"fewest nodes found: {small.nodes.count}, with {small.choice.describe()},"
            f" {_seconds(small.measured.seconds)} a step"
        )
    yield "the checkpoints of any of these layouts resume at any other: --load FOLDER"
    for number, found in enumerate(advice.outcome.found, start=1):
        yield ""
        yield from command_lines(search, found, f"{number}: ")


def _row(name: str, found: Found) -> str:
    measured = found.measured
    layout = found.choice.describe() + " *" * found.choice.rounds
    return (
        f"{name:<4}{layout:<34}{found.nodes.count:>6}{_seconds(measured.seconds):>9}"
        f"{measured.tokens / measured.seconds:>11,.0f}{100 * measured.mfu:>6.1f}%{format_bytes(measured.total):>10}"
        f"  {measured.step.binding}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _nothing(advice: Advice) -> Iterator[str]:
    hardware = advice.search.hardware
    if advice.closest is not None:
        yield from limit(advice.closest, hardware)
    yield from remedy(advice.search, advice.near)


def limit(found: Found, hardware: Hardware) -> Iterator[str]:
    """Yield what binds where a layout does not fit: which category on which device."""
    measured = found.measured
    if measured.total > hardware.memory_bytes:
        rank, part = measured.place
        yield (
            f"does not fit: {found.choice.describe()} needs {format_bytes(measured.total)} of a device's"
            f" {format_bytes(hardware.memory_bytes)}, rank {rank} in {part};"
        )
        shares = sorted(measured.memory.items(), key=lambda item: -item[1])[:3]
        yield "  most is " + ", ".join(f"{name.replace('_', ' ')} {format_bytes(nbytes)}" for name, nbytes in shares)
    else:
        yield (
            f"does not fit: {found.choice.describe()} needs {format_bytes(measured.host_bytes)} of a node's"
            f" {format_bytes(hardware.host_memory_bytes)} of host memory"
        )


def remedy(search: Search, near: Found | None) -> Iterator[str]:
    """Yield the nearest layout that fits, and its command."""
    if near is None:
        yield "no layout was found that fits, on these nodes or more"
        return
    given = search.run.given._asdict()
    changed = [
        f"--{name.replace('_', '-')} {value}" for name, value in near.choice._asdict().items() if value != given[name]
    ]
    yield from _wrapped([f"nearest that fits: {near.nodes.describe()},", *(changed or ["the same settings"])], "  ")
    yield (
        f"  {_seconds(near.measured.seconds)} a step, {format_bytes(near.measured.total)} of a device's"
        f" {format_bytes(search.hardware.memory_bytes)}"
    )
    yield from command_lines(search, near, "")


def command_lines(search: Search, found: Found, name: str) -> Iterator[str]:
    """Yield the command that starts a layout, for a shell: its lines end in backslashes.  name: in front, a comment."""
    yield f"# {name}{found.choice.describe()}, {found.nodes.describe()}"
    parts: list[str] = ["megazero pretrain"]
    for word in map(shlex.quote, flags(search.run, found.choice)):
        if word.startswith("--"):
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    *firsts, last = _wrapped(parts, "    ", width=_WIDTH - 2)
    yield from (f"{line} \\" for line in firsts)
    yield last


def _wrapped(parts: Sequence[str], indent: str, *, width: int = _WIDTH) -> Iterator[str]:
    """Yield parts in lines of at most `width`, with blanks between; all lines but the first begin with `indent`."""
    line = parts[0]
    for part in parts[1:]:
        if len(line) + 1 + len(part) > width:
            yield line
            line = indent + part
        else:
            line += f" {part}"
    yield line
