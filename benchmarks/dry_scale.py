"""Takes steps of one rank of very large jobs with hollow tensors, and states what start-up and a step cost in Python.

Every layout runs in a process of its own: the real engine around the model of one rank, on hollow tensors, which
have shapes and no memory, over process groups that send nothing.  Seconds are therefore those
of Python, of torch's dispatcher and of hollow tensors, which cost more than launching a kernel; nothing is computed or
sent.  Bytes and messages are those that the rank's communicators have counted, with no other rank beside it.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, NamedTuple

import torch
from report import HelpFormat, add_output, heading, new_record, paragraph, publish, table, tell

import megazero
from megazero.comm.interface import Collective, FileTransfer, HostTransfer
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.comm.startup import dry_mesh
from megazero.config.run import RunConfig
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.planner.dry.rank import dry_tensors
from megazero.train.build import build_components, step_context
from megazero.train.components import RunComponents
from megazero.train.step import StepControls, training_step

PACKAGE = str(Path(megazero.__file__).parent)
VOCABULARY = 50257


class Case(NamedTuple):
    """One rank of a job.  settings: those of its run, by name; micro_batches: of a step."""

    tp: int
    pp: int
    dp: int
    micro_batches: int
    settings: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}"


TRILLION: Mapping[str, Any] = MappingProxyType(
    {"num_layers": 128, "hidden_size": 25600, "num_attention_heads": 128, "seq_length": 1024, "zero_stage": 3}
)
SMALL: Mapping[str, Any] = MappingProxyType(
    {"num_layers": 8, "hidden_size": 4096, "num_attention_heads": 32, "seq_length": 1024, "zero_stage": 3}
)
SMALL_BLOCKS: Mapping[str, Any] = MappingProxyType(
    {"num_layers": 24, "hidden_size": 1472, "num_attention_heads": 16, "seq_length": 1024, "zero_stage": 3}
)
LARGE_JOBS = (
    Case(8, 1, 128, 1, TRILLION),
    Case(8, 64, 2, 64, TRILLION),
    Case(8, 1, 2048, 1, TRILLION),
    Case(8, 64, 32, 64, TRILLION),
)
SAME_MODEL = tuple(Case(8, 1, dp, 1, SMALL) for dp in (2, 16, 128, 1024, 2048))
SMALL_UNITS = tuple(Case(1, 1, dp, 1, SMALL_BLOCKS) for dp in (32, 64, 512, 2048))


class GatherMeter(Meter):
    """A meter with the bytes of this rank's slice of every message that gathers parameters."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._others = max(ranks - 1, 1)
        self.slices: list[int] = []

    def record(
        self, axis: str, collective: Collective | HostTransfer | FileTransfer, nbytes: int, across: int = 0
    ) -> None:
        super().record(axis, collective, nbytes, across)
        if (axis, collective) == ("dp", "all_gather"):
            self.slices.append(nbytes // self._others)

    def reset(self) -> None:
        super().reset()
        self.slices.clear()


def configured(case: Case) -> RunConfig:
    """Return the run of a case."""
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "micro_batch_size": 1,
        "global_batch_size": case.micro_batches * case.dp,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "precision": "bf16",
        "recompute_granularity": "full",
        "logits_chunk_bytes": 1 << 32,  # one chunk of the head: fewer operations
        "train_iters": 10,
        "lr": 1e-4,
        "mock_data": True,
    }
    outcome = validate({name: RawValue(name, value, name) for name, value in {**given, **case.settings}.items()})
    assert outcome.config is not None, outcome.problems
    return outcome.config


