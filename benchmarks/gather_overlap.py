"""Measures how much of ZeRO stage 3's gather time hides behind computation, from a trace of every gather.

    torchrun --nproc-per-node 2 benchmarks/gather_overlap.py [--steps 12] [--hidden-size 256] [--trace gathers.json]

A gather *lasts* from its launch to its completion, and *blocks* from the beginning of the wait for it to its
completion; the time that it lasts but doesn't block is hidden.  The same steps are taken with look-ahead and without,
in turns.
The trace is a file for Perfetto (https://ui.perfetto.dev): one line of launches to completions, one of waits.
"""

import argparse
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from small_gpt import SETTINGS, VOCABULARY, add_work, batch_of, make_model, meet, model_config
from torch import Tensor

from megazero.comm.interface import Work
from megazero.comm.mesh import GATHERING, Mesh
from megazero.comm.startup import destroy_process_groups, make_mesh
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.config.model import ModelConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import FusedAdamW
from megazero.tensor_parallel.random import RandomRegions
from megazero.timers import Timers
from megazero.train.step import StepContext, StepControls, training_step
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import resolve


@dataclass
class Gather:
    """The bytes of one gather and its moments, in seconds of one clock.

    A wait that begins after completion doesn't block.
    """

    nbytes: int
    launched: float
    done: float = 0.0
    wait_begins: float = 0.0
    wait_ends: float = 0.0

    @property
    def lasts(self) -> float:
        return max(self.done - self.launched, 0.0)

    @property
    def blocks(self) -> float:
        return min(max(self.done - self.wait_begins, 0.0), self.lasts)


class Traced:
    """A communicator whose all-gathers leave their moments in `gathers`."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.gathers: list[Gather] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather_into(self, output: Tensor, input: Tensor) -> Work:
        gather = Gather(output.numel() * output.element_size(), time.perf_counter())
        self.gathers.append(gather)
        return _TracedWork(self._inner.all_gather_into(output, input), gather)


class _TracedWork:
    """The work of a gather, which a thread of its own waits for, so that the moment of completion is measured."""

    def __init__(self, pending: Work, gather: Gather) -> None:
        self._pending = pending
        self._gather = gather
        self._thread = threading.Thread(target=self._see, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._gather.wait_begins = time.perf_counter()
        self._thread.join()
        self._gather.wait_ends = time.perf_counter()

    def _see(self) -> None:
        self._pending.wait()
        self._gather.done = time.perf_counter()


@dataclass
class Side:
    """An engine with or without look-ahead, its trace, and the seconds of its steps."""

    name: str
    parts: StepContext
    traced: Traced
    seconds: list[float]


def make_side(name: str, zero: ZeroConfig, config: ModelConfig, shared: Mesh, num_positions: int) -> Side:
    buffers = FusedBuffers(0, shared.device)
    mesh = make_mesh(shared.topology, shared.rank, shared.device, buffers)
    traced = Traced(mesh.gathering)
    mesh = replace(mesh, communicators={**mesh.communicators, GATHERING: traced})
    model = make_model(config, mesh.device)
    settings = EngineSettings(zero, FusedAdamW(SETTINGS))
    engine = Engine(
        model, model.units(), resolve(zero, PrecisionConfig()), mesh=mesh, buffers=buffers, settings=settings
    )
    buffers.resize(engine.largest_buffer_bytes)
    random, timers = RandomRegions(1, 0, mesh.device), Timers(mesh.device, waits=False)
    return Side(name, StepContext(engine, model, mesh, random, timers, num_positions, 1.0, False), traced, [])


def take_steps(side: Side, mesh: Mesh, options: argparse.Namespace, turn: int) -> None:
    for number in range(turn * options.steps, (turn + 1) * options.steps):
        batch = batch_of(number, mesh, options)
        mesh.world.barrier()
        start = time.perf_counter()
        training_step(side.parts, batch, StepControls(3e-4, 1.0)).loss.item()
        side.seconds.append(time.perf_counter() - start)
    if turn == 0:  # the first turn is a warm-up, which records the order of gathers
        side.traced.gathers.clear()
        side.seconds.clear()


def report(side: Side) -> None:
    lasts = sum(gather.lasts for gather in side.traced.gathers)
    blocks = sum(gather.blocks for gather in side.traced.gathers)
    steps = len(side.seconds)
    print(
        f"{side.name:18s} {1000 * statistics.median(side.seconds):7.1f} ms a step; gathers a step:"
        f" {len(side.traced.gathers) / steps:4.1f}, lasting {1000 * lasts / steps:6.1f} ms, blocking"
        f" {1000 * blocks / steps:6.1f} ms; hidden {100 * (1 - blocks / lasts):4.1f} %"
    )


def write_trace(side: Side, path: Path) -> None:
    events = []
    for gather in side.traced.gathers:
        spans = {"gather": (gather.launched, gather.done), "wait": (gather.wait_begins, gather.wait_ends)}
        for line, (name, (begin, end)) in enumerate(spans.items()):
            span = {"name": f"{name} {gather.nbytes} B", "ph": "X", "pid": 0, "tid": line}
            events.append(span | {"ts": 1e6 * begin, "dur": 1e6 * max(end - begin, 0.0)})
    path.write_text(json.dumps({"traceEvents": events}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=4, help="turns of each side; the first is a warm-up")
    add_work(parser)
    parser.add_argument("--trace", type=Path, help="file for the trace of rank 0 with look-ahead")
    options = parser.parse_args()
    mesh, config = meet(), model_config(options)
    num_positions = options.micro_batch_size * mesh.topology.dp * options.seq_length
    sides = [
        make_side("look-ahead", ZeroConfig(zero_stage=3), config, mesh, num_positions),
        make_side("no look-ahead", ZeroConfig(zero_stage=3, prefetch_bucket_size=0), config, mesh, num_positions),
    ]
    for turn in range(options.turns):
        for side in sides:
            take_steps(side, mesh, options, turn)
    if mesh.rank == 0:
        print(f"{mesh.device.type}, torch {torch.__version__}, {mesh.topology.dp} ranks, vocabulary {VOCABULARY}")
        for side in sides:
            report(side)
        if options.trace is not None:
            write_trace(sides[0], options.trace)
    for side in sides:
        side.parts.engine.close()
    destroy_process_groups()


if __name__ == "__main__":
    sys.exit(main())
