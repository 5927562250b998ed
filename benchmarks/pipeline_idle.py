"""Measures how long pipeline stages idle under each schedule, beside the formulas, on 2 processes.

    python benchmarks/pipeline_idle.py [--micro-batches 2 4 8 16] [--output FILE.md]

1. Idle shares of p = 2 pipeline stages on the clock, from traces of whole steps.  Stages are alike (a small vocabulary,
   so that embedding and head cost next to nothing), as the formulas assume; schedules take turns.
2. Idle shares of p = 4 with the measured durations of computations, by simulation: four processes would share cores.
3. With GPT-2's vocabulary, whose head costs as much as many layers: the balanced split beside an equal one.
4. Bytes of activations that each stage holds at the most, by the ledger, under 1f1b and gpipe.

With --output FILE.md the figures go to FILE.json too, and a picture of a step of every schedule to FILE-SCHEDULE.svg.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jobs import Place, run_job
from report import argument_parser, heading, mib, paragraph, publish, table, tell
from steps import LR, configuration

from megazero.comm.startup import make_mesh
from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.data.loader import MicroBatch, StepBatch
from megazero.data.mock import MockSamples
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.ledger import Ledger
from megazero.memory.ledger_interface import AnyLedger
from megazero.parallel.layer_split import balanced_split, model_costs
from megazero.pipeline.passes import most_in_flight_total
from megazero.pipeline.picture import picture
from megazero.pipeline.schedule import Kind, Shape, schedule
from megazero.pipeline.timeline import EQUAL_PARTS, Timeline, predicted_idle_share, simulate
from megazero.pipeline.trace import SpanRow, Trace, mean_durations, rows, timeline
from megazero.train.build import build_components, step_context
from megazero.train.start.check import topology
from megazero.train.step import StepControls, training_step

STAGES, SIMULATED_STAGES = 2, 4
GPT2_VOCABULARY = 50257
CHUNKS: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # on each stage, by schedule


class Case(NamedTuple):
    """A case to be timed: the name of a schedule (or of a split), and a number of micro-batches."""

    name: str
    micro_batches: int


@dataclass
class Times:
    """The steps of a case: when each computation ran, and the seconds of whole steps, update included."""

    timelines: list[Timeline] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def idle(self) -> list[float]:
        """The first quartile, the median and the third quartile of the idle share over steps."""
        shares = [measured.idle_share for measured in self.timelines]
        return statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else 3 * shares

    @property
    def makespan(self) -> float:
        """The median seconds from the first computation of a step to the end of its last."""
        return statistics.median(measured.makespan for measured in self.timelines)

    @property
    def step(self) -> float:
        return statistics.median(self.seconds)

    @property
    def durations(self) -> dict[Kind, float]:
        """The mean seconds of each kind of computation in a step; the median over steps."""
        means = [mean_durations(measured) for measured in self.timelines]
        return {kind: statistics.median(mean[kind] for mean in means) for kind in means[0]}

    @property
    def typical(self) -> Timeline:
        """The step with the median idle share (the lower one of two)."""
        return sorted(self.timelines, key=lambda measured: measured.idle_share)[(len(self.timelines) - 1) // 2]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--num-layers", type=int, default=8, help="blocks, in parts 1, 2 and 4; a multiple of 4")
    add("--hidden-size", type=int, default=256, help="width")
    add("--heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=64, help="tokens of a sample")
    add("--micro-batch-size", type=int, default=2, help="samples of a micro-batch")
    add("--vocab-size", type=int, default=64, help="rows of the embedding, but in part 3")
    add("--micro-batches", type=int, nargs="+", default=[2, 4, 8, 16], help="of a step; multiples of 2")
    add("--balance-layers", type=int, default=24, help="blocks in part 3")
    add("--balance-vocab-size", type=int, default=GPT2_VOCABULARY, help="rows of the embedding in part 3")
    add("--rounds", type=int, default=4, help="turns of every case")
    add("--steps", type=int, default=2, help="steps of a turn, and one before them that doesn't count")
    options = parser.parse_args(words)
    if options.num_layers % (2 * STAGES) or any(number < 1 or number % STAGES for number in options.micro_batches):
        parser.error("stages with the same layers in 2 chunks: layers in fours, micro-batches in twos")
    return options


def configure(name: str, options: argparse.Namespace, **changes: Any) -> RunConfig:
    """Return the configuration of two pipeline stages under a schedule."""
    layers, chunks = options.num_layers, CHUNKS[name]
    parts = STAGES * chunks
    settings = {
        "num_layers": layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.heads,
        "seq_length": options.seq_length,
        "vocab_size": options.vocab_size,
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": options.micro_batch_size * max(options.micro_batches),
        "pipeline_model_parallel_size": STAGES,
        "pipeline_schedule": name,
        "pipeline_split": ",".join([str(layers // parts)] * parts),
        **({"num_layers_per_virtual_pipeline_stage": layers // parts} if chunks > 1 else {}),
        **changes,
    }
    return configuration(settings, STAGES)


class System:
    """The training of one configuration on this process, in steps of any number of micro-batches."""

    def __init__(self, place: Place, config: RunConfig, ledger: AnyLedger | None = None) -> None:
        buffers = FusedBuffers(0, place.device, ledger=ledger)
        self.mesh = make_mesh(topology(config, place.launch.world_size), place.launch.rank, place.device, buffers)
        assert config.model.vocab_size is not None, "made-up samples have a stated vocabulary"
        core = build_components(config, self.mesh, buffers, vocab_size=config.model.vocab_size, ledger=ledger)
        self.trace = Trace(place.device)
        self.parts = replace(step_context(config, core), trace=self.trace)
        self._rows = config.training.micro_batch_size
        self._samples = MockSamples(config.model.vocab_size, config.model.seq_length, seed=1)

    def batch(self, num_micro_batches: int) -> StepBatch:
        """Return a step's batch of so many micro-batches, with the same samples every time."""
        micro_batches = []
        for first in range(0, num_micro_batches * self._rows, self._rows):
            tokens = torch.stack([torch.from_numpy(self._samples.sample(first + row)) for row in range(self._rows)])
            micro_batches.append(MicroBatch(first, tokens[:, :-1], tokens[:, 1:], None))
        return StepBatch(0, micro_batches)

    def take(self, batch: StepBatch) -> tuple[list[SpanRow], float]:
        """Take a traced step, and return this stage's spans and the seconds of the whole step."""
        self.mesh.world.barrier()
        self.trace.begin()
        start = time.perf_counter()
        training_step(self.parts, batch, StepControls(LR, 1.0)).loss.item()
        return rows(self.trace.end()), time.perf_counter() - start


