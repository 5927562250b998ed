"""Measures the configurations C1 to C5 (ZeRO, table 3): the bytes that each holds, its time, and its largest model.

    python benchmarks/zero_configs.py [--limit 64] [--hidden-size 128] [--micro-batch-size 16] [--output FILE]

One GPT, tensor parallel 2 x data parallel 2 (4 processes, which the program starts itself), settings by --zero-config:

    C1  ZeRO stage 1; layers recomputed from whole checkpoints in an arena
    C2  C1 with every checkpoint partitioned over the tensor-parallel processes (Pa)
    C3  C1 with ZeRO stage 2
    C4  C3 with Pa
    C5  C4 with the slices in host memory (Pa+cpu)

1. Bytes of a process by the ledger, and bytes sent by axis, in the second step of a model of --num-layers.
2. Step times of the same model without the ledger: the configurations take turns (C1 C2 ... C5 C1 C2 ...).
3. The largest model under --limit MiB a process (the paper's figure 6): layers are added until the ledger refuses one
   of two training steps.  The search begins at a straight line through the bytes of two models, but the result was run:
   L layers fit, L + 1 don't.

The program fails unless the largest models come in the paper's order, C1 < C3 and C1 < C2 < C4 <= C5.
"""

import argparse
import operator
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobs import Place, run_job
from report import MIB, argument_parser, heading, mib, paragraph, publish, table, tell
from steps import Held, Steps, configuration, crossing, held, largest_that_fits

from megazero.config.presets import ZERO_CONFIGS
from megazero.config.run import RunConfig
from megazero.units import format_count

NAMES = tuple(ZERO_CONFIGS)
SIGNS = {"<": operator.lt, "<=": operator.le}
# The paper's order of the largest models (ZeRO, figure 6), pair by pair.
ORDER = (("C1", "<", "C3"), ("C1", "<", "C2"), ("C2", "<", "C4"), ("C4", "<=", "C5"), ("C1", "<", "C5"))
TENSOR_PARALLEL, DATA_PARALLEL = 2, 2
WORLD_SIZE = TENSOR_PARALLEL * DATA_PARALLEL

# The largest models by figure 6 of the paper, whose text does not give that of C3.
PAPER = {"C1": "40B", "C2": "60B", "C4": "140B", "C5": "150B"}


@dataclass(frozen=True)
class Timed:
    """The seconds of every step but those of the first turn, and the loss of the last step."""

    seconds: list[float]
    loss: float


