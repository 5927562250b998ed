"""Measures tensor parallelism across nodes against ZeRO stage 2 across nodes (ZeRO, figure 2), and why it loses.

    python benchmarks/cross_node.py [--rates 1000 400 200 100 50] [--steps 2] [--rounds 3] [--output PAGE.md]

Needs root and Linux with ip and tc.  Two nodes of two processes are made on this machine (`cluster.sh`): what leaves a
node goes through its link, whose rate is set; what stays inside does not.  The same model takes the same global batch
in two layouts, each as runs of pretrain_gpt.py:

    across   tensor parallel 4, so that every all-reduce of activations crosses the link (the paper's baseline)
    inside   tensor parallel 2 in each node, ZeRO stage 2 with data parallel 2 between them

Activations grow with the batch, and ZeRO's traffic does not: with b samples of s tokens, width h and L recomputed
layers a node sends 5 L + 2 all-reduces of b s h in the first layout, and in the second one gradient and one parameter
for every parameter of the model (half of each twice).  The predicted time of a step is its time over links without a
limit plus that of these bytes at the link's rate.  The prediction is stated before any slow link is measured: at once
in the .json beside --output, at the end in the page.  Layouts take turns, each through all rates; the first step at a
new rate is dropped.
"""

import argparse
import datetime
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from link_traffic import (
    ACROSS,
    INSIDE,
    LAYOUTS,
    NODES,
    PROCESSES,
    WIRE,
    Layout,
    Prediction,
    Work,
    measured_rate,
    node_bytes,
    predicted_rate,
    process_numel,
)
from nodes import Cluster, Run, Step, ends_on_signals, obstacle
from report import HelpFormat, command, heading, machine, paragraph, publish, table, tell

from megazero.config.model import ModelConfig
from megazero.report.metrics import flops_per_token

PAPER = (5.7, 10.2)  # the smallest and the largest speed-up of figure 2
# The paper's nodes have 800 Gbit/s for 16 GPUs, which do about 38 TFLOP/s each with ZeRO: bytes per FLOP.
PAPER_BALANCE = 800e9 / 8 / (16 * 38e12)
CALIBRATION_STEPS = 6
START_SECONDS = 5.0  # about what the start of a run takes

Rate = float | None  # the rate of the links in Mbit/s; None: as fast as the machine can


@dataclass
class Figures:
    """The measured steps of a layout at one rate.

    seconds: those of each step, by round.  wire: bytes that the busier node has sent, by step.  metered: bytes that
    leave a node in a step by the program's own meter.  loss: that of the first step that counts.
    """

    seconds: list[list[float]] = field(default_factory=list)
    wire: list[int] = field(default_factory=list)
    metered: int = 0
    loss: float = math.nan

    def add(self, layout: Layout, before: Step, steps: Sequence[Step]) -> None:
        """Add the steps of a turn; `before`, the step ahead of them, gives the bytes that were sent until then."""
        self.seconds.append([step.record["step_seconds"] for step in steps])
        for earlier, later in pairwise((before, *steps)):
            self.wire.append(max(now - then for now, then in zip(later.sent, earlier.sent, strict=True)))
        self.metered = layout.rings * sum(steps[0].record["ranks"][0]["comm_bytes"][layout.axis].values())
        self.loss = steps[0].record["loss"]

    @property
    def median(self) -> float:
        return statistics.median(second for turn in self.seconds for second in turn)


Measured = dict[tuple[str, Rate], Figures]


@dataclass(frozen=True)
class Segment:
    """The part of a turn that runs at one rate: `dropped` steps that don't count, then `steps` that do."""

    rate: Rate
    dropped: int
    steps: int

    @property
    def length(self) -> int:
        return self.dropped + self.steps


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--rates", type=_rate, nargs="+", default=[1000.0, 400.0, 200.0, 100.0, 50.0], help="of the links, in Mbit/s")
    add("--steps", type=_positive, default=2, help="steps of a turn at every rate, after those that are dropped")
    add("--rounds", type=_positive, default=3, help="turns of each layout")
    add("--num-layers", type=_positive, default=4, help="blocks")
    add("--hidden-size", type=_positive, default=128, help="width")
    add("--heads", type=_positive, default=4, help="attention heads, a multiple of 4")
    add("--seq-length", type=_positive, default=256, help="tokens of a sample")
    add("--vocab-size", type=_positive, default=512, help="rows of the embedding, a multiple of 512")
    add("--global-batch-size", type=_positive, default=16, help="samples of a step, an even number")
    add("--output", type=Path, help="file for the page, which is printed in any case; figures go to a .json beside it")
    options = parser.parse_args(words)
    wrong = [
        f"--{name.replace('_', '-')} {getattr(options, name)} is no multiple of {divisor}"
        for name, divisor in (("heads", 4), ("vocab_size", 512), ("global_batch_size", 2))
        if getattr(options, name) % divisor
    ]
    if wrong:
        parser.error("; ".join(wrong))
    options.rates = sorted(set(options.rates), reverse=True)
    return options


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} is less than 1")
    return number


