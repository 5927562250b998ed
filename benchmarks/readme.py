"""Makes benchmarks/README.md and its chart from the records in benchmarks/results/.

    python benchmarks/readme.py

Of records of the same program, device, model, precision, number of processes and layout the newest counts.  No figure
on the page is typed by hand; a test compares the page with what this makes of the records.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import corpora
import kernels
import records
from ceilings import from_json
from ratio_chart import Bar, Panel, chart
from report import mib, paragraph, table

FOLDER = Path(__file__).parent
CHART = "step-time-ratios.svg"


class Kept(NamedTuple):
    """A record, and its file's name without .json."""

    name: str
    record: Mapping[str, Any]

    @property
    def title(self) -> str:
        """`8 x 256, fp32, 2 processes, CPU`."""
        record = self.record
        number = f"{record['world_size']} process{'es' * (record['world_size'] > 1)}"
        return f"{model_name(record)}, {record['precision']}, {number}, {record['device']}"


def model_name(record: Mapping[str, Any]) -> str:
    model = record["model"]
    return model if isinstance(model, str) else str(model.get("name", model))


def newest(folder: Path) -> list[Kept]:
    """Of every kind of record in the folder the newest, by program and title; other JSON files are no records."""
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
    """What a newer record must have in common to take this one's place."""
    names = ("program", "device", "model", "precision", "world_size", "layout", "micro_batch_size")
    return json.dumps([record.get(name) for name in names], sort_keys=True)


def compared(record: Mapping[str, Any]) -> str:
    """A row for each system of a compare run."""
    rows = []
    for name, system in record["systems"].items():
        if "refused" in system:
            rows.append([name, system["refused"], *["-"] * 7])
            continue
        low, median, high = (f"{1e3 * seconds:.1f}" for seconds in records.quartiles(system["step_seconds"]))
        ratio, peer = record["ratios"]["to_base"].get(name), record["ratios"]["to_best_peer"].get(name)
        beside_peer = "-" if peer is None or peer["ratio"] is None else f"{peer['ratio']:.2f} {peer['peer']}"
        rows.append(
            [
                name,
                median,
                f"{low} to {high}",
                system.get("verdict", "-") if ratio is None else f"{ratio:.2f}",
                beside_peer,
                f"{system['tokens_per_second']:.0f}",
                mib(system["peak_bytes"]),
                f"{system['state_bytes_per_parameter']:.1f}",
                mib(system["sent_bytes"]),
            ]
        )
    return table(_COMPARED, rows)


_COMPARED = [
    "system",
    "step, ms",
    "quartiles",
    "ratio",
    "to the best peer",
    "tokens/s",
    "peak, MiB",
    "states, B a parameter",
    "sent, MiB",
]


def panel(kept: Kept) -> Panel:
    """The ratios as bars, with the quartiles of each system's own steps."""
    bars = []
    for name, ratio in kept.record["ratios"]["to_base"].items():
        if ratio is not None:
            low, median, high = records.quartiles(kept.record["systems"][name]["step_seconds"])
            bars.append(Bar(name, ratio * low / median, ratio, ratio * high / median))
    return Panel(f"{kept.title}: by {kept.record['ratios']['base']}'s step", bars)


def throughput_table(runs: Sequence[Kept]) -> str:
    """A row for each system of each record."""
    rows = []
    for kept in runs:
        for system in kept.record["systems"].values():
            low, median, high = (1e3 * seconds for seconds in records.quartiles(system["step_seconds"]))
            sheet = system.get("mfu_of_data_sheet")
            rows.append(
                [
                    kept.title,
                    kept.record.get("layout", ""),
                    f"{median:.1f} ({low:.1f} to {high:.1f})",
                    f"{system['tokens_per_second']:.0f}",
                    f"{system['model_flops_per_second'] / 1e12:.4g}",
                    f"{100 * system['mfu_of_measured_ceiling']:.1f}",
                    "-" if sheet is None else f"{100 * sheet:.1f}",
                    mib(system["peak_bytes"]),
                ]
            )
    header = [
        "model",
        "layout",
        "step, ms (quartiles)",
        "tokens/s",
        "TFLOP/s of a process",
        "MFU, measured, %",
        "MFU, data sheet, %",
        "peak, MiB",
    ]
    return table(header, rows)


