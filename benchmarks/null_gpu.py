"""Takes training steps on the null GPU: what they launch, wait for and hold, beside limits, without a GPU.

    bash scripts/null_gpu.sh
    build/null_gpu/python benchmarks/null_gpu.py [--only CASE ...] [--output FILE.md]

A case is a process of its own (`null_gpu_case.py`) that is the last rank of its layout; the other ranks are torch's
fake process group.  Fifteen layouts are small models; four are GPT-2 with 124 million and 1.5 billion parameters,
compiled, of which the bytes are counted too that the memory-bound kernels of one block read and write, forward and
backward.  U is the bytes of one activation [tokens, width] in bf16.  The exit status is 1 where a case fails or
exceeds a limit.  benchmarks/README.md tells what these figures show and what they cannot.

With --device cpu the small layouts' steps are taken on the CPU, which tests the program and nothing else.
"""

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import HelpFormat, add_output, command, paragraph, publish, table, tell, today

FOLDER = Path(__file__).resolve().parent
MIB = 1 << 20
_SMALL = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 --vocab-size 1000 --micro-batch-size 2"
)


@dataclass(frozen=True)
class Case:
    """A layout with its limits, which are the figures of the newest record.

    words: the flags of the run.  launches: kernels, matrix products and copies of a step.  peak: MiB of the allocator.
    units: the U that the memory-bound kernels of a block's compiled code move.  A limit that is None is not checked.
    """

    name: str
    world_size: int
    words: str
    launches: float | None = None
    peak: float | None = None
    units: float | None = None


def _small(name: str, world_size: int, words: str, *limits: float) -> Case:
    precision = "" if "--fp16" in words else " --bf16"
    compiles = "" if "--compile" in words else " --compile off"
    return Case(name, world_size, f"{_SMALL} {words}{precision}{compiles}", *limits)


_TENSOR = "--tensor-model-parallel-size 2"
_PIPELINE = "--pipeline-model-parallel-size 2 --pipeline-schedule"
CASES = (
    _small("data 2, stage 0", 2, "--zero-stage 0 --global-batch-size 4", 314, 145),
    _small("data 4, stage 1, 2 micro-batches", 4, "--zero-stage 1 --global-batch-size 16", 535, 112),
    _small("data 4, stage 2, 2 micro-batches", 4, "--zero-stage 2 --global-batch-size 16", 542, 112),
    _small("data 4, stage 3, 2 micro-batches", 4, "--zero-stage 3 --global-batch-size 16", 609, 109),
    _small("data 2, stage 2, fp16", 2, "--zero-stage 2 --fp16 --global-batch-size 4", 306, 123),
    _small("data 2, stage 3, compiled", 2, "--zero-stage 3 --compile on --global-batch-size 4", 317, 119, 50.4),
    _small(
        "data 2, stage 2, 2 micro-batches, CUDA graphs",
        2,
        "--zero-stage 2 --compile on --enable-cuda-graph --global-batch-size 8",
        273,
        155,
    ),
    _small("data 2, stage 1, fp8", 2, "--zero-stage 1 --fp8-format hybrid --global-batch-size 4", 610, 123),
    _small(
        "tensor 2 x data 2, stage 1", 4, f"{_TENSOR} --sequence-parallel --zero-stage 1 --global-batch-size 4", 380, 94
    ),
    _small(
        "tensor 2 x data 2, stage 3, recomputed",
        4,
        f"{_TENSOR} --sequence-parallel --zero-stage 3 --recompute-granularity full --global-batch-size 4",
        452,
        89,
    ),
    _small(
        "pipeline 2 x data 2, stage 2, 1f1b", 4, f"{_PIPELINE} 1f1b --zero-stage 2 --global-batch-size 16", 590, 100
    ),
    _small(
        "pipeline 2 x tensor 2, interleaved",
        4,
        f"{_PIPELINE} interleaved --num-layers-per-virtual-pipeline-stage 1 {_TENSOR} --global-batch-size 8",
        600,
        92,
    ),
    _small(
        "pipeline 2 x tensor 2 x data 2, stage 1, zero-bubble",
        8,
        f"{_PIPELINE} zero-bubble {_TENSOR} --zero-stage 1 --global-batch-size 16",
        813,
        89,
    ),
    _small(
        "pipeline 2, stage 1, zero-bubble, compiled",
        2,
        f"{_PIPELINE} zero-bubble --zero-stage 1 --compile on --global-batch-size 8",
        703,
        117,
        12.1,
    ),
    _small("tensor 2, compiled", 2, f"{_TENSOR} --compile on --global-batch-size 2", 296, 104, 18.3),
    _small(
        "tensor 2, sequence parallel, compiled",
        2,
        f"{_TENSOR} --sequence-parallel --compile on --global-batch-size 2",
        377,
        102,
        10.7,
    ),
    Case(
        "GPT-2 124M, 64 samples, compiled",
        1,
        "--preset gpt2-124m --micro-batch-size 64 --bf16 --compile on",
        774,
        21445,
        47.5,
    ),
    Case(
        "GPT-2 124M, 64 samples, CUDA graphs",
        1,
        "--preset gpt2-124m --micro-batch-size 64 --bf16 --compile on --enable-cuda-graph",
        296,
        22000,
    ),
    Case(
        "GPT-2 1.5B, 16 samples, compiled",
        1,
        "--preset gpt2-1.5b --micro-batch-size 16 --bf16 --compile on",
        2636,
        63254,
        47.8,
    ),
    Case(
        "GPT-2 1.5B, 16 samples, fp8 by delayed scales, compiled",
        1,
        "--preset gpt2-1.5b --micro-batch-size 16 --bf16 --compile on --fp8-format hybrid --fp8-recipe delayed"
        " --fp8-cache-weights",
        3234,
        60141,
        79.8,
    ),
)


