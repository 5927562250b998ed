"""The seconds that a kernel, a message and a copy take on a machine, each by itself.  Pure functions.

A kernel takes what its products take at their rate, or what its bytes take at the memory's, whichever is longer (the
*roofline*, Williams et al. 2009), and never less than the shortest kernel.  A message takes a latency for every hop and
its bytes at the rate of the slowest link that they pass (alpha-beta), unless the machine has measured that collective.

    ring          n - 1 hops for a gather or a scatter of N bytes, each rank sends N (n-1)/n; twice that for an
                  all-reduce, which takes 2 log2 n hops of a tree where it is small (NCCL)
    exchange      n - 1 messages from every rank to every other one, at once (gloo, `comm/process_group.py`)
    hierarchical  a ring inside each node, and one across nodes of the ranks with the same place (`comm/two_hops.py`)

A ring over k devices of each node passes between nodes over the links of all k of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from megazero.planner.hardware import Hardware, Link
from megazero.planner.trace import Order

Algorithm = Literal["ring", "exchange", "hierarchical"]

# By torch's names of number formats.
_FORMATS = MappingProxyType(
    {
        **{"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"},
        **{"float8_e4m3fn": "fp8", "float8_e5m2": "fp8"},
    }
)
_BATCHED = ("bmm", "baddbmm")
# Kernels by kind (`hardware.KERNELS`), by a part of their names; the first that fits counts.
_KINDS = (
    ("optimizer", ("_fused_adam", "_fused_sgd", "_foreach")),
    ("norms", ("layer_norm", "rms_norm")),
    (
        "functions",
        ("gelu", "softmax", "exp", "tanh", "silu", "sigmoid", "dropout", "log", "erf", "pow", "bernoulli", "rsqrt"),
    ),
    ("reductions", ("sum", "mean", "norm", "amax", "max", "min", "isfinite", "all")),
)
# Of attention's own rate there may be none; then it is this share of that of products: softmax stands between the two.
_ATTENTION_SHARE = 0.55


class Kernel(Protocol):
    """The properties of a kernel that its cost depends on; `trace.Operation` has it."""

    @property
    def name(self) -> str: ...
    @property
    def inputs(self) -> Sequence["Shaped"]: ...
    @property
    def flops(self) -> int: ...
    @property
    def math(self) -> str: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...
    @property
    def order(self) -> Order: ...


class Shaped(Protocol):
    """A tensor's shape."""

    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Group:
    """The ranks of a communicator: how many, on how many nodes, and the most on one of them."""

    size: int
    nodes: int = 1

    def __post_init__(self) -> None:
        assert 1 <= self.nodes <= self.size, f"{self.size} ranks on {self.nodes} nodes"

    @property
    def per_node(self) -> int:
        """The ranks of a node, the fewest of all nodes if they differ."""
        return self.size // self.nodes


def kind_of(name: str) -> str:
    """Return the kind of a kernel that is no product, a key of `hardware.KERNELS`."""
    return next((kind for kind, parts in _KINDS if any(part in name for part in parts)), "memory")


def kernel_seconds(hardware: Hardware, kernel: Kernel, *, is_fused: bool = False) -> float:
    """Return the seconds of a kernel on the device.

    is_fused: its block is compiled, so that a part of the bytes of an element-wise kernel stays in registers.
    """
    nbytes = kernel.read_bytes + kernel.written_bytes
    if kernel.flops:
        return max(products_seconds(hardware, kernel), bytes_seconds(hardware, "memory", nbytes))
    if is_fused:  # no launch of its own either
        return hardware.fused * bytes_seconds(hardware, kind_of(kernel.name), nbytes)
    own = hardware.operators.get(kernel.name)
    if own is not None:
        return max(nbytes / own.at(nbytes), hardware.kernel_seconds) if nbytes else hardware.kernel_seconds
    return max(bytes_seconds(hardware, kind_of(kernel.name), nbytes), hardware.kernel_seconds)


def bytes_seconds(hardware: Hardware, kind: str, nbytes: float) -> float:
    """Return the seconds of so many bytes through memory, by a kind of kernel."""
    return nbytes / hardware.kernel_rate(kind).at(nbytes) if nbytes else 0.0


def products_seconds(hardware: Hardware, kernel: Kernel) -> float:
    """Return the seconds of the products of a kernel: of matrices, of a batch of them, or of attention."""
    wanted = _FORMATS.get(kernel.math, kernel.math)
    if "attention" in kernel.name:
        shape = kernel.inputs[0].shape
        rate = attention_rate(hardware, wanted, length=shape[-2], width=shape[-1])
        return max(kernel.flops / rate, hardware.kernel_seconds)
    # A batch fills a GPU as one product of as much work does.
    size = product_size(kernel, batch_is_one=hardware.is_asynchronous)
    rate = hardware.matrix[hardware.format_of(wanted)].at(size, kernel.order)
    return max(kernel.flops / rate, hardware.kernel_seconds)


def product_size(kernel: Kernel, *, batch_is_one: bool = False) -> float:
    """Return the cube root of m n k of a product, or of each in a batch unless that counts as one."""
    batch = kernel.inputs[-1].shape[0] if kernel.name in _BATCHED and not batch_is_one else 1
    return float((kernel.flops / 2 / max(batch, 1)) ** (1 / 3))


