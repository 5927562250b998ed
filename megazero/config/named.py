"""Settings of a run's configuration by their names, whichever section has them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megazero.config.run import RunConfig
from megazero.config.validate import INFO

# The settings that a plan of the run decides where they are "auto".
AUTOMATIC = (
    "recompute_granularity",
    "partition_activations",
    "checkpoint_in_cpu",
    "offload_optimizer",
    "offload_param",
)


def value_in(config: RunConfig, name: str) -> Any:
    """Return the value of a setting."""
    return getattr(getattr(config, INFO[name].section), name)


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with other values of some settings."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(INFO[name].section, {})[name] = value
    return replace(config, **{section: replace(getattr(config, section), **own) for section, own in sections.items()})


def undecided(config: RunConfig) -> tuple[str, ...]:
    """Return the names of the settings that are left to a plan."""
    return tuple(name for name in AUTOMATIC if value_in(config, name) == "auto")
