"""Descriptions of machines: how fast a device computes and how fast its links carry bytes.  Pure.

A *rate* is a number, or a list of pairs [size, rate] between which `curves.py` interpolates: of matrix products in
FLOP/s by the cube root of m n k, of memory and links in bytes/s by bytes.  The machines with a name are in
`machines.py`; any other one is a YAML file of the same fields, as `megazero plan --calibrate FILE.yaml` writes it:

    device: cuda
    devices_per_node: 8
    memory_bytes: 80e9
    matrix: {bf16: {peak: 312e12, rates: [[512, 30e12], [4096, 230e12]]}}
    memory: {rates: 1.7e12}
    links: {inside: {latency_seconds: 4e-6, rates: 230e9}, across: {latency_seconds: 8e-6, rates: 22e9}}

Numbers follow the one grammar of values (`megazero/config/values.py`); what is left out has the value of `Hardware`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import yaml

from megazero.config.fields import FieldInfo, by_name, parameter
from megazero.config.values import InvalidValue, Location, as_number, coerce, unknown, violation
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.parallel.nodes import Nodes
from megazero.planner.curves import Curve, constant
from megazero.planner.trace import Order

LinkKind = Literal["inside", "across", "host", "disk"]
LINKS: Mapping[LinkKind, str] = MappingProxyType(
    {
        "inside": "between devices of a node",
        "across": "between nodes, one device's share",
        "host": "between a device and host memory",
        "disk": "between host memory and files, one device's share",
    }
)
FORMATS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
# Kinds of kernels that are no matrix products, with a rate in bytes/s of their own; "memory" stands for the others.
KERNELS: Mapping[str, str] = MappingProxyType(
    {
        "memory": "copies and sums",
        "functions": "exponentials, gelu and the like",
        "norms": "layer norms, backward too",
        "reductions": "sums over an axis",
        "attention": "attention, in FLOP/s of its two products by tokens of a sequence",
        "optimizer": "a fused update",
        "host": "what the host computes itself, one device's share of its memory",
    }
)
COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")
_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Matrix:
    """Matrix products in one number format: the peak by which MFU is counted, FLOP/s, and the rates by size.

    by_order: the rates where the first factor lies in memory by columns, by `trace.Order`; the same where it has none.
    """

    peak: float
    rates: Curve
    by_order: Mapping[str, Curve] = field(default_factory=lambda: _NONE)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """All its rates."""
        return (self.rates, *self.by_order.values())

    def at(self, size: float, order: Order = "rows") -> float:
        """Return the rate of a product by the cube root of m n k, and the order of its first factor in memory."""
        return self.by_order.get(order, self.rates).at(size)

    def times(self, factor: float) -> "Matrix":
        """Return the same with every rate multiplied, but for the peak."""
        by_order = {order: curve.times(factor) for order, curve in self.by_order.items()}
        return Matrix(self.peak, self.rates.times(factor), by_order)


@dataclass(frozen=True)
class Link:
    """A link, one way: the seconds of a message without bytes, and bytes/s by the bytes of a message.

    collectives: seconds of whole collectives as they were measured, {kind: {ranks: curve}}: bytes that a rank sends a
    second, by the bytes of the whole tensor.  Where there are none, `costs.py` has a formula.
    """

    latency_seconds: float
    rates: Curve
    collectives: Mapping[str, Mapping[int, Curve]] = field(default_factory=lambda: _NONE)

    def times(self, factor: float) -> "Link":
        """Return the link that is so many times as fast."""
        collectives = {
            kind: {ranks: curve.times(factor) for ranks, curve in by_ranks.items()}
            for kind, by_ranks in self.collectives.items()
        }
        return Link(self.latency_seconds / factor, self.rates.times(factor), collectives)


@dataclass(frozen=True)
class Hardware:
    """One machine, as one of its devices finds it while all of them work.

    source: where the figures come from.  devices_per_node: processes of a node, where it has no GPUs.
    memory_bytes: of a device; host_memory_bytes: of a node.
    context_bytes, workspace_bytes, communicator_bytes: what a process has of its device beside tensors: for its context
    and kernels, for libraries' workspaces, and for every group of ranks that it communicates in.
    watts: of a device and its share of the node.
    kernel_seconds: the shortest kernel.  host_seconds: what the host needs to issue one, which is hidden where the
    device is behind; on a CPU it never is.  link_wait_seconds: what a host needs to begin and to wait for a message.
    matrix: by number format.  kernels: bytes/s of the others by `KERNELS`.
    fused: the share of the bytes of element-wise kernels that is left where blocks are compiled.
    links: by `LINKS`.
    operators: those with rates of their own, by name as `trace.Operation` has it, in bytes/s as their kinds have them.
    overlap_cost: the share of a message's time by which it delays what the device computes beside it: 0 to 1.
    at_once: the devices of a node that can work at full speed at the same time: fewer than there are where processes
    share cores.
    held_out: by how many times kernels, the host and messages between devices are slower here than measured one by
    one, since steps that gave no rates took so many times what these had predicted.
    error: the relative error that a predicted step is expected to have, two times out of three.
    """

    name: str
    source: str
    device: Literal["cpu", "cuda"]
    devices_per_node: int
    memory_bytes: int
    matrix: Mapping[str, Matrix]
    kernels: Mapping[str, Curve]
    links: Mapping[str, Link]
    host_memory_bytes: int = 0
    context_bytes: int = 0
    workspace_bytes: int = 0
    communicator_bytes: int = 0
    watts: float = 0.0
    kernel_seconds: float = 0.0
    host_seconds: float = 0.0
    link_wait_seconds: float = 0.0
    fused: float = 1.0
    operators: Mapping[str, Curve] = field(default_factory=lambda: _NONE)
    overlap_cost: float = 0.0
    at_once: float = 0.0
    held_out: float = 1.0
    error: float = 0.3

    @property
    def is_asynchronous(self) -> bool:
        """True if the host issues kernels ahead of the device."""
        return self.device == "cuda"

    def nodes(self, world_size: int) -> Nodes:
        """Return the nodes of a job of so many ranks; the last one may have fewer than the others."""
        full, rest = divmod(world_size, self.devices_per_node)
        return Nodes((self.devices_per_node,) * full + (rest,) * (rest > 0))

    def kernel_rate(self, kind: str) -> Curve:
        """Return the rates of a kind of kernel; those of memory where it has none of its own."""
        return self.kernels.get(kind, self.kernels["memory"])

    def format_of(self, wanted: str) -> str:
        """Return the number format whose rates stand for the wanted one: itself, or the next wider that there are."""
        if wanted in self.matrix:
            return wanted
        wider = {"fp8": ("bf16", "fp16"), "bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "tf32": ("fp32",)}
        return next((name for name in wider.get(wanted, ()) if name in self.matrix), min(self.matrix, key=_slowness))

    def peak(self, wanted: str) -> float:
        """Return the peak in FLOP/s of products in a number format."""
        return self.matrix[self.format_of(wanted)].peak

    def speed(self, num_working: int) -> float:
        """Return the speed of a device while so many of its node work, relative to all of them."""
        at_once = self.at_once or self.devices_per_node
        everyone = max(self.devices_per_node / at_once, 1.0)
        return everyone / max(min(num_working, self.devices_per_node) / at_once, 1.0)

    def at_speed(self, speed: float) -> "Hardware":
        """Return the machine whose devices compute so many times as fast."""
        if speed == 1.0:
            return self
        return replace(
            self,
            matrix={name: one.times(speed) for name, one in self.matrix.items()},
            kernels={kind: curve.times(speed) for kind, curve in self.kernels.items()},
            operators={name: curve.times(speed) for name, curve in self.operators.items()},
            host_seconds=self.host_seconds / speed,
        )

    def slowed(self, times: float) -> "Hardware":
        """Return the machine on which kernels, the host and messages take so many times as long, as `held_out`."""
        links = {kind: self.links[kind].times(1 / times) for kind in ("inside", "across")}
        return replace(self.at_speed(1 / times), links={**self.links, **links}, held_out=self.held_out * times)


def _slowness(name: str) -> int:
    return FORMATS.index(name) if name in FORMATS else len(FORMATS)


_SCALARS: Mapping[str, FieldInfo] = by_name(
    parameter("name", "str", "", optional=True),
    parameter("source", "str", "", optional=True),
    parameter("device", "str", None, choices=("cpu", "cuda")),
    parameter("devices_per_node", "int", None, ge=1, le=1 << 16),
    parameter("memory_bytes", "int", None, ge=1),
    parameter("host_memory_bytes", "int", 0, ge=0),
    parameter("context_bytes", "int", 0, ge=0),
    parameter("workspace_bytes", "int", 0, ge=0),
    parameter("communicator_bytes", "int", 0, ge=0),
    parameter("watts", "float", 0.0, ge=0),
    parameter("kernel_seconds", "float", 0.0, ge=0, lt=1),
    parameter("host_seconds", "float", 0.0, ge=0, lt=1),
    parameter("link_wait_seconds", "float", 0.0, ge=0, lt=1),
    parameter("fused", "float", 1.0, gt=0, le=1),
    parameter("overlap_cost", "float", 0.0, ge=0, le=1),
    parameter("at_once", "float", 0.0, ge=0),
    parameter("held_out", "float", 1.0, gt=0),
    parameter("error", "float", 0.3, gt=0, lt=1),
)
_RATE = parameter("rates", "float", None, gt=0)
_LATENCY = parameter("latency_seconds", "float", None, ge=0, lt=60)
_SECTIONS = ("matrix", "kernels", "operators", "links")


class _Reader:
    """Reads one description; collects the problems of all its values."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def number(self, at: Location, info: FieldInfo, values: Mapping[str, Any]) -> Any:
        """Return the value of a key, or its default."""
        key = at.key(info.name)
        if info.name not in values:
            if info.required:
                self.problems.append(Problem(f"{key} is missing", "a description of a machine has it", info.legal))
            return info.default
        try:
            return coerce(info, values[info.name])
        except InvalidValue:
            self.problems.append(violation(key.quote(values[info.name]), key.path, info, values[info.name]))
            return info.default

    def mapping(self, at: Location, value: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
        """Return a mapping with known keys only."""
        if not isinstance(value, Mapping):
            self.problems.append(Problem(at.quote(value), f"{at.path} is a mapping", f"{at.path}: {{{known[0]}: ...}}"))
            return {}
        found = {str(name): item for name, item in value.items()}
        self.problems += [unknown(at.key(name), found[name], known) for name in found if name not in known]
        return {name: item for name, item in found.items() if name in known}

    def rates(self, at: Location, value: Any) -> Curve:
        """Return a curve from a number or a list of pairs."""
        rule = "rates are one number above 0, or pairs [size, rate] of such numbers, the sizes growing"
        pairs = value if isinstance(value, (list, tuple)) else [[1.0, value]]
        sound = [(size, rate) for size, rate in map(_point, pairs) if size > 0 and rate > 0]
        sizes = [size for size, _ in sound]
        if not sound or len(sound) < len(pairs) or sizes != sorted(set(sizes)):
            self.problems.append(Problem(at.quote(value), rule, "1e12, [[1024, 2e11], [4096, 1e12]]"))
            return constant(1.0)
        return Curve(tuple(sound))

    def link(self, at: Location, value: Any) -> Link:
        values = self.mapping(at, value, ("latency_seconds", "rates", "collectives"))
        latency = self.number(at, _LATENCY, values)
        measured: dict[str, dict[int, Curve]] = {}
        below = at.key("collectives")
        for kind, by_ranks in self.mapping(below, values.get("collectives", {}), COLLECTIVES).items():
            if not isinstance(by_ranks, Mapping) or not all(_is_group(ranks) for ranks in by_ranks):
                rule = "the rates of a collective are a mapping from numbers of ranks, 2 or more"
                self.problems.append(Problem(below.key(kind).quote(by_ranks), rule, f"{kind}: {{2: 1e9}}"))
                continue
            at_kind = below.key(kind)
            measured[kind] = {int(r): self.rates(at_kind.key(str(r)), rates) for r, rates in by_ranks.items()}
        return Link(latency or 0.0, self.required_rates(at, values), measured)

    def required_rates(self, at: Location, values: Mapping[str, Any]) -> Curve:
        if "rates" in values:
            return self.rates(at.key("rates"), values["rates"])
        self.problems.append(Problem(f"{at.key('rates')} is missing", "a description of a machine has it", _RATE.legal))
        return constant(1.0)

    def matrix(self, at: Location, value: Any) -> Matrix:
        values = self.mapping(at, value, ("peak", "rates", "by_order"))
        curve = self.required_rates(at, values)
        below = at.key("by_order")
        orders = self.mapping(below, values.get("by_order", {}), get_args(Order))
        by_order = {order: self.rates(below.key(order), rates) for order, rates in orders.items()}
        peak = parameter("peak", "float", curve.highest, gt=0)
        return Matrix(self.number(at, peak, values), curve, by_order)


def _point(pair: Any) -> tuple[float, float]:
    """Return a pair of numbers; (0, 0) for what is none."""
    numbers = list(map(as_number, pair)) if isinstance(pair, (list, tuple)) else []
    size, rate = numbers if len(numbers) == 2 else (None, None)
    return float(size or 0), float(rate or 0)


def _is_group(ranks: Any) -> bool:
    number = as_number(ranks)
    return number is not None and number == int(number) >= 2


def read_hardware(values: Mapping[str, Any], *, origin: str) -> Hardware:
    """Return the machine that a mapping describes; raise ConfigError with all problems.  origin: its file."""
    reader, top = _Reader(), Location(origin)
    found = reader.mapping(top, values, (*_SCALARS, *_SECTIONS))
    operators = found.get("operators")
    named = tuple(map(str, operators)) if isinstance(operators, Mapping) else ("gelu",)
    sections = {
        name: reader.mapping(top.key(name), found.get(name, {}), known)
        for name, known in zip(_SECTIONS, (FORMATS, tuple(KERNELS), named, tuple(LINKS)), strict=True)
    }
    for name, needed in (("matrix", FORMATS), ("kernels", ("memory",)), ("links", ("inside",))):
        given = found.get(name, {})
        if isinstance(given, Mapping) and (not given if name == "matrix" else needed[0] not in given):
            path = f"{name}.{'bf16' if name == 'matrix' else needed[0]}"
            rule = "a description of a machine has it"
            reader.problems.append(Problem(f"{top.key(path)} is missing", rule, ", ".join(needed)))
    scalars = {name: reader.number(top, info, found) for name, info in _SCALARS.items()}
    at = {name: top.key(name) for name in _SECTIONS}
    matrix = {name: reader.matrix(at["matrix"].key(name), value) for name, value in sections["matrix"].items()}
    kernels, own = (
        {name: reader.rates(at[section].key(name), value) for name, value in sections[section].items()}
        for section in ("kernels", "operators")
    )
    links = {name: reader.link(at["links"].key(name), value) for name, value in sections["links"].items()}
    raise_problems(ConfigError, reader.problems)
    scalars["name"] = scalars["name"] or origin
    scalars["source"] = scalars["source"] or origin
    links = {kind: links.get(kind, links["inside"]) for kind in LINKS}
    return Hardware(matrix=matrix, kernels=kernels, operators=own, links=links, **scalars)


def to_yaml(hardware: Hardware) -> str:
    """Return the description as a YAML text, from which `read_hardware` makes an equal one."""
    plain = dict(_plain(hardware))
    return yaml.safe_dump(plain, sort_keys=False, width=120, default_flow_style=None)


def _plain(hardware: Hardware) -> Iterator[tuple[str, Any]]:
    for each in fields(hardware):
        value = getattr(hardware, each.name)
        if each.name == "matrix":
            value = {name: _matrix(one) for name, one in value.items()}
        elif each.name in ("kernels", "operators"):
            value = {name: _rates(curve) for name, curve in value.items()}
        elif each.name == "links":
            value = {name: _link(link) for name, link in value.items()}
        yield each.name, value


def _matrix(matrix: Matrix) -> dict[str, Any]:
    plain: dict[str, Any] = {"peak": matrix.peak, "rates": _rates(matrix.rates)}
    if matrix.by_order:
        plain["by_order"] = {order: _rates(curve) for order, curve in matrix.by_order.items()}
    return plain


def _link(link: Link) -> dict[str, Any]:
    plain: dict[str, Any] = {"latency_seconds": link.latency_seconds, "rates": _rates(link.rates)}
    if link.collectives:
        plain["collectives"] = {
            kind: {ranks: _rates(curve) for ranks, curve in by_ranks.items()}
            for kind, by_ranks in link.collectives.items()
        }
    return plain


def _rates(curve: Curve) -> list[list[float]] | float:
    return curve.points[0][1] if len(curve.points) == 1 else [list(point) for point in curve.points]
