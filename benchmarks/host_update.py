"""Measures the host's update of states in host memory beside the memory bandwidth of the same threads.

    python benchmarks/host_update.py [--threads 1 2] [--state ELEMENTS] [--output FILE.md]

The update is AdamW on a flat run, as the engine calls it (`megazero/optim/inner.py`): it reads gradients, master
weights and two moments, and writes the last three.  Memory bandwidth is the better one of two loops of torch's over as
many bytes: a copy (one read, one written) and a sum (two read, one written).  All bytes are counted that a call names;
that a cache reads a line before it is written counts for none.  Sizes go from what the caches hold to what they don't;
calls take turns, and the fastest counts, as whatever else the machine does only adds to a time.

With --state the runs of a size are the sub-groups of a state, updated one after the other as in a step, and both loops
go over all of it: where the state is larger than the caches, so is memory what all of them reach.

One thread is what a rank of a CPU job has (OMP_NUM_THREADS=1); ranks of one machine share its bandwidth.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jobs import Place, run_job
from report import Column, add_output, heading, new_record, paragraph, publish, table_of
from torch import Tensor

from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import AdamWSettings, ElementRun, FusedAdamW, StepInputs

_SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CPU = torch.device("cpu")
_AT_LEAST = 5  # turns
_AT_MOST = 2000

Rates = dict[str, float]  # bytes a second by call


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_output(parser)
    add = parser.add_argument
    add("--threads", type=int, nargs="+", default=[1, 2], help="threads of the process (default: 1 2)")
    sizes = [1 << power for power in (14, 17, 20, 23, 26)]
    add("--sizes", type=int, nargs="+", default=sizes, help="elements of a run (default: 16 Ki to 64 Mi)")
    add("--state", type=int, help="elements of the state whose sub-groups are runs (default: one run)")
    add("--budget", type=float, default=1.5, help="seconds for the turns of a size (default: 1.5)")
    return parser.parse_args(words)


def measure(_: Place, threads: int, sizes: Sequence[int], state: int | None, budget: float) -> dict[int, Rates]:
    """Measure all calls at every size, with so many threads."""
    torch.set_num_threads(threads)
    return {numel: rates(numel, (state or numel) // numel, budget) for numel in sizes}


def rates(numel: int, number: int, budget: float) -> Rates:
    """Return the bytes a second of updates of runs of so many elements, for each dtype of gradients, and of both loops.

    number: the runs of a state.
    """
    state = number * numel
    master, first, second = (torch.rand(state) for _ in range(3))
    step = torch.ones(())
    inputs = StepInputs(1e-4, torch.ones((), dtype=torch.float64), None).for_masters(master.dtype)
    buffers, optimizer = FusedBuffers(4 * numel, _CPU), FusedAdamW(_SETTINGS)
    calls: dict[str, tuple[Callable[[], object], int]] = {}
    for name, dtype in _DTYPES.items():
        whole = ElementRun(master, torch.rand(state).to(dtype), {"exp_avg": first, "exp_avg_sq": second}, group=1)
        runs = [whole.part(start, start + numel) for start in range(0, state, numel)]
        updates = [partial(optimizer.update, 0, run, step, inputs, buffers=buffers) for run in runs]
        calls[name] = partial(in_turn, updates), whole.gradient.nbytes + 6 * master.nbytes
    calls["copy"] = partial(copy, *first.new_zeros(2, 2 * state)), 16 * state
    calls["sum"] = partial(add, *first.new_zeros(3, 4 * state // 3)), 12 * (4 * state // 3)
    taken: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + budget
    while len(taken["sum"]) < _AT_LEAST or (time.perf_counter() < end and len(taken["sum"]) < _AT_MOST):
        for name, (call, _) in calls.items():
            call()  # what the call before has put into the caches is another's
            start = time.perf_counter()
            call()
            taken[name].append(time.perf_counter() - start)
    return {name: nbytes / min(taken[name]) for name, (_, nbytes) in calls.items()}


def in_turn(updates: Sequence[Callable[[], object]]) -> None:
    for update in updates:
        update()


def copy(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source)


def add(target: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.add(left, right, out=target)


def systems(found: Mapping[int, Mapping[int, Rates]]) -> dict[str, dict[str, float]]:
    """Return the figures of the record, for every number of threads, size, and dtype of gradients."""
    rows = {}
    for threads, by_size in found.items():
        for numel, rates in by_size.items():
            memory = max(rates["copy"], rates["sum"])
            for name, dtype in _DTYPES.items():
                nbytes = (dtype.itemsize + 24) * numel
                rows[f"{threads} thread{'s' * (threads > 1)}, {_count(numel)}, {name}"] = {
                    "median_step_seconds": nbytes / rates[name],
                    "update_bytes_per_second": rates[name],
                    "copy_bytes_per_second": rates["copy"],
                    "sum_bytes_per_second": rates["sum"],
                    "share_of_bandwidth": rates[name] / memory,
                }
    return rows


def _count(numel: int) -> str:
    return f"{numel >> 20} Mi" if numel >= 1 << 20 else f"{numel / 1024:g} Ki"


COLUMNS = (
    Column("update, ms", "median_step_seconds", ".3f", 1e3),
    Column("update, GB/s", "update_bytes_per_second", ".1f", 1e-9),
    Column("copy, GB/s", "copy_bytes_per_second", ".1f", 1e-9),
    Column("sum, GB/s", "sum_bytes_per_second", ".1f", 1e-9),
    Column("share of the bandwidth, %", "share_of_bandwidth", ".0f", 100),
)


def body_of(kept: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    return table_of(kept["systems"], COLUMNS, first="threads, elements, gradients")


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    found = {
        threads: run_job(1, measure, threads, options.sizes, options.state, options.budget, device="cpu")[0]
        for threads in options.threads
    }
    kept = new_record("host_update", "cpu", model="AdamW", precision="fp32", world_size=1, systems=systems(found))
    about = "The fastest calls; the bandwidth is the better one of a copy and a sum by the same threads"
    of_state = (
        f"; runs are the sub-groups of {_count(options.state)} elements, updated in turn" if options.state else ""
    )
    publish(
        [heading("The host's update", "cpu"), paragraph(f"{about}{of_state}:"), body_of(kept)], options.output, kept
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
