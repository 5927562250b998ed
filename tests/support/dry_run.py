"""Runs training steps of one rank out of many on hollow tensors over groups that send nothing, and prints JSON.

python dry_run.py '[[RANK, DP, TP, STAGE], [RANK, DP, TP, STAGE, PP, SETTINGS], ...]'

SETTINGS are the run's settings by name; "num_micro_batches" among them is the number of a step (2 if left out).  The
output is a list of figures, one object for each step.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from support.configs import make_run
from support.flat_layout import padded_numel

from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.comm.startup import dry_mesh
from megazero.data.loader import MicroBatch, StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.data_axis import data_axis
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.dry.rank import dry_tensors
from megazero.report.timing_report import TimingReport
from megazero.timers import Timers, Timings, parts_of
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step
from megazero.zero.plan import wires
from megazero.zero.statistics import EVERY_STATISTIC, layers_of, take_statistics

SEQUENCE = 256


def step(
    rank: int, dp: int, tp: int, stage: int, pp: int = 1, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the figures of one step of a rank, with every statistic after it, and the times of its parts.

    settings: of the run; and num_micro_batches, and ranks_per_node where there are several nodes.
    """
    settings = dict(settings or {})
    per_node = settings.pop("ranks_per_node", dp * tp * pp)
    nodes = Nodes((per_node,) * (dp * tp * pp // per_node))
    num_micro_batches = settings.pop("num_micro_batches", 2)
    given: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "seq_length": SEQUENCE,
        "vocab_size": 50257,
        "micro_batch_size": 1,
        "global_batch_size": num_micro_batches * dp,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "zero_stage": stage,
        "precision": "bf16",
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "logits_chunk_bytes": 1 << 30,  # one chunk of the head instead of a hundred
    }
    config = make_run(**{**given, **settings})
    with dry_tensors():
        device = torch.device("cpu")
        buffers = FusedBuffers(0, device)
        topology = data_axis(config.zero, Topology(tp=tp, dp=dp, pp=pp), nodes)
        mesh = dry_mesh(
            topology, rank, device, buffers, is_gpu=True, meter=Meter(), wires=wires(config.zero), nodes=nodes
        )
        core = build_components(config, mesh, buffers, vocab_size=50257)
        tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
        batch = StepBatch(0, [MicroBatch(index, tokens, tokens, None) for index in range(num_micro_batches)])
        training_step(step_context(config, core), batch, StepControls(lr=1e-4, loss_scale=1.0))
        messages, comm_bytes = messages_of(mesh.meter), mesh.meter.bytes_by_axis()
        across = mesh.meter.bytes_across_nodes()
        mesh.meter.reset()
        take_statistics(core.engine, EVERY_STATISTIC._replace(layer_grad_norms=True))
        statistics = messages_of(mesh.meter)
        core.engine.close()
    times = times_of(mesh, core.timers)
    return {
        "padded": padded_numel(core.engine.layout, trainable=True),
        "states": asdict(core.engine.model_state_bytes()),
        "comm_bytes": comm_bytes,
        "bytes_across_nodes": across,
        "notice": mesh.notice,
        "messages": messages,
        "statistics": statistics,
        "times": times,
        "layers": len(layers_of(core.engine)),
        "parts": len(parts_of(core.timers.level)),
        "num_buffers": buffers.num_buffers,
        "buckets": [bucket.numel for section in core.engine.layout.sections for bucket in section.buckets],
        "units": {section.unit: section.numel for section in core.engine.layout.sections},
    }


def messages_of(meter: Meter) -> dict[str, list[int]]:
    """Return {"axis collective": [messages, bytes]} of what has been sent since the meter began."""
    table = meter.bytes_by_axis()
    counts = {(axis, name): meter.count(axis, name) for axis, row in table.items() for name in row}
    return {f"{axis} {name}": [count.calls, count.nbytes] for (axis, name), count in counts.items()}


def times_of(mesh: Mesh, timers: Timers) -> list[dict[str, list[int]]]:
    """Report two steps at a log interval of two, and return what each has sent: the first has the timers' times."""
    report = TimingReport(mesh, level=timers.level, option="minmax", log_interval=2, is_on=timers.level > 0)
    sent = []
    for number, timings in ((1, timers.take()), (2, Timings({}))):
        mesh.meter.reset()
        report.step(number, 1.0, timings)
        sent.append(messages_of(mesh.meter))
    return sent


if __name__ == "__main__":
    print(json.dumps([step(*case) for case in json.loads(sys.argv[1])]))