def run(case: Case, seconds: float, log: Path) -> dict[str, Any]:
    """Take the steps of a case in a process, which is killed after so many seconds, and return their figures."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "found.json"
        stated = json.dumps({"world_size": case.world_size, "words": case.words.split()})
        environment = {
            "TORCHINDUCTOR_COMPILE_THREADS": str(os.cpu_count()),
            **os.environ,
            # A block's bytes are counted while it is compiled, so it must not come from a cache.
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
            "TRITON_CACHE_DIR": f"{scratch}/triton",
        }
        began = time.monotonic()
        with log.open("ab") as stream:
            try:
                status: int | str = subprocess.run(
                    [sys.executable, str(FOLDER / "null_gpu_case.py"), stated, str(output)],
                    cwd=FOLDER.parent, env=environment, stdout=stream, stderr=stream, timeout=seconds,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                status = f"over {seconds:.0f} s"
        if status != 0 or not output.exists():
            return {"refused": f"failed: exit status {status}", "seconds": round(time.monotonic() - began, 1)}
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return {**found, "seconds": round(time.monotonic() - began, 1)}


def units(found: Mapping[str, Any]) -> float | None:
    """Return the bytes of a block's memory-bound kernels in U; None where none were counted."""
    return found["block_bytes"] / found["unit_bytes"] if found.get("unit_bytes") else None


class Assumption(NamedTuple):
    """The rates of a GPU that a prediction assumes, in TFLOP/s: of three kinds of matrix products, and of attention.

    others: the blocks' products in forward and for the gradients of inputs.
    """

    others: float
    weight_gradients: float
    head: float
    attention: float


# Guesses for one H200, between those of its products alone and what training reaches; cuDNN's attention but for "FA2".
ASSUMPTIONS = {
    "low": Assumption(560, 480, 584, 206),
    "middle": Assumption(620, 560, 660, 333),
    "middle, FA2": Assumption(620, 560, 660, 240),
    "high": Assumption(690, 640, 690, 394),
}
_BYTES_PER_SECOND = 4.3e12
_UPDATE_BYTES = 34  # a parameter: its gradient copied (4) and read for the norm (2), AdamW in one pass (28)
_LOGITS_PASSES, _LOGITS_CHUNK = 3, 1 << 30  # over the logits in bf16; most bytes of a chunk in fp32


