"""Takes steps of a small run on real ranks, part by part as a dry run does, and compares what both ledgers count."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from support.configs import make_run

from megazero.comm.startup import make_mesh
from megazero.config.run import RunConfig
from megazero.data.loader import StepBatch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_figures import CATEGORIES
from megazero.parallel.nodes import Nodes
from megazero.planner.dry_run import DryJob, PartRecord, evaluate_once, made_up_batch, run_rank
from megazero.planner.trace import Part
from megazero.report.ledger_report import traffic
from megazero.train.build import build_components, step_context
from megazero.train.step import StepControls, training_step
from megazero.zero.plan import wires

VOCABULARY = 257
SMALL: Mapping[str, Any] = {
    "num_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 12,
    "seq_length": 24,
    "vocab_size": VOCABULARY,
    "make_vocab_size_divisible_by": 1,
    "micro_batch_size": 2,
    "reduce_bucket_size": 20000,
    "lr": 1e-3,
    "mock_data": True,
}
PARTS: tuple[Part, ...] = ("start-up", "first step", "steady step", "evaluation")
# gloo's thread may hold a tensor for a moment longer than its message takes, so the least of some steps counts.
REPEATED = ("second step", "third step", "fourth step")
EVALUATIONS = ("first evaluation", "second evaluation", "third evaluation")
MOMENT = 0.02  # seconds
Figures = dict[str, Any]


def job_of(settings: Mapping[str, Any], per_node: tuple[int, ...]) -> DryJob:
    """Return the job of these settings over SMALL on CPUs; per_node: the ranks of every node."""
    return DryJob(make_run(**{**SMALL, **settings}), VOCABULARY, Nodes(per_node), is_gpu=False)


def dry_figures(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> dict[str, Figures]:
    """Return the figures of every part of a rank by a dry run."""
    record = run_rank(job_of(settings, per_node), rank, PARTS)
    return {name: _of_record(part) for name, part in record.parts.items()}


def real_figures(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> dict[str, Figures]:
    """Return the figures of every part of this rank, which computes and communicates; a collective call."""
    job, device = job_of(settings, per_node), torch.device("cpu")
    config: RunConfig = job.config
    found: dict[str, Figures] = {}
    with Ledger(device) as ledger:
        buffers = FusedBuffers(0, device, ledger=ledger)
        mesh = make_mesh(job.topology, rank, device, buffers, wires=wires(config.zero), nodes=job.nodes)

        def take(name: str) -> None:
            time.sleep(MOMENT)
            memory = ledger.take()
            counts = {axis: {n: tuple(c) for n, c in row.items()} for axis, row in traffic(mesh.meter).items()}
            found[name] = _figures(memory, counts)
            mesh.meter.reset()

        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY, ledger=ledger)
        take("start-up")
        context = step_context(config, core)
        batch: StepBatch = made_up_batch(job)
        ledger.reset()
        for name in ("first step", *REPEATED):
            training_step(context, batch, StepControls(lr=1e-3, loss_scale=1.0))
            take(name)
        for name in EVALUATIONS:
            evaluate_once(context, batch)
            take(name)
        core.engine.close()
    found["steady step"] = _least([found.pop(name) for name in REPEATED])
    found["evaluation"] = _least([found.pop(name) for name in EVALUATIONS])
    return found


def _least(parts: Sequence[Figures]) -> Figures:
    """Return the figures of the part with the least peak, with the least of every category's figures in all of them."""
    least = min(parts, key=lambda part: (int(part["peak"]), part["at_peak"].get("activations", 0)))
    names = least["peaks"].keys() | least["at end"].keys()
    found = {
        moment: {name: min(part[moment].get(name, 0) for part in parts) for name in names}
        for moment in ("peaks", "at end")
    }
    return {**least, **{moment: {name: n for name, n in row.items() if n} for moment, row in found.items()}}


def differences(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> list[str]:
    """Return where this rank's figures differ from those of its dry run; a collective call.

    Start-up draws initial values, of which a dry run has none, so its temporaries are left out.
    """
    real, dry = real_figures(rank, settings, per_node), dry_figures(rank, settings, per_node)
    for figures in (real, dry):
        figures["start-up"] = {"at its end": figures["start-up"]["at end"], "traffic": figures["start-up"]["traffic"]}
        for moment in ("peaks", "at end"):
            figures["first step"][moment].pop("temporary", None)
    return list(_differing(dry, real, ""))


def _differing(dry: Mapping[str, Any], real: Mapping[str, Any], place: str) -> Iterator[str]:
    for name in sorted({*dry, *real}):
        one, other = dry.get(name), real.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differing(one, other, f"{place}{name}, ")
        elif one != other:
            yield f"{place}{name}: dry {one}, real {other}"


def _of_record(record: PartRecord) -> Figures:
    counts = {
        axis: {name: (count.calls, count.nbytes) for name, count in row.items() if count.nbytes}
        for axis, row in record.traffic.items()
    }
    return _figures(record.memory, {axis: row for axis, row in counts.items() if row})


def _figures(memory: Any, counts: Any) -> Figures:
    return {
        "peak": memory.peak_bytes,
        "at_peak": {name: n for name, n in memory.at_peak.items() if n},
        "peaks": {name: n for name, n in memory.peaks.items() if n},
        "at end": {name: int(n) for name, n in zip(CATEGORIES, memory.timeline.live[-1], strict=True) if n},
        "host": dict(memory.elsewhere),
        "traffic": counts,
    }
