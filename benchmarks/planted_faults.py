"""Plants faults one at a time in a copy of the tree: do the tests of their package, or of both doors, fail?

    python benchmarks/planted_faults.py --records FILE.jsonl [--only WORD] [--minutes 30]

Each row of `fault_table.py` changes one place of one file.  The tests that the row names are run on a copy of the tree
that has the fault, those that need no process group first, up to the first failure of a test that passes without it.

A line is appended to --records for every row as soon as it has been tried, and a row whose fault was seen is not tried
again unless it has changed, so the program may be stopped and started at will.  It ends with status 1 if any fault was
not seen, and with 2 if --minutes were over before all rows were tried.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from fault_table import FAULTS, Fault
from report import HelpFormat, tell

ROOT = Path(__file__).resolve().parents[1]
Record = dict[str, Any]
_FAILED, _NOTHING_COLLECTED = 1, 5  # statuses of pytest


class Outcome(NamedTuple):
    """The outcome of a row: "seen", and by which test, or "not seen"; or "error" or "out of time", and the output."""

    outcome: str
    test: str


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been run; appended to")
    add("--only", default="", help="rows whose file or description has this word")
    add("--minutes", type=float, default=float("inf"), help="begin no row after so long")
    add("--limit", type=float, default=280.0, help="seconds that one run of pytest may take")
    return parser.parse_args(words)


def problems(faults: Sequence[Fault], root: Path = ROOT) -> Iterator[str]:
    """Yield the reasons why rows cannot be planted."""
    for fault in faults:
        path = root / fault.path
        count = path.read_text(encoding="utf-8").count(fault.old) if path.is_file() else 0
        if count != 1:
            yield f"{fault}: the old text is {count} times in {fault.path}, not once"
        if fault.old == fault.new:
            yield f"{fault}: the new text is the old one"
        yield from (f"{fault}: there is no {test}" for test in fault.tests if not (root / test).exists())


def copy_tree(target: Path) -> None:
    """Copy to `target` all files of the tree that git tracks, and the untracked ones that it does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes((ROOT / name).read_bytes())


def run_tests(tree: Path, words: Sequence[str], limit: float) -> tuple[int, str]:
    """Return the status and the output of pytest in a tree; status -1: it took longer than `limit` seconds."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = -1
        output.seek(0)
        return status, output.read()


def first_failure(output: str) -> str:
    """Return the first failed test of pytest's summary, such as `tests/data/test_loader.py::test_name[case]`."""
    found = re.search(r"^FAILED (.+?::\w+(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    return found.group(1) if found else ""


def try_out(tree: Path, fault: Fault, limit: float) -> Outcome:
    """Plant a fault in a tree and run its tests, until one fails that passes without the fault.

    A test that fails without the fault too is left out, and the others are run again.
    """
    leave_out: list[str] = []
    for marked in ("not gloo and not cuda", "gloo"):
        while True:
            with planted(tree, fault):
                words = ["-m", marked, *fault.tests, *(f"--deselect={test}" for test in leave_out)]
                status, output = run_tests(tree, words, limit)
            if status in (0, _NOTHING_COLLECTED):
                break
            if status != _FAILED:
                return Outcome("out of time" if status == -1 else "error", output[-2000:])
            test = first_failure(output)
            status, _ = run_tests(tree, [test], limit)
            if status == 0:
                return Outcome("seen", test)
            leave_out.append(test)
    return Outcome("not seen", f"fails without it too: {', '.join(leave_out)}" if leave_out else "")


@contextmanager
def planted(tree: Path, fault: Fault) -> Iterator[None]:
    """Change the file of the fault within this context, and restore it afterwards."""
    path = tree / fault.path
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def read_records(path: Path) -> list[Record]:
    """Return the newest line of every row, in the order of the table; a row that has changed since has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {_key(record): record for record in map(json.loads, lines)}
    return [known[key] for key in (_key(described(fault)) for fault in FAULTS) if key in known]


def described(fault: Fault) -> Record:
    """Return the row as JSON would give it back."""
    return {**fault._asdict(), "tests": list(fault.tests)}


def _key(record: Record) -> str:
    return json.dumps([record[name] for name in Fault._fields])


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    findings = list(problems(FAULTS))
    if findings:
        raise SystemExit("\n".join(findings))
    wanted = [fault for fault in FAULTS if options.only in str(fault)]
    done = {_key(record) for record in read_records(options.records) if record["outcome"] == "seen"}
    missing = [fault for fault in wanted if _key(described(fault)) not in done]
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted_faults_") as folder:
        copy_tree(Path(folder))
        for number, fault in enumerate(missing, start=1):
            if time.monotonic() - start > 60 * options.minutes:
                return 2
            began = time.monotonic()
            outcome = try_out(Path(folder), fault, options.limit)
            record = {**described(fault), **outcome._asdict(), "seconds": round(time.monotonic() - began, 1)}
            with options.records.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
            tell(f"{number} of {len(missing)}: {fault}: {outcome.outcome} {outcome.test}")
    there = read_records(options.records)
    tell(f"{sum(record['outcome'] == 'seen' for record in there)} of {len(FAULTS)} faults are seen")
    return 1 if any(record["outcome"] != "seen" for record in there) else 0


if __name__ == "__main__":
    sys.exit(main())
