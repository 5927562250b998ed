"""Predicts steps of layouts and sizes drawn by a seed, then takes them on this machine: how far off is the planner?

    python benchmarks/plan_time.py --records FILE.jsonl --seed N [--count 60] [--minutes 60] [--output FILE.md]

The seed is to be chosen after the model of time is final, since a model can be fitted to any draw that is known.  The
machine is calibrated for 1, 2 and 4 processes first, as `megazero plan --calibrate` does it.  Then every layout is
predicted from its dry run and that calibration, and the predictions are written down before the first step is taken.
Layouts are drawn from tensor x pipeline x data parallel up to --most-processes, schedules, ZeRO stages, recomputation,
split sequences, micro-batches, and from widths, depths, sequences and vocabularies whose steps take about 0.1 to 10 s.
Each takes --steps steps behind two that are dropped; the median counts, of the slowest process.

A line is appended to --records as soon as it is known, and what has a line is not done again, so the program may be
stopped and started at will.  Status 2: --minutes were over before all were run.  Every process computes with one
thread.  A machine that does other work meanwhile spoils the figures.  So the cores that other programs take while a
layout's steps or the calibration last are recorded beside these, and where they are more than a twentieth of one core
the measurement is repeated, up to twice, whatever it has found; that with the fewest counts.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from jobs import Place, run_job
from report import HelpFormat, add_output, command, heading, paragraph, publish, table, tell
from steps import Steps, configuration_of

from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.errors import UserError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.calibration import measuring
from megazero.planner.calibration.machine import measured
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware, read_hardware, to_yaml
from megazero.planner.job_plan import make_plan
from megazero.planner.predict import forecast_of
from megazero.planner.seconds import StepTime

Record = dict[str, Any]
PROCESSES = (1, 2, 4)
AIMS = "median error at most 12 %, 75 % of the layouts within 15 %, rank correlation at least 0.9"
# Cores that other programs take meanwhile, up to which a measurement stands at once, and how often it is taken.
_UNDISTURBED, _TRIES = 0.05, 3
# Operations of a step, which bound its time from both sides.
_FEWEST, _MOST = 4e9, 2e11


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been found; appended to")
    add("--seed", type=int, required=True, help="of the draw")
    add("--count", type=int, default=60, help="layouts of the draw")
    add("--steps", type=int, default=5, help="steps of each that are timed")
    add("--most-processes", type=int, default=4, choices=PROCESSES, help="processes of a layout")
    add("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    add("--quick", action="store_true", help="calibrate in seconds, coarsely: to try the program")
    add_output(parser)
    return parser.parse_args(words)


def draws(seed: int, most_processes: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (processes, words of a command line) of legal layouts without end, each once."""
    chance, seen = random.Random(seed), set()
    while True:
        world = chance.choice([number for number in PROCESSES if number <= most_processes])
        words = _draw(chance, world)
        if str((world, words)) in seen or not _is_legal(words, world):
            continue
        seen.add(str((world, words)))
        yield world, words


