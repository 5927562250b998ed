"""Tests the families of models against transformers' own classes in float64: logits and gradients, at every tp.

Transformers computes RMSNorm and softmax in float32 whatever the model's dtype, so both are replaced by torch's in the
dtype of their input, with the same weights; so is BLOOM's GELU, whose constants have eight digits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.families import GROUPED, LLAMA, ROPE
from support.models import Piece, assemble, build_gpt, context, pieces, put_logical, small_config
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.parallel.param_spec import named_specs

VOCAB, DIVISIBLE_BY = 101, 8
Weights = dict[str, Tensor]
# The least of transformers' configuration, beside the names that families share.
_SHAPE = {"vocab_size": VOCAB, "hidden_size": 60, "num_hidden_layers": 3, "num_attention_heads": 12}
_LLAMA = {**_SHAPE, "intermediate_size": 168, "max_position_embeddings": 12, "rms_norm_eps": 1e-6, "head_dim": 6}
_LLAMA_3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3 = {**_LLAMA_3, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}


class Family(NamedTuple):
    """A family: settings here, transformers' class and configuration, and its parameters made from weights here."""

    settings: Mapping[str, Any]
    kind: str
    theirs: Mapping[str, Any]
    values: Callable[[Weights], Iterator[tuple[str, Tensor]]]


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(4))
    return ids[:, :-1], ids[:, 1:]


def llama(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' parameters of Llama, Qwen 2 and Qwen 3."""
    yield "model.embed_tokens.weight", weights["embedding.word.weight"]
    yield "model.norm.weight", weights["final_norm.weight"]
    yield "lm_head.weight", weights["head.weight"]
    for layer in range(3):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        here = {name.removeprefix(f"{ours}."): value for name, value in weights.items() if name.startswith(f"{ours}.")}
        yield f"{theirs}.input_layernorm.weight", here["input_norm.weight"]
        yield f"{theirs}.post_attention_layernorm.weight", here["post_attention_norm.weight"]
        for end in ("weight", "bias"):
            if f"attention.qkv.{end}" in here:
                heads = list(here[f"attention.qkv.{end}"])
            elif f"attention.query.{end}" in here:
                heads = [here[f"attention.query.{end}"], *here[f"attention.key_value.{end}"]]
            else:
                continue
            for letter, value in zip("qkv", heads, strict=True):
                yield f"{theirs}.self_attn.{letter}_proj.{end}", value.flatten(0, 1)
        for letter, name in (("q", "query"), ("k", "key")):
            if f"attention.{name}_norm.weight" in here:
                yield f"{theirs}.self_attn.{letter}_norm.weight", here[f"attention.{name}_norm.weight"]
        yield f"{theirs}.self_attn.o_proj.weight", here["attention.projection.weight"]
        yield f"{theirs}.mlp.gate_proj.weight", here["mlp.up.weight"][0]
        yield f"{theirs}.mlp.up_proj.weight", here["mlp.up.weight"][1]
        yield f"{theirs}.mlp.down_proj.weight", here["mlp.down.weight"]


_BLOCK_OF_BLOOM = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.projection": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
_TOP_OF_BLOOM = {
    "embedding.word": "word_embeddings",
    "embedding.norm": "word_embeddings_layernorm",
    "final_norm": "ln_f",
}


def bloom(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    """Yield transformers' parameters of BLOOM and Falcon, which go by the same names."""
    for name, value in weights.items():
        module, _, end = name.rpartition(".")
        if module in _TOP_OF_BLOOM:
            yield f"transformer.{_TOP_OF_BLOOM[module]}.{end}", value
        elif module.endswith("attention.query"):
            rows = (value.flatten(0, 1), weights[name.replace("query", "key_value")].flatten(0, 2))
            yield f"{_block(module)}.self_attention.query_key_value.{end}", torch.cat(rows)
        elif module.startswith("layers.") and not module.endswith("key_value"):
            key = module.split(".", 2)[2]
            if key == "attention.qkv":  # heads with a query, a key and a value each
                value = value.transpose(0, 1).flatten(0, 2)
            yield f"{_block(module)}.{_BLOCK_OF_BLOOM[key]}.{end}", value


def _block(module: str) -> str:
    return f"transformer.h.{module.split('.')[1]}"


FAMILIES: Mapping[str, Family] = {
    "llama 2": Family({**LLAMA, "kv_channels": 6}, "Llama", _LLAMA, llama),
    "llama 3": Family(
        {
            **LLAMA,
            **GROUPED,
            "kv_channels": 6,
            "rotary_base": 5e5,
            "use_rope_scaling": True,
            "rope_scaling_factor": 32.0,
        },
        "Llama",
        {**_LLAMA, "num_key_value_heads": 2, "rope_parameters": _LLAMA_3},
        llama,
    ),
    "llama, a group across two ranks": Family(
        {**LLAMA, "kv_channels": 6, "group_query_attention": True, "num_query_groups": 6},
        "Llama",
        {**_LLAMA, "num_key_value_heads": 6},
        llama,
    ),
    "llama, interpolated": Family(
        {**LLAMA, "kv_channels": 6, "rotary_seq_len_interpolation_factor": 3.0},
        "Llama",
        {**_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10_000.0}},
        llama,
    ),
    "qwen 2": Family(
        {**LLAMA, **GROUPED, "kv_channels": 5 * 2, "add_qkv_bias": True, "num_attention_heads": 6},
        "Qwen2",
        {**_LLAMA, "num_attention_heads": 6, "head_dim": 10, "num_key_value_heads": 2},
        llama,
    ),
    "qwen 3": Family(
        {**LLAMA, **GROUPED, "kv_channels": 8, "qk_layernorm": True},
        "Qwen3",
        {**_LLAMA, "num_key_value_heads": 2, "head_dim": 8},
        llama,
    ),
    "bloom": Family(
        {"position_embedding_type": "alibi", "embed_layernorm": True, "hidden_size": 40, "num_attention_heads": 8},
        "Bloom",
        {"vocab_size": VOCAB, "hidden_size": 40, "n_layer": 3, "n_head": 8},
        bloom,
    ),
    "falcon": Family(
        {**ROPE, "group_query_attention": True, "disable_bias_linear": True, "hidden_size": 48},
        "Falcon",
        {
            **_SHAPE,
            "hidden_size": 48,
            "multi_query": True,
            "parallel_attn": False,
            "bias": False,
            "activation": "gelu_pytorch_tanh",
        },
        bloom,
    ),
}


def config_of(name: str) -> ModelConfig:
    return small_config(**FAMILIES[name].settings)


def random_weights(config: ModelConfig) -> Weights:
    """Return full logical weights, all of them non-zero, biases too."""
    generator = torch.Generator().manual_seed(9)
    return {
        spec.name: 0.1 * torch.randn(spec.full_shape, generator=generator, dtype=torch.float64)
        + (1.0 if spec.name.endswith("norm.weight") else 0.0)
        for spec, _ in named_specs(build_gpt(config, context(), vocab_size=VOCAB))
    }


def transformers_model(name: str, weights: Weights) -> nn.Module:
    """Return transformers' model with these weights, in float64."""
    import transformers

    family = FAMILIES[name]
    settings = dict(family.theirs)
    if family.kind == "Qwen2":
        settings.pop("head_dim")  # it has none: a head's width follows from the others
    config = getattr(transformers, f"{family.kind}Config")(**settings, tie_word_embeddings="Ll" not in family.kind)
    config.tie_word_embeddings = family.kind in ("Bloom", "Falcon")
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family.kind}ForCausalLM")(config).double()
    for module in list(model.modules()):
        for key, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, key, nn.RMSNorm(child.weight.shape, child.variance_epsilon, dtype=torch.float64))
            elif type(child).__name__ == "BloomGelu":
                setattr(module, key, nn.GELU(approximate="tanh"))
    held = dict(model.named_parameters())
    values = dict(family.values(weights))
    assert held.keys() == values.keys()
    for key, value in values.items():
        held[key].data.copy_(value.reshape(held[key].shape))
    return model


