"""Measures links: collectives between the processes of a job, copies between device and host, files, and overlap."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megazero.comm.interface import Collective, Communicator
from megazero.comm.metered import sent_bytes
from megazero.comm.startup import make_mesh
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.planner.calibration.measuring import GroupStopwatch
from megazero.planner.calibration.training import SmallTraining, messages_in_training
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import Link

_LONG_SECONDS = 0.05  # of a message that is repeated


def link_inside(meter: GroupStopwatch) -> Link:
    """Measure the link between the processes of a node, in groups of neighbours."""
    return _link(meter, meter.place.per_node, crosses=False)


def link_across(meter: GroupStopwatch) -> Link:
    """Measure the link between nodes, in groups of ranks that are as far apart as they can be, so that all cross.

    All groups communicate at once, and a rate is what a device has while those of its node send too.
    """
    return _link(meter, meter.place.size, crosses=True)


def _link(meter: GroupStopwatch, most: int, *, crosses: bool) -> Link:
    """Measure collectives by kind, by bytes, and by the number of ranks of a group: the divisors of `most`."""
    place = meter.place
    found: dict[str, dict[int, Curve]] = {}
    for size in (size for size in range(2, most + 1) if most % size == 0):
        scratch = FusedBuffers(2 * meter.effort.messages[-1], place.device)
        order = ("dp", "pp", "tp") if crosses else ("pp", "tp", "dp")
        layout = Topology(dp=size, tp=place.size // size, order=order)
        mesh = make_mesh(layout, place.rank, place.device, scratch)
        for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast"):
            found.setdefault(kind, {})[size] = _collective(meter, mesh.axis("dp"), kind)
        if place.device.type == "cpu":
            for kind, curve in messages_in_training(meter, size, crosses=crosses).items():
                longer = found[kind][size].points
                points = (*curve.points, *(point for point in longer if point[0] > 2 * curve.points[-1][0]))
                found[kind][size] = Curve(points)
        if size == 2:
            found["send"] = {2: _collective(meter, mesh.axis("dp"), "send")}
    if not found:
        return Link(0.0, constant(_copy_rate(meter)))
    largest = found["all_gather"][max(found["all_gather"])]
    smallest_bytes, rate = largest.points[0]
    ranks = max(found["all_gather"])
    latency = sent_bytes("all_gather", int(smallest_bytes), ranks) / rate / (ranks - 1)
    return Link(latency, constant(largest.highest), found)


def _collective(meter: GroupStopwatch, group: Communicator, kind: str) -> Curve:
    """Measure one kind of collective by the bytes of the whole tensor, in bytes that a rank sends a second.

    A message that takes long takes its bytes at the link's rate, so that none longer than the first such one is sent.
    """
    points = []
    for nbytes in meter.effort.messages:
        numel = -(-nbytes // 4 // group.size) * group.size
        run = partial(_communicate, group, kind, *torch.zeros(2, numel, device=meter.place.device).unbind())
        amount = sent_bytes(cast(Collective, kind), 4 * numel, group.size)
        seconds = meter.seconds(run)
        points.append((4.0 * numel, amount / seconds))
        if seconds > _LONG_SECONDS:
            break
    return Curve(tuple(points))


def _communicate(group: Communicator, kind: str, whole: Tensor, other: Tensor) -> None:
    mine = whole.view(group.size, -1)[group.rank]
    if kind == "all_gather":
        work = group.all_gather_into(whole, mine)
    elif kind == "reduce_scatter":
        work = group.reduce_scatter_into(mine, whole)
    elif kind == "all_to_all":
        work = group.all_to_all_into(other, whole)
    elif kind == "all_reduce":
        work = group.all_reduce(whole)
    elif kind == "broadcast":
        work = group.broadcast(whole, 0)
    else:
        work = group.send(whole, 1) if group.rank == 0 else group.receive_into(whole, 0)
    work.wait()


def _copy_rate(meter: GroupStopwatch) -> float:
    x = torch.zeros(meter.effort.messages[-1] // 4)
    y = torch.zeros_like(x)
    return x.nbytes / meter.seconds(lambda: y.copy_(x))


def link_to_host(meter: GroupStopwatch) -> Link:
    device = meter.place.device
    if device.type == "cpu":
        return Link(0.0, constant(_copy_rate(meter)))
    number = meter.effort.messages[-1] // 4
    there, here = torch.zeros(number, device=device), torch.zeros(number, pin_memory=True)
    small, at = torch.zeros(1, device=device), torch.zeros(1, pin_memory=True)
    latency = meter.seconds(lambda: at.copy_(small, non_blocking=True))
    return Link(latency, constant(there.nbytes / meter.seconds(lambda: here.copy_(there, non_blocking=True))))


def link_to_files(meter: GroupStopwatch) -> Link:
    """Measure writes of a file of the folder for temporary ones, to the device that it is on."""
    block = os.urandom(meter.effort.messages[-1])
    with tempfile.TemporaryFile() as file:

        def run() -> None:
            file.seek(0)
            file.write(block)
            file.flush()
            os.fsync(file.fileno())

        return Link(0.0, constant(len(block) / meter.seconds(run)))


def _work(meter: GroupStopwatch) -> Callable[[], object]:
    size = meter.effort.sizes[-1] // 2
    x = torch.randn(size, size, device=meter.place.device)
    return lambda: torch.mm(x, x)


def overlap_cost(meter: GroupStopwatch) -> float:
    """Measure by what share of a message's time the work beside it is delayed."""
    place = meter.place
    if place.size == 1:
        return 0.0
    mesh = make_mesh(Topology(dp=place.size), place.rank, place.device, FusedBuffers(0, place.device))
    gathering, work = mesh.gathering, _work(meter)
    whole = torch.zeros(place.size, 1 << 20, device=place.device)
    alone = meter.seconds(work)
    sent = meter.seconds(lambda: gathering.all_gather_into(whole.view(-1), whole[place.rank]).wait())
    times = max(round(2 * sent / alone), 2)

    def beside() -> None:
        gather = gathering.all_gather_into(whole.view(-1), whole[place.rank])
        for _ in range(times):
            work()
        gather.wait()

    return min(max((meter.seconds(beside) - times * alone) / sent, 0.0), 1.0)


def at_once(meter: GroupStopwatch) -> float:
    """Measure how many devices work at full speed at the same time: how much faster a training step is alone."""
    if meter.place.device.type == "cuda" or meter.place.per_node == 1:
        return float(meter.place.per_node)
    training = SmallTraining(meter.place, meter.effort.models[len(meter.effort.models) // 2])
    share = meter.seconds(training.step, alone=True) / meter.seconds(training.step)
    training.close()
    return round(min(max(share, 1 / meter.place.per_node), 1.0) * meter.place.per_node, 2)
