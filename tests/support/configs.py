"""Builds configurations for tests from flat setting names: `make_run(hidden_size=60, zero_stage=2)`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megazero.config.run import DataConfig, RunConfig
from megazero.config.validate import validate
from megazero.config.values import RawValue

# The settings that a valid run must have, with small values.
SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 16,
        "vocab_size": 100,
        "micro_batch_size": 2,
        "train_iters": 10,
        "lr": 1e-3,
        "mock_data": True,
    }
)


def make_run(**settings: Any) -> RunConfig:
    """Return a valid small run with `settings` over SMALL; None leaves an optional setting unset."""
    outcome = validate({name: RawValue(name, value, name) for name, value in {**SMALL, **settings}.items()})
    assert outcome.config is not None, outcome.problems
    return outcome.config


def make_data(**settings: Any) -> DataConfig:
    """Return the data section of a run; a single corpus needs no list, and a path may be a string."""
    return make_run(**{"mock_data": False, **settings}).data
