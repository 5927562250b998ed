"""Takes steps of a small run on real ranks, part by part as a dry run does, and compares what both ledgers count."""

import re
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
from megazero.planner.dry.rank import DryJob, PartRecord, evaluate_once, made_up_batch, run_rank
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
# A part is repeated, for gloo's thread may hold a tensor for a moment longer or shorter than its message takes.
REPETITIONS = 7
# What such moments change of the first step, which happens once, as does the end of writes to files at the start, after
# which a block that is no longer in memory is read.
CHANGING = re.compile("peak$|at_peak, |peaks, (activations|temporary)|at end, temporary|traffic, file, read")
# In a dry run a late update is of the part that follows its step; those of two steady steps are alike.
LATE = re.compile("host, |traffic, file, ")
MOMENT = 0.02  # seconds
Figures = dict[str, Any]


def job_of(settings: Mapping[str, Any], per_node: tuple[int, ...]) -> DryJob:
    """Return the job of these settings over SMALL on CPUs; per_node: the ranks of every node."""
    return DryJob(make_run(**{**SMALL, **settings}), VOCABULARY, Nodes(per_node), is_gpu=False)


def dry_figures(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> dict[str, Figures]:
    """Return the figures of every part of a rank by a dry run."""
    record = run_rank(job_of(settings, per_node), rank, PARTS)
    return {name: figures_of_record(part) for name, part in record.parts.items()}


def real_figures(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> dict[str, list[Figures]]:
    """Return the figures of every repetition of every part of this rank, which computes; a collective call."""
    job, device = job_of(settings, per_node), torch.device("cpu")
    config: RunConfig = job.config
    found: dict[str, list[Figures]] = {name: [] for name in PARTS}
    with Ledger(device) as ledger:
        buffers = FusedBuffers(0, device, ledger=ledger)
        mesh = make_mesh(job.topology, rank, device, buffers, wires=wires(config.zero), nodes=job.nodes)

        def take(name: Part) -> None:
            time.sleep(MOMENT)
            memory = ledger.take()
            counts = {axis: {n: tuple(c) for n, c in row.items()} for axis, row in traffic(mesh.meter).items()}
            found[name].append(figures_of(memory, counts))
            mesh.meter.reset()

        core = build_components(config, mesh, buffers, vocab_size=VOCABULARY, ledger=ledger)
        take("start-up")
        context = step_context(config, core)
        batch: StepBatch = made_up_batch(job)
        ledger.reset()
        steps: tuple[Part, ...] = ("first step", *("steady step",) * REPETITIONS)
        for place, name in enumerate(steps):
            training_step(context, batch, StepControls(lr=1e-3, loss_scale=1.0))
            if settings.get("delayed_parameter_update") and place >= REPETITIONS - 1:
                # From the last step but one to the last, what is counted is one whole late update, however far those of
                # the steps before were when they were counted.
                core.engine.optimizer_numbers()
            take(name)
        for _ in range(REPETITIONS):
            evaluate_once(context, batch)
            take("evaluation")
        core.engine.close()
    return found


def differences(rank: int, settings: Mapping[str, Any], per_node: tuple[int, ...]) -> list[str]:
    """Return where no repetition of this rank has the figure of its dry run; a collective call.

    Start-up draws initial values, of which a dry run has none, so only what it leaves and sends is compared; of the
    first step, what the moments of gloo's thread do not change.
    """
    real, dry = real_figures(rank, settings, per_node), dry_figures(rank, settings, per_node)
    late = bool(settings.get("delayed_parameter_update"))
    return [f"{part}, {line}" for part in PARTS for line in differing(part, dry[part], real[part], is_late=late)]


def differing(part: Part, dry: Figures, real: Sequence[Figures], *, is_late: bool = False) -> Iterator[str]:
    """Yield the places where no repetition has the dry figure; a place that is missing has none."""
    expected, found = dict(_leaves(dry)), [dict(_leaves(repetition)) for repetition in real]
    for place in sorted(expected.keys() | {place for repetition in found for place in repetition}):
        if part == "start-up" and not place.startswith(("at end, ", "traffic, ")):
            continue
        if part == "first step" and CHANGING.match(place):
            continue
        if is_late and part != "steady step" and LATE.match(place):
            continue
        if is_late and place == "at end, temporary":  # the numbers of steps of tasks that a dry run has not run yet
            continue
        values = [repetition.get(place) for repetition in found]
        if expected.get(place) not in values:
            yield f"{place}: dry {expected.get(place)}, real {values}"


def _leaves(figures: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every figure with its place, the names on the way to it."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{place}{name}, ")
        else:
            yield f"{place}{name}", value


def figures_of_record(record: PartRecord) -> Figures:
    counts = {
        axis: {name: (count.calls, count.nbytes) for name, count in row.items() if count.nbytes}
        for axis, row in record.traffic.items()
    }
    return figures_of(record.memory, {axis: row for axis, row in counts.items() if row})


def figures_of(memory: Any, counts: Any) -> Figures:
    return {
        "peak": memory.peak_bytes,
        "at_peak": {name: n for name, n in memory.at_peak.items() if n},
        "peaks": {name: n for name, n in memory.peaks.items() if n},
        "at end": {name: int(n) for name, n in zip(CATEGORIES, memory.timeline.live[-1], strict=True) if n},
        "host": dict(memory.elsewhere),
        "traffic": counts,
    }
