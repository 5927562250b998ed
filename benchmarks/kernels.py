"""Times each kernel on a training step's path beside its roofline, on one process.

    python benchmarks/kernels.py [--preset gpt2-124m] [--precision bf16] [--device cuda] [--output FILE.md]

The kernels are linear layers by every library that can compute them, attention by every backend of torch's, layer norm,
GELU, the passes of backward that add up a bias's gradient, the LM head with its loss in chunks and with whole logits,
AdamW and the gradient norm (`kernel_cases.py`).  The roofline is max(operations / fastest product, bytes / copy) with
both ceilings measured in the same run (`ceilings.py`); 8-bit products have a ceiling of their own.  Caches are swept
before each call.  The record goes to a .json beside --output.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ceilings
import kernel_cases
import torch
from ceilings import Ceilings
from jobs import Place, run_job
from kernel_cases import Kernel, Sizes
from report import MIB, Column, argument_parser, described, heading, new_record, paragraph, publish, table_of
from steps import configuration_of
from stopwatch import Stopwatch

from megazero.config import derived
from megazero.config.presets import PRESETS
from megazero.config.run import RunConfig
from megazero.memory.ledger import Ledger
from megazero.tensor_parallel import float8
from megazero.tensor_parallel.products import Products
from megazero.zero.plan import DTYPES

FLOAT8 = "float8"
_ABOUT = 50  # about the number of kernels, by which the time is divided


@dataclass(frozen=True)
class Timing:
    """The measured figures of a kernel.

    seconds: of every call.  roofline: in seconds.  flops, nbytes: what it needs at the least.  peak_bytes: the most
    bytes alive beside its operands; None if not measured.
    """

    name: str
    seconds: list[float]
    roofline: float
    flops: float
    nbytes: float
    peak_bytes: int | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def share(self) -> float:
        """The share of the roofline's speed that the median call reaches."""
        return self.roofline / self.median

    def to_json(self) -> dict[str, Any]:
        return {
            "median_step_seconds": self.median,
            "step_seconds": self.seconds,
            "roofline_seconds": self.roofline,
            "share_of_roofline": self.share,
            "flops": self.flops,
            "bytes": self.nbytes,
            "peak_bytes": self.peak_bytes,
        }


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), help="a model by name, whose sizes win over those below")
    add("--num-layers", type=int, default=8, help="blocks; kernels don't depend on them")
    add("--hidden-size", type=int, default=256, help="width")
    add("--num-attention-heads", type=int, default=4, help="attention heads")
    add("--seq-length", type=int, default=128, help="tokens of a sample")
    add("--vocab-size", type=int, default=4096, help="rows of the embedding")
    add("--micro-batch-size", type=int, default=2, help="samples of a micro-batch")
    add("--precision", choices=ceilings.PRECISIONS, default="fp32", help="number format")
    add("--time-limit", type=float, default=60.0, help="seconds of all kernels, roughly")
    return parser.parse_args(words)


def configure(options: argparse.Namespace) -> RunConfig:
    """Return the configuration of the run whose kernels are timed."""
    words = ["--precision", options.precision, "--micro-batch-size", str(options.micro_batch_size)]
    if options.preset is not None:
        return configuration_of([*words, "--preset", options.preset], 1)
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size"):
        words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    return configuration_of(words, 1)


def sizes_of(config: RunConfig, device: torch.device) -> Sizes:
    """Return the sizes of one micro-batch without model parallelism."""
    model = config.model
    assert model.vocab_size is not None, "made-up samples have a stated vocabulary"
    return Sizes(
        samples=config.training.micro_batch_size,
        length=model.seq_length,
        hidden=model.hidden_size,
        heads=model.num_attention_heads,
        inner=derived.ffn_hidden_size(model),
        vocabulary=model.vocab_size,
        padded_vocabulary=derived.padded_vocab_size(
            model.vocab_size, divisible_by=model.make_vocab_size_divisible_by, tensor_parallel_size=1
        ),
        dtype=DTYPES[config.precision.precision],
        device=device,
    )