def _draw(chance: random.Random, world: int) -> list[str]:
    tp = chance.choice([degree for degree in PROCESSES if world % degree == 0])
    pp = chance.choice([degree for degree in PROCESSES if world // tp % degree == 0])
    dp = world // tp // pp
    head, heads = chance.choice((32, 64)), chance.choice((4, 8))
    length, micro_batch, number = chance.choice((64, 128, 256)), chance.choice((1, 2, 4)), chance.choice((1, 2, 4, 8))
    layers = chance.choice((4, 8)) if pp > 1 else chance.randint(2, 8)
    given: dict[str, Any] = {
        "num-layers": layers,
        "hidden-size": head * heads,
        "num-attention-heads": heads,
        "seq-length": length,
        "vocab-size": chance.choice((512, 4096, 16384)),
        "micro-batch-size": micro_batch,
        "global-batch-size": micro_batch * number * dp,
        "tensor-model-parallel-size": tp,
        "pipeline-model-parallel-size": pp,
        "zero-stage": chance.choice((0, 1, 2, 3)),
        "precision": "fp32",
    }
    if pp > 1:
        given["pipeline-schedule"] = chance.choice(("gpipe", "1f1b", "zero-bubble"))
    if tp > 1 and chance.random() < 0.5:
        given["sequence-parallel"] = "true"
    if chance.random() < 0.3:
        given["recompute-granularity"] = "full"
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _is_legal(words: Sequence[str], world: int) -> bool:
    try:
        config = configuration_of(words, world)
    except UserError:
        return False
    model, tokens = config.model, config.model.seq_length * int(words[words.index("--global-batch-size") + 1])
    weights = 12 * model.num_layers * model.hidden_size**2 + (model.vocab_size or 0) * model.hidden_size
    return bool(_FEWEST <= 6 * weights * tokens <= _MOST)


class Others:
    """The cores that programs beside the processes of a job take: the machine's busy time without theirs.

    0 where the system does not tell (`/proc/stat`).
    """

    def __init__(self) -> None:
        self._start = time.perf_counter(), _busy_seconds(), time.process_time()

    def cores(self, mesh: Mesh) -> float:
        """Return how many they have taken since this was made; a collective call."""
        wall, busy, own = (
            now - then
            for now, then in zip((time.perf_counter(), _busy_seconds(), time.process_time()), self._start, strict=True)
        )
        total = torch.tensor([own], dtype=torch.float64)
        mesh.world.all_reduce_scalars(total).wait()
        return max(busy - total.item(), 0.0) / wall


def _busy_seconds() -> float:
    """Return the seconds of all cores that something has used since the machine started, the host's others too."""
    path = Path("/proc/stat")
    fields = path.read_text(encoding="ascii").split(None, 9)[1:9] if path.exists() else ["0"] * 8
    user, nice, system, _, _, hard, soft, stolen = map(int, fields)
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def calibrated(place: Place, quick: bool) -> tuple[str, float]:
    """Return the description of this machine with the processes of a job, as YAML, and the cores of others."""
    mesh = make_mesh(
        Topology(dp=place.launch.world_size), place.launch.rank, place.device, FusedBuffers(0, place.device)
    )
    others, here = Others(), measuring.Place(place.launch.rank, place.launch.world_size, place.device, mesh.world)
    effort = measuring.Effort().coarse() if quick else measuring.Effort()
    found = to_yaml(measured(here, effort, name=f"cpu x {place.launch.world_size}", report=lambda line: None))
    return found, others.cores(mesh)


def predicted(words: Sequence[str], world: int, machine: Hardware) -> StepTime:
    """Return the predicted times of a step of a layout."""
    config = configuration_of(words, world)
    assert config.model.vocab_size is not None
    job = DryJob(config, config.model.vocab_size, Nodes((world,)), is_gpu=False)
    return forecast_of(make_plan(job, machine, parts=("start-up", "first step", "steady step"))).step


def prediction(world: int, words: Sequence[str], machine: Hardware) -> Record:
    """Return the record of a layout's prediction."""
    found = predicted(words, world, machine)
    figures = {"seconds": found.seconds, "shares": found.shares(), "binding": found.binding}
    return {**figures, "processes": world, "layout": " ".join(words)}


def measurement(world: int, words: Sequence[str], number: int) -> Record:
    """Return the record of a layout's steps."""
    ranks = run_job(world, timed, words, number, device="cpu")
    return {"seconds": max(seconds for seconds, _ in ranks), "others": max(others for _, others in ranks)}


def calibration(world: int, quick: bool) -> Record:
    """Return the record of a calibration for so many processes."""
    found, others = run_job(world, calibrated, quick, device="cpu")[0]
    return {"yaml": found, "others": others}


def least_disturbed(measure: Callable[[], Record]) -> Record:
    """Return the record of a measurement that other programs have not disturbed, or the least disturbed of a few."""
    found: list[Record] = []
    while len(found) < _TRIES and not any(one["others"] <= _UNDISTURBED for one in found):
        found.append(measure())
    return {**min(found, key=lambda one: float(one["others"])), "tries": len(found)}


def timed(place: Place, words: Sequence[str], number: int) -> tuple[float, float]:
    """Return the median seconds of a step, behind two that are dropped, and the cores of others meanwhile."""
    torch.set_num_threads(1)
    steps = Steps(configuration_of(words, place.launch.world_size), place)
    others, found = Others(), []
    for step in range(2 + number):
        batch = steps.batch(step)
        if dist.is_initialized():
            steps.mesh.world.barrier()
        start = time.perf_counter()
        steps.take(batch)
        found.append(time.perf_counter() - start)
    cores = others.cores(steps.mesh)
    steps.close()
    return statistics.median(found[2:]), cores


def read_records(path: Path) -> dict[str, Record]:
    """Return the records by their keys; a line that was cut off in writing is skipped."""
    found: dict[str, Record] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[record["key"]] = record
    return found


class Records:
    """The records of a file, and those that are added to it."""

    def __init__(self, path: Path, minutes: float) -> None:
        self._path, self._known = path, read_records(path)
        self._end = time.monotonic() + 60 * minutes

    def get(self, key: str, find: Callable[[], Mapping[str, Any]]) -> Record | None:
        """Return the record of a key, which is found and written if it is new; None when there is no time for it."""
        if key not in self._known:
            if time.monotonic() > self._end:
                return None
            record = {"key": key, **find()}
            is_cut_off = self._path.exists() and not self._path.read_bytes().endswith(b"\n")
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write("\n" * is_cut_off + json.dumps(record) + "\n")
            self._known[key] = record
        return self._known[key]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Spearman's rank correlation of two series without equal values."""
    places = [[sorted(series).index(value) for value in series] for series in (first, second)]
    return statistics.correlation(*([float(place) for place in series] for series in places))


def summary(rows: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Return the figures that the aims are about, of pairs (predicted, measured)."""
    errors = sorted(abs(guess / true - 1) for guess, true in rows)
    return {
        "median error": statistics.median(errors),
        "within 15 %": sum(error <= 0.15 for error in errors) / len(errors),
        "rank correlation": rank_correlation(*zip(*rows, strict=True)) if len(rows) > 2 else float("nan"),
    }


def page_of(found: Sequence[tuple[Record, Record]], options: argparse.Namespace) -> list[str]:
    """Return the parts of the page; found: predictions and measurements of the same layouts."""
    rows = [(one["seconds"], other["seconds"]) for one, other in found]
    figures = summary(rows)
    told = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    others = [other["others"] for _, other in found]
    again = sum(other["tries"] > 1 for _, other in found)
    disturbed = f" While steps were taken other programs used {min(others):.2f} to {max(others):.2f} cores;"
    disturbed += f" {again} layouts were measured again because it was more than {_UNDISTURBED}."
    header = ("layout", "processes", "predicted, s", "measured, s", "error, %", "what binds", "others, cores")
    lines = [
        [
            one["layout"],
            one["processes"],
            f"{guess:.3f}",
            f"{true:.3f}",
            f"{100 * (guess / true - 1):+.1f}",
            one["binding"],
            f"{other['others']:.2f}",
        ]
        for (one, other), (guess, true) in zip(found, rows, strict=True)
    ]
    return [
        heading(f"{len(found)} of {options.count} layouts predicted, then measured (seed {options.seed})", "cpu"),
        paragraph(f"Made by `{command(sys.argv)}`. Found: {told}. Aims: {AIMS}.{disturbed}"),
        table(header, lines),
    ]


def main() -> int:
    options = parse_arguments()
    records = Records(options.records, options.minutes)
    source = draws(options.seed, options.most_processes)
    layouts = [next(source) for _ in range(options.count)]
    machines: dict[int, Hardware] = {}
    for world in sorted({world for world, _ in layouts}):
        tell(f"calibrating for {world} processes")
        made = records.get(f"machine {world}", partial(least_disturbed, partial(calibration, world, options.quick)))
        if made is None:
            return 2
        machines[world] = read_hardware(yaml.safe_load(made["yaml"]), origin=f"machine {world}")

    predictions = []
    for number, (world, words) in enumerate(layouts, 1):
        one = records.get(f"predicted {world} {words}", partial(prediction, world, words, machines[world]))
        if one is None:
            return 2
        predictions.append(one)
        tell(f"predicted {number} of {len(layouts)}: {one['seconds']:.3f} s")
    found = []
    for number, ((world, words), one) in enumerate(zip(layouts, predictions, strict=True), 1):
        measure = partial(measurement, world, words, options.steps)
        other = records.get(f"measured {world} {words}", partial(least_disturbed, measure))
        if other is None:
            break
        found.append((one, other))
        error = 100 * (one["seconds"] / other["seconds"] - 1)
        tell(f"measured {number} of {len(layouts)}: {other['seconds']:.3f} s, predicted {error:+.1f} %")
    if found:
        publish(page_of(found, options), options.output)
    return 0 if len(found) == len(layouts) else 2


if __name__ == "__main__":
    sys.exit(main())
