"""Inspect checkpoints: the content of one, whether it is sound, how two differ, what has become of their run.

    megazero checkpoint inspect runs/demo            the newest checkpoint of a run (or give a step folder)
    megazero checkpoint verify runs/demo             read every byte and compare with the stored hashes
    megazero checkpoint diff runs/a runs/b           tensor by tensor; the layouts may be different ones
    megazero checkpoint journal runs/demo            starts, changed settings, saves, stops and faults of a run

Exit codes: 0 sound, or equal; 1 the two differ; 2 an error, damage included.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megazero.checkpoint.journal import JOURNAL, describe, read_journal
from megazero.checkpoint.runs import PROGRESS_KEY, RunIdentity, name_of, read_run
from megazero.checkpoint.state import TrainState
from megazero.command_line.tools import Flags, Number
from megazero.console import Console
from megazero.errors import CheckpointError, Problem, raise_problems
from megazero.units import format_bytes, format_count

if TYPE_CHECKING:
    from megazero.checkpoint.comparison import ValueDifference
    from megazero.checkpoint.manifest import TensorKey
    from megazero.checkpoint.reader import Checkpoint


def main(words: Sequence[str]) -> int:
    """Run one command, and return the exit code."""
    options = _parser().parse_args(words)
    console = Console()
    if options.command == "journal":
        return _journal(Path(options.path), console)
    # This imports torch; the flags are parsed without it.
    from megazero.checkpoint.reader import open_checkpoint

    if options.command == "diff":
        first, second = (open_checkpoint(path, step=options.step) for path in (options.first, options.second))
        return _diff(first, second, console)
    checkpoint = open_checkpoint(options.path, step=options.step)
    if options.command == "inspect":
        _inspect(checkpoint, console, tensors=options.tensors)
    else:
        _verify(checkpoint, console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Flags(prog="megazero checkpoint", description="Inspect, verify and compare checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="show the content of a checkpoint")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = commands.add_parser("verify", help="read everything and compare with the stored hashes")
    for command in (inspect, verify):
        command.add_argument("path", help="a run's checkpoint folder, or one step folder in it")
    journal = commands.add_parser("journal", help="show what has become of a run")
    journal.add_argument("path", help="a run's checkpoint folder")
    diff = commands.add_parser("diff", help="compare two checkpoints, whatever layout saved them")
    diff.add_argument("first", help="a run's checkpoint folder, or one step folder in it")
    diff.add_argument("second", help="the same")
    for command in (inspect, verify, diff):
        command.add_argument("--step", action=Number, kind="int", help="step of a run (default: the newest)")
    return parser


def _inspect(checkpoint: "Checkpoint", console: Console, *, tensors: bool) -> None:
    from megazero.checkpoint.manifest import dtype_bytes

    manifest = checkpoint.manifest
    stored = sum(file.num_bytes for file in manifest.files)
    console.line(f"{checkpoint.folder}")
    console.line(name_of(RunIdentity.from_json(checkpoint.progress.get(PROGRESS_KEY))))
    console.line(f"step        {checkpoint.step}")
    console.line(f"size        {format_bytes(stored)} in {len(manifest.files)} files, {checkpoint.num_boxes} boxes")
    console.line(f"config      {checkpoint.folder / manifest.config.name}")
    # The history of 8-bit numbers' scales is packed into text of up to millions of characters.
    shown = {key: "..." if len(json.dumps(value)) > 1000 else value for key, value in checkpoint.progress.items()}
    console.line(f"progress    {json.dumps(shown)}")
    console.line(f"parameters  {len(checkpoint.parameters)}")
    for kind in dict.fromkeys(entry.kind for entry in manifest.tensors):
        entries = [entry for entry in manifest.tensors if entry.kind == kind]
        nbytes = sum(math.prod(entry.shape) * dtype_bytes(entry.dtype) for entry in entries)
        count = sum(math.prod(entry.shape) for entry in entries)
        dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
        console.line(f"  {kind:<10} {format_count(count):>9} elements  {format_bytes(nbytes):>10}  {dtypes}")
    if tensors:
        for entry in sorted(manifest.tensors, key=lambda entry: (entry.parameter, entry.kind)):
            console.line(f"{entry.parameter}  {entry.kind}  {entry.dtype}  {list(entry.shape)}")


def _verify(checkpoint: "Checkpoint", console: Console) -> None:
    steps = console.track(checkpoint.verify(), total=1 + len(checkpoint.manifest.files), description="verifying")
    problems = [problem for found in steps for problem in found]
    try:
        TrainState.from_json(checkpoint.progress, step=checkpoint.step)
    except CheckpointError as error:
        problems += error.problems
    raise_problems(CheckpointError, problems)
    stored = sum(file.num_bytes for file in checkpoint.manifest.files)
    console.line(f"{checkpoint.folder}: sound; {format_bytes(stored)} in {len(checkpoint.manifest.files)} files")


def _journal(root: Path, console: Console) -> int:
    entries = [describe(entry) for entry in read_journal(root)]
    if not entries:
        raise CheckpointError(Problem(str(root), f"this folder has no {JOURNAL}", "the folder that a run saves to"))
    for line in (name_of(read_run(root)), *entries):
        console.line(line)
    return 0


def _diff(first: "Checkpoint", second: "Checkpoint", console: Console) -> int:
    from megazero.checkpoint.comparison import NONE, box_differences, metadata_differences, schema_differences

    lines = [*metadata_differences(first, second), *schema_differences(first, second)]
    total = first.num_boxes
    found: dict[TensorKey, ValueDifference] = {}
    for key, difference in console.track(box_differences(first, second), total=total, description="comparing"):
        found[key] = found.get(key, NONE).joined(difference)
    for (parameter, kind), (count, largest) in found.items():
        if count:
            lines.append(f"{parameter}, {kind}: {count} elements differ, max |a - b| = {largest:.9g}")
    for line in lines or [f"equal: {len(first.manifest.tensors)} tensors, progress and configuration"]:
        console.line(line)
    return 1 if lines else 0
