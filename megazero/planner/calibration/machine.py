"""Measures the machine that it runs on, as `hardware.py` describes one.

Every process of a job measures at the same time, so that what they share (cores, memory, links) is as busy as in
training.  On a CPU kernels, messages and the host's share are those of training steps (`training.py`), made slower by
what steps held out take beyond their prediction.  On a GPU kernels are torch's own, repeated, with the shapes of a
transformer's, a figure is the slowest process's, messages are those of the project's communicators, and the host's
share is a step of a tiny GPT, whose kernels take no time.  Bytes and operations are counted as in a dry run
(`dry/operations.py`), so that a plan costs them by measures.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megazero.comm.startup import choose_device, destroy_process_groups, join, make_mesh
from megazero.console import Console
from megazero.errors import ConfigError, Problem
from megazero.files import cannot_write, written_aside
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.launch import Launch
from megazero.parallel.threads import use_cpu_threads
from megazero.parallel.topology import Topology
from megazero.planner.calibration.links import (
    at_once,
    link_across,
    link_inside,
    link_to_files,
    link_to_host,
    overlap_cost,
)
from megazero.planner.calibration.measuring import ON_A_GPU, Effort, GroupStopwatch, Place, SmallModel, kernels_of
from megazero.planner.calibration.training import SmallTraining, held_out, kernels_in_training
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import Hardware, Matrix, to_yaml

Report = Callable[[str], None]
_TINY = SmallModel(16, 2, 16, 1, 64, layers=4)  # whose kernels take no time: what is left of its step is the host's


def calibrate(
    path: Path, launch: Launch, *, device: str = "auto", effort: Effort | None = None, is_quick: bool = False
) -> None:
    """Measure this machine with all processes of the job, and write its description to a new file on rank 0.

    is_quick: in seconds instead of minutes, more coarsely.
    Raises ConfigError, on all ranks, if the file is there already or cannot be written, or nodes differ in processes.
    """
    if path.exists() or not path.parent.is_dir():
        rule = "a calibration writes a new file into a folder that is there"
        raise ConfigError(Problem(f"--calibrate {path}", rule, "the name of a file that is not there yet"))
    if len(set(launch.nodes.ranks_per_node)) > 1:
        rule = "every node has the same number of processes, since one description stands for all nodes"
        raise ConfigError(Problem(f"--calibrate on {launch.nodes.describe()}", rule, "as many processes on every node"))
    console, chosen = Console(launch.rank), choose_device(device, launch)
    console.line(use_cpu_threads(None, launch, chosen) or f"device: {chosen}")
    join(launch, backend="auto", device=chosen, timeout_minutes=10.0)
    try:
        mesh = make_mesh(Topology(dp=launch.world_size), launch.rank, chosen, FusedBuffers(0, chosen))
        place = Place(launch.rank, launch.world_size, chosen, mesh.world, launch.ranks_per_node)
        effort = effort or (ON_A_GPU if chosen.type == "cuda" else Effort())
        found = measured(place, effort.coarse() if is_quick else effort, name=path.stem, report=console.line)
        if launch.rank == 0:
            _write(path, to_yaml(found))
        console.line(f"written: {path}; megazero plan --hardware {path} ...")
    finally:
        destroy_process_groups()


def _write(path: Path, text: str) -> None:
    try:
        with written_aside(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise cannot_write(path, error) from None


def measured(place: Place, effort: Effort, *, name: str, report: Report) -> Hardware:
    """Return the description of this machine, the same on every process; a collective call of all of them."""
    meter, device = GroupStopwatch(place, effort), place.device
    torch.manual_seed(0)
    where = f"{place.size} processes" + (f", {place.nodes.describe()}" if place.nodes.count > 1 else "")
    report(f"measuring on {device.type}, {where} at once: matrix products")
    formats = _formats(device)
    kernels: Mapping[str, Curve]
    operators: Mapping[str, Curve] = {}
    matrix = {short: _matrix(meter, dtype) for short, dtype in formats.items()}
    report("other kernels")
    if device.type == "cuda":
        kernels = {**repeated_kernels(meter, next(iter(formats.values()))), "host": constant(_host_rate(meter))}
        tiny = torch.zeros(1, device=device)
        kernel_seconds, host_seconds = meter.seconds(lambda: tiny.add_(1)), host_seconds_of_a_tiny_step(meter)
    else:
        training = kernels_in_training(meter)
        matrix["fp32"] = Matrix(matrix["fp32"].peak, training.products, training.by_order)
        kernels, operators = training.kernels, training.operators
        kernel_seconds, host_seconds = 0.0, training.host_seconds
    report("messages")
    inside = link_inside(meter)
    across = inside if place.nodes.count == 1 else link_across(meter)
    found = Hardware(
        name=name,
        source=f"megazero plan --calibrate on {where}, torch {torch.__version__}",
        device="cuda" if device.type == "cuda" else "cpu",
        devices_per_node=place.per_node,
        memory_bytes=_memory_bytes(device) // (place.per_node if device.type == "cpu" else 1),
        host_memory_bytes=_memory_bytes(torch.device("cpu")),
        matrix=matrix,
        kernels=kernels,
        links={"inside": inside, "across": across, "host": link_to_host(meter), "disk": link_to_files(meter)},
        kernel_seconds=kernel_seconds,
        host_seconds=host_seconds,
        operators=operators,
        overlap_cost=overlap_cost(meter),
        at_once=at_once(meter),
        error=meter.effort.error,
    )
    if device.type == "cuda":
        return found
    report("steps that give no rates")
    slowed = found.slowed(held_out(meter, found))
    if across is inside:
        return slowed
    return replace(slowed, links={**slowed.links, "across": across})  # no step that was held out has used it


def _formats(device: torch.device) -> dict[str, torch.dtype]:
    if device.type == "cuda":
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def _matrix(meter: GroupStopwatch, dtype: torch.dtype) -> Matrix:
    """Measure the three products of a linear layer by the cube root of their m n k: x is [2 s, s / 2], W [s, s / 2]."""
    points = []
    for size in meter.effort.sizes:
        x, weight, grad = (
            torch.randn(rows, columns, device=meter.place.device).to(dtype)
            for rows, columns in ((2 * size, size // 2), (size, size // 2), (2 * size, size))
        )

        def run(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> None:
            F.linear(x, weight)
            torch.mm(grad, weight)
            torch.mm(grad.t(), x)

        points.append((float(size), 3 * 2 * size**3 / meter.seconds(run)))
    curve = Curve(tuple(points))
    return Matrix(curve.highest, curve)


Build = Callable[[int, torch.device], Callable[[], object]]


def _sums(numel: int, device: torch.device) -> Callable[[], object]:
    x, y = torch.randn(2, numel, device=device)

    def run() -> None:
        torch.add(x, y)
        y.copy_(x)

    return run


def _functions(numel: int, device: torch.device) -> Callable[[], object]:
    x, grad = torch.randn(2, max(numel // 64, 1), 64, device=device)

    def run() -> None:
        torch.ops.aten.gelu(x, approximate="tanh")
        torch.ops.aten.gelu_backward(grad, x, approximate="tanh")

    return run


def _norms(numel: int, device: torch.device) -> Callable[[], object]:
    x, grad = torch.randn(2, max(numel // 256, 1), 256, device=device)
    weight, bias = torch.ones(256, device=device), torch.zeros(256, device=device)

    def run() -> None:
        _, mean, rstd = torch.ops.aten.native_layer_norm(x, [256], weight, bias, 1e-5)
        torch.ops.aten.native_layer_norm_backward(grad, x, [256], mean, rstd, weight, bias, [True, True, True])

    return run


def _reductions(numel: int, device: torch.device) -> Callable[[], object]:
    x = torch.randn(max(numel // 256, 1), 256, device=device)

    def run() -> None:
        torch.sum(x, dim=0)
        torch.linalg.vector_norm(x)

    return run


def _optimizer(numel: int, device: torch.device) -> Callable[[], object]:
    p, g, m, v = torch.rand(4, numel, device=device)
    step = torch.ones((), device=device)
    options: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}

    def run() -> None:
        torch._fused_adamw_([p], [g], [m], [v], [], [step], amsgrad=False, maximize=False, **options)

    return run


_BUILDERS: Mapping[str, Build] = MappingProxyType(
    {
        "memory": _sums,
        "functions": _functions,
        "norms": _norms,
        "reductions": _reductions,
        "optimizer": _optimizer,
    }
)


def repeated_kernels(meter: GroupStopwatch, dtype: torch.dtype) -> dict[str, Curve]:
    """Measure kernels by kind, each over and over: on a GPU the host runs ahead, so none can be timed in a step."""
    found = {kind: _kernels(meter, build) for kind, build in _BUILDERS.items()}
    return {**found, "attention": _attention(meter, dtype)}


def _kernels(meter: GroupStopwatch, build: Build) -> Curve:
    """Measure bytes/s of kernels by the bytes that each of them moves."""
    points = []
    for nbytes in meter.effort.nbytes:
        run = build(max(nbytes // 12, 1), meter.place.device)
        found = kernels_of(run)
        total = sum(one.read_bytes + one.written_bytes for one in found)
        points.append((total / len(found), total / meter.seconds(run)))
    return Curve(tuple(points))


def _attention(meter: GroupStopwatch, dtype: torch.dtype) -> Curve:
    """Measure FLOP/s of causal attention, forward and backward together, by the tokens of a sequence."""
    points = []
    for length in meter.effort.lengths:
        shape = (3, max(meter.effort.lengths[-1] // length, 1), 4, length, 32)
        q, k, v = torch.randn(shape, device=meter.place.device, dtype=dtype)
        for part in (q, k, v):
            part.requires_grad_()

        def run(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> None:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(mixed, (q, k, v), mixed.detach())

        flops = sum(one.flops for one in kernels_of(run))
        points.append((float(length), flops / meter.seconds(run)))
    return Curve(tuple(points))


def _host_rate(meter: GroupStopwatch) -> float:
    """Measure bytes/s of an update in host memory."""
    run = _optimizer(1 << 22, torch.device("cpu"))
    total = sum(one.read_bytes + one.written_bytes for one in kernels_of(run))
    return total / meter.seconds(run)


def host_seconds_of_a_tiny_step(meter: GroupStopwatch) -> float:
    """Measure what a kernel costs beside its own time: a tiny step's seconds by the number of its kernels."""
    training = SmallTraining(meter.place, _TINY)
    training.step()
    number = len(kernels_of(training.step))
    seconds = meter.seconds(training.step) / number
    training.close()
    return seconds


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
