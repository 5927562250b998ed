"""Saves and opens checkpoints of thousands of ranks without their data, and states seconds, memory and files.

Every rank's boxes are those of a model of 10^12 parameters (128 layers x 25600), tp 8, ZeRO stage 3, a unit of a layer
cut over the data-parallel ranks, three kinds of state in fp32.  Its part, the merging, the indices and the manifest are
real; data files are sparse, of the right size, and hashes are invented.  Ranks take turns in a few processes, so what
ranks do at the same time in a job adds up here; figures of one merge, and of opening as one rank, are as in a job.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from report import HelpFormat, add_output, heading, new_record, paragraph, publish, table, tell

import megazero.checkpoint.writer as writer
from megazero.checkpoint.folders import MANIFEST
from megazero.checkpoint.manifest import BOX_BYTES, BoxEntry, FileEntry, TensorEntry
from megazero.checkpoint.merging import IndexPlan, Written, merge, part_path, plan_indices, write_part
from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.runs import body_hash
from megazero.checkpoint.slices import fragment_pieces
from megazero.checkpoint.writer import Draft, Saving
from megazero.parallel.param_spec import ParamSpec, StateFragment, StateKind

HIDDEN, LAYERS, TP = 25600, 128, 8
KINDS: tuple[StateKind, ...] = ("weight", "exp_avg", "exp_avg_sq")
HEADER_BYTES = 100_000
# Name, full shape, and the dim that tensor parallelism cuts.
LAYER = (
    ("norm1.weight", (HIDDEN,), None),
    ("qkv.weight", (3 * HIDDEN, HIDDEN), 0),
    ("proj.weight", (HIDDEN, HIDDEN), 1),
    ("norm2.weight", (HIDDEN,), None),
    ("up.weight", (4 * HIDDEN, HIDDEN), 0),
    ("down.weight", (HIDDEN, 4 * HIDDEN), 1),
)


def unit(layer: int, tp_rank: int) -> Iterator[ParamSpec]:
    """Yield the parameters of a layer on a tensor-parallel rank; those that are not cut are saved by the first."""
    for name, shape, dim in LAYER:
        local = tuple(length // TP if axis == dim else length for axis, length in enumerate(shape))
        offset = tuple(length // TP * tp_rank if axis == dim else 0 for axis, length in enumerate(shape))
        yield ParamSpec(f"layers.{layer}.{name}", shape, local, offset, sharded_axes=() if dim is None else ("tp",))


def ranges(rank: int, world_size: int) -> Iterator[tuple[ParamSpec, int, int]]:
    """Yield the parameters that a rank has a part of, and the range of the flat local tensor that is its part."""
    dp = world_size // TP
    tp_rank, dp_rank = divmod(rank, dp)
    for layer in range(LAYERS):
        specs = list(unit(layer, tp_rank))
        share = -(-sum(spec.numel for spec in specs) // dp)
        position = 0
        for spec in specs:
            start = max(0, share * dp_rank - position)
            stop = min(spec.numel, share * (dp_rank + 1) - position)
            if start < stop and (spec.sharded_axes or tp_rank == 0):
                yield spec, start, stop
            position += spec.numel


def written(saving: Saving, rank: int) -> Written:
    """Return what a rank would have written, with invented hashes."""
    boxes, tensors, position = [], [], HEADER_BYTES
    for kind in KINDS:
        for spec, start, stop in ranges(rank, saving.world_size):
            tensors.append(TensorEntry(spec.name, kind, tuple(spec.full_shape), "F32"))
            for piece in fragment_pieces(spec, start, stop, BOX_BYTES // 4):
                end = position + 4 * piece.box.numel
                digest = hashlib.sha256(f"{rank} {position}".encode()).hexdigest()
                boxes.append(BoxEntry(spec.name, kind, piece.box.offset, piece.box.lengths, position, end, digest))
                position = end
    name = saving.data_name(rank)
    file = FileEntry(name, position, HEADER_BYTES, hashlib.sha256(name.encode()).hexdigest())
    return Written(file, tuple(boxes), tuple(tensors))


def report_of(saving: Saving, rank: int) -> dict[str, Any]:
    """Make a rank's sparse data file, and return its report."""
    found = written(saving, rank)
    path = Path(saving.folder) / found.file.name
    path.touch()
    os.truncate(path, found.file.num_bytes)
    return found.report(rank, saving.world_size)


def seconds_of_part(saving: Saving, plan: IndexPlan, rank: int) -> float:
    """Write a rank's part; return the seconds of that alone."""
    found = written(saving, rank)
    began = time.perf_counter()
    write_part(Path(saving.folder), saving.save_id, found, plan)
    return time.perf_counter() - began


