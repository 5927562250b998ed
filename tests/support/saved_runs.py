"""Checkpoints of one tiny tensor, saved for given runs, for tests of what belongs to whom."""

from pathlib import Path

import torch

from megazero.checkpoint.runs import RunIdentity, write_run
from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator
from megazero.parallel.param_spec import ParamSpec, StateFragment

ONE = RunIdentity("00000000000000a1", "2026-01-02 03:04:05 UTC", "node1")
OTHER = RunIdentity("00000000000000b2", "2026-02-03 04:05:06 UTC", "node2")


def save_for(root: Path, step: int, run: RunIdentity | None) -> Path:
    """Save a checkpoint as `run` does, or without an id as an earlier version did; return its folder."""
    fragment = StateFragment(ParamSpec("scale", (2,), (2,), (0,)), "weight", 0, 2, torch.tensor([1.0, 2.0]))
    progress = {"iteration": step} if run is None else {"iteration": step, "run": run.to_json()}
    if run is not None:
        root.mkdir(parents=True, exist_ok=True)
        write_run(root, run)
    draft = Draft(root, step, progress, "seed: 1\n")
    return save(draft, [fragment], control=LocalCommunicator())