def _rate(word: str) -> float:
    rate = float(word)
    if not 0.1 <= rate <= 100_000:
        raise argparse.ArgumentTypeError(f"{word} Mbit/s is not between 0.1 and 100000")
    return rate


def work_of(options: argparse.Namespace) -> Work:
    return Work(
        options.num_layers,
        options.hidden_size,
        options.seq_length,
        options.vocab_size,
        options.global_batch_size,
    )


def flags(layout: Layout, options: argparse.Namespace) -> list[str]:
    """Return the flags of pretrain_gpt.py for a layout; layers are recomputed as in the paper's runs."""
    settings = {
        "tensor_model_parallel_size": layout.tensor_parallel,
        "num_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.heads,
        "seq_length": options.seq_length,
        "vocab_size": options.vocab_size,
        "micro_batch_size": options.global_batch_size // layout.data_parallel,
        "global_batch_size": options.global_batch_size,
        "recompute_granularity": "full",
        "hidden_dropout": 0,
        "attention_dropout": 0,
        "lr": 3e-4,
        "train_iters": 10_000,  # a run is ended when enough steps are measured
        "eval_iters": 0,
        "device": "cpu",
    }
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["--mock-data", *words, *layout.flags]


def schedule(rates: Sequence[float], steps: int) -> list[Segment]:
    """Return the segments of a turn, first without a limit, since a run's first steps make connections and moments."""
    return [Segment(None, 2, steps), *(Segment(rate, 1, steps) for rate in rates)]


class Turns:
    """The runs of the layouts on one cluster."""

    def __init__(self, cluster: Cluster, folder: Path, options: argparse.Namespace) -> None:
        self._cluster = cluster
        self._folder = folder
        self._options = options
        self._number = 0

    def take(self, layout: Layout, segments: Sequence[Segment], figures: Measured) -> None:
        """Run a layout once through all segments, and add its steps to the figures."""
        self._number += 1
        self._cluster.set_rate(None)
        words, folder = flags(layout, self._options), self._folder / str(self._number)
        told = []
        with Run(self._cluster, words, folder, processes=PROCESSES) as training:
            for segment in segments:
                self._cluster.set_rate(segment.rate)
                training.forget()
                *_, before = training.steps(segment.dropped)
                found = figures.setdefault((layout.name, segment.rate), Figures())
                found.add(layout, before, training.steps(segment.steps))
                told.append(f"{rate_name(segment.rate)} {statistics.median(found.seconds[-1]):.2f}")
        tell(f"{layout.name}, seconds a step: {', '.join(told)}")


def rate_name(rate: Rate) -> str:
    return "no limit" if rate is None else f"{rate:g} Mbit/s"


def predict(turns: Turns, work: Work) -> dict[str, Prediction]:
    """Predict each layout's step times from one run over links without a limit and the formulas."""
    figures: Measured = {}
    for layout in LAYOUTS:
        turns.take(layout, [Segment(None, 2, CALIBRATION_STEPS)], figures)
    return {layout.name: Prediction(figures[layout.name, None].median, node_bytes(layout, work)) for layout in LAYOUTS}


def expected_seconds(predictions: Mapping[str, Prediction], options: argparse.Namespace) -> float:
    """Return the seconds that all rounds are expected to take."""
    segments = schedule(options.rates, options.steps)
    turns = (
        START_SECONDS + sum(segment.length * prediction.seconds(segment.rate) for segment in segments)
        for prediction in predictions.values()
    )
    return float(options.rounds * sum(turns))


def ratio(seconds: Mapping[str, float]) -> float:
    return seconds[ACROSS.name] / seconds[INSIDE.name]


def predicted(predictions: Mapping[str, Prediction], rate: Rate) -> float:
    """Return the predicted ratio of the layouts' step times at a rate."""
    return ratio({name: prediction.seconds(rate) for name, prediction in predictions.items()})


