"""Rules for adapters beside frozen weights."""

from collections.abc import Iterator

from megazero.config.model import LORA_TARGETS
from megazero.config.run import RunConfig
from megazero.errors import Problem

RANDOM_BASE = "--lora-random-base"
ADAPTERS_HAVE_A_BASE = "adapters are trained beside weights that have been trained"


def adapters_have_layers(config: RunConfig, world_size: int) -> Iterator[Problem]:
    targets = config.model.lora_targets
    if not config.model.lora_rank:
        return
    given = f"--lora-targets {' '.join(targets)}"
    if not targets or len(set(targets)) < len(targets) or not set(targets) <= set(LORA_TARGETS):
        yield Problem(given, "adapters belong to layers, each named once", f"some of {' '.join(LORA_TARGETS)}")


def adapters_have_a_base(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.model.lora_rank and config.checkpoint.load is None and not config.checkpoint.lora_random_base:
        given = f"--lora-rank {config.model.lora_rank} without --load"
        yield Problem(given, ADAPTERS_HAVE_A_BASE, f"--load BASE --finetune, or {RANDOM_BASE}")


def adapters_alone_have_rates(config: RunConfig, world_size: int) -> Iterator[Problem]:
    if config.model.lora_rank and config.optimizer.decoupled_lr is not None:
        given = f"--decoupled-lr {config.optimizer.decoupled_lr} with --lora-rank {config.model.lora_rank}"
        yield Problem(given, "embedding and head, whose rate that is, are frozen beside adapters", "one of them")


ADAPTER_RULES = (adapters_have_layers, adapters_have_a_base, adapters_alone_have_rates)
