"""Measures superlinear scaling with the data-parallel degree (ZeRO, figure 3), and what it consists of.

    python benchmarks/batch_scaling.py [--limit 56] [--hidden-size 256] [--seq-length 32] [--output FILE]

With ZeRO stage 2 a process holds less of the model states the more data-parallel processes there are (Nd), and a larger
micro-batch takes the memory that is free.  For Nd = 1, 2 and 4, with the settings of --zero-config C3:

1. The largest micro-batch is found with which two training steps hold no more than --limit MiB a process by the ledger;
   a micro-batch of one sample more is shown to be refused.
2. Tokens a second of a process with it are measured, and CPU seconds a token of all its threads, gloo's included.

Processes share the cores, so four run all the time: four jobs of one, two jobs of two, or one job of four, side by
side and step by step.  So tokens a second of a process may be compared between degrees, and the scaling is superlinear
if they grow with Nd.  Every degree is also timed with the micro-batch of Nd = 1: what changes there is the price of
communication and the smaller share of the optimizer's work; the rest is due to the larger batch.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from jobs import Place, run_jobs
from report import MIB, argument_parser, heading, mib, paragraph, publish, table, tell
from steps import Held, Steps, configuration, crossing, held, largest_that_fits

from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem
from megazero.timers import Timers

DEGREES = (1, 2, 4)
PROCESSES = max(DEGREES)
UPDATE = "optimizer"  # the timer of a step's last part


class Case(NamedTuple):
    """A configuration to be timed: a data-parallel degree and a micro-batch in samples."""

    degree: int
    micro_batch: int


class Step(NamedTuple):
    """The times of one step of one process: wall seconds, CPU seconds, and CPU seconds in the optimizer's part."""

    wall: float
    cpu: float
    update: float


@dataclass
class Times:
    """The timed steps of all processes in all rounds.  tokens: those of one process in one step."""

    tokens: int
    steps: list[Step] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """The tokens a second of one process in the median step, while three others run."""
        return self.tokens / statistics.median(step.wall for step in self.steps)

    @property
    def cpu_per_token(self) -> float:
        return sum(step.cpu for step in self.steps) / (self.tokens * len(self.steps))

    @property
    def update_per_token(self) -> float:
        return sum(step.update for step in self.steps) / (self.tokens * len(self.steps))