def predicted_seconds(found: Mapping[str, Any], rates: Assumption) -> dict[str, float]:
    """Return the seconds, by part, that a compiled case's step would take with these rates, in bf16 without dropout.

    Matrix products and attention take their operations at their rates, all else its bytes at the memory's.
    """
    model = found["model"]
    n, layers, width, vocabulary = (model[key] for key in ("tokens", "layers", "width", "vocabulary"))
    products = 24 * n * width**2 * layers  # of forward; backward has two times as much
    head = 3 * 2 * n * width * vocabulary
    attention = 3.5 * 2 * n * model["length"] * width * layers  # causal; backward has 2.5 times as much as forward
    num_chunks = -(-4 * n * vocabulary // _LOGITS_CHUNK)
    head_bytes = _LOGITS_PASSES * 2 * n * vocabulary + num_chunks * 8 * width * vocabulary
    return {
        "products of blocks": products / 1e12 * (2 / rates.others + 1 / rates.weight_gradients),
        "attention": attention / 1e12 / rates.attention,
        "memory-bound in blocks": found["block_bytes"] * layers / _BYTES_PER_SECOND,
        "products of the head": head / 1e12 / rates.head,
        "softmax and gradient sums": head_bytes / _BYTES_PER_SECOND,
        "gradients and update": _UPDATE_BYTES * model["parameters"] / _BYTES_PER_SECOND,
    }


def predictions(systems: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the parts of the page that predict the speed of the large cases."""
    # The rates are those of products in bf16.
    large = {
        name: found
        for name, found in systems.items()
        if name.startswith("GPT-2") and "model" in found and "fp8" not in name
    }
    rows = []
    for name, found in large.items():
        for words, rates in ASSUMPTIONS.items():
            parts = predicted_seconds(found, rates)
            whole = sum(parts.values())
            figures = [f"{1e3 * seconds:.1f}" for seconds in (*parts.values(), whole)]
            rows.append([name, words, *figures, f"{found['model']['tokens'] / whole / 1e3:.1f}k"])
    if not rows:
        return []
    names = list(predicted_seconds(next(iter(large.values())), ASSUMPTIONS["low"]))
    words = (
        "Predictions, not measurements: what a step would take on one H200 if its matrix products and its attention ran"
        " at the assumed rates, and all else moved its bytes at 4.3 TB/s. The bytes of blocks are those counted above;"
        " logits are read or written three times, and a parameter takes 34 bytes a step. The rates are guesses from"
        " products of such shapes on such a GPU; the host, and kernels that wait for each other, are left out."
    )
    return ["## Predicted for one H200", paragraph(words), table(["step", "rates", *names, "ms", "tokens/s"], rows)]


def excesses(case: Case, found: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a case: its failure, or each limit that its figures exceed."""
    if "refused" in found:
        return [f"{case.name}: {found['refused']}"]
    if "launches" not in found:
        return []
    figures = (
        ("synchronizations", found["synchronizations"], 0),
        ("launches", found["launches"], case.launches),
        ("MiB at the peak", found["peak_bytes"] / MIB, case.peak),
        ("U of a block", units(found), case.units),
    )
    return [
        f"{case.name}: {value:g} {what}, at most {limit:g} are allowed"
        for what, value, limit in figures
        if value is not None and limit is not None and value > limit
    ]


def page(record: Mapping[str, Any]) -> list[str]:
    """Return the parts of the page that shows a record."""
    rows = []
    for name, found in record["systems"].items():
        if "refused" in found:
            rows.append([name, found["refused"], *["-"] * 5])
        elif "launches" in found:
            moved = units(found)
            peak, block = f"{found['peak_bytes'] / MIB:.1f}", "-" if moved is None else f"{moved:.1f}"
            figures = [found[key] for key in ("launches", "products", "copies", "synchronizations")]
            rows.append([name, *figures, peak, block])
        else:
            rows.append([name, "ran on the CPU", *["-"] * 5])
    header = ["layout, last rank", "launches", "products of them", "copies", "waits", "peak, MiB", "a block, U"]
    words = (
        "Figures of one training step on the null GPU, which counts kernels and does not run them. Launches are"
        " kernels, matrix products and copies, which include memory that is set, and CUDA graphs, each as one; waits"
        " are synchronisations of the host with the device; the peak is the caching allocator's, with what it counts as"
        " free of the memory of CUDA graphs; U is the bytes of an activation [tokens, width] in bf16, and the column"
        " has what the memory-bound kernels of one block read and write, forward and backward,"
        " attention's own left out, an operator of this project as one pass over its tensors (before 28 November 2026"
        " the passes that round to 8 bits did not count); of a block on several tensor ranks, its compiled parts alone."
        " No figure here is a time, and none was made on a GPU."
    )
    made = f"{record['date']}; {record['device']} on a {platform.machine()} CPU, torch {record['torch']}."
    head = ["# Training steps on the null GPU", made, f"`{record['command']}`", paragraph(words), table(header, rows)]
    return head + predictions(record["systems"])


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: tests this program")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES], metavar="CASE", help="by name")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of each case")
    add_output(parser)
    options = parser.parse_args(words)
    if options.device == "cuda" and not hasattr(ctypes.CDLL(None), "null_gpu_log"):
        parser.error(
            "this python doesn't run on the null GPU: `bash scripts/null_gpu.sh` builds it, and then"
            " `build/null_gpu/python benchmarks/null_gpu.py` runs on it"
        )
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    cases = [case for case in CASES if not options.only or case.name in options.only]
    if options.device == "cpu":
        cases = [case for case in cases if _SMALL in case.words and "--compile on" not in case.words]
    found, wrong = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            log = Path(folder) / "log"
            found[case.name] = row = run(case, options.seconds, log)
            exceeded = excesses(case, row)
            wrong += exceeded
            tell(f"{case.name}: {'; '.join(exceeded) or 'within its limits'} ({row['seconds']:.0f} s)")
            if "refused" in row:
                tell(log.read_text(encoding="utf-8", errors="replace")[-3000:])
    device = "null GPU" if options.device == "cuda" else "CPU"
    made = {"date": today(), "device": device, "torch": torch.__version__}
    line = command(sys.argv) if options.device == "cpu" else f"build/null_gpu/{command(sys.argv)}"
    record = {"examines": "the null GPU", **made, "command": line, "systems": found, "exceeded": wrong}
    publish(page(record), options.output, record)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
