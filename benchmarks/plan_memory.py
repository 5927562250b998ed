"""Compares dry ranks with real ones on layouts drawn at random: every category's bytes and every message, exactly.

    python benchmarks/plan_memory.py [--layouts 40] [--seed 1] [--record FILE.jsonl]

Layouts are toys on 1 to 4 processes of this machine: ZeRO stages, tensor and pipeline parallelism, schedules,
recomputation, places of checkpoints and states, formats, dropout.  A drawn layout that breaks a rule is drawn again.
Every rank takes start-up, steps and evaluations, really and dry, and both ledgers and meters are compared
(`tests/support/planned_step.py`): a dry figure must be one that a repetition of the real part has.  What is in the
record is not measured again, so that a run that was interrupted goes on.  The program fails if any figure differs.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from report import HelpFormat, tell

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.planned_step import SMALL, differences
from support.processes import close_pools, run_ranks

from megazero.config.validate import validate
from megazero.config.values import RawValue
from megazero.rules.run import check

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (1, 2),
    "pipeline_model_parallel_size": (1, 2),
    "zero_stage": (0, 1, 2, 3),
    "sequence_parallel": (False, True),
    "num_layers": (2, 3),
    "micro_batch_size": (1, 2),
    "precision": ("fp32", "bf16", "fp16"),
    "hidden_dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "recompute_granularity": ("none", "selective", "full"),
    "partition_activations": (False, True),
    "contiguous_checkpointing": (False, True),
    "checkpoint_in_cpu": (False, True),
    "offload_optimizer": ("none", "cpu"),
    "offload_param": ("none", "cpu"),
    "untie_embeddings_and_output_weights": (False, True),
    "swiglu": (False, True),
    "normalization": ("LayerNorm", "RMSNorm"),
    "clip_grad": (0.0, 1.0),
}


def layouts(seed: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Yield legal layouts without end: settings over those of a small run, and the ranks of every node."""
    drawn = random.Random(seed)
    while True:
        settings = {name: drawn.choice(values) for name, values in CHOICES.items()}
        world_size = drawn.choice((1, 2, 4))
        parts = settings["tensor_model_parallel_size"] * settings["pipeline_model_parallel_size"]
        per_node = drawn.choice(((world_size,), (world_size // 2,) * 2)) if world_size > 1 else (1,)
        if world_size % parts:
            continue
        settings["global_batch_size"] = 2 * settings["micro_batch_size"] * (world_size // parts)
        given = {name: RawValue(name, value, name) for name, value in {**SMALL, **settings, "train_iters": 9}.items()}
        outcome = validate(given)
        if outcome.config is not None and not check(outcome.config, world_size):
            yield settings, per_node


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--layouts", type=int, default=40, help="how many are drawn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, metavar="FILE.jsonl", help="the layouts compared so far, a line each")
    options = parser.parse_args()
    done = _done(options.record)
    wrong = 0
    for number, (settings, per_node) in zip(range(options.layouts), layouts(options.seed), strict=False):
        key = json.dumps([settings, per_node])
        if key not in done:
            found = run_ranks(sum(per_node), differences, settings, per_node, timeout=900)
            done[key] = [line for rank in found for line in rank]
            if options.record is not None:
                with options.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"layout": key, "differences": done[key]}) + "\n")
        wrong += bool(done[key])
        tell(f"{number + 1} of {options.layouts}: {'; '.join(done[key][:4]) or 'equal'}  {key}")
    tell(f"{options.layouts - wrong} of {options.layouts} layouts are equal to the byte (seed {options.seed})")
    close_pools()
    return 1 if wrong else 0


def _done(record: Path | None) -> dict[str, list[str]]:
    """Return {layout: differences} of the record."""
    if record is None or not record.is_file():
        return {}
    lines = map(json.loads, record.read_text(encoding="utf-8").splitlines())
    return {line["layout"]: line["differences"] for line in lines}


if __name__ == "__main__":
    sys.exit(main())
