"""Tests of the settings of recomputation: defaults, aliases and ranges."""

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.engine_sections import ActivationConfig
from megazero.config.fields import describe


def test_nothing_is_recomputed_unless_asked_for() -> None:
    kept = ActivationConfig()
    assert (kept.recompute_granularity, kept.recompute_method, kept.recompute_num_layers) == ("none", None, None)
    switches = [info.name for info in describe("", ActivationConfig) if info.kind in ("bool", "switch")]
    assert len(switches) == 5 and not any(getattr(kept, name) for name in switches)
    assert kept.number_checkpoints is None and kept.logits_chunk_bytes is None


@pytest.mark.parametrize("name", ["partition_activations", "checkpoint_in_cpu"])
def test_two_switches_may_be_left_to_megazero(name: str) -> None:
    for value in (True, False, "auto"):
        found = getattr(ActivationConfig(**{name: value}), name)
        assert found == value and type(found) is type(value)


def test_other_names() -> None:
    aliases = {info.name: info.aliases for info in describe("", ActivationConfig) if info.aliases}
    assert aliases == {
        "recompute_method": ("activations-checkpoint-method",),
        "recompute_num_layers": ("checkpoint-num-layers", "activations-checkpoint-num-layers"),
        "partition_activations": ("distribute-saved-activations", "distribute-checkpointed-activations"),
        "contiguous_checkpointing": ("contigious-checkpointing",),
        "synchronize_each_layer": ("synchronize-checkpoint-boundary",),
    }


@each(
    ("name", "value"),
    [
        ("recompute_granularity", "half"),
        ("recompute_granularity", None),
        ("recompute_method", "balanced"),
        ("recompute_num_layers", 0),
        ("partition_activations", "perhaps"),
        ("checkpoint_in_cpu", None),
        ("contiguous_checkpointing", "auto"),
        ("number_checkpoints", 0),
        ("logits_chunk_bytes", 0),
    ],
)
def test_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        ActivationConfig(**{name: value})
