"""Measures the most that a device can do: operations a second of a large matrix product, bytes a second of a copy.

    python benchmarks/ceilings.py [--precision bf16] [--device cuda]

The *roofline* of a kernel that needs F operations and moves B bytes is max(F / product, B / copy) seconds: no kernel is
much faster, and one that is far slower can be improved.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from jobs import Place, run_job
from report import argument_parser, heading, publish, table
from stopwatch import Stopwatch

from megazero.tensor_parallel import onednn
from megazero.tensor_parallel.products import Products, TorchProducts
from megazero.zero.plan import DTYPES

PRECISIONS = tuple(DTYPES)
# Rows and columns of the square matrices, and bytes to copy: large for the device, but short work for a CPU's thread.
_ROWS = {"cpu": 1024, "cuda": 8192}
_COPIED = {"cpu": 64 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Ceilings:
    """The most that the device of one process can do, as measured.

    matmul: FLOP/s of a matrix product by library.  copy: bytes a second, the sum of those read and those written.
    rows: the number of rows and of columns of the matrices.
    """

    precision: str
    matmul: Mapping[str, float]
    copy: float
    rows: int

    @property
    def flops(self) -> float:
        """The FLOP/s of the fastest library."""
        return max(self.matmul.values())

    def seconds(self, flops: float, nbytes: float) -> float:
        """Return the roofline, in seconds, of a kernel that needs so many operations and moves so many bytes."""
        return max(flops / self.flops, nbytes / self.copy)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "flops": self.flops}

    def describe(self) -> str:
        products = ", ".join(f"{name} {flops / 1e12:.4g}" for name, flops in self.matmul.items())
        return (
            f"product of {self.rows} x {self.rows} matrices in {self.precision}: {products} TFLOP/s;"
            f" copy: {self.copy / 1e9:.4g} GB/s, read and written"
        )


def from_json(kept: Mapping[str, Any]) -> Ceilings:
    """Return the ceilings of which `to_json` made `kept`."""
    return Ceilings(kept["precision"], kept["matmul"], kept["copy"], kept["rows"])


def libraries(device: torch.device, dtype: torch.dtype) -> dict[str, Products]:
    """Return the libraries that can compute products of such tensors on this machine, by name."""
    found: dict[str, Products] = {"torch": TorchProducts()}
    if device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available():
        found["oneDNN"] = onednn.OneDnnProducts()
    return found


def measure(
    device: torch.device, precision: str, *, rows: int | None = None, copied: int | None = None, budget: float = 0.5
) -> Ceilings:
    """Measure both ceilings of a device.  copied: bytes to copy; budget: seconds for each of the timings."""
    rows, copied = rows or _ROWS[device.type], copied or _COPIED[device.type]
    stopwatch = Stopwatch(device, budget=budget)
    seconds = _product_seconds(stopwatch, DTYPES[precision], rows)
    source, target = (torch.empty(copied, dtype=torch.uint8, device=device).random_() for _ in range(2))
    copy = 2 * copied / stopwatch.best(lambda: target.copy_(source))
    return Ceilings(precision, {name: 2 * rows**3 / taken for name, taken in seconds.items()}, copy, rows)


def _product_seconds(stopwatch: Stopwatch, dtype: torch.dtype, rows: int) -> dict[str, float]:
    """Return the seconds of a matrix product by library, each the best of several."""
    left, right = (torch.randn(rows, rows, device=stopwatch.device).to(dtype) for _ in range(2))
    return {
        name: stopwatch.best(partial(products.output, left, right, None))
        for name, products in libraries(stopwatch.device, dtype).items()
    }


def float8_flops(device: torch.device, *, rows: int | None = None, budget: float = 0.5) -> float:
    """Return the FLOP/s of a product of 8-bit matrices in the layout that the library requires."""
    rows = rows or _ROWS[device.type]
    left, right = (torch.randn(rows, rows, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    product = partial(
        torch._scaled_mm, left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return 2 * rows**3 / Stopwatch(device, budget=budget).best(product)


def mean(ceilings: Sequence[Ceilings]) -> Ceilings:
    """Return the mean ceilings of a process from those of all ranks, which measured at the same time."""
    first = ceilings[0]
    matmul = {name: statistics.mean(rank.matmul[name] for rank in ceilings) for name in first.matmul}
    return Ceilings(first.precision, matmul, statistics.mean(rank.copy for rank in ceilings), first.rows)


def measure_here(place: Place, precision: str) -> Ceilings:
    place.wait_for_all()
    return measure(place.device, precision)


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32", help="number format of the product")
    parser.add_argument("--world-size", type=int, default=1, help="processes that measure at the same time")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    ranks: list[Ceilings] = run_job(options.world_size, measure_here, options.precision, device=options.device)
    rows = [
        [rank, name, f"{flops / 1e12:.4g}"] for rank, found in enumerate(ranks) for name, flops in found.matmul.items()
    ]
    copies = [[rank, f"{found.copy / 1e9:.4g}"] for rank, found in enumerate(ranks)]
    publish(
        [
            heading("Ceilings of a device", options.device, options.precision),
            table(["rank", "library", "TFLOP/s"], rows),
            table(["rank", "GB/s of a copy"], copies),
        ],
        options.output,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
