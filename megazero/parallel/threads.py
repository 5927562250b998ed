"""The number of threads with which a process computes on the CPU: its share of the node's cores.

Several processes with all cores each would get in each other's way, which is why torchrun gives them one thread each
(OMP_NUM_THREADS=1); that leaves cores idle wherever there are more of them than processes.  Beside a GPU the CPU
computes where model states live in host memory or files.

Torch's number is that of all its threads: each takes it over when it first computes.
"""

import os
from collections.abc import Mapping

import torch

from megazero.operating_system import usable_cores
from megazero.parallel.launch import Launch


def use_cpu_threads(given: int | None, launch: Launch, device: torch.device, *, offloads: bool = False) -> str:
    """Set the number of threads, with --cpu-threads `given`; return a line about it.

    offloads: whether model states leave the device.  "" on a GPU without: nothing is computed on the CPU, none is set.
    """
    if device.type != "cpu" and not offloads:
        return ""
    count = cpu_threads(given, launch, os.environ)
    if count is not None:
        torch.set_num_threads(count)
    here, cores = _processes_here(launch), usable_cores()
    return f"CPU threads a process: {torch.get_num_threads()} | cores: {cores} | processes on this node: {here}"


def share_cpu_threads(launch: Launch) -> None:
    """Set the number of threads in a program of the user's, unless the number is one that the program has chosen.

    Torch's own number is torchrun's, or without OMP_NUM_THREADS that of all cores, logical or physical: there a number
    up to the share is the program's, and a larger one counts as torch's.
    """
    count, now = cpu_threads(None, launch, os.environ), torch.get_num_threads()
    if count is not None and (now == 1 if os.environ.get("OMP_NUM_THREADS") else now > count):
        torch.set_num_threads(count)


def cpu_threads(given: int | None, launch: Launch, environment: Mapping[str, str]) -> int | None:
    """Return the number of threads to set; None where torch's own choice stands.

    given: --cpu-threads.  Without it OMP_NUM_THREADS counts, which torch has read, unless torchrun has written it; else
    a process alone on its node has torch's choice, and several share the cores.
    """
    if given is not None:
        return given
    here = _processes_here(launch)
    set_by_user = environment.get("OMP_NUM_THREADS", "")
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment and set_by_user == "1" and here > 1
    if here == 1 or (set_by_user and not by_torchrun):
        return None
    return share_of_cores(launch, environment)


def share_of_cores(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return the number of cores for each process of this node: those that srun has bound it to, or an equal share."""
    own = environment.get("SLURM_CPUS_PER_TASK", "")
    if "TORCHELASTIC_RUN_ID" not in environment and own.isdecimal() and int(own):
        return int(own)
    return max(1, usable_cores() // _processes_here(launch))


def _processes_here(launch: Launch) -> int:
    return len(launch.nodes.ranks(launch.node))
