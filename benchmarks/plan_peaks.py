"""Compares the planned peak of a GPU's memory with its allocator's, on the null GPU and as measured on one H200.

    bash scripts/null_gpu.sh
    python benchmarks/plan_peaks.py --record FILE.jsonl [--only NAME ...] [--output FILE.md]

A case is a job, of which the last rank takes steps on the null GPU (`null_gpu_case.py`), whose allocator, autograd and
compiler are those of torch's CUDA build, and is run dry.  A plan's figure is its tensors of the steady step and the
stated workspaces of cuBLAS, which the allocator has given out too.  Peaks in the record are not measured again, so that
a run that was interrupted goes on.  The exit status is 1 if a plan is off by more than three per cent, but for
the one case in `KNOWN`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from report import HelpFormat, add_output, command, paragraph, publish, table, tell, today
from steps import configuration_of

from megazero.parallel.nodes import Nodes
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.rank import DryJob, differing_ranks, run_rank
from megazero.planner.machines import MACHINES

FOLDER = Path(__file__).resolve().parent
GIB = 1 << 30
BOUND = 0.03
_GPT = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --vocab-size 50257"
    " --micro-batch-size 8 --bf16"
)
_LLAMA = (
    "--num-layers 6 --hidden-size 1536 --num-attention-heads 12 --group-query-attention --num-query-groups 4 --swiglu"
    " --ffn-hidden-size 4096 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
    " --untie-embeddings-and-output-weights --seq-length 2048 --vocab-size 32000 --micro-batch-size 4 --bf16"
)
_DEEP = f"{_GPT} --num-layers 16 --recompute-granularity full"
_FP8 = "--fp8-format hybrid"
_SMALL, _LARGE = "--preset gpt2-124m --bf16", "--preset gpt2-1.5b --bf16"
_WIDE = (
    "--hidden-size 5120 --num-attention-heads 40 --seq-length 1024 --vocab-size 50257 --micro-batch-size 8"
    " --global-batch-size 16 --bf16 --compile off --zero-stage 2 --recompute-granularity full --hidden-dropout 0.1"
    " --attention-dropout 0.1 --offload-optimizer cpu --offload-optimizer-ratio"
)


class Case(NamedTuple):
    """A job; measured: the allocator's peak in bytes where it was measured on one H200, None on the null GPU."""

    world_size: int
    words: str
    measured: float | None = None


NULL_GPU: Mapping[str, Case] = {
    "GPT": Case(1, f"{_GPT} --compile on"),
    "GPT, dropout": Case(1, f"{_GPT} --compile on --hidden-dropout 0.1 --attention-dropout 0.1"),
    "GPT, selective recomputation": Case(1, f"{_GPT} --compile on --recompute-granularity selective"),
    "GPT, full recomputation": Case(1, f"{_DEEP} --compile on"),
    "GPT, full recomputation, not compiled": Case(1, f"{_DEEP} --compile off --global-batch-size 16"),
    "GPT, logits in chunks of 128 MiB": Case(1, f"{_GPT} --compile on --logits-chunk-bytes 134217728"),
    "GPT, fp8 tensorwise": Case(1, f"{_GPT} --compile on {_FP8} --fp8-cache-weights"),
    "GPT, fp8 delayed": Case(1, f"{_GPT} --compile on {_FP8} --fp8-recipe delayed --fp8-cache-weights"),
    "GPT, fp8, not compiled": Case(1, f"{_GPT} --compile off {_FP8}"),
    "GPT, data 4, stage 2, sums in fp32": Case(
        4, f"{_GPT} --compile on --zero-stage 2 --accumulate-allreduce-grads-in-fp32 --global-batch-size 64"
    ),
    "GPT, tensor 2, sequence parallel, data 2, stage 1": Case(
        4,
        f"{_GPT} --compile on --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1 --global-batch-size 16",
    ),
    "GPT, pipeline 2, 1f1b, data 2, stage 2": Case(
        4,
        f"{_GPT} --compile on --pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --zero-stage 2"
        " --global-batch-size 64",
    ),
    "GPT, pipeline 2, zero-bubble, tensor 2, stage 1": Case(
        4,
        f"{_GPT} --compile on --pipeline-model-parallel-size 2 --pipeline-schedule zero-bubble"
        " --tensor-model-parallel-size 2 --global-batch-size 32 --zero-stage 1",
    ),
    "Llama": Case(1, f"{_LLAMA} --compile on"),
    "Llama, not compiled": Case(1, f"{_LLAMA} --compile off"),
    "Llama, full recomputation": Case(1, f"{_LLAMA} --compile on --recompute-granularity full"),
    "Llama, data 4, stage 3": Case(4, f"{_LLAMA} --compile on --zero-stage 3 --global-batch-size 32"),
    "GPT-2 124M, 64 sequences": Case(1, f"{_SMALL} --micro-batch-size 64 --compile on"),
    "GPT-2 124M, 64 sequences, not compiled": Case(1, f"{_SMALL} --micro-batch-size 64 --compile off"),
    "GPT-2 1.5B, 8 sequences, not compiled": Case(1, f"{_LARGE} --micro-batch-size 8 --compile off"),
    "4 layers of 5,120, full recomputation, a tenth of the optimizer in host memory": Case(
        1, f"--num-layers 4 {_WIDE} 0.1"
    ),
}
# Of the records 2026-11-26-nvidia-h200-examination and 2026-11-26-nvidia-h200-fp8.
H200: Mapping[str, Case] = {
    "GPT-2 124M, 64 sequences": Case(1, f"{_SMALL} --micro-batch-size 64 --compile on", 20.94 * GIB),
    "the same in stage 3": Case(1, f"{_SMALL} --micro-batch-size 64 --compile on --zero-stage 3", 21.08 * GIB),
    "GPT-2 124M, 64 sequences, not compiled": Case(1, f"{_SMALL} --micro-batch-size 64 --compile off", 21.90 * GIB),
    "GPT-2 1.5B, 16 sequences": Case(1, f"{_LARGE} --micro-batch-size 16 --compile on", 61.77 * GIB),
    "GPT-2 1.5B, 32 sequences": Case(1, f"{_LARGE} --micro-batch-size 32 --compile on", 99.57 * GIB),
    "GPT-2 1.5B, 8 sequences, not compiled": Case(1, f"{_LARGE} --micro-batch-size 8 --compile off", 43.95 * GIB),
    "GPT-2 1.5B, 16 sequences, fp8 tensorwise": Case(
        1, f"{_LARGE} --micro-batch-size 16 --compile on {_FP8} --fp8-cache-weights", 58.7 * GIB
    ),
    "GPT-2 1.5B, 16 sequences, fp8 delayed": Case(
        1, f"{_LARGE} --micro-batch-size 16 --compile on {_FP8} --fp8-recipe delayed --fp8-cache-weights", 58.7 * GIB
    ),
    "40 layers of 5,120, full recomputation, 45 % of the optimizer in host memory": Case(
        1, f"--num-layers 40 {_WIDE} 0.45", 129.26 * GIB
    ),
}
KNOWN = "40 layers of 5,120, full recomputation, 45 % of the optimizer in host memory"


