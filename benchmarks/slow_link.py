"""Measures steps whose states live in host memory, over an emulated slow link between the device and the host.

    python benchmarks/slow_link.py [--shares 0.3 0.7 1 1.5] [--traces FOLDER] [--output FILE.md]

Copies take bytes / bandwidth seconds on a thread of their own, one direction beside the other (`slow_streams.py`), so a
step shows what it hides of them: which copies run beside the computation, and which ones it waits for.  The computation
is paced too, since a small model on a shared machine takes another time in every step: it sleeps for most of a block's
forward and backward, and of the update of an element (--block-ms 0 --update-ns 0: it doesn't).  As for a GPU, the host
narrows weights to bf16 before they travel.

One process takes steps of each case (a ZeRO stage, and what is offloaded) by turns with copies that are made at once,
and over links whose *transfer* (the step's bytes both ways / bandwidth) is a share of the step's *computation*
(forward, backward, norm and the host's update, without copies).

ratio   step / max(computation, transfer)
floor   max(backward, gradients' transfer) + max(norm + update + forward, weights' transfer): what no order of copies
        can undercut, as gradients exist from backward on, and no weight changes before the norm of all is known.  With
        offloaded parameters those that backward gathers come beside backward, and the others beside the rest.

--traces writes the last step of every case as FOLDER/CASE-SHARE.json, to be opened in ui.perfetto.dev: the phases and
waits of the step, the copies of both directions, and an arrow from every copy to the wait that it ends.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import orjson
from jobs import Place, run_job
from report import Column, argument_parser, described, heading, new_record, paragraph, publish, spread, table, table_of
from slow_streams import Log, PacedAdamW, PhaseTimers, SlowLink, SlowLinkCommunicator, Wait, pace_blocks
from steps import Steps, configuration

from megazero.config.run import RunConfig

_OPTIMIZER = {"offload_optimizer": "cpu"}
_BOTH = {**_OPTIMIZER, "offload_param": "cpu"}
# By name: the stage, and what is offloaded.
CASES: Mapping[str, Mapping[str, Any]] = {
    "stage 1, optimizer": {"zero_stage": 1, **_OPTIMIZER},
    "stage 2, optimizer": {"zero_stage": 2, **_OPTIMIZER},
    "stage 3, optimizer": {"zero_stage": 3, **_OPTIMIZER},
    "stage 3, optimizer and parameters": {"zero_stage": 3, **_BOTH},
}
_GRADIENTS = ("backward", "last gradients")


class Waited(NamedTuple):
    """The waits of a step for one reason, in one phase: their number, their seconds, and the longest."""

    phase: str
    reason: str
    number: float
    seconds: float
    longest: float


class Base(NamedTuple):
    """The figures of steps whose copies are made at once: medians of seconds without copies, and bytes of a step."""

    forward: float
    backward: float
    rest: float
    away: int
    back: int
    back_in_backward: int

    @property
    def computation(self) -> float:
        return self.forward + self.backward + self.rest

    def transfer(self, bandwidth: float) -> float:
        return (self.away + self.back) / bandwidth

    def floor(self, bandwidth: float) -> float:
        """Return the least seconds of a step over a link of this bandwidth."""
        away, gathered = self.away / bandwidth, self.back_in_backward / bandwidth
        beside_the_rest = self.back / bandwidth - gathered
        return max(self.backward, away, gathered) + max(self.rest + self.forward, beside_the_rest)


class Steady(NamedTuple):
    """Steps over one link: their seconds, waits by reason, and the log of the last."""

    share: float
    bandwidth: float
    seconds: list[float]
    waited: list[Waited]
    events: list[dict[str, Any]]


class Outcome(NamedTuple):
    """What one case has come to.  losses: those of all steps, in order."""

    base: Base
    steady: list[Steady]
    losses: list[float]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--num-layers", type=int, default=16, help="blocks")
    add("--hidden-size", type=int, default=128, help="width")
    add("--heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=32, help="tokens of a sample")
    add("--vocab-size", type=int, default=512, help="rows of the embedding")
    add("--micro-batch-size", type=int, default=1, help="samples of a step")
    add(
        "--block-ms", type=float, default=6.0, help="milliseconds added to a block's forward, and twice to its backward"
    )
    add("--update-ns", type=float, default=12.0, help="nanoseconds added to the host's update of an element")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="number format")
    add("--bucket-size", type=int, default=1 << 16, help="elements of the largest bucket")
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="what is offloaded in which stage")
    add("--shares", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5], help="transfer as shares of the computation")
    add("--rounds", type=int, default=2, help="turns of every link")
    add("--steps", type=int, default=4, help="steps of a turn, and one before them that does not count")
    add("--traces", type=Path, metavar="FOLDER", help="folder for the traces")
    return parser.parse_args(words)


def configure(case: str, options: argparse.Namespace) -> RunConfig:
    return configuration(
        {
            **CASES[case],
            "precision": options.precision,
            "num_layers": options.num_layers,
            "hidden_size": options.hidden_size,
            "num_attention_heads": options.heads,
            "seq_length": options.seq_length,
            "vocab_size": options.vocab_size,
            "micro_batch_size": options.micro_batch_size,
            "reduce_bucket_size": options.bucket_size,
        },
        1,
    )


class Turns:
    """The steps of one case on this process, over a link whose bandwidth changes from turn to turn."""

    def __init__(self, place: Place, config: RunConfig, options: argparse.Namespace) -> None:
        self._link = SlowLink()
        self.losses: list[float] = []
        paced = partial(PacedAdamW, seconds=1e-9 * options.update_ns)
        optimizer = patch("megazero.optim.configured.FusedAdamW", paced)
        timers = patch("megazero.train.build.Timers", partial(PhaseTimers, self._link))
        copies = patch("megazero.memory.homes.copy_stream", side_effect=self._link.streams)  # of gradients, of weights
        one_rank = patch("megazero.comm.startup.LocalCommunicator", partial(SlowLinkCommunicator, self._link))
        with timers, copies, one_rank, optimizer:
            self._steps = Steps(config, place)
        self._steps.core.engine._host._converts_while_copying = False  # as for a GPU, the host narrows weights
        pace_blocks(self._steps.core.model.layers.values(), 1e-3 * options.block_ms)

    def take(self, number: int, bandwidth: float | None) -> list[tuple[float, Log]]:
        """Take so many steps and one before them; return seconds and log of each but that one."""
        self._link.bandwidth = bandwidth
        taken = []
        batches = [self._steps.batch(len(self.losses) + place) for place in range(1 + number)]
        for batch in batches:
            self._link.take()
            start = time.perf_counter()
            self.losses.append(self._steps.take(batch))
            taken.append((time.perf_counter() - start, self._link.take()))
        return taken[1:]


def measure(place: Place, config: RunConfig, options: argparse.Namespace) -> Outcome:
    """Take the turns of one case: at once, then over every link, `rounds` times."""
    turns = Turns(place, config, options)
    base = base_of([step for _ in range(2) for step in turns.take(options.steps, None)])
    links = {share: (base.away + base.back) / (share * base.computation) for share in options.shares}
    found: dict[float, list[tuple[float, Log]]] = defaultdict(list)
    at_once: list[tuple[float, Log]] = []
    for _ in range(options.rounds):
        at_once += turns.take(options.steps, None)
        for share, bandwidth in links.items():
            found[share] += turns.take(options.steps, bandwidth)
    steady = [
        Steady(
            share,
            links[share],
            [seconds for seconds, _ in taken],
            waits_of([log for _, log in taken]),
            list(events_of(taken[-1][1])),
        )
        for share, taken in found.items()
    ]
    return Outcome(base_of(at_once), steady, turns.losses)


def base_of(steps: Sequence[tuple[float, Log]]) -> Base:
    """Return the figures of steps whose copies are made at once."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for whole, log in steps:
        made = {name: sum(one.ended - one.begun for one in log.copies if one.phase == name) for name in _phases(log)}
        forward, backward = (log.seconds(name) - made.get(name, 0.0) for name in ("forward", "backward"))
        seconds["forward"].append(forward)
        seconds["backward"].append(backward)
        seconds["rest"].append(whole - sum(made.values()) - forward - backward)
    log = steps[-1][1]
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    away, back = log.nbytes("to the host"), log.nbytes("to the device")
    return Base(
        middle["forward"], middle["backward"], middle["rest"], away, back, log.nbytes("to the device", *_GRADIENTS)
    )


