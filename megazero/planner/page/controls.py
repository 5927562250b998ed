"""The controls of a plan's page: the settings that a reader may change, and the values that they offer.  Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.errors import ConfigError, Problem

MICRO_BATCH = "micro-batch"
# {control: (the section and the field that it changes, the values that it offers)}; a micro-batch has sizes of its own.
CONTROLS: Mapping[str, tuple[str, str, tuple[Any, ...]]] = MappingProxyType(
    {
        MICRO_BATCH: ("training", "micro_batch_size", ()),
        "stage": ("zero", "zero_stage", (0, 1, 2, 3)),
        "recomputation": ("activations", "recompute_granularity", ("none", "selective", "full")),
        "homes": ("zero", "offload_optimizer", ("none", "cpu")),
    }
)
DEFAULT = f"{MICRO_BATCH},stage"


def read_controls(text: str) -> tuple[str, ...]:
    """Return the controls of a list with commas; of "none" no control.  Raises ConfigError for a word that is none."""
    words = [] if text == "none" else text.split(",")
    for word in words:
        if word not in CONTROLS:
            rule = "these settings of a page can be changed, with commas between, or none of them"
            raise ConfigError(Problem(f"--what-if {text}", rule, f"{', '.join(CONTROLS)}; none"))
    return tuple(name for name in CONTROLS if name in words)