def figures_of_merge(saving: Saving, plan: IndexPlan, number: int) -> tuple[float, int]:
    """Merge an index; return seconds and the peak of this process's memory so far."""
    began = time.perf_counter()
    merge(Path(saving.folder), saving.save_id, plan, number)
    return time.perf_counter() - began, peak()


def peak() -> int:
    """Return the peak of this process's memory, in bytes; that of getrusage may be the peak of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def saved(root: Path, world_size: int, processes: int) -> dict[str, Any]:
    """Save a checkpoint of that many ranks under `root`; return the figures."""
    draft = Draft(root, 1, {}, "")
    context = multiprocessing.get_context("spawn")
    with ExitStack() as held:
        saving = writer.prepare(draft, held, world_size)
        with ProcessPoolExecutor(processes, context) as pool:
            reports = list(pool.map(partial(report_of, saving), range(world_size), chunksize=16))
            began = time.perf_counter()
            plan = plan_indices(reports)
            planned = time.perf_counter() - began
            parts = list(pool.map(partial(seconds_of_part, saving, plan), range(world_size), chunksize=16))
        sizes = [part_path(Path(saving.folder) / file.name).stat().st_size for file in plan.files]
        with ProcessPoolExecutor(processes, context) as pool:
            began = time.perf_counter()
            merged = list(pool.map(partial(figures_of_merge, saving, plan), range(plan.num_indices)))
            together = time.perf_counter() - began
        for file in plan.files:
            part_path(Path(saving.folder) / file.name).unlink()
        began = time.perf_counter()
        writer.publish(saving, draft, plan)
        published = time.perf_counter() - began
    folders = [len(names) + len(files) for _, names, files in os.walk(root / "step_0000001")]
    return {
        "boxes": sum(report["boxes"] for report in reports),
        "exchanged_bytes": len(json.dumps(reports[0])),
        "plan_seconds": planned,
        "part_seconds": max(parts),
        "part_bytes": max(sizes),
        "indices": plan.num_indices,
        "merge_seconds": max(seconds for seconds, _ in merged),
        "all_merges_seconds": together,
        "merge_peak_bytes": max(peak_bytes for _, peak_bytes in merged),
        "publish_seconds": published,
        "most_in_a_folder": max(folders),
    }


def opened(folder: Path, rank: int, world_size: int, wanted: str) -> dict[str, Any]:
    """Open a checkpoint and check what one rank wants of it; return seconds and memory.

    Checking comes in two steps: what is wanted, and then a rank's share of the hashes of all indices, rank 0's.
    """
    before, began = peak(), time.perf_counter()
    checkpoint = open_checkpoint(folder)
    seconds = [time.perf_counter() - began]
    kinds, layers = (KINDS, LAYERS) if wanted == "all" else (KINDS[:1], LAYERS if wanted == "weights" else 2)
    specs = [(spec, start, stop) for spec, start, stop in ranges(rank, world_size)]
    names = {f"layers.{layer}." for layer in range(layers)}
    fragments = [
        StateFragment(spec, kind, start, stop, torch.empty(0))
        for kind in kinds
        for spec, start, stop in specs
        if any(spec.name.startswith(name) for name in names)
    ]
    began = time.perf_counter()
    checkpoint.check(fragments)
    seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    checkpoint.check_files(rank=0, size=world_size)
    seconds.append(time.perf_counter() - began)
    names = ("open_seconds", "check_seconds", "share_seconds")
    return {**dict(zip(names, seconds, strict=True)), "peak_bytes": peak(), "before_bytes": before}


def in_a_process(folder: Path, rank: int, world_size: int, wanted: str) -> dict[str, Any]:
    """Return the figures of `opened`, of a new process."""
    given = json.dumps([str(folder), rank, world_size, wanted])
    done = subprocess.run([sys.executable, __file__, "--open", given], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_version_1(folder: Path) -> None:
    """Make the checkpoint one of the format's first version: all boxes in the manifest."""
    body = json.loads((folder / MANIFEST).read_bytes())
    boxes: dict[str, list[Any]] = {}
    for entry in body.pop("indices"):
        _, *tables = map(json.loads, (folder / entry["name"]).read_bytes().splitlines())
        for file in (file for each in tables for file in each["files"]):
            boxes.setdefault(file["name"], []).extend(file["boxes"])
    names = {name: name.replace("/", "_") for name in boxes}
    for file in body["files"]:
        file["boxes"] = sorted(boxes[file["name"]], key=lambda box: box["begin"])
        (folder / file["name"]).rename(folder / names[file["name"]])
        file["name"] = names[file["name"]]
    del body["sha256"]
    body["version"] = 1
    (folder / MANIFEST).write_text(json.dumps({"sha256": body_hash(body), **body}, separators=(",", ":")))


