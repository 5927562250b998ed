"""Tests of the model's settings: Megatron's defaults and the ranges of sizes."""

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError
from support.each import each

from megazero.config.model import ModelConfig

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 60, "num_attention_heads": 12, "seq_length": 16}


def test_defaults_are_megatrons() -> None:
    model = ModelConfig(**SHAPE)
    assert (model.make_vocab_size_divisible_by, model.init_method_std, model.norm_epsilon) == (128, 0.02, 1e-5)
    assert (model.hidden_dropout, model.attention_dropout) == (0.1, 0.1)
    assert model.ffn_hidden_size is None and model.max_position_embeddings is None and model.vocab_size is None
    assert not model.untie_embeddings_and_output_weights


@each("missing", sorted(SHAPE))
def test_shape_has_no_default(missing: str) -> None:
    with pytest.raises(ValidationError, match=missing):
        ModelConfig(**{name: value for name, value in SHAPE.items() if name != missing})


@each(
    ("name", "value"),
    [("num_layers", 0), ("hidden_dropout", 1.0), ("attention_dropout", -0.1), ("norm_epsilon", 0), ("vocab_size", 1)],
)
def test_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        ModelConfig(**SHAPE | {name: value})


def test_it_is_frozen_and_refuses_unknown_names() -> None:
    model = ModelConfig(**SHAPE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        model.num_layers = 3
    with pytest.raises(ValidationError, match="num_layer"):
        ModelConfig(**SHAPE, num_layer=3)
    with pytest.raises(ValidationError):
        dataclasses.replace(model, num_layers=0)
