"""Trains a random sample of all legal layouts, each beside one process: do losses, norms and weights agree?

    python benchmarks/layout_matrix.py --records FILE.jsonl [--count 200] [--seed 1] [--minutes 30] [--output FILE.md]
        [--families gpt2 llama3 bloom]

Layouts are drawn from all that the project's rules allow up to --most-processes: tensor x pipeline x data parallel,
schedules and chunks, ZeRO stages, micro-batches, split sequences, recomputation, partitioned checkpoints, windows (the
dimensions of tests/support/layouts.py; the draw is a function of --seed), and families of models take turns
(tests/support/families.py), each with the next layout drawn that is legal for it.  Each trains --steps steps of a small
model in float64 on real text, on processes that the program starts itself, and is compared with the plain
single-process reference of the tests: losses and gradient norms of every rank and step, every final weight by name.

A line is appended to --records for every layout as soon as it has run, and a layout with a line is not run again (but
for those that failed to run), so the program may be stopped and started at will.  It ends with status 1 if any layout
failed or deviates by more than --bound, and with 2 if --minutes were over before all were run.
"""

import argparse
import datetime
import functools
import itertools
import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from report import HelpFormat, command, paragraph, publish, table, tell

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.families import FAMILIES
from support.layouts import DIMENSIONS, GLOBAL_BATCH, MOST_PROCESSES, Layout, is_legal, legal_layouts
from support.processes import RankFailure, close_pools
from support.reference import History
from support.training import deviation, reference_history, train_cell, write_text_corpus

Record = dict[str, Any]
FIGURES = ("losses", "grad_norms", "weights")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been run; appended to")
    add("--count", type=int, default=200, help="layouts in the sample")
    add("--seed", type=int, default=1, help="of the draw")
    add("--families", nargs="+", choices=list(FAMILIES), default=["gpt2"], help="models that take turns")
    add("--most-processes", type=int, default=MOST_PROCESSES, help="processes of a layout")
    add("--steps", type=int, default=10, help="training steps of each")
    add("--bound", type=float, default=1e-9, help="largest relative deviation that passes")
    add("--minutes", type=float, default=float("inf"), help="begin no layout after so long")
    add("--output", type=Path, help="file for the summary, which is printed in any case")
    return parser.parse_args(words)


@dataclass(frozen=True)
class Case:
    """A family of models in a layout; a GPT-2's is named by its layout alone."""

    layout: Layout
    family: str

    def __str__(self) -> str:
        return str(self.layout) if self.family == "gpt2" else f"{self.family} {self.layout}"


def sample(count: int, seed: int, most_processes: int, families: Sequence[str] = ("gpt2",)) -> list[Case]:
    """Draw `count` of all legal layouts (all of them if there are fewer), in the order of the draw."""
    drawn = list(legal_layouts(most_processes=most_processes))
    random.Random(seed).shuffle(drawn)
    cases: list[Case] = []
    turns = itertools.cycle(families)
    family = next(turns)
    for layout in drawn:
        if len(cases) < count and is_legal(layout, family):
            cases.append(Case(layout, family))
            family = next(turns)
    return cases