def measure(place: Place, config: RunConfig, time_limit: float) -> tuple[dict[str, Ceilings], list[Timing]]:
    """Measure the ceilings (by "" for the working precision and "float8") and time every kernel."""
    sizes, budget = sizes_of(config, place.device), min(time_limit / _ABOUT, 0.5)
    torch.manual_seed(1)
    libraries = ceilings.libraries(place.device, sizes.dtype)
    found = {"": ceilings.measure(place.device, config.precision.precision, budget=budget)}
    if place.device.type == "cuda" and _has_float8(place.device, sizes.dtype):
        libraries[FLOAT8] = float8.float8_products("hybrid")
        found[FLOAT8] = replace(found[""], matmul={FLOAT8: ceilings.float8_flops(place.device, budget=budget)})
    return found, time_kernels(sizes, libraries, found, budget)


def _has_float8(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= (8, 9)


def time_kernels(
    sizes: Sizes, libraries: Mapping[str, Products], found: Mapping[str, Ceilings], budget: float
) -> list[Timing]:
    stopwatch, timings = Stopwatch(sizes.device, budget=budget), []
    for kernel in kernel_cases.kernels(sizes, libraries):
        ceiling = found.get(kernel.products, found[""])
        seconds = stopwatch.seconds(kernel.call)
        peak = peak_bytes(kernel, sizes.device) if kernel.operands else None
        roofline = ceiling.seconds(kernel.flops, kernel.nbytes)
        timings.append(Timing(kernel.name, seconds, roofline, kernel.flops, kernel.nbytes, peak))
    return timings


def peak_bytes(kernel: Kernel, device: torch.device) -> int:
    """Return the most bytes that are alive during a call by the ledger, operands not counted."""
    with Ledger(device) as ledger:
        for operand in kernel.operands:
            ledger.tag(operand, "parameters")
        ledger.reset()
        before = sum(ledger.live_bytes().values())
        kernel.call()
        return ledger.take().peak_bytes - before


def record(config: RunConfig, found: Mapping[str, Ceilings], timings: Sequence[Timing], device: str) -> dict[str, Any]:
    return new_record(
        "kernels",
        device,
        model=described(config.model),
        micro_batch_size=config.training.micro_batch_size,
        precision=config.precision.precision,
        world_size=1,
        ceilings={name or config.precision.precision: ceiling.to_json() for name, ceiling in found.items()},
        systems={timing.name: timing.to_json() for timing in timings},
    )


COLUMNS = (
    Column("µs", "median_step_seconds", ".1f", 1e6),
    Column("roofline, µs", "roofline_seconds", ".1f", 1e6),
    Column("share of it, %", "share_of_roofline", ".0f", 100),
    Column("memory beside operands, MiB", "peak_bytes", ".2f", 1 / MIB),
)


def body_of(kept: Mapping[str, Any]) -> str:
    """Return the table of a record."""
    return table_of(kept["systems"], COLUMNS, first="kernel")


def page(kept: Mapping[str, Any], found: Mapping[str, Ceilings], device: str) -> list[str]:
    """Return the parts of the report."""
    model = kept["model"]
    limits = "; ".join(ceiling.describe() for ceiling in found.values())
    return [
        heading(f"Kernels of {model['name']} beside their rooflines", device, kept["precision"]),
        paragraph(
            f"Width {model['hidden_size']}, {model['num_attention_heads']} heads, vocabulary {model['vocab_size']};"
            f" {kept['micro_batch_size']} samples of {model['seq_length']} tokens. Ceilings: {limits}. Medians:"
        ),
        body_of(kept),
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    config = configure(options)
    ((found, timings),) = run_job(1, measure, config, options.time_limit, device=options.device)
    kept = record(config, found, timings, options.device)
    publish(page(kept, found, options.device), options.output, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