class Largest(NamedTuple):
    """The largest model that fits: its layers, those that the straight line had promised, and the bytes it holds."""

    layers: int
    promised: int
    held: Held | None


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--num-layers", type=int, default=8, help="blocks of the model whose bytes and times are shown")
    add("--hidden-size", type=int, default=128, help="width")
    add("--heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=128, help="tokens of a sample")
    add("--vocab-size", type=int, default=512, help="rows of the embedding")
    add("--micro-batch-size", type=int, default=16, help="samples of a process and step; checkpoints grow with it")
    add("--bucket-size", type=int, default=131_072, help="elements of a bucket, the size of constant-size buffers")
    add("--limit", type=float, default=64.0, help="MiB that may be alive on a process while models grow")
    add(
        "--largest",
        nargs="+",
        choices=NAMES,
        default=list(NAMES),
        help="configurations whose largest model is looked for",
    )
    add("--rounds", type=int, default=11, help="turns of every configuration in timing; the first is a warm-up")
    add("--steps", type=int, default=4, help="steps of a turn")
    return parser.parse_args(words)


def configure(name: str, num_layers: int, options: argparse.Namespace) -> RunConfig:
    """Return the configuration that --zero-config makes."""
    settings = {
        "zero_config": name,
        "tensor_model_parallel_size": TENSOR_PARALLEL,
        "num_layers": num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.heads,
        "seq_length": options.seq_length,
        "vocab_size": options.vocab_size,
        "micro_batch_size": options.micro_batch_size,
        "global_batch_size": DATA_PARALLEL * options.micro_batch_size,
        "reduce_bucket_size": options.bucket_size,
        "logits_chunk_bytes": MIB,
    }
    return configuration(settings, WORLD_SIZE)


def take_turns(place: Place, configs: Sequence[RunConfig], rounds: int, steps: int) -> list[Timed]:
    """Time the steps of this process, each after a barrier, so that no process pays for the step before."""
    systems = [Steps(config, place) for config in configs]
    timed = [Timed([], 0.0) for _ in systems]
    for turn in range(rounds):
        for index, system in enumerate(systems):
            for number in range(turn * steps, (turn + 1) * steps):
                batch = system.batch(number)
                system.mesh.world.barrier()
                start = time.perf_counter()
                loss = system.take(batch)
                seconds = [time.perf_counter() - start] if turn else []
                timed[index] = Timed(timed[index].seconds + seconds, loss)
    for system in systems:
        system.close()
    return timed


def largest_model(name: str, small: Held, options: argparse.Namespace) -> Largest:
    """Find the largest model of a configuration under --limit.  small: what the model of --num-layers holds."""
    limit = int(options.limit * MIB)
    tried: dict[int, Held | None] = {}

    def fits(num_layers: int) -> bool:
        config = configure(name, num_layers, options)
        tried[num_layers] = held(config, WORLD_SIZE, device=options.device, limit_bytes=limit)
        verdict = "fit" if tried[num_layers] else "don't fit"
        tell(f"{name}: {num_layers} layers {verdict} in {options.limit:g} MiB")
        return tried[num_layers] is not None

    other = measure(name, 2 * options.num_layers, options)
    points = [(options.num_layers, small.peak), (2 * options.num_layers, other.peak)]
    promised = crossing(limit, points)
    layers = largest_that_fits(fits, promised)
    return Largest(layers, promised, tried.get(layers))


def measure(name: str, num_layers: int, options: argparse.Namespace) -> Held:
    """Return the bytes that a model of so many layers holds without a limit."""
    found = held(configure(name, num_layers, options), WORLD_SIZE, device=options.device)
    assert found is not None, "without a limit nothing is refused"
    tell(f"{name}: {num_layers} layers hold {mib(found.peak)} MiB")
    return found


def out_of_order(layers: Mapping[str, int]) -> list[str]:
    """Return the places at which the largest models are not in the paper's order, each as a sentence."""
    return [
        f"{first} {sign} {second} is not so ({layers[first]} and {layers[second]} layers)"
        for first, sign, second in ORDER
        if {first, second} <= layers.keys() and not SIGNS[sign](layers[first], layers[second])
    ]


def bytes_table(found: Mapping[str, Held]) -> str:
    header = [
        "MiB of a process",
        "model states",
        "checkpoints",
        "communication buffers",
        "the rest",
        "peak",
        "in host memory",
        "sent, tensor parallel",
        "sent, data parallel",
    ]
    rows = []
    for name, held_ in found.items():
        parts = (held_.model_states, held_.checkpoints, held_.buffers, held_.rest, held_.peak, held_.host)
        rows.append([name, *map(mib, parts), mib(held_.sent["tp"]), mib(held_.sent["dp"])])
    return table(header, rows)


def times_table(timed: Mapping[str, Timed]) -> str:
    base = statistics.median(next(iter(timed.values())).seconds)
    rows = []
    for name, times in timed.items():
        median = statistics.median(times.seconds)
        low, _, high = (1000 * quartile for quartile in statistics.quantiles(times.seconds, n=4))
        spread = f"{1000 * median:.1f} ({low:.1f} to {high:.1f})"
        rows.append([name, spread, f"{median / base:.3f}", f"{times.loss:.6f}"])
    return table(["", "ms a step (quartiles)", "x C1", "loss of the last step"], rows)


def largest_table(found: Mapping[str, Largest]) -> str:
    header = ["", "layers", "promised", "parameters", "x C1", "peak MiB", "in host memory", "the paper's figure 6"]
    base = next(iter(found.values())).held
    rows = []
    for name, largest in found.items():
        row: list[object] = [name, largest.layers, largest.promised]
        if largest.held is None or base is None:
            row += ["-"] * 4
        else:
            held_ = largest.held
            numel = TENSOR_PARALLEL * held_.numel
            row += [format_count(numel), f"{held_.numel / base.numel:.2f}", mib(held_.peak), mib(held_.host)]
        rows.append([*row, PAPER.get(name, "-")])
    return table(header, rows)


def page(
    options: argparse.Namespace, small: Mapping[str, Held], timed: Mapping[str, Timed], largest: Mapping[str, Largest]
) -> list[str]:
    """Return the parts of the report."""
    model = (
        f"width {options.hidden_size}, sequence {options.seq_length}, vocabulary {options.vocab_size},"
        f" {options.micro_batch_size} samples a process and step"
    )
    wrong = out_of_order({name: found.layers for name, found in largest.items()})
    compared = [" ".join(pair) for pair in ORDER if {pair[0], pair[2]} <= largest.keys()]
    return [
        heading("ZeRO configurations C1 to C5, tensor parallel 2 x data parallel 2", options.device),
        paragraph(
            f"{options.num_layers} layers of {model}. The fullest process's second step by the ledger; model states,"
            " checkpoints, communication buffers and the rest add up to the peak. The rest is what a layer needs while"
            " it is computed again, gradients on their way, and temporaries; with Pa also two gathered checkpoints, the"
            " one in use and the one before it:"
        ),
        bytes_table(small),
        paragraph(
            "Step times of the same model without the ledger, in turns; ratios are worth more than milliseconds:"
        ),
        times_table(timed),
        paragraph(
            f"The largest model under {options.limit:g} MiB a process: with so many layers two training steps pass,"
            " with one more the ledger refuses (*promised* by a straight line through the bytes of two smaller models)."
            " The paper's column has tensor parallel 16, GPUs of 32 GB, fp16, and larger models are wider too; what is"
            " compared is the order:"
        ),
        largest_table(largest),
        f"Not in the paper's order: {'; '.join(wrong)}." if wrong else f"In the paper's order: {', '.join(compared)}.",
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    small = {name: measure(name, options.num_layers, options) for name in NAMES}
    configs = [configure(name, options.num_layers, options) for name in NAMES]
    ranks = run_job(WORLD_SIZE, take_turns, configs, options.rounds, options.steps, device=options.device)
    timed = dict(zip(NAMES, ranks[0], strict=True))
    tell("timed")
    largest = {name: largest_model(name, small[name], options) for name in options.largest}
    publish(page(options, small, timed, largest), options.output)
    return 1 if out_of_order({name: found.layers for name, found in largest.items()}) else 0


if __name__ == "__main__":
    sys.exit(main())