def measured(case: Case, python: Path) -> int:
    """Return the allocator's peak of a steady step on the null GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        stated, output = json.dumps({"world_size": case.world_size, "words": case.words.split()}), f"{scratch}/found"
        words = [str(python), str(FOLDER / "null_gpu_case.py"), stated, output]
        subprocess.run(words, cwd=FOLDER.parent, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        peak: int = json.loads(Path(output).read_text(encoding="utf-8"))["peak_bytes"]
        return peak


def planned(case: Case, operators: Operators | None = None) -> int:
    """Return the peak of the last stage's steady step, with the workspaces of an H200; operators: found so far."""
    config = configuration_of(case.words.split(), case.world_size)
    assert config.model.vocab_size is not None, "made-up samples have a stated vocabulary"
    job = DryJob(config, config.model.vocab_size, Nodes((case.world_size,)), is_gpu=True)
    rank = run_rank(job, list(differing_ranks(job))[-1], ("start-up", "first step", "steady step"), operators)
    return rank.parts["steady step"].memory.peak_bytes + MACHINES["h200"].workspace_bytes


def rows(cases: Mapping[str, Case], peaks: Mapping[str, float]) -> list[tuple[str, float, int]]:
    """Return name, the allocator's peak and the planned one of every case."""
    return [(name, peaks[name], planned(case)) for name, case in cases.items() if name in peaks]


def page(found: Mapping[str, Sequence[tuple[str, float, int]]]) -> list[str]:
    """Return the parts of the page."""
    words = (
        "The allocator's peak of a step after the first ones, and the one that a dry run finds: its tensors, and 64 MiB"
        " of workspaces that cuBLAS takes from the allocator. On the null GPU steps run through torch's CUDA build,"
        " its allocator, autograd, Inductor and Triton, but no kernel runs, so that memory that a kernel's library"
        " takes for itself is not in it; the H200's figures have it. Blocks are compiled unless a row tells otherwise."
    )
    parts = [f"# Planned peaks beside the allocator's\n\n{today()}; torch 2.13 plans, torch 2.11 is measured."]
    parts += [f"`{command(sys.argv)}`", paragraph(words)]
    for place, lines in found.items():
        cells = [
            (name, f"{peak / GIB:.3f}", f"{plan / GIB:.3f}", f"{100 * (plan / peak - 1):+.2f} %")
            for name, peak, plan in lines
        ]
        parts += [f"## {place}", table(["", "allocator, GiB", "plan, GiB", "error"], cells)]
    return parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--null-gpu", type=Path, default=Path("build/null_gpu/python"), help="its interpreter")
    parser.add_argument("--only", nargs="+", choices=[*NULL_GPU], metavar="NAME", help="cases to measure")
    parser.add_argument("--record", type=Path, required=True, metavar="FILE.jsonl", help="the peaks so far, by line")
    add_output(parser)
    options = parser.parse_args()
    peaks: dict[str, float] = {}
    if options.record.is_file():
        lines = map(json.loads, options.record.read_text(encoding="utf-8").splitlines())
        peaks = {line["case"]: line["peak_bytes"] for line in lines}
    for name, case in NULL_GPU.items():
        if name in peaks or (options.only and name not in options.only):
            continue
        tell(name)
        peaks[name] = measured(case, options.null_gpu.absolute())
        with options.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": name, "peak_bytes": peaks[name]}) + "\n")
    of_h200 = {name: case.measured for name, case in H200.items() if case.measured is not None}
    found = {"On the null GPU": rows(NULL_GPU, peaks), "On one H200": rows(H200, of_h200)}
    publish(page(found), options.output)
    off = [name for lines in found.values() for name, peak, plan in lines if abs(plan / peak - 1) > BOUND]
    return 1 if set(off) - {KNOWN} else 0


if __name__ == "__main__":
    sys.exit(main())