def measure(world_size: int, processes: int, *, before: bool) -> dict[str, Any]:
    """Return the figures of a world."""
    with tempfile.TemporaryDirectory() as scratch:
        tell(f"{world_size} ranks: saving")
        found = saved(Path(scratch), world_size, processes)
        # In the middle of the tensor-parallel ranks and of the data-parallel ones.
        folder, rank = Path(scratch) / "step_0000001", world_size // 2 + world_size // (2 * TP)
        found["manifest_bytes"] = (folder / MANIFEST).stat().st_size
        found["index_bytes"] = sum(path.stat().st_size for path in folder.glob("index_*.jsonl"))
        tell(f"{world_size} ranks: opening")
        found["opened"] = {
            name: in_a_process(folder, rank, world_size, wanted)
            for name, wanted in (
                ("all state of a rank", "all"),
                ("the weights of a rank", "weights"),
                ("the weights of two layers", "layers"),
            )
        }
        if before:
            tell(f"{world_size} ranks: opening version 1")
            write_version_1(folder)
            found["opened"]["all state of a rank, version 1"] = in_a_process(folder, rank, world_size, "all")
    return found


ABOUT = """Boxes are those of tp 8 x data-parallel ranks, 128 layers x 25600, stage 3, one flat unit a layer, weights
and two moments in fp32. A part, a merge and opening are single processes' figures (the slowest of all parts and
merges); all merges are those of all indices, taken in turn by the processes that the command gives, while a job has a
rank for each. Publishing is rank 0's: the manifest, fsync of all folders, the rename. Peak is of a whole process,
with Python, torch and the package. Exchanged is what each rank sends to all once, before indices are cut. Opening has
three steps: the manifest; then, for what is wanted, directories and segments of indices, coverage and data files'
sizes; then rank 0's share, of as many as there are ranks, of the hashes of whole indices and the sizes of all data
files. Under stage 3 a rank has a small piece of nearly every parameter, so all of its state needs the directories of
all indices, and a segment or two of each tensor; weights need a third of them. Version 1 has the same boxes in the
manifest, which each rank parses and checks whole, and is read by the same reader."""


def page_of(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the parts of the page."""
    mib = 1 << 20
    saves = [
        [
            *(ranks, f"{each['boxes']:,}", each["indices"], each["most_in_a_folder"]),
            *(f"{each['exchanged_bytes'] / 1024:.1f}", f"{each['plan_seconds']:.2f}", f"{each['part_seconds']:.3f}"),
            *(f"{each['merge_seconds']:.2f}", f"{each['all_merges_seconds']:.1f}"),
            *(f"{each['merge_peak_bytes'] / mib:.0f}", f"{each['publish_seconds']:.2f}"),
            *(f"{each['manifest_bytes'] / mib:.2f}", f"{each['index_bytes'] / mib:.0f}"),
        ]
        for ranks, each in found.items()
    ]
    opens = [
        [
            *(ranks, name, f"{one['open_seconds']:.2f}", f"{one['check_seconds']:.2f}"),
            f"{one['share_seconds']:.3f}",
            *(f"{one['peak_bytes'] / mib:.0f}", f"{one['before_bytes'] / mib:.0f}"),
        ]
        for ranks, each in found.items()
        for name, one in each["opened"].items()
    ]
    saving = ("ranks", "boxes", "indices", "most in a folder", "exchanged, KiB a rank", "cutting, s", "a part, s")
    saving += ("a merge, s", "all merges, s", "peak of merging, MiB", "publishing, s", "manifest, MiB", "indices, MiB")
    opening = (
        "ranks",
        "wanted",
        "manifest, s",
        "indices and checks, s",
        "a share of hashes, s",
        "peak, MiB",
        "peak before, MiB",
    )
    return [
        heading(f"Checkpoints of {' and '.join(found)} ranks, without their data", "cpu"),
        paragraph(ABOUT),
        "## Saving",
        table(saving, saves),
        "## Opening as one rank",
        table(opening, opens),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add_output(parser)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024], help="multiples of 8 (default: 1024)")
    parser.add_argument("--processes", type=int, default=2, help="that take turns for the ranks (default: 2)")
    parser.add_argument("--open", help=argparse.SUPPRESS)
    options = parser.parse_args(sys.argv[1:])
    if options.open:
        folder, *rest = json.loads(options.open)
        print(json.dumps(opened(Path(folder), *rest)))
        return 0
    found = {str(ranks): measure(ranks, options.processes, before=ranks <= 1024) for ranks in options.ranks}
    record = new_record("checkpoint_scale", "cpu", found=found)
    publish(page_of(found), options.output, {key: value for key, value in record.items() if key != "program"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
