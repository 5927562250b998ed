"""Makes benchmarks/README.md from the records in benchmarks/results/.

    python benchmarks/readme.py

Of all records of the same program, device, model, precision, number of processes and layout, only the newest is shown.
No figure on the page is typed by hand; a test compares the page with what this program makes of the records.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import corpora
import generation
import host_update
import kernels
import slow_link
import standings
import throughput
from ceilings import from_json
from report import paragraph

FOLDER = Path(__file__).parent

TOP = """\
# Benchmarks

`python benchmarks/readme.py` makes this page of the records in `results/`, and the programs beside it make the records;
`python benchmarks/run_all.py` runs all of it but `corpora.py` in at most nine minutes. Seconds are medians, quartiles
beside them. Systems of one table took turns in one run, so ratios are worth more than milliseconds.

`python benchmarks/structure.py` measures the source itself: lines, lengths, imports, Python calls of a training step;
`--sizes` prints lines by package beside the newest record's.

## Examining a machine with a GPU

One command finds out in at most nine minutes what one GPU can tell: exactness beside float64 on the CPU, compiled or
not; stages 0 to 3 over NCCL; layouts of two and four processes that share the GPU; loss curves by pretrain_gpt.py;
some twenty settings beside the CPU; two runs of the deterministic mode, to the bit; the ledger beside the allocator;
the tests marked `cuda`; tokens a second, waits of the host and kernels of GPT-2 124M and 1.5B, beside a plain GPT-2
under torch.compile.

    python benchmarks/gpu_examination.py

On a machine without network that has torch for CUDA but lacks packages, fetch those first where there is a network, and
copy the checkout with them:

    bash benchmarks/gpu_examination.sh --fetch build/wheels
    bash benchmarks/gpu_examination.sh build/wheels

The record appears as `results/DATE-DEVICE-examination.json` and grows with every phase; what phases print goes to a log
beside it. A phase that fails or hangs is recorded, later ones still run, and the exit status is 1. `--device cpu` runs
what a CPU can at toy sizes, which tests the program and nothing else.

## Without a GPU: the null GPU

The null GPU runs the CUDA build of torch on a machine without a GPU. A library (`null_cuda/runtime.cpp`) stands in for
the CUDA runtime and cuBLAS, another (`null_cuda/driver.cpp`) for the driver: memory is the host's, mapped and never
touched, and kernels are logged and not run. All above them is real: torch's dispatcher, its caching allocator,
autograd's threads, Inductor and Triton, which compile for an H200. On Linux (x86_64) with gcc and Python's headers:

    bash scripts/null_gpu.sh
    build/null_gpu/python benchmarks/null_gpu.py

The first command downloads 2.5 GB of CUDA packages to `build/null_gpu` (5 GB on the disk) and compiles the libraries;
run again, it makes only what is missing. The second takes a training step of each of sixteen layouts, small, and of
GPT-2 124M and 1.5B, compiled, at full size; other ranks are torch's fake process group. It prints, beside limits whose
excess makes the exit status 1, each step's launches, waits of the host for the device, and the allocator's peak, and
the bytes that the memory-bound kernels of a compiled block move; from these it predicts steps' times on one H200, as
stated in the record. `build/null_gpu/python` runs any other program too:

    build/null_gpu/python pretrain_gpt.py --mock-data --vocab-size 1000 --num-layers 2 --hidden-size 256 \\
        --num-attention-heads 4 --seq-length 256 --micro-batch-size 2 --global-batch-size 2 --train-iters 4 --lr 1e-3 \\
        --bf16 --compile off --attention-backend efficient --device cuda

