"""Measures ZeRO's wires over slow links between nodes: stage 3 as it is, in two hops, hpZ, ZeRO++, MiCS, and stage 2.

    python benchmarks/slow_nodes.py [--rates 1000 400 100] [--steps 3] [--rounds 2] [--output PAGE.md]

Needs root and Linux with ip and tc.  Two nodes of two processes are made on this machine (`cluster.sh`): what leaves a
node goes through its link, whose rate is set; what stays inside does not.  Every variant trains the same model on the
same samples, as a run of pretrain_gpt.py that goes through all rates; variants take turns.  The first step at a new
rate is dropped.  Bytes are those that the busier node's link has carried in a step, headers and control messages too,
beside those that its ranks have counted, and both beside what follows from the algorithms.
"""

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from nodes import Cluster, Run, ends_on_signals, obstacle
from report import HelpFormat, add_output, heading, paragraph, publish, table, tell

from megazero.command_line.parse import parse
from megazero.config.derived import num_parameters

NODES, PROCESSES = 2, 2
_HPZ = "--zero-stage 3 --zero-hpz-partition-size 2"


class Variant(NamedTuple):
    """Flags beside those of all, and what crosses from a node in a step.

    gathered, reduced: multiples of the bytes of all parameters, or gradients, times (A - 1) / A for A nodes: 1 where a
    byte crosses once for each node, I for messages of each of I ranks to every other.
    """

    flags: str
    gathered: float
    reduced: float


def _bits(number: int) -> float:
    """Return the bytes of numbers in blocks of 256, each with a scale of 4, over those of 16-bit ones."""
    return (number / 8 + 4 / 256) / 2


# Stage 3 gathers twice, hpZ once; an all-reduce over A nodes, as MiCS has it of 1/I of all gradients, sends twice.
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "stage 3": Variant("--zero-stage 3", 2 * PROCESSES, PROCESSES),
        "stage 3, two hops": Variant("--zero-stage 3 --hierarchical-collectives", 2, 1),
        "hpZ": Variant(_HPZ, PROCESSES, PROCESSES),
        "hpZ, two hops": Variant(f"{_HPZ} --hierarchical-collectives", 1, 1),
        "hpZ, qwZ, two hops": Variant(f"{_HPZ} --zero-quantized-weights --hierarchical-collectives", _bits(8), 1),
        "ZeRO++": Variant(
            f"{_HPZ} --zero-quantized-weights --zero-quantized-gradients --mics-hierarchical-params-gather",
            _bits(8),
            _bits(4),
        ),
        "MiCS": Variant("--zero-stage 3 --mics-shard-size 2", 0, 2),
        "stage 2": Variant("--zero-stage 2", PROCESSES, PROCESSES),
    }
)
_DROPPED = 2  # steps of a run before the first rate: they connect and make the optimizer's state
Rate = float | None  # Mbit/s; None: as fast as the machine can


class Figures:
    """The seconds and bytes of the steps of a variant at one rate; loss: that of the last step.

    sent: what the busier node's link has carried.  counted: what its ranks have sent to other nodes.
    """

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self.counted: list[int] = []
        self.loss = float("nan")


Measured = dict[tuple[str, Rate], Figures]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--rates", type=float, nargs="+", default=[1000.0, 400.0, 100.0], help="of the links, in Mbit/s")
    add("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what is measured")
    add("--steps", type=int, default=3, help="steps of a turn at every rate, after one that is dropped")
    add("--rounds", type=int, default=2, help="turns of each variant")
    add("--num-layers", type=int, default=4, help="blocks")
    add("--hidden-size", type=int, default=256, help="width")
    add("--seq-length", type=int, default=64, help="tokens of a sample")
    add("--vocab-size", type=int, default=512, help="rows of the embedding")
    add_output(parser)
    return parser.parse_args(words)


def flags(variant: str, options: argparse.Namespace) -> list[str]:
    """Return the flags of pretrain_gpt.py: one sample for each process in a step."""
    given = (
        f"--mock-data --num-layers {options.num_layers} --hidden-size {options.hidden_size} --num-attention-heads 4"
        f" --seq-length {options.seq_length} --vocab-size {options.vocab_size} --micro-batch-size 1"
        f" --global-batch-size {NODES * PROCESSES} --hidden-dropout 0 --attention-dropout 0 --lr 3e-4"
        f" --train-iters 10000 --eval-iters 0 --device cpu --bf16 {VARIANTS[variant].flags}"
    )
    return given.split()