_Steps = dict[Case, list[tuple[list[SpanRow], float]]]  # the steps of one rank


def timed_steps(
    place: Place, configs: Mapping[str, RunConfig], numbers: Sequence[int], rounds: int, steps: int
) -> _Steps:
    """Time the cases on this rank in turns, so that whatever else the machine does hits all cases alike."""
    systems = {name: System(place, config) for name, config in configs.items()}
    taken: _Steps = {Case(name, number): [] for number in numbers for name in configs}
    for _ in range(rounds):
        for case, found in taken.items():
            system = systems[case.name]
            batch = system.batch(case.micro_batches)
            found += [system.take(batch) for _ in range(1 + steps)][1:]
    for system in systems.values():
        system.parts.engine.close()
    return taken


def time_cases(
    configs: Mapping[str, RunConfig], numbers: Sequence[int], options: argparse.Namespace
) -> dict[Case, Times]:
    """Time the cases on all stages, and put the stages' spans of every step together."""
    ranks: list[_Steps] = run_job(
        STAGES, timed_steps, configs, numbers, options.rounds, options.steps, device=options.device
    )
    found = {}
    for case in ranks[0]:
        steps = list(zip(*(rank[case] for rank in ranks), strict=True))
        found[case] = Times(
            [timeline([spans for spans, _ in step]) for step in steps],
            [max(seconds for _, seconds in step) for step in steps],
        )
    return found


def held_steps(place: Place, configs: Mapping[str, RunConfig], number: int) -> dict[str, int]:
    """Return the most bytes of activations that this stage holds at once in its second step, by schedule."""
    found = {}
    for name, config in configs.items():
        with Ledger(place.device) as ledger:
            system = System(place, config, ledger)
            batch = system.batch(number)
            for _ in range(2):
                ledger.reset()
                system.take(batch)
            found[name] = ledger.take().peaks["activations"]
            system.parts.engine.close()
    return found


def formula(case: Case, durations: Mapping[Kind, float], num_stages: int = STAGES) -> float:
    """Return the idle share that the schedule's formula predicts from these durations."""
    shape = Shape(num_stages, case.micro_batches, CHUNKS[case.name])
    return predicted_idle_share(case.name, shape, {**EQUAL_PARTS, **durations})


