"""Measures the structure of a source tree, beside that of another tree or of an earlier record.

    python benchmarks/structure.py [--tree DIR] [--against DIR|RECORD] [--output NAME]     everything, 2 to 5 minutes
    python benchmarks/structure.py --sizes [--against DIR|RECORD]                          lines only, a second

Measured are files and lines by package, lengths of functions and files, imports, repeated runs of lines; files and
Python calls of a training step (`step_calls.py`); three walks through the code (`walks.py`); the time of --help.  The
times of the tests are those given as --fast-seconds and --whole-seconds.  NAME.json goes to benchmarks/results/.

--sizes prints the lines of every package and the longest functions and files beside the newest record's.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import source_measures as source
from report import HelpFormat, table, tell, today
from walks import measure_walks

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
ELSEWHERE = ("tools", "benchmarks", "tests")
LONGEST = 10
HELP_RUNS = 5
NUM_LAYERS = (2, 12)
# Two micro-batches a step, so that work for the last one only differs from work for each.
_STEP = (
    "--mock-data --vocab-size 512 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2"
    " --global-batch-size 4 --lr 1e-3 --train-iters 4 --eval-iters 0 --zero-stage 2 --device cpu"
)


def sizes(tree: Path) -> dict[str, Any]:
    """Return what `--sizes` compares, a part of every record: lines by package, the longest functions and files."""
    files = source.read_files(tree)
    packages = source.by_package(files)
    return {
        "package_lines": {name: sum(len(file.lines) for file in inside) for name, inside in packages.items()},
        "longest_functions": source.longest_functions(files, LONGEST),
        "longest_files": source.longest_files(files, LONGEST),
    }


def shape(tree: Path) -> dict[str, Any]:
    """Measure all that can be found by reading a tree, without running it."""
    files = source.read_files(tree)
    graph = source.imports(files)
    return {
        **sizes(tree),
        "whole": source.package_row(files),
        "packages": {name: source.package_row(inside) for name, inside in source.by_package(files).items()},
        "elsewhere": {name: source.package_row(source.read_files(tree, name)) for name in ELSEWHERE},
        "fan_in": source.fan_in(graph).most_common(LONGEST),
        "fan_out": source.fan_out(graph).most_common(LONGEST),
        "repeated_runs": source.repeated_runs(files),
        "walks": measure_walks(tree),
    }


def step_calls(tree: Path, num_layers: int) -> dict[str, Any]:
    """Count files and Python calls of one training step of the tree's own pretrain_gpt.py, on one process."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "calls.json")
        words = [str(FOLDER / "step_calls.py"), str(found), *_STEP.split(), "--num-layers", str(num_layers)]
        run(tree, words)
        return dict(json.loads(found.read_text(encoding="utf-8")))


def help_seconds(tree: Path) -> dict[str, float]:
    """Time `pretrain_gpt.py --help`: the median wall seconds, and those of CPU, which other work disturbs less."""
    wall, cpu = [], []
    for _ in range(HELP_RUNS):
        began, used = time.perf_counter(), os.times()
        run(tree, ["pretrain_gpt.py", "--help"])
        ended = os.times()
        wall.append(time.perf_counter() - began)
        cpu.append(ended.children_user + ended.children_system - used.children_user - used.children_system)
    return {"help_seconds": round(statistics.median(wall), 2), "help_cpu_seconds": round(statistics.median(cpu), 2)}


