"""Makes benchmarks/README.md from the records in benchmarks/results/.

    python benchmarks/readme.py

Of all records of the same program, device, model, precision, number of processes and layout, only the newest is shown.
No figure on the page is typed by hand; a test compares the page with what this program makes of the records.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import corpora
import kernels
import records
import standings
from ceilings import from_json
from report import mib, paragraph, table

FOLDER = Path(__file__).parent


EXAMINATION = """\
One command finds out in at most nine minutes what one GPU can tell: exactness beside float64 on the CPU, compiled or
not; stages 0 to 3 over NCCL; layouts of two and four processes that share the GPU; loss curves by pretrain_gpt.py; the
ledger beside the allocator; the tests marked `cuda`; tokens a second, waits of the host and kernels of GPT-2 124M and
1.5B, beside a plain GPT-2 under torch.compile.

    python benchmarks/gpu_examination.py

On a machine without network that has torch for CUDA but lacks packages, fetch those first where there is a network, and
copy the checkout with them:

    bash benchmarks/gpu_examination.sh --fetch build/wheels
    bash benchmarks/gpu_examination.sh build/wheels

The record appears as `results/DATE-DEVICE-examination.json` and grows with every phase; what phases print goes to a log
beside it. A phase that fails or hangs is recorded, later ones still run, and the exit status is 1. `--device cpu` runs
what a CPU can at toy sizes, which tests the program and nothing else."""


class Kept(NamedTuple):
    """A record, and the name of its file without .json."""

    name: str
    record: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The record's title on the page, such as `8 x 256, fp32, 2 processes, CPU`."""
        record = self.record
        number = f"{record['world_size']} process{'es' * (record['world_size'] > 1)}"
        return f"{model_name(record)}, {record['precision']}, {number}, {record['device']}"


def model_name(record: Mapping[str, Any]) -> str:
    model = record["model"]
    return model if isinstance(model, str) else str(model.get("name", model))


def newest(folder: Path) -> list[Kept]:
    """Return the newest record of every kind in the folder, by program and title; other JSON files are skipped."""
    found: dict[str, Kept] = {}
    for path in sorted(folder.glob("*.json")):
        if not is_record(path):
            continue
        record = records.read(path)
        kept, key = Kept(path.stem, record), kind(record)
        if key not in found or found[key].record["date"] <= record["date"]:
            found[key] = kept
    return sorted(found.values(), key=lambda kept: (kept.record["program"], kept.title, kept.name))


def is_record(path: Path) -> bool:
    content = json.loads(path.read_text(encoding="utf-8"))
    return isinstance(content, dict) and "program" in content


def kind(record: Mapping[str, Any]) -> str:
    """Return a key that is equal for two records if the newer one takes the place of the older one."""
    names = ("program", "device", "model", "precision", "world_size", "layout", "micro_batch_size")
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def throughput_table(runs: Sequence[Kept]) -> str:
    """Return a table with a row for each system of each record."""
    header = (
        "model|layout|step, ms (quartiles)|tokens/s|TFLOP/s of a process|MFU, measured, %|MFU, data sheet, %|peak, MiB"
    )
    rows = []
    for kept, system in ((run, system) for run in runs for system in run.record["systems"].values()):
        low, median, high = (1e3 * seconds for seconds in records.quartiles(system["step_seconds"]))
        sheet = system.get("mfu_of_data_sheet")
        row = [kept.title, kept.record.get("layout", ""), f"{median:.1f} ({low:.1f} to {high:.1f})"]
        row += [f"{system['tokens_per_second']:.0f}", f"{system['model_flops_per_second'] / 1e12:.4g}"]
        row += [f"{100 * system['mfu_of_measured_ceiling']:.1f}", "-" if sheet is None else f"{100 * sheet:.1f}"]
        rows.append([*row, mib(system["peak_bytes"])])
    return table(header.split("|"), rows)


def made(kept: Kept) -> str:
    """Return the lines that state when and by which command a record was made, and the device's ceilings."""
    record = kept.record
    limits = "; ".join(from_json(found).describe() for found in record.get("ceilings", {}).values())
    when = f"{record['date']}, torch {record['torch']} ([record](results/{kept.name}.json))" + f"; {limits}" * bool(
        limits
    )
    return f"{paragraph(when)}\n\n    {record['command']}"