def attention_rate(hardware: Hardware, wanted: str, *, length: int, width: int) -> float:
    """Return the FLOP/s of attention over so many tokens, in heads of a width."""
    if "attention" in hardware.kernels:
        return hardware.kernels["attention"].at(length)
    matrix = hardware.matrix[hardware.format_of(wanted)]
    return _ATTENTION_SHARE * matrix.rates.at((length * length * width) ** (1 / 3) * 4)


def collective_seconds(
    hardware: Hardware, collective: str, nbytes: float, group: Group, algorithm: Algorithm | None = None
) -> float:
    """Return the seconds of a collective over a whole tensor of `nbytes`, all ranks beginning together.

    collective: as `trace.Message` names it.  algorithm: by default what the machine's backend does: rings on GPUs,
    exchanges on CPUs.
    """
    if group.size == 1:
        return 0.0
    inside, across = hardware.links["inside"], hardware.links["across"]
    algorithm = algorithm or ("ring" if hardware.is_asynchronous else "exchange")
    if collective in ("send", "receive"):
        link = across if group.nodes > 1 else inside
        return _measured(link, "send", nbytes, 2) or link.latency_seconds + nbytes / link.rates.at(max(nbytes, 1))
    if collective in ("scalars", "barrier"):
        collective = "all_reduce"
    measured = _measured(across if group.nodes > 1 else inside, collective, nbytes, group.size)
    if measured is not None and algorithm != "hierarchical":
        return measured
    if algorithm == "hierarchical" and 1 < group.nodes < group.size:
        return _hierarchical(hardware, collective, nbytes, group)
    hops_across = min(group.nodes, group.size - 1) if group.nodes > 1 else 0
    hops_inside = group.size - 1 - hops_across
    latency = hops_inside * inside.latency_seconds + hops_across * across.latency_seconds
    share = nbytes * (group.size - 1) / group.size
    if collective == "all_to_all":
        return latency + _exchanged(hardware, nbytes, group)
    rate = _ring_rate(hardware, nbytes, group)
    if collective != "all_reduce":
        return latency + (nbytes if collective == "broadcast" else share) / rate
    ring = 2 * latency + 2 * share / rate
    if algorithm == "exchange":
        return ring
    steps = math.log2(group.per_node) * inside.latency_seconds + math.log2(group.nodes) * across.latency_seconds
    return min(ring, 2 * steps + 2 * nbytes / rate)


def _measured(link: Link, collective: str, nbytes: float, size: int) -> float | None:
    """Return the seconds of a collective that the machine has measured with so many ranks; None if it has not."""
    curve = link.collectives.get(collective, {}).get(size)
    if curve is None:
        return None
    nbytes = max(nbytes, 1.0)
    share = nbytes * (size - 1) / size
    sent = {"all_reduce": 2 * share, "send": nbytes, "broadcast": nbytes}.get(collective, share)
    at_least = curve.points[0][0]
    if nbytes < at_least:  # below the smallest measured, a message costs its latency alone
        return sent / nbytes * at_least / curve.at(at_least)
    return sent / curve.at(nbytes)


def _ring_rate(hardware: Hardware, nbytes: float, group: Group) -> float:
    """Return the bytes/s of a ring: the slower of a link inside and of all links that leave a node together."""
    rates = []
    if group.per_node > 1 or group.nodes == 1:
        rates.append(hardware.links["inside"].rates.at(max(nbytes, 1)))
    if group.nodes > 1:
        rates.append(group.per_node * hardware.links["across"].rates.at(max(nbytes, 1)))
    return min(rates)


def _exchanged(hardware: Hardware, nbytes: float, group: Group) -> float:
    """Return the seconds of the bytes of an all-to-all: those inside and those across move beside each other."""
    within = nbytes * (group.per_node - 1) / group.size / hardware.links["inside"].rates.at(max(nbytes, 1))
    beyond = nbytes * (group.size - group.per_node) / group.size
    return max(within, beyond / hardware.links["across"].rates.at(max(nbytes, 1)) if group.nodes > 1 else 0.0)


def _hierarchical(hardware: Hardware, collective: str, nbytes: float, group: Group) -> float:
    """Return the seconds of two hops: between nodes every rank moves its place's share, inside a node all of it."""
    inner, outer = Group(group.per_node), Group(group.nodes, group.nodes)
    halves = ("reduce_scatter", "all_gather") if collective == "all_reduce" else (collective,)
    return sum(
        collective_seconds(hardware, half, nbytes, inner, "ring")
        + collective_seconds(hardware, half, nbytes / group.per_node, outer, "ring")
        for half in halves
    )


def copy_seconds(hardware: Hardware, nbytes: float) -> float:
    """Return the seconds of a copy between a device and host memory."""
    link = hardware.links["host"]
    return link.latency_seconds + nbytes / link.rates.at(max(nbytes, 1))


def file_seconds(hardware: Hardware, nbytes: float) -> float:
    """Return the seconds of a write to a file, or a read."""
    link = hardware.links["disk"]
    return link.latency_seconds + nbytes / link.rates.at(max(nbytes, 1))


def group_of(nodes: tuple[int, ...]) -> Group:
    """Return the group whose ranks are on these nodes."""
    return Group(len(nodes), len(set(nodes)))