def _phases(log: Log) -> set[str]:
    return {copy.phase for copy in log.copies}


def waits_of(logs: Sequence[Log]) -> list[Waited]:
    """Return a step's waits by phase and reason, the longest first; seconds and numbers are means over the steps."""
    found: dict[tuple[str, str], list[Wait]] = defaultdict(list)
    for wait in (wait for log in logs for wait in log.waits):
        found[wait.phase, wait.reason].append(wait)
    rows = []
    for (phase, reason), waits in found.items():
        seconds = [wait.ended - wait.begun for wait in waits]
        rows.append(Waited(phase, reason, len(waits) / len(logs), sum(seconds) / len(logs), max(seconds)))
    return sorted(rows, key=lambda row: -row.seconds)


def events_of(log: Log) -> Iterable[dict[str, Any]]:
    """Yield the trace events (Chrome's format) of a step."""
    threads = {"step": 1, "to the host": 2, "to the device": 3}
    origin = min(phase.begun for phase in log.phases)

    def event(thread: str, kind: str, at: float, **others: Any) -> dict[str, Any]:
        return {"pid": 1, "tid": threads[thread], "ph": kind, "ts": 1e6 * (at - origin), **others}

    for name, number in threads.items():
        yield {"pid": 1, "tid": number, "ph": "M", "name": "thread_name", "args": {"name": name}}
    for phase in log.phases:
        yield event("step", "X", phase.begun, dur=1e6 * (phase.ended - phase.begun), name=phase.name)
    for copy in log.copies:
        said = {
            "bytes": copy.nbytes,
            "queued in": copy.phase,
            "waited for its turn, ms": 1e3 * (copy.begun - copy.queued),
        }
        yield event(copy.way, "X", copy.begun, dur=1e6 * (copy.ended - copy.begun), name=copy.phase, args=said)
    for number, wait in enumerate(log.waits):
        name = f"waits: {wait.reason}"
        yield event("step", "X", wait.begun, dur=1e6 * (wait.ended - wait.begun), name=name, cat="wait")
        if wait.copy.begun >= origin:  # else a copy of the step before
            yield event(wait.copy.way, "s", wait.copy.begun, id=number, name="wait", cat="wait")
            yield event("step", "f", wait.ended, id=number, name="wait", cat="wait", bp="e")