def logits_and_gradients(rank: int, size: int, name: str) -> tuple[Tensor, list[Piece]]:
    """Return this rank's logits, and its pieces of the gradients of the mean loss, summed where ranks have parts."""
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    model = build_gpt(config_of(name), context(axis), vocab_size=VOCAB, divisible_by=DIVISIBLE_BY)
    put_logical(model, random_weights(config_of(name)))
    tokens, labels = batch()
    (model.summed_loss(tokens, labels) / labels.numel()).backward()
    for spec, parameter in named_specs(model):
        if "tp" in spec.summed_over:
            assert parameter.grad is not None
            axis.all_reduce(parameter.grad).wait()
    return model(tokens).detach(), pieces(model, gradients=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_transformers(name: str) -> None:
    theirs = transformers_model(name, random_weights(config_of(name)))
    tokens, labels = batch()
    with patch.object(F, "softmax", lambda x, dim, dtype=None: x.softmax(dim)):
        expected = theirs(tokens).logits
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    for size in (1, 2, 4):
        if config_of(name).num_attention_heads % size:
            continue
        results = run_ranks(size, logits_and_gradients, size, name)
        logits = torch.cat([logits for logits, _ in results], dim=-1)[..., :VOCAB]
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-10, atol=1e-11)
        gradients = dict(FAMILIES[name].values(assemble(held for _, held in results)))
        for key, parameter in theirs.named_parameters():
            found = gradients[key].reshape(parameter.shape)
            torch.testing.assert_close(found, parameter.grad, rtol=1e-9, atol=1e-12)


@each("name", FAMILIES)
def test_parameters_are_counted(name: str) -> None:
    model = build_gpt(config_of(name), context(), vocab_size=VOCAB)
    assert derived.num_parameters(config_of(name), VOCAB) == sum(each.numel() for each in model.parameters())
