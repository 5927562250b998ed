"""Judges a comparison: which systems' losses agree, how their times relate, and the record and table of the results.

A *curve* is the losses of all steps, each the mean over processes.  Every system trains the same first values on the
same samples, so every curve must be the plain model's up to rounding; a system with another curve has the verdict
`differs`, and no part in any ratio.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from report import MIB, Column, described, new_record, quartiles, spread, table_of
from systems import ALONE, MEGATRON, Work
from turns import Held, Turn

# The largest relative difference of a loss from the plain one, at the first steps; later it may be 100 times that,
# since AdamW makes steps of full size from gradients that are nothing but rounding.
BOUNDS: Mapping[str, float] = {"fp32": 1e-5, "bf16": 2e-3}
FIRST_STEPS, LATER = 16, 100.0
# The processes of `floor` train each for itself, so only the first loss is that of the other systems.
JUDGED_BY_FIRST_LOSS = ("floor",)
BASES = ("ddp", "eager")
_ONE_OR_TWO = ("zero1-torch", "deepspeed-1", "deepspeed-2", MEGATRON[1])
PEERS: Mapping[str, tuple[str, ...]] = {
    "library": ALONE[:2],
    "megazero": ALONE[:2],
    "library-0": ("ddp", "ddp-view"),
    "library-1": _ONE_OR_TWO,
    "library-2": _ONE_OR_TWO,
    "library-3": ("fsdp2",),
    "library-3-keep": ("fsdp2-keep", "deepspeed-3"),
    "library-2-cpu": ("deepspeed-2-cpu",),
    "library-3-cpu": ("deepspeed-3-cpu",),
    "megazero-0": ("ddp", MEGATRON[0]),
    "megazero-1": _ONE_OR_TWO,
    "megazero-2": _ONE_OR_TWO,
    "megazero-3": ("fsdp2",),
}


@dataclass
class Run:
    """The run of one system.

    turns: by turn and rank; the first turn is a warm-up.  held: by rank.  refused: why there are no turns, or no more
    of them; empty otherwise.
    """

    turns: list[list[Turn]] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str = ""
    refused: str = ""

    @property
    def losses(self) -> list[float]:
        """The curve: the loss of every step, the mean over processes."""
        return [
            statistics.fmean(losses) for turn in self.turns for losses in zip(*(r.losses for r in turn), strict=True)
        ]

    @property
    def rounds(self) -> list[list[float]]:
        """The seconds of every step that counts, by turn; a step is as slow as its slowest process."""
        return [[max(seconds) for seconds in zip(*(r.seconds for r in turn), strict=True)] for turn in self.turns[1:]]

    @property
    def step_seconds(self) -> list[float]:
        return [seconds for turn in self.rounds for seconds in turn]

    @property
    def whole(self) -> list[float]:
        """The seconds of a step, by turn: the time from the turn's first barrier to its last, divided by its steps."""
        return [max(r.whole for r in turn) / len(turn[0].losses) for turn in self.turns[1:]]


@dataclass(frozen=True)
class Comparison:
    """All that was measured.

    name: the model's.  num_threads: threads of a process.  steps: those of a turn.  plain: the plain model's curve.
    runs: by system.
    """

    work: Work
    name: str
    num_threads: int
    device: str
    steps: int
    plain: Sequence[float]
    runs: Mapping[str, Run]

    @property
    def bound(self) -> float:
        return BOUNDS[self.work.precision]

    def differs(self, name: str) -> bool:
        """Return True if the system's losses are not the plain model's, so that it trains something else."""
        losses = self.judged(name)
        agrees = difference(losses[:FIRST_STEPS], self.plain[:FIRST_STEPS]) <= self.bound
        return not (agrees and difference(losses, self.plain) <= LATER * self.bound)

    def judged(self, name: str) -> list[float]:
        """Return the part of a system's curve that must agree with the plain model's."""
        losses = self.runs[name].losses
        return losses[:1] if name in JUDGED_BY_FIRST_LOSS else losses

    def counts(self, name: str) -> bool:
        """Return True if the system has run without a failure, and its losses agree with the plain model's."""
        return name in self.runs and not self.runs[name].refused and not self.differs(name)

    @property
    def is_sound(self) -> bool:
        """True if all systems that are installed have run, with the losses of the plain model."""
        return all(self.counts(name) or run.refused == NOT_INSTALLED for name, run in self.runs.items())

    def ratio(self, name: str, base: str) -> float | None:
        """Return a system's step time divided by the base's: the median over rounds of the ratios of their medians.

        Returns None where one of the two has failed or differs.
        """
        if not (self.counts(name) and self.counts(base)):
            return None
        pairs = zip(self.runs[name].rounds, self.runs[base].rounds, strict=True)
        return statistics.median(statistics.median(mine) / statistics.median(other) for mine, other in pairs)

    @property
    def base(self) -> str | None:
        return next((name for name in BASES if self.counts(name)), None)

    def best_peer(self, name: str) -> str | None:
        """Return the fastest of the systems that do the same as this one of megazero's, or None without any."""
        peers = [peer for peer in PEERS.get(name, ()) if self.counts(peer)]
        return min(peers, key=lambda peer: statistics.median(self.runs[peer].step_seconds), default=None)


