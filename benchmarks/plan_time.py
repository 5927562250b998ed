"""Predicts steps of layouts and sizes drawn by a seed, then takes them on this machine: how far off is the planner?

    python benchmarks/plan_time.py --records FILE.jsonl --seed N [--count 60] [--minutes 60] [--output FILE.md]

The seed is to be chosen after the model of time is final, since a model can be fitted to any draw that is known.  The
machine is calibrated for 1, 2 and 4 processes first, as `megazero plan --calibrate` does it.  Then every layout is
predicted from its dry run and that calibration, and the predictions are written down before the first step is taken.
Layouts are drawn from tensor x pipeline x data parallel up to --most-processes, schedules, ZeRO stages, recomputation,
split sequences, micro-batches, and from widths, depths, sequences and vocabularies whose steps take about 0.1 to 10 s.
Each takes --steps steps behind two that are dropped; the median counts, of the slowest process.

Of the layouts a share of --emulated runs on two nodes of one process each, tensor, pipeline or data parallel across
them: network namespaces of this machine (`cluster.sh`), whose links have a rate that is drawn too.  In each cluster the
calibration measures the link between nodes and what messages cost the computation beside them; what else describes the
machine is the calibration of as many processes, since the cores are the same.  This needs root and Linux with ip and
tc; elsewhere these layouts are left out, and the page says so.

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import yaml
from jobs import Place, run_job, run_on_cluster
from nodes import Cluster, ends_on_signals, obstacle
from report import HelpFormat, add_output, command, heading, paragraph, publish, table, tell
from steps import Steps, configuration_of

from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.config import derived
from megazero.errors import UserError
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.nodes import Nodes
from megazero.parallel.topology import Topology
from megazero.planner.calibration import measuring
from megazero.planner.calibration.links import link_across, overlap_cost
from megazero.planner.calibration.machine import measured
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware, read_hardware, to_yaml
from megazero.planner.job_plan import DryRuns
from megazero.planner.predict import forecast_of
from megazero.planner.seconds import StepTime
from megazero.train.start.check import topology

Record = dict[str, Any]
PROCESSES = (1, 2, 4)
AIMS = "median error at most 12 %, 75 % of the layouts within 15 %, rank correlation at least 0.9"
# Cores that other programs take meanwhile, up to which a measurement stands at once, and how often it is taken.
_UNDISTURBED, _TRIES = 0.05, 3
# Operations of a step, which bound its time from both sides.
_FEWEST, _MOST = 4e9, 2e11
NODES = 2  # of a cluster, with one process each
RATES = (1000, 400, 200, 100)  # of its links, in Mbit/s, by default
# About the seconds that a link between nodes carries a step's bytes: it is to matter, and the step is to end.
_SHORTEST, _LONGEST = 0.03, 4.0


class Machine(NamedTuple):
    """What a layout runs on: so many processes of one node, or of a node each, with links of so many Mbit/s."""

    processes: int
    mbit: int = 0

    @property
    def name(self) -> str:
        """The name that records have."""
        return f"{self.processes}" + (f" over {self.mbit} Mbit/s" if self.mbit else "")

    @property
    def nodes(self) -> Nodes:
        return Nodes((1,) * self.processes if self.mbit else (self.processes,))


class Drawn(NamedTuple):
    """A layout that is drawn, by the words of a command line, and what it runs on."""

    machine: Machine
    words: list[str]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been found; appended to")
    add("--seed", type=int, required=True, help="of the draw")
    add("--count", type=int, default=60, help="layouts of the draw")
    add("--steps", type=int, default=5, help="steps of each that are timed")
    add("--most-processes", type=int, default=4, choices=PROCESSES, help="processes of a layout")
    add("--emulated", type=float, default=0.3, help="share of the layouts that run on nodes with emulated links")
    add("--rates", type=int, nargs="+", default=list(RATES), help="of these links, in Mbit/s")
    add("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    add("--quick", action="store_true", help="calibrate in seconds, coarsely: to try the program")
    add_output(parser)
    return parser.parse_args(words)


def draws(seed: int, most_processes: int, emulated: float, rates: Sequence[int] = RATES) -> Iterator[Drawn]:
    """Yield legal layouts without end, each once.

    emulated: the share of them that is on several nodes.  rates: of the links between these, in Mbit/s.
    """
    chance, seen = random.Random(seed), set()
    while True:
        if chance.random() < emulated:
            # A draw that is too long or too short over its link is drawn again, so that the share stays.
            while not _is_legal(found := _draw_on_nodes(chance, rates)):
                pass
        else:
            while not _is_legal(found := _draw_on_one_node(chance, most_processes)):
                pass
        if str(found) not in seen:
            seen.add(str(found))
            yield found


def _draw_on_nodes(chance: random.Random, rates: Sequence[int]) -> Drawn:
    axis, mbit = chance.choice(("tp", "pp", "dp")), chance.choice(rates)
    tp, pp = (NODES if axis == name else 1 for name in ("tp", "pp"))
    words = _words(chance, NODES, tp, pp)
    return Drawn(Machine(NODES, mbit), [*words, *(["--allow-tensor-parallel-across-nodes"] if tp > 1 else [])])


def _draw_on_one_node(chance: random.Random, most_processes: int) -> Drawn:
    world = chance.choice([number for number in PROCESSES if number <= most_processes])
    tp = chance.choice([degree for degree in PROCESSES if world % degree == 0])
    pp = chance.choice([degree for degree in PROCESSES if world // tp % degree == 0])
    return Drawn(Machine(world), _words(chance, world, tp, pp))


def _words(chance: random.Random, world: int, tp: int, pp: int) -> list[str]:
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


def _is_legal(drawn: Drawn) -> bool:
    machine = drawn.machine
    try:
        config = configuration_of(drawn.words, machine.processes)
    except UserError:
        return False
    model, batch = config.model, derived.global_batch_size(config, machine.processes)
    tokens = model.seq_length * batch
    table = (model.vocab_size or 0) * model.hidden_size
    weights = 12 * model.num_layers * model.hidden_size**2 + table
    is_sized = bool(_FEWEST <= 6 * weights * tokens <= _MOST)
    if not machine.mbit or not is_sized:
        return is_sized
    layout = topology(config, machine.processes)
    activations, number = tokens * model.hidden_size, batch // config.training.micro_batch_size // layout.dp
    # Elements that a node sends, roughly: all-reduces of activations; activations once, and the gradient of the
    # embedding, which two stages have; or gradients and parameters.
    sent = 4 * model.num_layers * activations if layout.tp > 1 else activations + table
    if layout.dp > 1:
        sent = weights * {2: number + 1, 3: 3 * number}.get(config.zero.zero_stage, 2) / 2
    return bool(_SHORTEST <= 4 * sent / (machine.mbit * 1e6 / 8) <= _LONGEST)


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
    """Return the seconds of all cores that something has used since the machine started, the host's others too.

    Interrupts do not count: those of an emulated link are of the job's own messages.
    """
    path = Path("/proc/stat")
    fields = path.read_text(encoding="ascii").split(None, 9)[1:9] if path.exists() else ["0"] * 8
    user, nice, system, _, _, _, _, stolen = map(int, fields)
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def calibrated(place: Place, quick: bool) -> tuple[str, float]:
    """Return the description of this machine with the processes of a job, as YAML, and the cores of others."""
    meter, mesh = _meter(place, quick)
    others, name = Others(), f"cpu x {place.launch.world_size}"
    found = to_yaml(measured(meter.place, meter.effort, name=name, report=lambda line: None))
    return found, others.cores(mesh)


def with_links(one_node: str, place: Place, quick: bool) -> tuple[str, float]:
    """Return the description of a machine as that of nodes of one process each, with the link between these measured.

    As `calibrated` returns it.
    """
    meter, mesh = _meter(place, quick)
    others, before = Others(), read_hardware(yaml.safe_load(one_node), origin="one node")
    links = {**before.links, "across": link_across(meter)}
    found = replace(before, devices_per_node=1, at_once=1.0, links=links, overlap_cost=overlap_cost(meter))
    return to_yaml(found), others.cores(mesh)


def _meter(place: Place, quick: bool) -> tuple[measuring.GroupStopwatch, Mesh]:
    launch = place.launch
    mesh = make_mesh(Topology(dp=launch.world_size), launch.rank, place.device, FusedBuffers(0, place.device))
    here = measuring.Place(launch.rank, launch.world_size, place.device, mesh.world, launch.ranks_per_node)
    effort = measuring.Effort().coarse() if quick else measuring.Effort()
    return measuring.GroupStopwatch(here, effort), mesh


def predicted(drawn: Drawn, machine: Hardware, runs: DryRuns) -> StepTime:
    """Return the predicted times of a step of a layout.  runs: the dry runs so far."""
    config = configuration_of(drawn.words, drawn.machine.processes)
    assert config.model.vocab_size is not None
    job = DryJob(config, config.model.vocab_size, drawn.machine.nodes, is_gpu=False)
    return forecast_of(runs.plan(job, machine, parts=("start-up", "first step", "steady step"))).step


def prediction(drawn: Drawn, machine: Hardware) -> Record:
    """Return the record of a layout's prediction."""
    found = predicted(drawn, machine, DryRuns())
    figures = {"seconds": found.seconds, "shares": found.shares(), "binding": found.binding}
    return {**figures, **drawn.machine._asdict(), "layout": " ".join(drawn.words)}


