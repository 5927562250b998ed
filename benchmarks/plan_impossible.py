"""Plans that fit no device: which limit binds in each, and which layout nearest to the given one fits.

    python benchmarks/plan_impossible.py [--only WORD] [--record FILE.jsonl]

Each row of the table is a run and a machine.  Its given layout is sampled, and so are layouts around it, as
`megazero plan` does where a plan does not fit.  A row that is in the record is not tried again.  The program fails if
a plan fits, or if no layout was found for it.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from report import HelpFormat, tell

from megazero.parallel.nodes import Nodes
from megazero.planner.advice.advise import remedies
from megazero.planner.advice.choices import read
from megazero.planner.advice.search import Search
from megazero.planner.machines import MACHINES
from megazero.units import format_bytes

_FIXED = "--seq-length 2048 --vocab-size 32000 --train-iters 10 --lr 1e-4 --eval-iters 0"
_SHAPES: Mapping[str, str] = {
    "1.3B": "--num-layers 24 --hidden-size 2048 --num-attention-heads 16",
    "2.7B": "--num-layers 32 --hidden-size 2560 --num-attention-heads 32",
    "6.7B": "--num-layers 32 --hidden-size 4096 --num-attention-heads 32",
    "13B": "--num-layers 40 --hidden-size 5120 --num-attention-heads 40",
}
# {name: (machine, nodes, shape, format, the given layout)}
PLANS: Mapping[str, tuple[str, int, str, str, str]] = {
    "states of stage 0": ("dgx2-v100", 1, "2.7B", "fp16", "--zero-stage 0 --micro-batch-size 1 --global-batch-size 16"),
    "states of stage 1": ("dgx2-v100", 1, "6.7B", "fp16", "--zero-stage 1 --micro-batch-size 1 --global-batch-size 16"),
    "states of stage 2": ("dgx2-v100", 1, "13B", "fp16", "--zero-stage 2 --micro-batch-size 1 --global-batch-size 16"),
    "whole parameters": ("dgx2-v100", 2, "13B", "fp16", "--zero-stage 3 --micro-batch-size 4 --global-batch-size 128"),
    "stage 0 on A100": ("dgx-a100", 1, "6.7B", "bf16", "--zero-stage 0 --micro-batch-size 1 --global-batch-size 8"),
    "stage 1 on A100": ("dgx-a100", 1, "13B", "bf16", "--zero-stage 1 --micro-batch-size 1 --global-batch-size 8"),
    "stage 0 on H100": ("dgx-h100", 1, "13B", "bf16", "--zero-stage 0 --micro-batch-size 1 --global-batch-size 8"),
    "activations, 1.3B": ("dgx2-v100", 1, "1.3B", "fp16", "--micro-batch-size 8 --global-batch-size 128"),
    "activations, 2.7B": ("dgx-a100", 1, "2.7B", "bf16", "--micro-batch-size 16 --global-batch-size 128"),
    "activations, 6.7B": (
        *("dgx-h100", 2, "6.7B", "bf16"),
        "--zero-stage 3 --micro-batch-size 8 --global-batch-size 128",
    ),
    "activations beside tensor parallelism": (
        *("dgx2-v100", 1, "6.7B", "fp16"),
        "--tensor-model-parallel-size 4 --micro-batch-size 8 --global-batch-size 32",
    ),
    "selective recomputation": (
        *("dgx-a100", 1, "6.7B", "bf16"),
        "--zero-stage 2 --micro-batch-size 8 --global-batch-size 64 --recompute-granularity selective",
    ),
    "checkpoints": (
        *("dgx2-v100", 1, "1.3B", "fp16"),
        "--micro-batch-size 128 --global-batch-size 2048 --recompute-granularity full",
    ),
    "micro-batches in flight": (
        *("dgx2-v100", 1, "6.7B", "fp16"),
        "--pipeline-model-parallel-size 8 --micro-batch-size 4 --global-batch-size 128",
    ),
    "gpipe": (
        *("dgx-a100", 1, "2.7B", "bf16"),
        "--pipeline-model-parallel-size 4 --pipeline-schedule gpipe --micro-batch-size 4 --global-batch-size 256",
    ),
    "one GPU": ("dgx-a100", 0, "6.7B", "bf16", "--micro-batch-size 1 --global-batch-size 1"),
    "one GPU, offloaded": (
        *("dgx2-v100", 0, "13B", "fp16"),
        "--zero-stage 3 --offload-optimizer cpu --offload-param cpu --micro-batch-size 8 --global-batch-size 8",
    ),
    "fp32": ("dgx2-v100", 1, "2.7B", "fp32", "--zero-stage 1 --micro-batch-size 1 --global-batch-size 16"),
    "sums in fp32": (
        *("dgx2-v100", 1, "2.7B", "fp16"),
        "--zero-stage 1 --micro-batch-size 2 --global-batch-size 32 --accumulate-allreduce-grads-in-fp32",
    ),
    "small shard groups": (
        *("dgx2-v100", 2, "6.7B", "fp16"),
        "--zero-stage 2 --mics-shard-size 2 --micro-batch-size 1 --global-batch-size 32",
    ),
}


def tried(name: str) -> dict[str, Any]:
    """Return what binds a plan, and the nearest layout that fits."""
    machine, count, shape, precision, layout = PLANS[name]
    hardware = MACHINES[machine]
    nodes = Nodes((hardware.devices_per_node,) * count if count else (1,))
    words = shlex.split(f"{_SHAPES[shape]} {_FIXED} --precision {precision} {layout}")
    began = time.process_time()
    search = Search(read(words, sum(nodes.ranks_per_node)), 32000, hardware)
    given = search.measured(search.run.given, nodes)
    assert given is not None, f"{name}: a start refuses the given layout"
    _, near = remedies(search, search.candidates(nodes), nodes)
    found: dict[str, Any] = {
        "plan": name,
        "machine": f"{machine}, {nodes.describe()}",
        "run": f"{shape}, {precision}, {search.run.given.describe()}",
        "fits": given.fits(hardware),
        "needs": format_bytes(given.total),
        "has": format_bytes(hardware.memory_bytes),
        "binds": f"{given.fullest.replace('_', ' ')}, rank {given.place[0]}, {given.place[1]}",
        "cpu_seconds": round(time.process_time() - began, 1),
        "run_dry": search.runs,
    }
    if near is not None:
        changes = near.choice.changes(search.run.given)
        found |= {"nearest": f"{near.choice.describe()}, {near.nodes.describe()}", "changes": changes}
        found["nearest_needs"] = format_bytes(near.measured.total)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--only", default="", help="rows whose name has this word")
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl", help="the rows tried so far, a line each")
    options = parser.parse_args()
    lines = options.record.read_text().splitlines() if options.record is not None and options.record.is_file() else []
    rows = {row["plan"]: row for row in map(json.loads, lines)}
    for name in (name for name in PLANS if options.only in name):
        if name not in rows:
            rows[name] = tried(name)
            if options.record is not None:
                with options.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(rows[name]) + "\n")
        row = rows[name]
        tell(
            f"| {name} | {row['machine']} | {row['run']} | {row['needs']} of {row['has']} | {row['binds']} |"
            f" {row.get('nearest', 'none found')} | {row.get('changes', '')} | {row.get('nearest_needs', '')} |"
        )
    return int(any(row["fits"] or "nearest" not in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