def measured(figures: Measured, rate: Rate) -> float:
    return ratio({layout.name: figures[layout.name, rate].median for layout in LAYOUTS})


def by_round(figures: Measured, rate: Rate) -> list[float]:
    """Return the measured ratio of the layouts' step times in every round."""
    turns = {
        layout.name: [statistics.median(turn) for turn in figures[layout.name, rate].seconds] for layout in LAYOUTS
    }
    return [across / inside for across, inside in zip(turns[ACROSS.name], turns[INSIDE.name], strict=True)]


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.2f}"


def bytes_table(options: argparse.Namespace, figures: Measured) -> str:
    work, slowest = work_of(options), options.rates[-1]
    header = ["MB that leave a node in a step", "formula", "meter", "link, no limit", f"link, {rate_name(slowest)}"]
    rows = []
    for layout in LAYOUTS:
        free, slow = figures[layout.name, None], figures[layout.name, slowest]
        wire = [statistics.mean(found.wire) for found in (free, slow)]
        rows.append([layout.name, *map(megabytes, (node_bytes(layout, work), free.metered, *wire))])
    return table(header, rows)


def times_table(options: argparse.Namespace, predictions: Mapping[str, Prediction], figures: Measured) -> str:
    header = ["links"]
    for layout in LAYOUTS:
        header += [f"{layout.name}, s a step (quartiles)", "predicted"]
    header += ["ratio (rounds)", "predicted", "measured / predicted"]
    rows = []
    for rate in (None, *options.rates):
        row = [rate_name(rate)]
        for layout in LAYOUTS:
            found = figures[layout.name, rate]
            steps = [second for turn in found.seconds for second in turn]
            low, _, high = statistics.quantiles(steps, n=4) if len(steps) > 1 else steps * 3
            row += [f"{found.median:.3f} ({low:.3f} to {high:.3f})", f"{predictions[layout.name].seconds(rate):.3f}"]
        here, rounds, before = measured(figures, rate), by_round(figures, rate), predicted(predictions, rate)
        row += [f"{here:.2f} ({min(rounds):.2f} to {max(rounds):.2f})", f"{before:.2f}", f"{here / before:.2f}"]
        rows.append(row)
    return table(header, rows)


def rate_word(rate: float | None) -> str:
    if rate is None:
        return "at no rate that was measured"
    return "without a limit" if math.isinf(rate) else f"at {rate:.0f} Mbit/s"


def paper_table(options: argparse.Namespace, predictions: Mapping[str, Prediction], figures: Measured) -> str:
    points = [(rate, measured(figures, rate)) for rate in options.rates]
    rows = []
    for target in PAPER:
        rate = predicted_rate(predictions[ACROSS.name], predictions[INSIDE.name], target)
        rows.append(
            [f"{target}x", "never" if rate is None else rate_word(rate), rate_word(measured_rate(points, target))]
        )
    return table(["the paper's ratio", "predicted", "measured, between the points above"], rows)


def same_balance(options: argparse.Namespace, predictions: Mapping[str, Prediction]) -> float:
    """Return the rate in Mbit/s that gives a node here as many bytes of link for a FLOP as the paper's nodes have."""
    work = work_of(options)
    model = ModelConfig(
        num_layers=work.num_layers,
        hidden_size=work.hidden_size,
        num_attention_heads=options.heads,
        seq_length=work.seq_length,
    )
    flops = flops_per_token(model, vocab_size=work.vocab_size) * work.global_batch_size * work.seq_length
    return float(8e-6 * PAPER_BALANCE * flops / NODES / predictions[INSIDE.name].compute)


def prediction_words(options: argparse.Namespace, predictions: Mapping[str, Prediction], stated: str) -> str:
    work = work_of(options)
    across, inside = predictions[ACROSS.name], predictions[INSIDE.name]
    tokens = work.global_batch_size * work.seq_length
    ratios = ", ".join(f"{predicted(predictions, rate):.1f} at {rate_name(rate)}" for rate in options.rates)
    return (
        f"Prediction, stated {stated}, before any slow link was measured. A step of {tokens} tokens sends for a layer"
        f" 5 all-reduces of {tokens} x {work.hidden_size} activations (across), or gradients and parameters of its"
        f" 12 x {work.hidden_size}^2 weights (inside). Bytes are {across.node_bytes / inside.node_bytes:.1f} to 1,"
        " which grows as tokens / width, and which the ratio of times nears as links get slow. Without a limit steps"
        f" took {across.compute:.3f} s and {inside.compute:.3f} s. On a slow link a byte costs {WIRE:.3f}, with headers"
        f" and acknowledgements. A step = that time + bytes / rate gives ratios of {ratios}."
    )


