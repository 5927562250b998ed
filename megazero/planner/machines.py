"""The machines that have a name: `megazero plan --hardware dgx-h100`.

Peaks, memory, links and watts are those of the makers' data sheets, dense and one way:

    dgx2-v100   NVIDIA DGX-2: 16 V100-SXM3-32GB, 125 TFLOP/s fp16, 0.9 TB/s, NVSwitch 150 GB/s, 8 x 100 Gbit/s, 10 kW
    dgx-a100    NVIDIA DGX A100 640GB: 8 A100-SXM-80GB, 312 TFLOP/s, 2.04 TB/s, 300 GB/s, 8 x 200 Gbit/s, 6.5 kW
    dgx-h100    NVIDIA DGX H100: 8 H100-SXM-80GB, 989 TFLOP/s, 3.35 TB/s, 450 GB/s, 8 x 400 Gbit/s, 10.2 kW
    h200        the same node with H200-SXM-141GB: 4.8 TB/s
    gb200       NVIDIA GB200 NVL72: 72 Blackwell GPUs of one NVLink domain, which is the node here; 2,500 TFLOP/s,
                186 GB, 8 TB/s, 900 GB/s, 72 x 400 Gbit/s, 120 kW
    cpu         two processes on two cores of a small virtual machine (AMD EPYC), a thread each; rounded from what
                `megazero plan --calibrate` found on one that did other work too, so calibrate your own

What a kernel reaches of them is an estimate of this project, the same for every model and layout: products come to a
share of the peak that grows with their size, up to what large ones reach in public measurements (790 TFLOP/s of bf16
at 8192^3 on an H200, about 100 on a V100 and 270 on an A100); memory to nine tenths of its bandwidth, NCCL to about
eight tenths of a link's.  Latencies are those of NCCL's rings: microseconds a hop.  Hence the wide error.  Of a
device's memory CUDA's context and loaded kernels take about half a gigabyte, a communicator of NCCL's about a tenth,
and cuBLAS's workspace in PyTorch 8 MiB, from Hopper on 32 MiB.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megazero.config.yaml_file import read_nested
from megazero.errors import ConfigError, Problem
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import Hardware, Link, Matrix, read_hardware

GB = 1e9
TFLOPS = 1e12
_COMMUNICATOR = 100 * 10**6
# cuBLAS's, for forward's thread and for backward's; a Hopper's is larger.
_WORKSPACE, _LARGE_WORKSPACE = 2 * (8 << 20), 2 * (32 << 20)
_DATA_SHEET = "data sheet; shares of the peaks are estimates (megazero/planner/machines.py)"

# The share of the peak by the cube root of m n k: wider devices need larger products.
_VOLTA = ((128, 0.03), (256, 0.12), (512, 0.33), (1024, 0.58), (2048, 0.73), (4096, 0.80), (8192, 0.82))
_AMPERE = ((128, 0.01), (256, 0.06), (512, 0.22), (1024, 0.47), (2048, 0.70), (4096, 0.81), (8192, 0.86))
_HOPPER = ((128, 0.004), (256, 0.025), (512, 0.10), (1024, 0.30), (2048, 0.57), (4096, 0.70), (8192, 0.75))
_BLACKWELL = ((128, 0.002), (256, 0.012), (512, 0.06), (1024, 0.20), (2048, 0.46), (4096, 0.64), (8192, 0.72))


def _matrix(shares: tuple[tuple[float, float], ...], peaks: Mapping[str, float]) -> dict[str, Matrix]:
    return {
        name: Matrix(peak * TFLOPS, Curve(tuple((size, share * peak * TFLOPS) for size, share in shares)))
        for name, peak in peaks.items()
    }


def _links(
    inside: float, across: float, host: float, disk: float, *, microseconds: tuple[float, float]
) -> dict[str, Link]:
    """Return the links of rates in GB/s as they are reached; microseconds: of a hop inside a node, and across."""
    return {
        "inside": Link(microseconds[0] * 1e-6, constant(inside * GB)),
        "across": Link(microseconds[1] * 1e-6, constant(across * GB)),
        "host": Link(10e-6, constant(host * GB)),
        "disk": Link(100e-6, constant(disk * GB)),
    }


def _memory(rate: float, *, host: float) -> dict[str, Curve]:
    """Return the rates of kernels that memory binds: nine tenths of its bandwidth, less of what is small.

    host: the bandwidth of host memory that one device's share of the processors reaches.
    """
    shares = ((2**16, 0.02), (2**20, 0.25), (2**24, 0.75), (2**28, 0.9))
    return {"memory": Curve(tuple((size, share * rate) for size, share in shares)), "host": constant(host)}


# Bytes a second of a CPU's links: gloo over the machine's own network, memory, and files.
_CPU_LINKS = (("inside", 1e9), ("across", 1e9), ("host", 5e9), ("disk", 0.5e9))

MACHINES: Mapping[str, Hardware] = MappingProxyType(
    {
        "dgx2-v100": Hardware(
            name="dgx2-v100",
            source=_DATA_SHEET,
            device="cuda",
            devices_per_node=16,
            memory_bytes=32 * 10**9,
            host_memory_bytes=1500 * 10**9,
            context_bytes=450 * 10**6,
            workspace_bytes=_WORKSPACE,
            communicator_bytes=_COMMUNICATOR,
            watts=10e3 / 16,
            kernel_seconds=4e-6,
            host_seconds=8e-6,
            link_wait_seconds=20e-6,
            matrix=_matrix(_VOLTA, {"fp64": 7.8, "fp32": 15.7, "fp16": 125.0}),
            kernels=_memory(0.9e12, host=10e9),
            fused=0.5,
            links=_links(120, 5.3, 6, 1.5, microseconds=(4, 8)),
            overlap_cost=0.1,
        ),
        "dgx-a100": Hardware(
            name="dgx-a100",
            source=_DATA_SHEET,
            device="cuda",
            devices_per_node=8,
            memory_bytes=80 * 10**9,
            host_memory_bytes=2000 * 10**9,
            context_bytes=500 * 10**6,
            workspace_bytes=_WORKSPACE,
            communicator_bytes=_COMMUNICATOR,
            watts=6.5e3 / 8,
            kernel_seconds=3e-6,
            host_seconds=7e-6,
            link_wait_seconds=20e-6,
            matrix=_matrix(_AMPERE, {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}),
            kernels=_memory(2.04e12, host=30e9),
            fused=0.5,
            links=_links(235, 22, 12, 5, microseconds=(3, 8)),
            overlap_cost=0.1,
        ),
        "dgx-h100": Hardware(
            name="dgx-h100",
            source=_DATA_SHEET,
            device="cuda",
            devices_per_node=8,
            memory_bytes=80 * 10**9,
            host_memory_bytes=2000 * 10**9,
            context_bytes=600 * 10**6,
            workspace_bytes=_LARGE_WORKSPACE,
            communicator_bytes=_COMMUNICATOR,
            watts=10.2e3 / 8,
            kernel_seconds=3e-6,
            host_seconds=6e-6,
            link_wait_seconds=15e-6,
            matrix=_matrix(
                _HOPPER,
                {"fp64": 67.0, "fp32": 67.0, "tf32": 494.0, "fp16": 989.0, "bf16": 989.0, "fp8": 1979.0},
            ),
            kernels=_memory(3.35e12, host=45e9),
            fused=0.5,
            links=_links(360, 45, 50, 6, microseconds=(3, 7)),
            overlap_cost=0.1,
        ),
        "h200": Hardware(
            name="h200",
            source=_DATA_SHEET,
            device="cuda",
            devices_per_node=8,
            memory_bytes=141 * 10**9,
            host_memory_bytes=2000 * 10**9,
            context_bytes=600 * 10**6,
            workspace_bytes=_LARGE_WORKSPACE,
            communicator_bytes=_COMMUNICATOR,
            watts=10.2e3 / 8,
            kernel_seconds=3e-6,
            host_seconds=6e-6,
            link_wait_seconds=15e-6,
            matrix=_matrix(
                _HOPPER,
                {"fp64": 67.0, "fp32": 67.0, "tf32": 494.0, "fp16": 989.0, "bf16": 989.0, "fp8": 1979.0},
            ),
            kernels=_memory(4.8e12, host=45e9),
            fused=0.5,
            links=_links(360, 45, 50, 6, microseconds=(3, 7)),
            overlap_cost=0.1,
        ),
        "gb200": Hardware(
            name="gb200",
            source=_DATA_SHEET,
            device="cuda",
            devices_per_node=72,
            memory_bytes=186 * 10**9,
            host_memory_bytes=17_000 * 10**9,
            context_bytes=700 * 10**6,
            workspace_bytes=_LARGE_WORKSPACE,
            communicator_bytes=_COMMUNICATOR,
            watts=120e3 / 72,
            kernel_seconds=3e-6,
            host_seconds=6e-6,
            link_wait_seconds=15e-6,
            matrix=_matrix(
                _BLACKWELL,
                {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0},
            ),
            kernels=_memory(8.0e12, host=150e9),
            fused=0.5,
            links=_links(700, 45, 180, 6, microseconds=(3, 7)),
            overlap_cost=0.1,
        ),
        "cpu": Hardware(
            name="cpu",
            source="rounded from a calibration of a small virtual machine (megazero/planner/machines.py)",
            device="cpu",
            devices_per_node=2,
            memory_bytes=12 * 10**9,
            host_memory_bytes=24 * 10**9,
            host_seconds=20e-6,
            matrix={
                "fp64": Matrix(42e9, Curve(((32, 10e9), (128, 40e9), (1024, 40e9)))),
                "fp32": Matrix(88e9, Curve(((32, 20e9), (128, 85e9), (1024, 80e9)))),
                "bf16": Matrix(88e9, Curve(((32, 10e9), (128, 40e9), (1024, 60e9)))),
            },
            kernels={
                "memory": Curve(((2**14, 10e9), (2**18, 60e9), (2**22, 60e9), (2**25, 15e9))),
                "functions": Curve(((2**14, 2.5e9), (2**18, 5e9))),
                "norms": Curve(((2**14, 2.5e9), (2**18, 15e9), (2**22, 20e9), (2**25, 12e9))),
                "reductions": Curve(((2**14, 3e9), (2**18, 25e9), (2**22, 35e9), (2**25, 13e9))),
                "optimizer": Curve(((2**16, 14e9), (2**20, 60e9), (2**24, 60e9), (2**27, 30e9))),
                "attention": Curve(((16, 6e9), (64, 20e9), (1024, 20e9))),
            },
            links={kind: Link(0.2e-3, constant(rate)) for kind, rate in _CPU_LINKS},
            overlap_cost=1.0,
            error=0.5,
        ),
    }
)


def hardware_of(name: str) -> Hardware:
    """Return the machine of this name, or the one that a YAML file describes; raise ConfigError if there is neither."""
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if path.suffix.lower() in (".yaml", ".yml") or path.is_file():
        return read_hardware(read_nested(path), origin=name)
    rule = "--hardware names a machine, or a YAML file that describes one"
    near = difflib.get_close_matches(name.lower(), MACHINES, n=1) or list(MACHINES)
    raise ConfigError(Problem(f"--hardware {name}", rule, ", ".join((*near, "FILE.yaml"))))
