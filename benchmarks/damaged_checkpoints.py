"""Resumes runs whose newest checkpoint is damaged, hostile or misplaced: what becomes of each?

    python benchmarks/damaged_checkpoints.py --records FILE.jsonl [--output FILE.md] [--minutes 30]

A tiny run saves at steps 2 and 4 and is left.  A trial copies its folder, damages it in one way - one random bit of the
checkpoint of step 4, or a kind of `damage_table.py` - and starts the run again in a process of its own, which may take
10 seconds and 4 GiB more memory than it has.  Then the run must have come to its last step with the weights, moments
and counters of a run that was never left, or have ended with a message; every checkpoint that is left must be sound.

Outcomes: "next taken" (the damaged one is named and set aside), "newest taken", "refused"; any other is a failure.  A
line is appended to --records for each trial, and none is tried twice, so the program may be stopped and started at
will.  It ends with status 1 if a trial failed, and with 2 if --minutes were over before all were tried.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from damage_table import HARMLESS, KINDS, REFUSED, flip_bit
from report import HelpFormat, heading, table, tell
from support.small_runs import train_run

from megazero.checkpoint.folders import list_steps
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.state import TrainState
from megazero.errors import UserError

Record = dict[str, Any]
LIMIT_SECONDS = 10.0
_MEMORY = 4 << 30
SETTINGS: Mapping[str, Any] = {"train_iters": 6, "save_interval": 2, "hidden_dropout": 0.1}
EXPECTED = "next taken"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been tried; appended to")
    add("--flips", type=int, default=200, help="trials with one random bit")
    add("--seed", type=int, default=1, help="of the draw of bits")
    add("--only", default="", help="kinds whose name has this word")
    add("--minutes", type=float, default=float("inf"), help="begin no trial after so long")
    add("--output", type=Path, help="file for the summary, which is printed in any case")
    return parser.parse_args(words)


def state_of(root: Path) -> dict[str, Any]:
    """Return the weights, moments and counters of the newest checkpoint, as values that can be compared."""
    checkpoint = open_checkpoint(root)
    tensors = {
        f"{kind} of {name}": checkpoint.read_full(name, kind).flatten().tolist()
        for name, parameter in checkpoint.parameters.items()
        for kind in parameter.kinds
    }
    progress = {name: value for name, value in checkpoint.progress.items() if name != "run"}  # two runs are compared
    return {"progress": progress, **tensors}


def verdict(root: Path) -> str:
    """Return the verdict of `tools/checkpoint.py verify` on the newest checkpoint: sound, or damaged."""
    try:
        checkpoint = open_checkpoint(root)
        TrainState.from_json(checkpoint.progress, step=checkpoint.step)
        return "damaged" if any(checkpoint.verify()) else "sound"
    except UserError:
        return "damaged"


def resume(root: Path, settings: Mapping[str, Any], results: Any) -> None:
    """Start the run in this process, and send its end to `results`."""
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            verified = verdict(root)
            told = train_run(0, 1, {**SETTINGS, "save": str(root), **settings})
        results.send({"verified": verified, "ended": "trained", "text": told.text})
    except UserError as error:
        results.send({"verified": verified, "ended": "refused", "text": error.render()})
    except BaseException:
        results.send({"ended": "traceback", "text": traceback.format_exc()[-2000:]})


def in_child(root: Path, **settings: Any) -> Record:
    """Start the run in a process of its own; one that takes longer than LIMIT_SECONDS is killed.

    This process trains nothing itself, since threads of torch would not be there in a process that is forked from it.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    start = time.perf_counter()
    child = fork.Process(target=resume, args=(root, settings, sender))
    child.start()
    sender.close()
    found: Record = {"ended": "hang", "text": ""}
    with contextlib.suppress(EOFError):
        if receiver.poll(LIMIT_SECONDS):
            found = receiver.recv()
    child.kill() if found["ended"] == "hang" else child.join(LIMIT_SECONDS)
    child.join()
    return {**found, "seconds": round(time.perf_counter() - start, 2)}


def outcome(root: Path, found: Record, expected_state: Mapping[str, Any]) -> str:
    """Return the outcome of a trial; a failure begins with an exclamation mark."""
    if found["ended"] != "trained":
        return str(found["ended"]) if found["ended"] == "refused" else f"! {found['ended']}"
    if state_of(root) != expected_state:
        return "! another state"
    unsound = [step.path.name for step in list_steps(root) if any(open_checkpoint(step.path).verify())]
    if unsound:
        return f"! {', '.join(unsound)} is damaged"
    return "next taken" if "resumed at iteration 2" in found["text"] else "newest taken"


