"""Measures pretrain_gpt.py's step for any of its flags: seconds, tokens and model FLOPs a second, memory, losses.

    python benchmarks/throughput.py --world-size 2 --steps 20 --output FILE.md -- \\
        --preset gpt2-124m --bf16 --zero-stage 2 --micro-batch-size 4

The words behind `--` are flags of pretrain_gpt.py, except --device; samples are made up, dropout is off unless flags
turn it on, and the learning rate is constantly that of --lr.  Processes are real ones (gloo on CPUs, nccl on GPUs).

1. Both ceilings of the device are measured by all processes at the same time (`ceilings.py`).
2. Steps are timed from the moment when all processes are ready until the last one has its loss on the host; batches are
   made before.
3. Two more steps run under the ledger, which slows them, for the bytes of each category at the peak.

Model FLOPs of a token are 6 Psi + 12 L s h (Psi: weights of matrix products, L blocks, s tokens, width h): those that
the mathematics requires, without recomputation.  Their rate divided by the measured ceiling is the MFU.  The record
goes to a .json beside --output.
"""

import argparse
import gc
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ceilings
import torch
from ceilings import Ceilings
from jobs import Place, run_job
from report import (
    MIB,
    Column,
    argument_parser,
    described,
    device_name,
    heading,
    mib,
    new_record,
    paragraph,
    publish,
    spread,
    table,
    table_of,
)
from steps import Held, Steps, configuration_of, hold

from megazero.config import derived
from megazero.config.run import RunConfig
from megazero.errors import ConfigError
from megazero.memory.ledger_figures import CATEGORIES
from megazero.report.metrics import Rates, flops_per_token, peak_tflops
from megazero.rules.run import compiled_under_ledger

SYSTEM = "megazero"


@dataclass(frozen=True)
class Timed:
    """The figures of one process.

    seconds: those of every timed step.  losses: those of all steps, the ones before the timed ones included.
    allocated: the most bytes that the device's allocator had given out in a timed step; 0 on a CPU.  held: the bytes of
    a step under the ledger.
    """

    ceilings: Ceilings
    seconds: list[float]
    losses: list[float]
    allocated: int
    held: Held


def parse_arguments(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this program, and the words behind `--`."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--world-size", type=int, default=1, help="processes")
    add("--steps", type=int, default=20, help="steps on the clock")
    add("--warm-up", type=int, default=5, help="steps before them")
    add("--time-limit", type=float, default=300.0, help="seconds of all steps; fewer are taken where they are too long")
    given = list(sys.argv[1:] if words is None else words)
    cut = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:cut]), given[cut + 1 :]


def measure(place: Place, config: RunConfig, warm_up: int, steps: int, time_limit: float) -> Timed:
    """Measure all three parts on this process."""
    place.wait_for_all()
    found = ceilings.measure(place.device, config.precision.precision)
    seconds, losses, allocated = time_steps(place, config, warm_up, steps, time_limit)
    gc.collect()
    return Timed(found, seconds, losses, allocated, hold(place, config, None))


def time_steps(
    place: Place, config: RunConfig, warm_up: int, steps: int, time_limit: float
) -> tuple[list[float], list[float], int]:
    """Take and time steps; return (seconds of the timed steps, losses of all steps, most bytes allocated)."""
    system = Steps(config, place)
    began = time.perf_counter()
    seconds: list[float] = []
    losses: list[float] = []
    on_cuda = place.device.type == "cuda"
    number = warm_up + steps
    while len(losses) < number:
        if len(losses) == max(warm_up, 1):
            left = time_limit - (time.perf_counter() - began)
            number = warm_up + min(steps, _affordable(system, left, seconds[-1]))
            if on_cuda:
                torch.cuda.reset_peak_memory_stats(place.device)
        batch = system.batch(len(losses))
        place.wait_for_all()
        start = time.perf_counter()
        losses.append(system.take(batch))
        seconds.append(time.perf_counter() - start)
    allocated = torch.cuda.max_memory_allocated(place.device) if on_cuda else 0
    place.wait_for_all()
    system.close()
    return seconds[warm_up:], losses, allocated


def _affordable(system: Steps, left: float, step: float) -> int:
    """Return how many steps all processes have time for, at least one; every process gets the same number."""
    most = torch.tensor(max(left / step, 1.0), dtype=torch.float64, device=system.mesh.device)
    system.mesh.world.all_reduce_scalars(most, "min").wait()
    return int(most.item())


def device_peak(config: RunConfig, device: str) -> float | None:
    """Return the device's FLOP/s by the maker's data sheet, or None for a device without an entry."""
    peak = peak_tflops(device_name(device), precision=config.precision.precision)
    return None if peak is None else 1e12 * peak


