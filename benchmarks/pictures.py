"""Draws the pictures of README.md: a loss curve, memory through a step by ZeRO stage, and a layout.

    python benchmarks/pictures.py --metrics-file runs/quickstart/metrics.jsonl --output docs/pictures

The loss is that of a run that has been made; the quickstart makes one.  Memory is the ledger's, from a dry run: a real
training step of one rank on tensors without values, over torch's fake process group, which takes a run's code but no
memory.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import HelpFormat, tell
from torch.testing._internal.distributed.fake_pg import FakeStore

from megazero.comm.startup import make_mesh
from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import CATEGORIES, StepMemory
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.dry.rank import dry_tensors
from megazero.report.history import read_history
from megazero.report.pictures.chart import CURVES_SIZE, curve_parts
from megazero.report.pictures.layout_picture import layout_parts
from megazero.report.pictures.ledger_picture import CATEGORY_COLOURS, Frame, areas, bytes_grid
from megazero.report.run_page import LOSS_TITLE, loss_lines
from megazero.svg import legend, picture, text
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step
from megazero.units import format_bytes

# GPT-2 of 1.5 billion parameters, whose blocks are recomputed.
SHAPE: Mapping[str, Any] = {
    "num_layers": 48,
    "hidden_size": 1600,
    "num_attention_heads": 25,
    "seq_length": 1024,
    "micro_batch_size": 4,
    "vocab_size": 50257,
}
TINY: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 1,
    "vocab_size": 500,
}
REPLICAS = 64
FEW_REPLICAS = 16  # of the tiny model, whose units more ranks lay out together


def step_of_stage(stage: int, shape: Mapping[str, Any], replicas: int) -> StepMemory:
    """Return the memory of rank 0's second step; no process group may exist beforehand."""
    settings = {
        **shape,
        "zero_stage": stage,
        "global_batch_size": shape["micro_batch_size"] * replicas,
        "precision": "bf16",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "train_iters": 1,
        "lr": 1e-4,
        "mock_data": True,
    }
    outcome = validate({name: RawValue(name, value, name) for name, value in settings.items()})
    assert outcome.config is not None, outcome.problems
    dist.init_process_group("fake", rank=0, world_size=replicas, store=FakeStore())
    device = torch.device("cpu")
    ledger = Ledger(device)
    with dry_tensors(ledger), ledger:
        buffers = FusedBuffers(0, device, ledger=ledger)
        mesh = make_mesh(Topology(dp=replicas), 0, device, buffers)
        parts = build_components(outcome.config, mesh, buffers, vocab_size=shape["vocab_size"], ledger=ledger)
        tokens = torch.zeros(shape["micro_batch_size"], shape["seq_length"], dtype=torch.int64)
        batch = StepBatch(0, [MicroBatch(0, tokens, tokens, None)])
        for _ in range(2):
            ledger.reset()
            training_step(step_context(outcome.config, parts), batch, StepControls(lr=1e-4, loss_scale=1.0))
        memory = ledger.take()
        parts.engine.close()
    dist.destroy_process_group()
    return memory


def with_less_of_the_update(step: StepMemory) -> StepMemory:
    """Return a step up to its update, and a quarter as many operations of that, in which little changes.

    Of a rank that updates all weights by itself, the update would fill the picture.
    """
    timeline = step.timeline
    update = next(mark.operation for mark in timeline.phases if mark.phase == "update")
    end = min(round(1.25 * update), timeline.num_operations)
    kept = timeline.operations <= end
    cut = replace(timeline, operations=timeline.operations[kept], live=timeline.live[kept], num_operations=end)
    return replace(step, timeline=cut)


def phase_borders(step: StepMemory, frame: Frame) -> list[str]:
    """Return a line where forward, backward and the update begin, and their names below."""
    first = {mark.phase: frame.x(mark.operation) for mark in reversed(step.timeline.phases) if mark.phase != "reduce"}
    starts = sorted((x, name) for name, x in first.items())
    ends = [*(x for x, _ in starts[1:]), frame.right]
    parts = [f'<path class="line" d="M{x:.1f} {frame.top}V{frame.foot}"/>' for x, _ in starts[1:]]
    return parts + [
        text((x + end) / 2, frame.foot + 18, name, "middle") for (x, name), end in zip(starts, ends, strict=True)
    ]


def memory_picture(steps: Sequence[StepMemory], title: str) -> str:
    """Return the SVG file: a drawing for every stage, side by side, to one scale of bytes."""
    top = 1.06 * max(step.peak_bytes for step in steps)
    width, gap = 220, 12
    shown = [name for name in CATEGORIES if any(step.peaks[name] for step in steps)]
    entries = [(name.replace("_", " "), CATEGORY_COLOURS[name]) for name in shown]
    parts = [text(16, 24, title, "title"), *legend(16, 48, entries[:6]), *legend(16, 68, entries[6:])]
    for stage, step in enumerate(steps):
        drawn = with_less_of_the_update(step)
        frame = Frame(drawn.timeline.num_operations + 1, top, 80 + stage * (width + gap), 110, width, 260)
        parts += bytes_grid(frame, named=stage == 0)
        parts += areas(drawn, frame)
        heading = f"stage {stage}: peak {format_bytes(step.peak_bytes)}"
        parts.append(text(frame.left + width / 2, 98, heading, "strong middle"))
        parts += phase_borders(drawn, frame)
    return picture(80 + len(steps) * (width + gap) + 12, 402, parts, label=title)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--metrics-file", type=Path, metavar="FILE.jsonl", help="metrics of a run, for the loss curve")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the pictures")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the program")
    arguments = parser.parse_args(words)
    shape, replicas = (TINY, FEW_REPLICAS) if arguments.small else (SHAPE, REPLICAS)
    arguments.output.mkdir(parents=True, exist_ok=True)
    drawn: dict[str, str] = {}
    if arguments.metrics_file is not None:
        loss = curve_parts(LOSS_TITLE, loss_lines(read_history(arguments.metrics_file)))
        drawn["loss"] = picture(*CURVES_SIZE, loss, label="loss of the quickstart")
    model = "a tiny GPT" if arguments.small else "GPT-2 1.5B"
    title = f"Memory of one of {replicas} ranks through a step by ZeRO stage: {model}, bf16, blocks recomputed"
    drawn["memory-by-stage"] = memory_picture([step_of_stage(stage, shape, replicas) for stage in range(4)], title)
    width, height, parts = layout_parts(Topology(tp=2, dp=4, pp=2), Nodes((8, 8)))
    drawn["layout"] = picture(width, height, parts, label="a layout of 16 ranks on 2 nodes")
    for name, svg in drawn.items():
        (arguments.output / f"{name}.svg").write_text(svg, encoding="utf-8")
        tell(f"{arguments.output / name}.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