def run(cluster: Cluster | None, machine: Machine, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function on the processes of a machine, and return their results by rank."""
    if not machine.mbit:
        return run_job(machine.processes, fn, *args, device="cpu")
    assert cluster is not None, "layouts on nodes have a cluster"
    cluster.set_rate(machine.mbit)
    return run_on_cluster(cluster, fn, *args)


def measurement(cluster: Cluster | None, drawn: Drawn, number: int) -> Record:
    """Return the record of a layout's steps."""
    ranks = run(cluster, drawn.machine, timed, drawn.words, number)
    return {"seconds": max(seconds for seconds, _ in ranks), "others": max(others for _, others in ranks)}


def calibration(cluster: Cluster | None, machine: Machine, quick: bool, one_node: str) -> Record:
    """Return the record of a calibration; one_node: the description of as many processes, for those on nodes."""
    fn = partial(with_links, one_node) if machine.mbit else calibrated
    found, others = run(cluster, machine, fn, quick)[0]
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


def page_of(found: Sequence[tuple[Record, Record]], options: argparse.Namespace, left_out: str = "") -> list[str]:
    """Return the parts of the page; found: predictions and measurements of the same layouts."""
    told = []
    for name, is_wanted in (("all", (True, False)), ("emulated links", (True,)), ("one node", (False,))):
        rows = [(one["seconds"], other["seconds"]) for one, other in found if bool(one["mbit"]) in is_wanted]
        figures = ", ".join(f"{name} {value:.3f}" for name, value in summary(rows).items()) if rows else "none"
        told.append(f"{name} ({len(rows)} layouts): {figures}")
    others = [other["others"] for _, other in found]
    again = sum(other["tries"] > 1 for _, other in found)
    disturbed = f" While steps were taken other programs used {min(others):.2f} to {max(others):.2f} cores;"
    disturbed += f" {again} layouts were measured again because it was more than {_UNDISTURBED}."
    links = (
        f" Where a link is stated, {NODES} nodes of one process each, network namespaces of this machine, were joined"
        " by one of that rate each way, over which the calibration has measured messages."
    )
    header = ("layout", "processes", "link, Mbit/s", "predicted, s", "measured, s", "error, %", "what binds")
    lines = [
        [
            one["layout"],
            one["processes"],
            one["mbit"] or "",
            f"{one['seconds']:.3f}",
            f"{other['seconds']:.3f}",
            f"{100 * (one['seconds'] / other['seconds'] - 1):+.1f}",
            one["binding"],
            f"{other['others']:.2f}",
        ]
        for one, other in found
    ]
    words = f"Made by `{command(sys.argv)}`. Found: {'; '.join(told)}. Aims: {AIMS}.{links}{disturbed}{left_out}"
    return [
        heading(f"{len(found)} of {options.count} layouts predicted, then measured (seed {options.seed})", "cpu"),
        paragraph(words),
        table((*header, "others, cores"), lines),
    ]


def judged(options: argparse.Namespace, layouts: Sequence[Drawn], cluster: Cluster | None, left_out: str) -> int:
    """Calibrate, predict and measure what has no record yet; return the exit status."""
    records = Records(options.records, options.minutes)
    described: dict[Machine, str] = {}
    for machine in sorted(
        {machine for drawn in layouts for machine in (drawn.machine, Machine(drawn.machine.processes))}
    ):
        tell(f"calibrating for {machine.name} processes")
        measure = partial(calibration, cluster, machine, options.quick, described.get(Machine(machine.processes), ""))
        made = records.get(f"machine {machine.name}", partial(least_disturbed, measure))
        if made is None:
            return 2
        described[machine] = made["yaml"]
    machines = {one: read_hardware(yaml.safe_load(text), origin=one.name) for one, text in described.items()}

    predictions = []
    for number, drawn in enumerate(layouts, 1):
        find = partial(prediction, drawn, machines[drawn.machine])
        one = records.get(f"predicted {drawn.machine.name} {drawn.words}", find)
        if one is None:
            return 2
        predictions.append(one)
        tell(f"predicted {number} of {len(layouts)}: {one['seconds']:.3f} s")
    found = []
    for number, (drawn, one) in enumerate(zip(layouts, predictions, strict=True), 1):
        measure = partial(measurement, cluster, drawn, options.steps)
        other = records.get(f"measured {drawn.machine.name} {drawn.words}", partial(least_disturbed, measure))
        if other is None:
            break
        found.append((one, other))
        error = 100 * (one["seconds"] / other["seconds"] - 1)
        tell(f"measured {number} of {len(layouts)}: {other['seconds']:.3f} s, predicted {error:+.1f} %")
    if found:
        publish(page_of(found, options, left_out), options.output)
    return 0 if len(found) == len(layouts) else 2


def main() -> int:
    options = parse_arguments()
    source = draws(options.seed, options.most_processes, options.emulated, options.rates)
    layouts = [next(source) for _ in range(options.count)]
    emulated = [drawn for drawn in layouts if drawn.machine.mbit]
    reason = obstacle() if emulated else ""
    if not emulated or reason:
        left_out = ""
        if reason:
            left_out = f" {len(emulated)} layouts over emulated links are left out: {reason}."
            tell(left_out.strip())
        return judged(options, [drawn for drawn in layouts if not drawn.machine.mbit], None, left_out)
    with ends_on_signals(), Cluster(NODES) as cluster:
        return judged(options, layouts, cluster, "")


if __name__ == "__main__":
    sys.exit(main())