def simulated(case: Case, durations: Mapping[Kind, float], num_stages: int) -> Timeline:
    """Simulate stages whose computations all take these durations, by kind in seconds."""
    shape = Shape(num_stages, case.micro_batches, CHUNKS[case.name])
    return simulate([schedule(case.name, shape, stage) for stage in range(shape.num_stages)], shape, durations)


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def measured_table(found: Mapping[Case, Times]) -> str:
    lines = []
    for case, times in found.items():
        low, middle, high = times.idle
        durations = [f"{kind.value} {1000 * seconds:.1f}" for kind, seconds in times.durations.items()]
        other = found[Case("1f1b", case.micro_batches)]
        lines.append(
            [
                case.micro_batches,
                case.name,
                percent(formula(case, times.durations)),
                percent(simulated(case, times.durations, STAGES).idle_share),
                f"{percent(middle)} ({percent(low)} to {percent(high)})",
                ", ".join(durations),
                f"{1000 * times.makespan:.1f}",
                f"{times.makespan / other.makespan:.2f}",
            ]
        )
    header = [
        "m",
        "schedule",
        "formula, %",
        "simulated, %",
        "measured, %",
        "ms of a computation",
        "ms, all computations",
        "x 1f1b",
    ]
    return table(header, lines)


def simulated_table(found: Mapping[Case, Times]) -> str:
    durations = {case.name: times.durations for case, times in found.items()}  # those with the most micro-batches
    numbers = sorted({case.micro_batches * SIMULATED_STAGES // STAGES for case in found})
    lines = []
    for case in (Case(name, number) for number in numbers for name in durations):
        step = simulated(case, durations[case.name], SIMULATED_STAGES)
        other = simulated(Case("1f1b", case.micro_batches), durations["1f1b"], SIMULATED_STAGES)
        predicted = percent(formula(case, durations[case.name], SIMULATED_STAGES))
        ratio = f"{step.makespan / other.makespan:.2f}"
        lines.append([case.micro_batches, case.name, predicted, percent(step.idle_share), ratio])
    return table(["m", "schedule", "formula, %", "simulated, %", "time x 1f1b"], lines)


class Balance(NamedTuple):
    """The figures of part 3.

    splits: layers of each stage, by name.  costs: multiply-adds of the costliest stage by split, and of the "head", in
    units of a layer's.  times: the steps of each split.
    """

    splits: Mapping[str, tuple[int, ...]]
    costs: Mapping[str, float]
    times: Mapping[str, Times]

    @property
    def expected(self) -> float:
        return self.costs["balanced"] / self.costs["equal"]

    def describe(self) -> str:
        balanced, equal = (self.times[name] for name in ("balanced", "equal"))
        splits = {name: "+".join(map(str, split)) for name, split in self.splits.items()}
        return (
            f"The head costs as much as {self.costs['head']:.1f} layers, so the balanced split is"
            f" {splits['balanced']} layers where an equal one is {splits['equal']}: costliest stages of"
            f" {self.costs['balanced']:.1f} and {self.costs['equal']:.1f} layers, a ratio of {self.expected:.2f}. All"
            f" computations of a 1f1b step take {1000 * balanced.makespan:.0f} ms beside {1000 * equal.makespan:.0f}:"
            f" {balanced.makespan / equal.makespan:.2f}; whole steps, with the sum over the tied embedding's two ends"
            f" and the update, {1000 * balanced.step:.0f} beside {1000 * equal.step:.0f}:"
            f" {balanced.step / equal.step:.2f}. Stages idle for {percent(balanced.idle[1])} % and"
            f" {percent(equal.idle[1])} %; by the formula, for stages that are alike, it is"
            f" {percent(formula(self.case, balanced.durations))} %."
        )

    @property
    def case(self) -> Case:
        return Case("1f1b", len({span.action.micro_batch for span in self.times["equal"].timelines[0].stages[0]}))


def measure_balance(options: argparse.Namespace) -> Balance:
    """Time an equal split and the balanced one, in turns."""
    layers, vocabulary = options.balance_layers, options.balance_vocab_size
    padded = derived.padded_vocab_size(vocabulary, divisible_by=128, tensor_parallel_size=1)
    hidden = options.hidden_size
    costs = model_costs(
        hidden=hidden,
        matrices=12 * hidden**2,
        heads_width=hidden,
        seq=options.seq_length,
        padded_vocab=padded,
    )
    balanced = balanced_split(
        layers, STAGES, layer_cost=costs.layer, embedding_cost=costs.embedding, head_cost=costs.head
    )
    splits = {"equal": (layers - layers // STAGES, layers // STAGES), "balanced": balanced}
    head = costs.head / costs.layer
    in_layers = {name: max(split[0], split[1] + head) for name, split in splits.items()}
    configs = {
        name: configure(
            "1f1b",
            options,
            num_layers=layers,
            vocab_size=vocabulary,
            pipeline_split=",".join(map(str, split)),
        )
        for name, split in splits.items()
    }
    number = sorted(options.micro_batches)[len(options.micro_batches) // 2]
    found = time_cases(configs, [number], options)
    return Balance(splits, {**in_layers, "head": head}, {case.name: times for case, times in found.items()})


def held_table(ranks: Sequence[Mapping[str, int]], number: int) -> str:
    """Return a table by stage, in which the ratio of bytes should be that of the schedules' micro-batches in flight."""
    shape, lines = Shape(STAGES, number), []
    for stage, held in enumerate(ranks):
        most = {name: most_in_flight_total(schedule(name, shape, stage)) for name in held}
        ratios = f"{held['1f1b'] / held['gpipe']:.3f}", f"{most['1f1b'] / most['gpipe']:.3f}"
        lines.append([stage, most["gpipe"], mib(held["gpipe"]), most["1f1b"], mib(held["1f1b"]), *ratios])
    header = ["stage", "gpipe: in flight", "gpipe, MiB", "1f1b: in flight", "1f1b, MiB", "ratio of MiB", "in flight"]
    return table(header, lines)


def page(
    options: argparse.Namespace,
    found: Mapping[Case, Times],
    balance: Balance,
    held: Sequence[Mapping[str, int]],
) -> list[str]:
    """Return the parts of the report."""
    size = (
        f"width {options.hidden_size}, sequence {options.seq_length}, {options.micro_batch_size} samples a micro-batch"
    )
    most = max(options.micro_batches)
    return [
        heading("Idle time of pipeline stages beside the formulas", options.device),
        paragraph(
            f"{options.num_layers} layers, {size}, vocabulary {options.vocab_size}; p = {STAGES} pipeline stages, a"
            " process each; interleaved with 2 chunks on a stage. Idle shares are medians over steps, quartiles in"
            " brackets, from the first computation of a step to the end of its last; F forward, B backward, I and W"
            " the gradients of the input and of the weights, of a chunk, in the mean; simulated with these, exchanges"
            " taking no time. The formula of zero-bubble is exact where W takes no longer than F and I, else a lower"
            " bound:"
        ),
        measured_table(found),
        paragraph(
            f"p = {SIMULATED_STAGES} stages with as many layers each, by simulation with the durations that were"
            f" measured at m = {most}, exchanges taking no time:"
        ),
        simulated_table(found),
        f"## The balanced split, vocabulary {options.balance_vocab_size}, {options.balance_layers} layers",
        paragraph(balance.describe()),
        f"## Activations held at the most, m = {most}",
        paragraph("By the ledger, in a step of the first model; *in flight* are micro-batches, by the schedule:"),
        held_table(held, most),
    ]


def record(found: Mapping[Case, Times], balance: Balance, held: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the figures for programs, in seconds and bytes."""
    measured = [
        {
            "schedule": case.name,
            "num_stages": STAGES,
            "num_micro_batches": case.micro_batches,
            "num_chunks": CHUNKS[case.name],
            "predicted_idle_share": formula(case, times.durations),
            "idle_shares": [step.idle_share for step in times.timelines],
            "makespans": [step.makespan for step in times.timelines],
            "step_seconds": times.seconds,
            "mean_seconds": {kind.value: seconds for kind, seconds in times.durations.items()},
        }
        for case, times in found.items()
    ]
    splits = {
        name: {"split": split, "makespan": balance.times[name].makespan, "step_seconds": balance.times[name].step}
        for name, split in balance.splits.items()
    }
    return {"measured": measured, "balance": splits, "peak_activation_bytes": [dict(stage) for stage in held]}


def write_pictures(page_file: Path, found: Mapping[Case, Times]) -> None:
    """Write the pictures beside the page."""
    few = sorted({case.micro_batches for case in found})[:2][-1]  # so few that the picture is legible
    for case, times in found.items():
        if case.micro_batches == few:
            title = f"{case.name}, {STAGES} pipeline stages, {few} micro-batches"
            ideal = simulated(case, times.durations, STAGES)
            svg = picture(times.typical, title=title, predicted=formula(case, times.durations), ideal=ideal)
            page_file.with_name(f"{page_file.stem}-{case.name}.svg").write_text(svg, encoding="utf-8")


def in_order(found: Mapping[Case, Times], numbers: Iterable[int]) -> bool:
    """Return True if interleaved and zero-bubble idle less than 1f1b for every number of micro-batches."""
    idle = {case: times.idle[1] for case, times in found.items()}
    return all(
        idle[Case(name, number)] < idle[Case("1f1b", number)]
        for number in numbers
        for name in ("interleaved", "zero-bubble")
    )


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    configs = {name: configure(name, options) for name in CHUNKS}
    found = time_cases(configs, options.micro_batches, options)
    tell("timed the schedules")
    balance = measure_balance(options)
    tell("timed the splits")
    by_ledger = {name: configs[name] for name in ("gpipe", "1f1b")}
    held = run_job(STAGES, held_steps, by_ledger, max(options.micro_batches), device=options.device)
    publish(page(options, found, balance, held), options.output, record(found, balance, held))
    if options.output is not None:
        write_pictures(options.output, found)
    return 0 if in_order(found, options.micro_batches) else 1


if __name__ == "__main__":
    sys.exit(main())