def figures(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Return the figures of a case for the record, by link."""
    found, base = {}, outcome.base
    for share, bandwidth, seconds, waited, _ in outcome.steady:
        median = statistics.median(seconds)
        found[f"{share:g}"] = {
            "median_step_seconds": median,
            "step_seconds": seconds,
            "forward_seconds": base.forward,
            "backward_seconds": base.backward,
            "rest_seconds": base.rest,
            "computation_seconds": base.computation,
            "transfer_seconds": base.transfer(bandwidth),
            "floor_seconds": base.floor(bandwidth),
            "ratio": median / max(base.computation, base.transfer(bandwidth)),
            "ratio_to_floor": median / base.floor(bandwidth),
            "bandwidth": bandwidth,
            "stored_bytes": base.away,
            "loaded_bytes": base.back,
            "waits": [wait._asdict() for wait in waited],
        }
    return found


COLUMNS = (
    Column("step, ms", "median_step_seconds", ".1f", 1e3),
    Column("quartiles", "quartiles"),
    Column("computation, ms", "computation_seconds", ".1f", 1e3),
    Column("transfer, ms", "transfer_seconds", ".1f", 1e3),
    Column("ratio", "ratio", ".2f"),
    Column("floor, ms", "floor_seconds", ".1f", 1e3),
    Column("ratio to the floor", "ratio_to_floor", ".2f"),
)


def body_of(kept: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    rows = {name: {**row, "quartiles": spread(row["step_seconds"])} for name, row in kept["systems"].items()}
    return table_of(rows, COLUMNS, first="case, transfer / computation")


def waits_table(kept: Mapping[str, Any]) -> str:
    """Return the table of what steps wait for, from half a percent of a step on."""
    rows = []
    for name, row in kept["systems"].items():
        for wait in row["waits"]:
            if wait["seconds"] >= 0.005 * row["median_step_seconds"]:
                numbers = (f"{wait['number']:.1f}", f"{1e3 * wait['seconds']:.1f}", f"{1e3 * wait['longest']:.1f}")
                rows.append([name, wait["phase"], wait["reason"], *numbers])
    return table(["case", "phase", "waits for", "waits a step", "ms a step", "longest, ms"], rows)


def page(kept: Mapping[str, Any], device: str) -> list[str]:
    """Return the parts of the report."""
    model = kept["model"]
    return [
        heading("Offloading over an emulated slow link", device, kept["precision"]),
        paragraph(
            f"{model['num_layers']} layers x {model['hidden_size']}, sequence {model['seq_length']}, vocabulary"
            f" {model['vocab_size']}, on one process. A case's number is its transfer as a share of its computation;"
            " ratio is step / max(computation, transfer), and the floor is what no order of copies can undercut:"
        ),
        body_of(kept),
        paragraph("What steps wait for, means over steps, from 0.5 % of a step on:"),
        waits_table(kept),
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    systems: dict[str, dict[str, Any]] = {}
    for case in options.cases:
        config = configure(case, options)
        ((outcome),) = run_job(1, measure, config, options, device="cpu")
        systems |= {f"{case}: {share}": row for share, row in figures(outcome).items()}
        for steady in outcome.steady if options.traces else ():
            options.traces.mkdir(parents=True, exist_ok=True)
            name = f"{case.replace(', ', '-').replace(' ', '-')}-{steady.share:g}.json"
            (options.traces / name).write_bytes(orjson.dumps({"traceEvents": steady.events}))
    described_model = described(configure(options.cases[0], options).model)
    kept = new_record(
        "slow_link", "cpu", model=described_model, precision=options.precision, world_size=1, systems=systems
    )
    publish(page(kept, "cpu"), options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
