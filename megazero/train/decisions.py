"""Decides the settings that are "auto" before ranks meet: rank 0 does, and its decision is every rank's.

The program that starts a run brings the way to decide (`megazero pretrain` runs the planner).  A run that goes on keeps
what it has decided before, as long as everything is as it was that the decision depends on.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megazero.checkpoint.fallback import Taken
from megazero.comm.startup import SharedStore, publish
from megazero.command_line.parse import from_yaml
from megazero.config.named import undecided, value_in, with_values
from megazero.config.run import RunConfig
from megazero.errors import ConfigError, Problem
from megazero.parallel.launch import Launch
from megazero.train.pipeline_stages import activation_config

WORLD_SIZE_KEY = "world_size"  # of what a checkpoint holds of its run's progress
_SECTIONS = ("parallel", "zero", "precision", "curriculum")
_SIZES = ("micro_batch_size", "global_batch_size")


class Decision(NamedTuple):
    """Values of settings, by name, and the lines that say why."""

    values: Mapping[str, Any]
    reasons: tuple[str, ...]


Decide = Callable[[RunConfig, torch.device, Launch], Decision]


def nothing_decides(config: RunConfig, device: torch.device, launch: Launch) -> Decision:
    """Raise ConfigError: the program has no planner."""
    names = undecided(config)
    rule = "the command line decides what is left to it, by a plan of the run"
    raise ConfigError(Problem(", ".join(f"{name} auto" for name in names), rule, "megazero pretrain, or a value"))


def decide_first(
    config: RunConfig, found: Taken | None, device: torch.device, launch: Launch, decide: Decide
) -> Decision | None:
    """Return the decision, on rank 0 of a run that has something to decide; None on others.

    found: the checkpoint that the run goes on from.
    """
    if launch.rank or not undecided(config):
        return None
    return kept(config, found, launch.world_size) or decide(config, device, launch)


def decided(
    config: RunConfig, decision: Decision | None, store: SharedStore | None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with rank 0's decision, and its reasons; a collective call if there is one.

    store: that of all ranks; None where there is one rank.
    """
    if not undecided(config):
        return config, ()
    if store is not None:
        values, reasons = json.loads(publish(store, "decision", None if decision is None else json.dumps(decision)))
        decision = Decision(values, tuple(reasons))
    assert decision is not None, "rank 0 has decided"
    return with_values(config, decision.values), decision.reasons


def kept(config: RunConfig, found: Taken | None, world_size: int) -> Decision | None:
    """Return what the run has decided before it was saved; None for a new one, or where the decision may be another."""
    if found is None or config.checkpoint.finetune or found.checkpoint.progress.get(WORLD_SIZE_KEY) != world_size:
        return None
    try:
        saved = from_yaml(found.checkpoint.config_yaml, origin=str(found.checkpoint.folder))
    except ConfigError:  # a checkpoint of another version, whose settings this one cannot read
        return None
    values = {name: value_in(saved, name) for name in undecided(config)}
    if list(_basis(saved)) != list(_basis(with_values(config, values))):
        return None
    return Decision(values, tuple(f"{name} auto: {word_of(value)}, as before" for name, value in values.items()))


def _basis(config: RunConfig) -> Iterator[Any]:
    """Yield the decision and what it depends on, but for the number of ranks and the machine."""
    yield activation_config(config)
    yield replace(config.model, vocab_size=None)
    yield from (getattr(config, name) for name in _SECTIONS)
    yield from (getattr(config.training, name) for name in _SIZES)


def word_of(value: object) -> str:
    """Return the value of a setting as a line has it."""
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
