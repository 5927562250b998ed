"""The named models have the sizes that their names promise."""

import pytest

from megazero.config.presets import PRESETS
from megazero.config.run import FIELDS


def parameters(row: dict[str, int]) -> int:
    """GPT-2's number of parameters, counted from the published architecture (tied head, biases everywhere)."""
    h, layers = row["hidden_size"], row["num_layers"]
    attention = h * 3 * h + 3 * h + h * h + h
    feed_forward = h * 4 * h + 4 * h + 4 * h * h + h
    norms = 2 * (2 * h)
    embeddings = (row["vocab_size"] + row["max_position_embeddings"]) * h
    return layers * (attention + feed_forward + norms) + embeddings + 2 * h


# OpenAI's own counts of gpt2 and gpt2-xl.
@pytest.mark.parametrize(("name", "expected"), [("gpt2-124m", 124_439_808), ("gpt2-1.5b", 1_557_611_200)])
def test_parameters(name: str, expected: int) -> None:
    assert parameters(dict(PRESETS[name])) == expected


def test_rows_name_settings_of_the_model() -> None:
    names = {info.name for info in FIELDS if info.section == "model"}
    assert all(set(row) <= names for row in PRESETS.values())