def calls_of(function: Callable[[], object]) -> int:
    """Return the number of calls of functions of the package that a function makes."""
    count = 0

    def hook(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(hook)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def measure(case: Case) -> dict[str, Any]:
    """Return the figures of the middle rank of a job: of its start-up, and of three steps, the last one counted."""
    began = time.perf_counter()
    config, topology = configured(case), Topology(tp=case.tp, pp=case.pp, dp=case.dp)
    rank, device = case.world_size // 2, torch.device("cpu")
    with dry_tensors():
        buffers = FusedBuffers(0, device)
        meter = GatherMeter(case.dp)
        mesh = dry_mesh(topology, rank, device, buffers, is_gpu=True, meter=meter)
        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY)
        tokens = torch.zeros(1, config.model.seq_length, dtype=torch.int64)
        batch = StepBatch(0, [MicroBatch(index, tokens, tokens, None) for index in range(case.micro_batches)])
        context = step_context(config, core)

        def step() -> None:
            training_step(context, batch, StepControls(lr=1e-4, loss_scale=1.0))

        start_up = time.perf_counter() - began
        seconds = [_seconds_of(step) for _ in range(2)]
        mesh.meter.reset()
        calls = calls_of(step)
        sent, slices = messages_and_bytes(mesh), list(meter.slices)
        core.engine.close()
    return {
        **_sizes(core),
        "start_up_seconds": start_up,
        "step_seconds": seconds,
        "calls": calls,
        "sent": sent,
        "slices": slices,
        "gathered_numel": core.engine.gathered_numel[1],
        "buffer_bytes": buffers.total_bytes + _bucket_bytes(core),
        "peak_rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def _seconds_of(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _sizes(core: RunComponents) -> dict[str, int]:
    layout = core.engine.layout
    return {
        "parameters": layout.used_numel(trainable=True),
        "units": len(core.engine.units),
        "buckets": len(layout.trainable_buckets),
        "bucket_numel": layout.max_reduced_numel,
    }


def _bucket_bytes(core: RunComponents) -> int:
    """Return the bytes of the arena that buckets are filled and sent in."""
    arena = core.engine.gradient_arenas.get("buckets")
    return 0 if arena is None else arena.capacity_bytes


def messages_and_bytes(mesh: Mesh) -> dict[str, dict[str, list[int]]]:
    """Return {axis: {collective: [messages, bytes]}} of what the rank has sent since its meter began."""
    counts = {
        axis: {name: mesh.meter.count(axis, name) for name in row} for axis, row in mesh.meter.bytes_by_axis().items()
    }
    return {axis: {name: [one.calls, one.nbytes] for name, one in row.items()} for axis, row in counts.items()}


def in_a_process(case: Case) -> dict[str, Any]:
    """Return the figures of a case, measured in a new process; "refused": why there are none."""
    tell(case.name)
    given = json.dumps([*case[:-1], dict(case.settings)])
    done = subprocess.run([sys.executable, __file__, "--case", given], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"refused": done.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rows_of(found: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """Return the rows of the table of sizes, seconds, memory and calls."""
    return [
        [name, figures["refused"]] if "refused" in figures else _row(name, figures) for name, figures in found.items()
    ]


def _row(name: str, figures: Mapping[str, Any]) -> list[object]:
    first, second = figures["step_seconds"]
    return [
        *(name, f"{figures['parameters'] / 1e9:.2f}", figures["units"], figures["buckets"]),
        f"{figures['bucket_numel'] / 1e6:.1f}",
        *(f"{seconds:.1f}" for seconds in (figures["start_up_seconds"], first, second)),
        *(f"{figures[kind] / 2**20:.0f}" for kind in ("peak_rss_bytes", "buffer_bytes")),
        f"{figures['calls']:,}",
    ]


def slice_rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """Return the rows of the table of gathers: their number, this rank's slices of them, what is whole at once."""
    return [
        [
            *(name, len(figures["slices"]), f"{min(figures['slices']) / 2**10:,.1f}"),
            *(f"{at(figures['slices']) / 2**10:,.1f}" for at in (statistics.median, max)),
            f"{2 * figures['gathered_numel'] / 2**20:,.0f}",
        ]
        for name, figures in found.items()
        if figures.get("slices")
    ]


def sent_rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """Return the rows of the table of messages, one for each axis and collective."""
    return [
        [name, axis, collective, f"{messages:,}", f"{nbytes / 2**20:,.1f}"]
        for name, figures in found.items()
        for axis, row in figures.get("sent", {}).items()
        for collective, (messages, nbytes) in row.items()
    ]


ABOUT = """Units, buckets and parameters are those of the middle rank. Start-up is all from the run's settings to the
engine, without imports; steps include the first step's recording of what operators return. Peak is the process's,
imports and all three steps included; buffers are what the engine would have for buckets on the wire. Calls are those of
the package's functions in a third step, those of hollow tensors included, under a profile hook: they are the same in
every run, while seconds are of one run on a shared machine."""
PREDICTED = """Before, every unit's gather was a message of its own in stage 3, however small its slices. Predicted of
units that are gathered together ahead of their use, by messages of 2^17 elements a rank, in a window of 2^18: nothing
changes up to 32 data-parallel ranks; at 64 only units smaller than a block are joined; at 512 a message has three
blocks of 26 million parameters, and at 2,048 ten, less than a block short of 256 KiB a slice, but for the first gather
of a step and the last; as much as the window and the largest unit is gathered at once, 1.1 GiB at 2,048; models that
fit into that are gathered once a step, and no figure of other collectives changes."""
HEADER = ("layout", "parameters of a rank, 10^9", "units", "buckets", "largest bucket, 10^6", "start-up, s")
HEADER = (*HEADER, "first step, s", "second step, s", "peak RSS, MiB", "buffers, MiB", "Python calls of a step")
SLICE_HEADER = ("layout", "gathers of a step", "smallest slice of a rank, KiB", "median", "largest")
SLICE_HEADER = (*SLICE_HEADER, "most that is gathered at once, MiB")
SENT_HEADER = ("layout", "axis", "collective", "messages of a step", "MiB of a step")
PARTS: Mapping[str, Sequence[Case]] = MappingProxyType(
    {
        "A model of 10^12 parameters (128 layers x 25600), ZeRO stage 3": LARGE_JOBS,
        "The same model (8 layers x 4096) at other data-parallel sizes, ZeRO stage 3": SAME_MODEL,
        "Blocks of 26 million parameters (24 layers x 1472), ZeRO stage 3": SMALL_UNITS,
    }
)


def tables(found: Mapping[str, Mapping[str, Mapping[str, Any]]], suffix: str = "") -> list[str]:
    """Return the headings and tables of sizes and seconds of all parts."""
    return [text for title, rows in found.items() for text in (f"## {title}{suffix}", table(HEADER, rows_of(rows)))]


def page_of(
    found: Mapping[str, Mapping[str, Mapping[str, Any]]], before: Mapping[str, Mapping[str, Mapping[str, Any]]] | None
) -> list[str]:
    """Return the parts of the page; before: what an earlier run has found."""
    page = [heading("Start-up and steps of up to 16,384 ranks on hollow tensors", "cpu", "bf16"), paragraph(ABOUT)]
    page += [] if before is None else [paragraph(PREDICTED)]
    page += tables(found)
    page += [] if before is None else tables(before, ", before")
    for suffix, runs in (("", found), (", before", before or {})):
        for title, rows in runs.items():
            if of_gathers := slice_rows(rows):
                page += [f"## Gathers of parameters: {title}{suffix}", table(SLICE_HEADER, of_gathers)]
    for title, rows in found.items():
        page += [f"## Messages: {title}", table(SENT_HEADER, sent_rows(rows))]
    return page


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add_output(parser)
    parser.add_argument("--before", type=Path, metavar="FILE.json", help="an earlier record, shown below the new one")
    parser.add_argument(
        "--part", default="", metavar="TEXT", help="only the parts of the page with this in their title"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(sys.argv[1:])
    if options.case:
        print(json.dumps(measure(Case(*json.loads(options.case)))))
        return 0
    parts = {title: cases for title, cases in PARTS.items() if options.part in title}
    found = {title: {case.name: in_a_process(case) for case in cases} for title, cases in parts.items()}
    before = json.loads(options.before.read_text(encoding="utf-8"))["found"] if options.before else None
    page = page_of(found, before)
    record = new_record("dry_scale", "cpu", found=found)
    publish(page, options.output, {key: value for key, value in record.items() if key != "program"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