def take_turn(cluster: Cluster, variant: str, folder: Path, options: argparse.Namespace, measured: Measured) -> None:
    """Run a variant once through all rates, and add its steps to the figures."""
    cluster.set_rate(None)
    told = []
    with Run(cluster, flags(variant, options), folder, processes=PROCESSES) as training:
        training.steps(_DROPPED)
        for rate in (None, *options.rates):
            cluster.set_rate(rate)
            training.forget()
            *_, before = training.steps(1)
            steps = training.steps(options.steps)
            figures = measured[variant, rate]
            figures.seconds += [step.record["step_seconds"] for step in steps]
            for earlier, later in pairwise((before, *steps)):
                figures.sent.append(max(now - then for now, then in zip(later.sent, earlier.sent, strict=True)))
                figures.counted.append(max(counted_by_node(later.record["ranks"])))
            figures.loss = steps[-1].record["loss"]
            told.append(f"{rate_name(rate)} {statistics.median(figures.seconds):.3f}")
    tell(f"{variant}, seconds a step: {', '.join(told)}")


def counted_by_node(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the bytes that the ranks of every node have sent to other nodes."""
    sent = [sum(sum(table.values()) for table in rank.get("bytes_across_nodes", {}).values()) for rank in ranks]
    return [sum(sent[first : first + PROCESSES]) for first in range(0, len(sent), PROCESSES)]


def crossing_bytes(variant: str, options: argparse.Namespace) -> float:
    """Return the bytes that cross from a node in a step by formula: Psi numbers of 16 bits, (A - 1) / A of them."""
    config = parse(flags(variant, options)).config
    psi, chosen = num_parameters(config.model, options.vocab_size), VARIANTS[variant]
    return 2 * psi * (NODES - 1) / NODES * (chosen.gathered + chosen.reduced)


def rate_name(rate: Rate) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def parts_of(measured: Measured, options: argparse.Namespace) -> list[str]:
    """Return the parts of the page."""
    rates: list[Rate] = [None, *options.rates]
    first = options.variants[0]
    median = {key: statistics.median(figures.seconds) for key, figures in measured.items()}
    header = ["variant", *(f"{rate_name(rate)}, s" for rate in rates), "MB a node and step"]
    header += ["counted, MB", "by formula, MB", "by formula, Psi"]
    header += [f"times {first}'s rate at {rate_name(rates[-1])}", "last loss"]
    rows = []
    for name in options.variants:
        slowest = measured[name, rates[-1]]
        rows.append(
            [
                name,
                *(f"{median[name, rate]:.3f}" for rate in rates),
                f"{statistics.median(slowest.sent) / 1e6:.2f}",
                f"{statistics.median(slowest.counted) / 1e6:.2f}",
                f"{crossing_bytes(name, options) / 1e6:.2f}",
                f"{VARIANTS[name].gathered + VARIANTS[name].reduced:.3g}",
                f"{median[first, rates[-1]] / median[name, rates[-1]]:.2f}",
                f"{slowest.loss:.4f}",
            ]
        )
    words = (
        f"A GPT of {options.num_layers} x {options.hidden_size} on two nodes of two processes, one sample of"
        f" {options.seq_length} tokens for each, bf16: medians of {options.rounds} turns of {options.steps} steps. By"
        " formula, a step crosses from a node with so many Psi numbers of 16 bits, times (A - 1) / A for A nodes,"
        " scales of blocks included. Messages of each rank to every other cross once for each of a node's ranks, which"
        " a hop inside avoids, as a ring in the order of nodes does (3 Psi in stage 3). Formulas count two gathers of"
        " every parameter, of which backward's first is not needed, and no padding."
    )
    return [heading("ZeRO over slow links between nodes", "cpu", "bf16"), paragraph(words), table(header, rows)]


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    reason = obstacle()
    if reason:
        print(f"error: no emulated cluster on this machine: {reason}", file=sys.stderr)
        return 2
    measured: Measured = defaultdict(Figures)
    try:
        with ends_on_signals(), tempfile.TemporaryDirectory() as folder, Cluster(NODES) as cluster:
            for number in range(options.rounds):
                for variant in options.variants:
                    name = f"{number}-{variant.replace(' ', '-').replace(',', '')}"
                    take_turn(cluster, variant, Path(folder) / name, options, measured)
    except KeyboardInterrupt:
        print("stopped; the cluster is taken down", file=sys.stderr)
        return 130
    publish(parts_of(measured, options), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
