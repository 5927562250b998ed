"""Tests of the presets: models have the sizes in their names, and C1 to C5 are the ZeRO paper's configurations."""

import pytest

from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS


def parameters(row: dict[str, int]) -> int:
    """Return GPT-2's number of parameters, counted from the published architecture (tied head, biases everywhere)."""
    h, layers = row["hidden_size"], row["num_layers"]
    attention = h * 3 * h + 3 * h + h * h + h
    feed_forward = h * 4 * h + 4 * h + 4 * h * h + h
    norms = 2 * (2 * h)
    embeddings = (row["vocab_size"] + row["max_position_embeddings"]) * h
    return layers * (attention + feed_forward + norms) + embeddings + 2 * h


# The expected numbers are those of OpenAI's gpt2 and gpt2-xl.
@pytest.mark.parametrize(("name", "expected"), [("gpt2-124m", 124_439_808), ("gpt2-1.5b", 1_557_611_200)])
def test_parameters(name: str, expected: int) -> None:
    assert parameters(dict(PRESETS[name])) == expected


def test_rows_name_settings_of_the_model() -> None:
    names = {info.name for info in FIELDS if info.section == "model"}
    assert all(set(row) <= names for row in PRESETS.values())


# ZeRO, table 3: the states that are partitioned beside the optimizer's, and the memory in which checkpoints lie.
@pytest.mark.parametrize(
    ("name", "gradients", "activations", "in_cpu"),
    [
        ("C1", False, False, False),
        ("C2", False, True, False),
        ("C3", True, False, False),
        ("C4", True, True, False),
        ("C5", True, True, True),
    ],
)
def test_the_papers_configurations(name: str, gradients: bool, activations: bool, in_cpu: bool) -> None:
    row = dict(ZERO_CONFIGS[name])
    assert row == {
        "zero_stage": 2 if gradients else 1,
        "recompute_granularity": "full",
        "contiguous_checkpointing": True,
        "contiguous_gradients": True,
        "partition_activations": activations,
        "checkpoint_in_cpu": in_cpu,
    }
    assert set(row) <= {info.name for info in FIELDS if info.section in ("zero", "activations")}