def page(
    options: argparse.Namespace, predictions: Mapping[str, Prediction], figures: Measured, stated: str
) -> list[str]:
    """Return the parts of the report."""
    work, losses = work_of(options), {layout.name: figures[layout.name, None].loss for layout in LAYOUTS}
    parameters = process_numel(work, 1)
    return [
        heading("Tensor parallelism across nodes against ZeRO stage 2 across nodes", "cpu"),
        paragraph(
            f"{NODES} nodes of {PROCESSES} processes, network namespaces joined by a bridge; every node's link has the"
            f" rate of the table in both directions, what stays inside a node has none. {ACROSS.name}: {ACROSS.what};"
            f" {INSIDE.name}: {INSIDE.what}. {work.num_layers} recomputed layers of width {work.hidden_size}, sequence"
            f" {work.seq_length}, vocabulary {work.vocab_size}, {parameters / 1e6:.2f}M parameters,"
            f" {work.global_batch_size} samples a step in both, runs of pretrain_gpt.py in turns."
        ),
        paragraph(prediction_words(options, predictions, stated)),
        paragraph("Medians over steps of all rounds:"),
        times_table(options, predictions, figures),
        paragraph(
            "By formula, by the program's own meter, and as counted at the link, headers and acknowledgements included"
            " (without a limit packets are up to 64 KiB long):"
        ),
        bytes_table(options, figures),
        paragraph(
            f"Where the ratios of the paper's figure 2 ({PAPER[0]} to {PAPER[1]}) lie. There models, degrees and"
            " batches are others; where the ratio comes from is the same. The paper's nodes had about"
            f" {1e6 * PAPER_BALANCE:.0f} bytes of link for a MFLOP of the model, which a node here has at"
            f" {same_balance(options, predictions):.0f} Mbit/s:"
        ),
        paper_table(options, predictions, figures),
        f"Losses of the third step: {', '.join(f'{name} {loss:.6f}' for name, loss in losses.items())}.",
    ]


def keep(path: Path | None, record: Mapping[str, object]) -> None:
    """Write the figures for programs to a .json beside the page, if there is to be a page."""
    if path is not None:
        path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def figures_record(figures: Measured) -> list[dict[str, object]]:
    return [{"layout": name, "mbit": rate, **asdict(found)} for (name, rate), found in figures.items()]


def measure(options: argparse.Namespace, cluster: Cluster, folder: Path) -> list[str]:
    """Measure everything and return the page; progress goes to stderr, figures to their file as soon as they exist."""
    turns, figures = Turns(cluster, folder, options), Measured()
    predictions = predict(turns, work_of(options))
    stated = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    record = {
        "command": command(sys.argv),
        "device": f"{machine('cpu')}, one thread a process",
        "torch": torch.__version__,
        "work": asdict(work_of(options)),
        "wire": WIRE,
        "prediction": {
            "stated": stated,
            "layouts": {name: asdict(prediction) for name, prediction in predictions.items()},
            "ratios": [{"mbit": rate, "ratio": predicted(predictions, rate)} for rate in (None, *options.rates)],
        },
    }
    keep(options.output, record)
    tell(prediction_words(options, predictions, stated))
    tell(f"{options.rounds} rounds take about {expected_seconds(predictions, options):.0f} s")
    for number in range(options.rounds):
        for layout in LAYOUTS:
            turns.take(layout, schedule(options.rates, options.steps), figures)
        tell(f"round {number + 1} of {options.rounds} done")
        keep(options.output, {**record, "measured": figures_record(figures)})
    return page(options, predictions, figures, stated)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    reason = obstacle()
    if reason:
        print(f"error: no emulated cluster on this machine: {reason}", file=sys.stderr)
        return 2
    try:
        with ends_on_signals(), tempfile.TemporaryDirectory() as folder, Cluster(NODES) as cluster:
            parts = measure(options, cluster, Path(folder))
    except KeyboardInterrupt:
        print("stopped; the cluster is taken down", file=sys.stderr)
        return 130
    publish(parts, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