What it shows: exceptions, such as tensors on two devices or types without a kernel; synchronisations; launches;
allocations and peaks; the kernels that are chosen and generated. What it cannot show: numbers, for whatever a kernel
would have written is garbage or zero, so losses mean nothing and tests that compare them fail; seconds; races between
streams; memory of NCCL and of kernels' own. NCCL, cuDNN and the profiler's kernels (CUPTI) do not run on it. A CUDA
graph is recorded, waiting meanwhile is an error as on a GPU, and its launch is counted. Nothing seen on it was seen on
a GPU."""


class Section(NamedTuple):
    """A section of the page, with the records of one program.

    words: the paragraph that explains them.  body: makes the text below a record's title, its table.
    """

    program: str
    title: str
    words: str
    body: Callable[[Mapping[str, Any]], str]


SECTIONS = (
    Section(
        "compare",
        "A step beside other engines'",
        "Ratios of a step's time are to `ddp`, of one process to `eager`, and of megazero's to the fastest of those"
        " that do the same; what trains something else `differs` and has none. Peak is of a process, on a CPU beyond"
        " what imports take. States are its parameters, gradients, master weights and moments; sent is what it sends in"
        " a step.",
        standings.body_of,
    ),
    Section(
        "throughput",
        "Throughput",
        "FLOPs are the model's, 6 Psi + 12 L s h a token (Psi: weights of matrix products, L blocks, s tokens, width"
        " h); MFU is their rate beside that of a large matrix product, measured by the same processes in the same run,"
        " and beside the maker's data sheet.",
        throughput.body_of,
    ),
    Section(
        "kernels",
        "Kernels beside their rooflines",
        "The roofline is max(operations / product, bytes / copy), with the fastest product and the copy measured in the"
        " same run; caches are swept before each call.",
        kernels.body_of,
    ),
    Section(
        "generation",
        "Generation",
        "Texts are continued greedily, with the cache of keys and values and without, beside transformers' `generate`,"
        " which has a cache too; times have the prompt in them. Other programs kept the machine busy, so CPU seconds"
        " tell more than tokens a second.",
        generation.body_of,
    ),
    Section(
        "slow_link",
        "Offloading over a slow link",
        "Copies between the device and host memory, and most of the computation, take a stated time. The transfer is a"
        " step's bytes both ways by the bandwidth of one; ratio is step / max(computation, transfer). The floor is what"
        " no order of copies undercuts: gradients exist from backward on, and no weight changes before all their norm.",
        slow_link.body_of,
    ),
    Section(
        "host_update",
        "The host's update",
        "AdamW on a flat run in host memory, with gradients in bf16 or fp32, beside loops of torch's that copy and add"
        " up as many bytes by the same threads.",
        host_update.body_of,
    ),
    Section(
        "corpora",
        "Preprocessing",
        "From jsonl to token files; the rates beyond start-up leave out what the whole command takes on one short"
        " document. What encodes alone writes nothing, and has its start-up, without `read` also its reading, for"
        " free.",
        corpora.body_of,
    ),
)


def records_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records in a folder by name; other JSON files are skipped."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    return {name: content for name, content in found.items() if "program" in content}


def newest(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the newest record of every kind, in the order of titles."""
    kinds: dict[str, str] = {}
    for name, record in records.items():
        fields = ("program", "device", "model", "precision", "world_size", "layout", "micro_batch_size")
        kind = json.dumps([record.get(field) for field in fields], sort_keys=True)
        if kind not in kinds or records[kinds[kind]]["date"] <= record["date"]:
            kinds[kind] = name
    return {name: records[name] for name in sorted(kinds.values(), key=lambda name: (title_of(records[name]), name))}


def title_of(record: Mapping[str, Any]) -> str:
    """Return a record's title, such as `8 x 256, fp32, 2 processes, CPU`; it is empty where no model was run."""
    if isinstance(record["model"], str):
        return ""
    number = f"{record['world_size']} process{'es' * (record['world_size'] > 1)}"
    return f"{record['model']['name']}, {record['precision']}, {number}, {record['device']}"


def generated(folder: Path) -> str:
    """Return the text that README.md in `folder` must have, made from the records and pages in its folder `results`."""
    results = folder / "results"
    records = records_in(results)
    parts = [TOP]
    for section in SECTIONS:
        runs = newest({name: record for name, record in records.items() if record["program"] == section.program})
        if runs:
            parts += [f"## {section.title}", paragraph(section.words)]
        for name, record in runs.items():
            made_on = record.get("machine", record["device"])
            when = f"{record['date']}, {made_on}, torch {record['torch']} ([record](results/{name}.json))"
            limits = [from_json(kept).describe() for kept in record.get("ceilings", {}).values()]
            if title_of(record):
                parts.append(f"### {title_of(record)}")
            parts += [section.body(record), paragraph("; ".join([when, *limits])), f"    {record['command']}"]
    pages = [page for page in sorted(results.glob("*.md")) if page.stem not in records]
    if pages:
        titles = [page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages]
        links = (f"- [{title}](results/{page.name})" for title, page in zip(titles, pages, strict=True))
        parts += ["## Other pages", "\n".join(links)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    (FOLDER / "README.md").write_text(generated(FOLDER), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