def made(kept: Kept) -> str:
    """When and how, and what the device does at most."""
    record = kept.record
    limits = "; ".join(from_json(found).describe() for found in record.get("ceilings", {}).values())
    when = f"{record['date']}, torch {record['torch']} ([record](results/{kept.name}.json))" + f"; {limits}" * bool(
        limits
    )
    return f"{paragraph(when)}\n\n    {record['command']}"


def page(found: Sequence[Kept], pages: Mapping[str, str]) -> str:
    """pages: titles of other pages by file name."""
    parts = [
        "# Benchmarks",
        paragraph(
            "`python benchmarks/readme.py` makes this page of the records in `results/`, and the programs beside it"
            " make the records; `python benchmarks/run_all.py` runs all of it but `corpora.py` in at most nine"
            " minutes. Seconds are medians, quartiles beside them. Systems of one table took turns in one run, so"
            " ratios are worth more than milliseconds."
        ),
        *_comparisons([kept for kept in found if kept.record["program"] == "compare"]),
        *_throughputs([kept for kept in found if kept.record["program"] == "throughput"]),
        *_kernels([kept for kept in found if kept.record["program"] == "kernels"]),
        *_corpora([kept for kept in found if kept.record["program"] == "corpora"]),
    ]
    if pages:
        parts += ["## Other pages", "\n".join(f"- [{title}](results/{name})" for name, title in sorted(pages.items()))]
    return "\n\n".join(parts) + "\n"


def _comparisons(runs: Sequence[Kept]) -> Iterator[str]:
    if not runs:
        return
    yield "## A step beside other engines'"
    if any(panel(kept).bars for kept in runs):
        yield f"![Step times by system, as ratios](results/{CHART})"
    yield paragraph(
        "Ratios of a step's time are to `ddp`, of one process to `eager`, and of megazero's to the fastest of those"
        " that do the same; what trains something else `differs` and has none. Peak is of a process, on a CPU beyond"
        " what imports take. States are its parameters, gradients, master weights and moments; sent is what it sends"
        " in a step."
    )
    for kept in runs:
        yield f"### {kept.title}"
        yield compared(kept.record)
        yield made(kept)


def _throughputs(runs: Sequence[Kept]) -> Iterator[str]:
    if not runs:
        return
    yield "## Throughput"
    yield throughput_table(runs)
    yield paragraph(
        "FLOPs are the model's, 6 Psi + 12 L s h a token (Psi: weights of matrix products, L blocks, s tokens, width"
        " h); MFU is their rate beside that of a large matrix product, measured by the same processes in the same run,"
        " and beside the maker's data sheet."
    )
    for kept in runs:
        yield made(kept)


def _kernels(runs: Sequence[Kept]) -> Iterator[str]:
    if not runs:
        return
    yield "## Kernels beside their rooflines"
    yield paragraph(
        "The roofline is max(operations / product, bytes / copy), with the fastest product and the copy measured in the"
        " same run; caches are swept before each call."
    )
    for kept in runs:
        yield f"### {kept.title}"
        yield kernels.rows_of(kept.record)
        yield made(kept)


def _corpora(runs: Sequence[Kept]) -> Iterator[str]:
    if not runs:
        return
    yield "## Preprocessing"
    yield paragraph(
        "From jsonl to token files; the rates beyond start-up leave out what the whole command takes on one short"
        " document. What encodes alone writes nothing, and has its start-up, without `read` also its reading, for free."
    )
    for kept in runs:
        yield corpora.words_of(kept.record)
        yield corpora.rows_of(kept.record)
        yield made(kept)


def other_pages(folder: Path) -> dict[str, str]:
    """Titles of the Markdown pages that belong to no record, by file name."""
    titles = {}
    for path in sorted(folder.glob("*.md")):
        beside = records.place(path, ".json")
        if not beside.exists() or not is_record(beside):
            titles[path.name] = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
    return titles


def generated(folder: Path) -> dict[Path, str]:
    """What is to stand in benchmarks/ at `folder`."""
    results = folder / "results"
    found = newest(results)
    files = {folder / "README.md": page(found, other_pages(results))}
    panels = [panel(kept) for kept in found if kept.record["program"] == "compare"]
    if any(panel.bars for panel in panels):
        files[results / CHART] = chart("Time of a step by system", panels)
    return files


def main() -> int:
    for path, text in generated(FOLDER).items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(FOLDER.parent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