def page(found: Sequence[Kept], pages: Mapping[str, str]) -> str:
    """Return the text of README.md from records; pages: titles of other pages by file name."""
    parts = [
        "# Benchmarks",
        paragraph(
            "`python benchmarks/readme.py` makes this page of the records in `results/`, and the programs beside it"
            " make the records; `python benchmarks/run_all.py` runs all of it but `corpora.py` in at most nine"
            " minutes. Seconds are medians, quartiles beside them. Systems of one table took turns in one run, so"
            " ratios are worth more than milliseconds."
        ),
        paragraph(
            "`python benchmarks/structure.py` measures the source itself: lines, lengths, imports, Python calls of a"
            " training step; `--sizes` prints lines by package beside the newest record's and beside budgets."
        ),
        "## Examining a machine with a GPU",
        EXAMINATION,
        *(part for section in SECTIONS for part in section.parts(found)),
    ]
    if pages:
        parts += ["## Other pages", "\n".join(f"- [{title}](results/{name})" for name, title in sorted(pages.items()))]
    return "\n\n".join(parts) + "\n"


class Section(NamedTuple):
    """A section of the page, with the records of one program.

    words: the paragraph that explains them.  rows: makes the text between a record's title and the lines on how it was
    made.  first: makes one table of all records, in place of titles.
    """

    program: str
    title: str
    words: str
    rows: Callable[[Mapping[str, Any]], str] | None = None
    first: Callable[[Sequence[Kept]], str] | None = None

    def parts(self, found: Sequence[Kept]) -> Iterator[str]:
        runs = [kept for kept in found if kept.record["program"] == self.program]
        if not runs:
            return
        yield f"## {self.title}"
        if self.first is not None:
            yield self.first(runs)
        yield paragraph(self.words)
        for kept in runs:
            if self.rows is not None:
                yield f"### {kept.title}" if self.program != "corpora" else corpora.words_of(kept.record)
                yield self.rows(kept.record)
            yield made(kept)


SECTIONS = (
    Section(
        "compare",
        "A step beside other engines'",
        "Ratios of a step's time are to `ddp`, of one process to `eager`, and of megazero's to the fastest of those"
        " that do the same; what trains something else `differs` and has none. Peak is of a process, on a CPU beyond"
        " what imports take. States are its parameters, gradients, master weights and moments; sent is what it sends in"
        " a step.",
        standings.rows_of,
    ),
    Section(
        "throughput",
        "Throughput",
        "FLOPs are the model's, 6 Psi + 12 L s h a token (Psi: weights of matrix products, L blocks, s tokens, width"
        " h); MFU is their rate beside that of a large matrix product, measured by the same processes in the same run,"
        " and beside the maker's data sheet.",
        first=throughput_table,
    ),
    Section(
        "kernels",
        "Kernels beside their rooflines",
        "The roofline is max(operations / product, bytes / copy), with the fastest product and the copy measured in the"
        " same run; caches are swept before each call.",
        kernels.rows_of,
    ),
    Section(
        "corpora",
        "Preprocessing",
        "From jsonl to token files; the rates beyond start-up leave out what the whole command takes on one short"
        " document. What encodes alone writes nothing, and has its start-up, without `read` also its reading, for"
        " free.",
        corpora.rows_of,
    ),
)


def other_pages(folder: Path) -> dict[str, str]:
    """Return the titles of the Markdown pages that belong to no record, by file name."""
    titles = {}
    for path in sorted(folder.glob("*.md")):
        beside = records.place(path, ".json")
        if not beside.exists() or not is_record(beside):
            titles[path.name] = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return titles


def generated(folder: Path) -> str:
    """Return the text that README.md in `folder` must have, made from the records in its folder `results`."""
    return page(newest(folder / "results"), other_pages(folder / "results"))


def main() -> int:
    (FOLDER / "README.md").write_text(generated(FOLDER), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