class CpuTimers(Timers):
    """Timers that count CPU seconds of all threads of the process in place of wall time."""

    def _now(self) -> float:
        return time.process_time()


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--limit", type=float, default=56.0, help="MiB that may be alive on a process")
    add("--num-layers", type=int, default=4, help="blocks")
    add("--hidden-size", type=int, default=256, help="width")
    add("--heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=32, help="tokens of a sample")
    add("--vocab-size", type=int, default=512, help="rows of the embedding")
    add("--bucket-size", type=int, default=131_072, help="elements of a bucket, the size of constant-size buffers")
    add("--rounds", type=int, default=5, help="turns of every case in timing")
    add("--steps", type=int, default=4, help="steps of a turn, and two before them that don't count")
    return parser.parse_args(words)


def configure(case: Case, options: argparse.Namespace) -> RunConfig:
    """Return the configuration that --zero-config C3 makes of a case."""
    settings = {
        "zero_config": "C3",
        "num_layers": options.num_layers,
        "hidden_size": options.hidden_size,
        "num_attention_heads": options.heads,
        "seq_length": options.seq_length,
        "vocab_size": options.vocab_size,
        "micro_batch_size": case.micro_batch,
        "global_batch_size": case.degree * case.micro_batch,
        "reduce_bucket_size": options.bucket_size,
        "logits_chunk_bytes": MIB,
    }
    return configuration(settings, case.degree)


def largest_case(degree: int, options: argparse.Namespace) -> tuple[Case, Held]:
    """Find the largest micro-batch of a degree under --limit, and return it with the bytes that it holds."""
    limit = int(options.limit * MIB)
    tried: dict[int, Held | None] = {}

    def fits(micro_batch: int) -> bool:
        config = configure(Case(degree, micro_batch), options)
        tried[micro_batch] = held(config, degree, device=options.device, limit_bytes=limit)
        verdict = "fits" if tried[micro_batch] else "doesn't fit"
        tell(f"Nd = {degree}: a micro-batch of {micro_batch} {verdict} in {options.limit:g} MiB")
        return tried[micro_batch] is not None

    points = []
    for micro_batch in (4, 12):
        found = held(configure(Case(degree, micro_batch), options), degree, device=options.device)
        assert found is not None, "without a limit nothing is refused"
        points.append((micro_batch, found.peak))
    largest = largest_that_fits(fits, crossing(limit, points))
    fullest = tried.get(largest)
    if fullest is None:
        needs = f"a sample a process with Nd = {degree} holds more"
        raise ConfigError(Problem(f"--limit {options.limit:g}", needs, "a higher --limit, a smaller model"))
    return Case(degree, largest), fullest


def timed_steps(place: Place, config: RunConfig, number: int) -> list[Step]:
    """Time steps of this process, each of which begins when all processes of all jobs are ready, and return them."""
    system, timers, taken = Steps(config, place), CpuTimers(place.device, level=1), []
    system.parts = replace(system.parts, timers=timers)
    for index in range(2 + number):
        batch = system.batch(index)
        place.wait_for_all()
        timers.take()
        wall, cpu = time.perf_counter(), time.process_time()
        system.take(batch)
        taken.append(Step(time.perf_counter() - wall, time.process_time() - cpu, timers.take().read()[UPDATE]))
    place.wait_for_all()  # a job that ended before the others would leave its core to them
    system.close()
    return taken[2:]


def time_cases(cases: Sequence[Case], options: argparse.Namespace) -> dict[Case, Times]:
    """Time the cases in turns, so that whatever else the machine does hits all of them alike."""
    found = {case: Times(case.micro_batch * options.seq_length) for case in cases}
    for number in range(options.rounds):
        for case, times in found.items():
            config = configure(case, options)
            jobs = run_jobs(
                PROCESSES // case.degree, case.degree, timed_steps, config, options.steps, device=options.device
            )
            times.steps += [step for job in jobs for rank in job for step in rank]
        tell(f"round {number + 1} of {options.rounds}")
    return found


def memory_table(largest: Mapping[Case, Held], options: argparse.Namespace) -> str:
    rows = []
    for case, found in largest.items():
        tokens = case.micro_batch * options.seq_length
        rows.append([case.degree, mib(found.model_states), case.micro_batch, tokens, mib(found.peak)])
    return table(["Nd", "model states, MiB", "largest micro-batch", "tokens", "peak, MiB"], rows)


def times_table(found: Mapping[Case, Times]) -> str:
    base = next(iter(found.values()))
    rows = []
    for case, times in found.items():
        rows.append(
            [
                case.degree,
                case.micro_batch,
                f"{times.tokens_per_second:.0f}",
                f"{times.tokens_per_second / base.tokens_per_second:.2f}",
                f"{1e6 * times.cpu_per_token:.1f}",
                f"{base.cpu_per_token / times.cpu_per_token:.2f}",
                f"{1e6 * times.update_per_token:.1f}",
            ]
        )
    header = [
        "Nd",
        "micro-batch",
        "tokens/s of a process",
        "x Nd = 1",
        "CPU µs a token",
        "tokens a CPU second, x Nd = 1",
    ]
    return table([*header, "CPU µs a token in the optimizer's part"], rows)


def page(options: argparse.Namespace, largest: Mapping[Case, Held], found: Mapping[Case, Times]) -> list[str]:
    """Return the parts of the report."""
    model = (
        f"{options.num_layers} layers of width {options.hidden_size}, sequence {options.seq_length}, vocabulary"
        f" {options.vocab_size}; --zero-config C3 (ZeRO stage 2, recomputed layers), tensor parallel 1"
    )
    return [
        heading("The batch that ZeRO stage 2 makes room for, data parallel 1, 2 and 4", options.device),
        paragraph(
            f"{model}. The largest micro-batch with which two training steps stay under {options.limit:g} MiB a process"
            " by the ledger; one sample more is refused:"
        ),
        memory_table(largest, options),
        paragraph(
            f"{PROCESSES} processes run all the time, in {PROCESSES} / Nd jobs side by side, so processes of all"
            " degrees have the same share of the machine; medians over steps of all processes and rounds, CPU time of"
            " all threads, gloo's included. First with the largest micro-batches, then with that of Nd = 1:"
        ),
        times_table(found),
        paragraph(explanation(found)),
    ]


def explanation(found: Mapping[Case, Times]) -> str:
    """Return the paragraph that explains what the figures consist of."""
    cases = list(found)
    first, last = cases[0], cases[len(DEGREES) - 1]
    control = Case(last.degree, first.micro_batch)
    base = found[first].tokens_per_second
    gains = [found[case].tokens_per_second / base for case in cases[1 : len(DEGREES)]]
    price = found[control].cpu_per_token / found[first].cpu_per_token
    saved = 1e6 * (found[control].cpu_per_token - found[last].cpu_per_token)
    update = 1e6 * (found[control].update_per_token - found[last].update_per_token)
    return (
        f"With the batch that fits, a process does {' and '.join(f'{gain:.2f}' for gain in gains)} times the tokens a"
        f" second of Nd = 1 ({'superlinear' if min(gains) > 1 else 'not superlinear'} scaling from there); with the"
        f" batch of Nd = 1, Nd = {last.degree} takes {price:.2f} times its CPU time a token. The larger batch saves"
        f" {saved:.0f} CPU µs a token of Nd = {last.degree}: {update:.0f} in the optimizer's part of the step,"
        f" {saved - update:.0f} in forward, backward and the communication beside them. These are costs of a step, not"
        " of a token (reducing gradients, gathering parameters, the optimizer, calls of operations, reading weights"
        " from memory for each product), spread over more tokens. Memory becomes free as 1 - 1/Nd, and the bytes that a"
        " step sends grow as (Nd - 1)/Nd, which is the same: between degrees that both communicate, a token's share of"
        " communication stays, and little is gained. The global batch grows too, from"
        f" {first.micro_batch} to {last.degree * last.micro_batch} samples: whether training gains as much is another"
        " question. On GPUs, where network and products have other prices, other figures are to be expected."
    )


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    largest = dict(largest_case(degree, options) for degree in DEGREES)
    small = next(iter(largest)).micro_batch
    cases = dict.fromkeys([*largest, *(Case(degree, small) for degree in DEGREES[1:])])
    publish(page(options, largest, time_cases(list(cases), options)), options.output)
    sizes = [case.micro_batch for case in largest]
    return 0 if sizes == sorted(set(sizes)) else 1


if __name__ == "__main__":
    sys.exit(main())