NOT_INSTALLED = "not installed"


def difference(curve: Sequence[float], plain: Sequence[float]) -> float:
    """Return the largest relative difference of a curve from the beginning of the plain one.

    It is infinite for a curve without steps or with a loss that is no number.
    """
    if not curve or len(curve) > len(plain):
        return math.inf
    relative = [abs(loss - other) / abs(other) for loss, other in zip(curve, plain, strict=False)]
    return max(relative) if all(map(math.isfinite, relative)) else math.inf


def record(comparison: Comparison, num_parameters: int) -> dict[str, Any]:
    """Return the figures for programs, in seconds and bytes."""
    work, runs = comparison.work, comparison.runs
    best = {name: comparison.best_peer(name) for name in runs}
    base = comparison.base
    return new_record(
        "compare",
        comparison.device,
        model={**described(work.model), "name": comparison.name, "num_parameters": num_parameters},
        precision=work.precision,
        world_size=work.world_size,
        micro_batch_size=work.micro_batch_size,
        tokens_per_step=work.tokens,
        cores=os.cpu_count(),
        threads_per_process=comparison.num_threads,
        steps_per_turn=comparison.steps,
        turns=max((len(run.turns) for run in runs.values()), default=0),
        loss_bound=comparison.bound,
        plain_losses=list(comparison.plain),
        ratios={
            "base": base,
            "to_base": {name: comparison.ratio(name, base) for name in runs} if base else {},
            "to_best_peer": {
                name: {"peer": peer, "ratio": comparison.ratio(name, peer)} for name, peer in best.items() if peer
            },
        },
        systems={name: _system(comparison, name, num_parameters) for name in runs},
    )


def _system(comparison: Comparison, name: str, num_parameters: int) -> dict[str, Any]:
    run = comparison.runs[name]
    if run.refused:
        return {"refused": run.refused}
    seconds = run.step_seconds
    low, median, high = quartiles(seconds)
    held = run.held
    return {
        "verdict": "differs" if comparison.differs(name) else "agrees",
        "loss_difference": difference(comparison.judged(name), comparison.plain),
        "tokens_per_second": comparison.work.tokens / median,
        "median_step_seconds": median,
        "quartile_step_seconds": [low, high],
        "step_seconds": seconds,
        "turn_seconds_per_step": run.whole,
        "losses": run.losses,
        "peak_bytes": max(rank.peak for rank in held),
        "state_bytes": max(rank.states for rank in held),
        "state_bytes_per_parameter": max(rank.states for rank in held) / num_parameters,
        "sent_bytes": max(rank.sent for rank in held),
        "sent_in_4p": max(rank.sent for rank in held) / (4 * num_parameters),
        "messages": max(rank.messages for rank in held),
        "settings": dict(run.settings),
        "version": run.version,
    }


COLUMNS = (
    Column("step, ms", "median_step_seconds", ".1f", 1e3),
    Column("quartiles", "quartiles"),
    Column("ratio", "ratio", ".2f"),
    Column("to the best peer", "peer"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("peak, MiB", "peak_bytes", ".2f", 1 / MIB),
    Column("states, B a parameter", "state_bytes_per_parameter", ".1f"),
    Column("sent, MiB", "sent_bytes", ".2f", 1 / MIB),
)


def body_of(made: Mapping[str, Any]) -> str:
    """Return the table of a record, with a row for each system."""
    shown, ratios = {}, made["ratios"]
    for name, system in made["systems"].items():
        shown[name] = dict(system)
        if "refused" in system:
            continue
        ratio, peer = ratios["to_base"].get(name), ratios["to_best_peer"].get(name)
        shown[name]["quartiles"] = spread(system["step_seconds"])
        shown[name]["ratio"] = system["verdict"] if ratio is None else ratio
        if peer is not None and peer["ratio"] is not None:
            shown[name]["peer"] = f"{peer['ratio']:.2f} {peer['peer']}"
    return table_of(shown, COLUMNS)