def figures(config: RunConfig, ranks: Sequence[Timed], flags: Sequence[str], peak: float | None) -> dict[str, Any]:
    """Return the figures for the record: times of the slowest process in each step, bytes of the fullest process."""
    world_size = len(ranks)
    seconds = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
    median = statistics.median(seconds)
    tokens = derived.global_batch_size(config, world_size) * config.model.seq_length
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "made-up samples have a stated vocabulary"
    rates = Rates(flops_per_token(config.model, vocab_size=vocab_size), world_size)
    flops = 1e12 * rates.tflops_per_device(tokens, seconds=median)
    fullest = max((rank.held for rank in ranks), key=lambda held: held.peak)
    allocated = max(rank.allocated for rank in ranks)
    return {
        "settings": shlex.join(flags),
        "tokens_per_step": tokens,
        "tokens_per_second": rates.tokens_per_second(tokens, seconds=median),
        "median_step_seconds": median,
        "step_seconds": seconds,
        "losses": ranks[0].losses,
        "flops_per_token": rates.flops_per_token,
        "model_flops_per_second": flops,
        "mfu_of_measured_ceiling": flops / ceilings.mean([rank.ceilings for rank in ranks]).flops,
        "mfu_of_data_sheet": None if peak is None else flops / peak,
        "peak_bytes": allocated or fullest.peak,
        "ledger_peak_bytes": fullest.peak,
        "peak_bytes_by_category": dict(fullest.at_peak),
        "state_bytes_per_parameter": fullest.model_states / fullest.numel,
        "sent_bytes": sum(fullest.sent.values()),
        "sent_bytes_by_axis": dict(fullest.sent),
    }


def layout(config: RunConfig, world_size: int) -> str:
    """Describe a layout, such as `pipeline 1 x data 2 x tensor 1, ZeRO stage 2, 4 micro-batches of 2`."""
    parallel, data = config.parallel, derived.data_parallel_size(config, world_size)
    degrees = f"pipeline {parallel.pipeline_model_parallel_size} x data {data}"
    number = derived.num_micro_batches(config, world_size)
    batches = f"{number} micro-batch{'es' * (number > 1)} of {config.training.micro_batch_size}"
    stage = config.zero.zero_stage
    return f"{degrees} x tensor {parallel.tensor_model_parallel_size}, ZeRO stage {stage}, {batches}"


def record(config: RunConfig, ranks: Sequence[Timed], flags: Sequence[str], device: str) -> dict[str, Any]:
    return new_record(
        "throughput",
        device,
        model=described(config.model),
        precision=config.precision.precision,
        world_size=len(ranks),
        layout=layout(config, len(ranks)),
        ceilings={config.precision.precision: ceilings.mean([rank.ceilings for rank in ranks]).to_json()},
        systems={SYSTEM: figures(config, ranks, flags, device_peak(config, device))},
    )


COLUMNS = (
    Column("step, ms", "median_step_seconds", ".1f", 1e3),
    Column("quartiles", "quartiles"),
    Column("tokens/s", "tokens_per_second", ".0f"),
    Column("TFLOP/s of a process", "model_flops_per_second", ".4g", 1e-12),
    Column("MFU, measured, %", "mfu_of_measured_ceiling", ".1f", 100),
    Column("MFU, data sheet, %", "mfu_of_data_sheet", ".1f", 100),
    Column("peak, MiB", "peak_bytes", ".2f", 1 / MIB),
    Column("states, B a parameter", "state_bytes_per_parameter", ".1f"),
    Column("sent, MiB", "sent_bytes", ".2f", 1 / MIB),
)


def body_of(kept: Mapping[str, Any]) -> str:
    """Return the table of a record, whose one row has the layout as its name."""
    system = kept["systems"][SYSTEM]
    return table_of({kept["layout"]: {**system, "quartiles": spread(system["step_seconds"])}}, COLUMNS, first="layout")


def page(kept: Mapping[str, Any], found: Ceilings, device: str) -> list[str]:
    """Return the parts of the report."""
    system, model = kept["systems"][SYSTEM], kept["model"]
    size = f"{model['num_layers']} layers x {model['hidden_size']}, sequence {model['seq_length']}"
    categories = [[name, mib(system["peak_bytes_by_category"][name])] for name in CATEGORIES]
    return [
        heading(f"Throughput of {model['name']}", device, kept["precision"]),
        paragraph(
            f"{size}, vocabulary {model['vocab_size']}; {system['tokens_per_step']} tokens a step, of which"
            f" {len(system['step_seconds'])} were timed; loss {system['losses'][0]:.4f} in the first and"
            f" {system['losses'][-1]:.4f} in the last."
            f" Ceilings, of one process while all measure: {found.describe()}. Model FLOPs of a token:"
            f" 6 Psi + 12 L s h = {system['flops_per_token'] / 1e6:.4g} million, Psi being"
            f" {model['matmul_parameters'] / 1e6:.4g} million weights. Memory and sent bytes are of a process:"
        ),
        body_of(kept),
        paragraph("At the peak of a step under the ledger, on the fullest process:"),
        table(["category", "MiB"], [*categories, ["all", mib(system["ledger_peak_bytes"])]]),
    ]


def main(words: Sequence[str] | None = None) -> int:
    options, flags = parse_arguments(words)
    config = configuration_of(flags, options.world_size)
    if config.training.compile in ("on", "max"):  # before steps are timed: memory is measured under a ledger
        raise ConfigError(compiled_under_ledger("the ledger of this program", config.training.compile))
    ranks: list[Timed] = run_job(
        options.world_size, measure, config, options.warm_up, options.steps, options.time_limit, device=options.device
    )
    kept = record(config, ranks, flags, options.device)
    publish(page(kept, ceilings.mean([rank.ceilings for rank in ranks]), options.device), options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