def run(tree: Path, words: Sequence[str]) -> None:
    """Run a Python program that imports the tree's code; raise RuntimeError with the end of its output if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)} in {tree} failed:\n{(done.stdout + done.stderr)[-2000:]}")


def measure(tree: Path) -> dict[str, Any]:
    """Return the record of a tree, without the times of its tests."""
    tell(f"{tree}: reading")
    found: dict[str, Any] = {"measures": "structure", "date": today(), "commit": commit(tree), **shape(tree)}
    found["machine"] = f"{os.cpu_count()} cores, Python {sys.version.split()[0]}"
    found["steps"] = {}
    for number in NUM_LAYERS:
        tell(f"{tree}: a step with {number} layers")
        found["steps"][f"{number} layers"] = step_calls(tree, number)
    tell(f"{tree}: --help")
    return {**found, **help_seconds(tree)}


def commit(tree: Path) -> str:
    """Return the abbreviated commit that is checked out, with "+" where files differ from it; "" outside of git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        words = ["git", "-C", str(tree), "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return ""


def newest_record(folder: Path = RESULTS) -> Path | None:
    """Return the newest record of this program in a folder, or None if there is none."""
    records = [path for path in folder.glob("*.json") if is_record(path)]
    return max(
        records, key=lambda path: (json.loads(path.read_text(encoding="utf-8"))["date"], path.name), default=None
    )


def is_record(path: Path) -> bool:
    """Return True if the file is a record that this program has written: a JSON object that `measures` "structure"."""
    with contextlib.suppress(ValueError):  # for a file that is neither text nor JSON
        content = json.loads(path.read_text(encoding="utf-8"))
        return isinstance(content, dict) and content.get("measures") == "structure"
    return False


def rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row for each figure: its name, before, after; "-" where one side does not have it."""
    flat_before, flat_after = dict(figures(before)), dict(figures(after))
    for name in [*flat_after, *(name for name in flat_before if name not in flat_after)]:
        yield [name, flat_before.get(name, "-"), flat_after.get(name, "-")]


def figures(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the figures of a record by name, in the order of the table; none for an empty record."""
    if not record:
        return
    yield "commit", record["commit"] or "-"
    for name, row in {"megazero": record["whole"], **record["packages"], **record["elsewhere"]}.items():
        kinds = " / ".join(f"{row[kind]:,}" for kind in ("code", "comments", "docstrings", "blank"))
        yield (
            f"{name}: files, lines (code / comments / docstrings / blank)",
            f"{row['files']}, {row['lines']:,} ({kinds})",
        )
        yield f"{name}: function length, median / p90 / max", spread(row["function_lines"])
        yield f"{name}: file length, median / p90 / max", spread(row["file_lines"])
    for what in ("longest_functions", "longest_files", "fan_in", "fan_out"):
        yield what.replace("_", " "), ", ".join(f"{name} {number}" for name, number in record[what][:3])
    yield f"runs of {source.REPEATED_LINES} equal lines", str(len(record["repeated_runs"]))
    for name, step in record.get("steps", {}).items():
        yield (
            f"a training step, {name}: files, functions, calls, moves, depth",
            ", ".join(f"{step[key]:,}" for key in ("files", "functions", "calls", "moves", "depth")),
        )
    for name, walk in record["walks"].items():
        missing = f", {len(walk['missing'])} stations missing" if walk["missing"] else ""
        yield f"following {name}: files, returns", f"{walk['files']}, {walk['returns']}{missing}"
    for name, what in (
        ("help", "--help"),
        ("help_cpu", "--help, CPU"),
        ("fast", "test.sh --fast"),
        ("whole", "the whole suite"),
    ):
        if record.get(f"{name}_seconds") is not None:
            yield f"{what}, seconds", f"{record[f'{name}_seconds']:g}"


def spread(lengths: Mapping[str, int]) -> str:
    return f"{lengths['median']} / {lengths['p90']} / {lengths['max']}"


def size_report(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the parts of what `--sizes` prints."""
    lines, earlier = now["package_lines"], before.get("package_lines", {})
    packages = [_size_row(name, lines.get(name, 0), earlier.get(name)) for name in sorted({*lines, *earlier})]
    whole = _size_row("all", sum(lines.values()), sum(earlier.values()) or None)
    return [
        table(["package", "lines", f"at {before.get('commit') or '-'}", "change"], [*packages, whole]),
        table(["longest functions", "lines", "before"], _beside(now, before, "longest_functions")),
        table(["longest files", "lines", "before"], _beside(now, before, "longest_files")),
    ]


def _size_row(name: str, lines: int, before: int | None) -> list[str]:
    change = "-" if before is None else f"{lines - before:+,}"
    return [name, f"{lines:,}" if lines else "-", f"{before:,}" if before else "-", change]


def _beside(now: Mapping[str, Any], before: Mapping[str, Any], what: str) -> Iterable[list[str]]:
    """Return a row for each of the longest now, with its earlier length if it was among the longest then."""
    earlier = dict(before.get(what, ()))
    return [[name, str(lines), str(earlier.get(name, "-"))] for name, lines in now[what]]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--tree", type=Path, default=FOLDER.parent, help="the checkout to measure")
    parser.add_argument("--against", type=Path, help="a checkout or a record; with --sizes the newest record")
    parser.add_argument("--sizes", action="store_true", help="only lines, beside the record's")
    parser.add_argument("--output", help="name of the record in benchmarks/results/, without .json")
    parser.add_argument("--fast-seconds", type=float, help="what scripts/test.sh --fast took")
    parser.add_argument("--whole-seconds", type=float, help="what scripts/test.sh took")
    options = parser.parse_args(words)
    for path in (options.tree, options.against):
        if path is not None and not ((path / "megazero").is_dir() or (path != options.tree and path.is_file())):
            parser.error(f"{path}: neither a checkout (a folder with megazero/) nor a record")
        if path is not None and path.is_file() and not is_record(path):
            parser.error(f"{path}: no record of this program")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    tree, against = options.tree.resolve(), options.against
    if options.sizes:
        against = against or newest_record()
        print("\n\n".join(size_report(sizes(tree), _earlier(against, sizes))))
        return 0
    before = _earlier(against, measure)
    after = {**measure(tree), "fast_seconds": options.fast_seconds, "whole_seconds": options.whole_seconds}
    if options.output:
        path = RESULTS / f"{options.output}.json"
        path.write_text(json.dumps(after, indent=1) + "\n", encoding="utf-8")
        tell(str(path))
    print(table(["", "before", "after"], rows(before, after)))
    missing = [station for walk in after["walks"].values() for station in walk["missing"]]
    if missing:
        tell(f"stations that the tree does not have, see benchmarks/walks.py: {', '.join(missing)}")
    return 1 if missing else 0


def _earlier(against: Path | None, measured: Any) -> dict[str, Any]:
    """Return the record to compare with, read from a file or measured from another tree; empty without either."""
    if against is None:
        return {}
    if against.is_file():
        return dict(json.loads(against.read_text(encoding="utf-8")))
    return {"commit": commit(against), **measured(against.resolve())}


if __name__ == "__main__":
    sys.exit(main())