def passes(record: Record) -> bool:
    """Return True if the outcome is the one that this kind must have, and verify agrees with it."""
    kind = record["kind"]
    if kind.startswith("bit "):
        return bool(record["outcome"] == EXPECTED and record["verified"] == "damaged")
    newest_is_sound = kind in HARMLESS or kind.startswith("`latest`")
    wanted = "newest taken" if newest_is_sound else "refused" if kind in REFUSED else EXPECTED
    return bool(record["outcome"] == wanted and (record.get("verified") == "sound") == (kind in HARMLESS))


def first_line(text: str) -> str:
    """Return what a run says of the damage: its first warning, or its first problem, without folders."""
    lines = [line.strip() for line in text.splitlines()] or [""]
    warnings = [line.removeprefix("WARNING: ") for line in lines if line.startswith("WARNING: ")]
    problem = " ".join(lines[:3]) if " error" in lines[0] else ""
    return (warnings or [problem])[0][:400]


def trials(options: argparse.Namespace) -> Iterator[str]:
    """Yield the names of all trials: bits by number, then kinds."""
    if not options.only:
        yield from (f"bit {number}" for number in range(options.flips))
    yield from (kind for kind in KINDS if options.only in kind)


def read_records(path: Path) -> dict[str, Record]:
    """Return the records by trial; a line that was cut off in writing is skipped."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            found[record["kind"]] = record
    return found


def attempt(kind: str, template: Path, expected_state: Mapping[str, Any], seed: int) -> Record:
    """Damage a copy of the template in one way, resume the run, and return the record of what became of it."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        shutil.copytree(template, root)
        if kind.startswith("bit "):
            place = flip_bit(root, random.Random(f"{seed} {kind}"))
        else:
            place = ""
            KINDS[kind](root)
        found = in_child(root, load=str(root))
        text = found.pop("text")
        record = {
            "kind": kind,
            "place": place,
            **found,
            "outcome": outcome(root, found | {"text": text}, expected_state),
        }
        said = text if record["outcome"].startswith("! traceback") else first_line(text)
        return {**record, "said": said.replace(f"{root}/", "").replace(f"{folder}/", "")}


def run_missing(options: argparse.Namespace) -> bool:
    """Try what has no record; return False if the time was over before the last one."""
    known, start = read_records(options.records), time.monotonic()
    missing = [kind for kind in trials(options) if kind not in known]
    if not missing:
        return True
    with tempfile.TemporaryDirectory() as folder:
        stayed, left = Path(folder) / "stayed", Path(folder) / "left"
        in_child(stayed)
        in_child(left, exit_interval=4)
        expected_state = state_of(stayed)
        for number, kind in enumerate(missing, start=1):
            if time.monotonic() - start > 60 * options.minutes:
                return False
            record = attempt(kind, left, expected_state, options.seed)
            with options.records.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(record) + "\n")
            tell(f"{number} of {len(missing)}: {kind}: {record['outcome']}, {record['seconds']:.1f} s")
    return True


def page(records: Sequence[Record]) -> str:
    """Return the summary as Markdown."""
    flips = [record for record in records if record["kind"].startswith("bit ")]
    kinds = [record for record in records if record not in flips]
    parts = [
        heading("Runs whose newest checkpoint is damaged, hostile or misplaced", "cpu", "fp64"),
        "A run saves at steps 2 and 4, is left, damaged and started again; 'next taken' means that it named the damage,"
        "\nwent on from step 2 and ended with the weights, moments and counters of a run that was never left.",
    ]
    if flips:
        counts = Counter((record["outcome"], record["place"].partition(",")[0]) for record in flips)
        rows = [(place, what, number) for (what, place), number in sorted(counts.items())]
        slowest = max(record["seconds"] for record in flips)
        parts += [
            f"## {len(flips)} random bits",
            table(("file", "outcome", "trials"), rows),
            f"The slowest took {slowest:.1f} s, damage, verification and two or more training steps included.",
        ]
    if kinds:
        cells = [
            (each["kind"], each["outcome"], f"{each['seconds']:.1f}", each["said"].replace("|", "\\|"))
            for each in kinds
        ]
        parts += [f"## {len(kinds)} kinds", table(("kind", "outcome", "seconds", "what the run says"), cells)]
    failed = [record["kind"] for record in records if not passes(record)]
    parts.append(f"Failed: {', '.join(failed)}" if failed else "None failed.")
    return "\n\n".join(parts) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    torch.set_num_threads(1)
    complete = run_missing(options)
    known = read_records(options.records)
    records = [known[kind] for kind in trials(options) if kind in known]
    text = page(records)
    print(text)
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    if not all(map(passes, records)):
        return 1
    return 0 if complete else 2


if __name__ == "__main__":
    sys.exit(main())