def read_records(path: Path, steps: int) -> dict[str, Record]:
    """Return the records of runs with so many steps, by layout; a line that was cut off in writing is skipped."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if record["steps"] == steps:
            found[record["layout"]] = record
    return found


def append(path: Path, record: Record) -> None:
    """Append a line to the file, a new one even if the last line was cut off."""
    is_cut_off = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write("\n" * is_cut_off + json.dumps(record) + "\n")


def run(case: Case, steps: int, prefix: str, reference: History) -> Record:
    """Train one case and return the record of its comparison with the reference."""
    start = time.perf_counter()
    record: Record = {"layout": str(case), "family": case.family, "steps": steps, "choices": asdict(case.layout)}
    cell = case.layout.cell(steps=steps).with_settings(FAMILIES[case.family])
    try:
        found: Record = asdict(deviation(train_cell(cell, prefix), reference))
    except (RankFailure, AssertionError) as error:
        text = re.sub(r"/[^\s\"]*/", "", str(error))  # files by name, without folders
        found = {"error": text if len(text) < 6000 else f"{text[:3000]}\n...\n{text[-3000:]}"}
    return {**record, **found, "seconds": round(time.perf_counter() - start, 2)}


def run_missing(cases: Iterable[Case], options: argparse.Namespace) -> None:
    """Run the cases that have no record or failed, in this order, as long as there is time."""
    known = read_records(options.records, options.steps)
    missing = [case for case in cases if "error" in known.get(str(case), {"error": "not run"})]
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_text_corpus(Path(folder))

        @functools.cache
        def alone(family: str, num_layers: int) -> History:
            sizes = {"num_layers": num_layers, "global_batch_size": GLOBAL_BATCH}
            return reference_history(prefix, options.steps, **sizes, **FAMILIES[family])

        for number, case in enumerate(missing, start=1):
            if time.monotonic() - start > 60 * options.minutes:
                return
            record = run(case, options.steps, prefix, alone(case.family, case.layout.num_layers))
            append(options.records, record)
            tell(f"{number} of {len(missing)}: {case}: {verdict(record)}, {record['seconds']:.1f} s")


def verdict(record: Record) -> str:
    """Return the largest deviation, such as `2.1e-15`, or `failed`."""
    return "failed" if "error" in record else f"{worst(record):.1e}"


def worst(record: Record) -> float:
    """Return the largest deviation, which is infinite where the run failed or a deviation is not a number."""
    figures = [float("nan") if "error" in record else record[name] for name in FIGURES]
    return max(float("inf") if math.isnan(figure) else figure for figure in figures)


def worst_of(records: Iterable[Record], name: str) -> str:
    figures = [record[name] for record in records if name in record]
    return f"{max(figures):.1e}" if figures else "-"


def by_choice(records: Sequence[Record]) -> str:
    """Return a table with a row for every choice in every dimension."""
    rows = []
    for dimension, values in DIMENSIONS.items():
        for value in values:
            of_it = [record for record in records if record["choices"][dimension] == value]
            rows.append([dimension, _word(value), len(of_it), *(worst_of(of_it, name) for name in FIGURES)])
    return table(["dimension", "choice", "layouts", "losses", "norms", "weights"], rows)


def by_family(records: Sequence[Record]) -> str:
    """Return a table with a row for every family."""
    rows = []
    for family in FAMILIES:
        of_it = [record for record in records if record.get("family", "gpt2") == family]
        if of_it:
            rows.append([family, len(of_it), *(worst_of(of_it, name) for name in FIGURES)])
    return table(["family", "layouts", "losses", "norms", "weights"], rows)


def by_processes(records: Sequence[Record]) -> str:
    """Return a table with a row for every number of processes."""
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(Layout(**record["choices"]).world_size, []).append(record)
    rows = [
        [size, len(of_it), *(worst_of(of_it, name) for name in FIGURES), f"{sum(r['seconds'] for r in of_it):.0f}"]
        for size, of_it in sorted(groups.items())
    ]
    return table(["processes", "layouts", "losses", "norms", "weights", "seconds"], rows)


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def page(records: Mapping[str, Record], cases: Sequence[Case], options: argparse.Namespace) -> list[str]:
    """Return the parts of the summary."""
    there = [records[str(case)] for case in cases if str(case) in records]
    off = [record for record in there if not worst(record) < options.bound]
    today, cores = datetime.date.today().isoformat(), os.cpu_count()
    parts = [
        f"# {len(there)} of {len(cases)} drawn layouts beside one process",
        f"{today}; CPU, {cores} cores, one thread a process, torch {torch.__version__}, float64.",
        f"`{command(sys.argv)}`",
        paragraph(
            f"Every layout trains {options.steps} steps of a small model on real text, global batch {GLOBAL_BATCH}, no"
            " dropout, clipping active. Figures are the largest relative deviations from the plain"
            f" single-process reference; {len(off)} of {len(there)} are not below {options.bound:g}."
        ),
        by_family(there),
        by_processes(there),
        by_choice(there),
    ]
    if off:
        rows = [[record["layout"], verdict(record), record.get("weight", "-")] for record in off]
        parts += [
            paragraph("Not below the bound:"),
            table(["layout", "deviation", "weight that is farthest off"], rows),
        ]
    return parts


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    cases = sample(options.count, options.seed, options.most_processes, options.families)
    run_missing(cases, options)
    close_pools()
    records = read_records(options.records, options.steps)
    publish(page(records, cases, options), options.output)
    there = [records[str(case)] for case in cases if str(case) in records]
    if any(not worst(record) < options.bound for record in there):
        return 1
    return 0 if len(there) == len(cases) else 2


if __name__ == "__main__":
    sys.exit(main())
