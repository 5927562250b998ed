"""The families of models that transformers has classes for: names of parameters, their layouts, and `config.json`.

A *family* is a table.  Its rows pair parameters of megazero with those of transformers, which differ in form:

    same      one tensor, unchanged
    rows      [*out, in] here, [rows, in] there; or [*out] and [rows]
    conv1d    [*out, in] here, [in, rows] there (GPT-2)
    split     [k, *out, in] here, k tensors of rows there (queries, keys and values; SwiGLU's two layers)
    heads     [3, a, d, in] here, rows in the order of heads there, each with its query, key and value (BLOOM)
    joined    two tensors here, their rows one after the other there (Falcon's queries, and its keys and values)

Its *traits* are what its models have in common, by which a model of megazero finds its family.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.errors import CheckpointError, Problem

Tensors = list[Tensor]
Shapes = Sequence[tuple[int, ...]]


class Form(NamedTuple):
    """Two functions between megazero's tensors of a row, of known shapes, and transformers'."""

    to_theirs: Callable[[Tensors], Tensors]
    to_ours: Callable[[Tensors, Shapes], Tensors]


def _flat(value: Tensor) -> Tensor:
    """Return [rows, in] of [*out, in]."""
    return value.flatten(0, -2)


def _reshaped(values: Tensors, shapes: Shapes) -> Tensors:
    return [value.reshape(shape).contiguous() for value, shape in zip(values, shapes, strict=True)]


def _cut(value: Tensor, lengths: Sequence[int]) -> Tensors:
    return list(value.tensor_split(list(accumulate(lengths))[:-1]))


def _unjoined(values: Tensors, shapes: Shapes) -> Tensors:
    return _reshaped(_cut(values[0], [math.prod(shape[:-1]) for shape in shapes]), shapes)


def _by_heads(value: Tensor) -> Tensor:
    """Return [3 a d, in] in the order of heads, of [3, a, d, in]; or [3 a d] of [3, a, d]."""
    return value.transpose(0, 1).flatten(0, 2)


def _from_heads(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    three, heads, *rest = shape
    return value.reshape(heads, three, *rest).transpose(0, 1).contiguous()


SAME = Form(lambda ours: ours, _reshaped)
ROWS = Form(lambda ours: [_flat(ours[0])], _reshaped)
_FLAT = Form(lambda ours: [ours[0].flatten()], _reshaped)
_CONV1D = Form(lambda ours: [_flat(ours[0]).T], lambda theirs, shapes: _reshaped([theirs[0].T], shapes))
_SPLIT = Form(
    lambda ours: [_flat(part) for part in ours[0].unbind()],
    lambda theirs, shapes: _reshaped([torch.stack(theirs)], shapes),
)
_SPLIT_BIAS = Form(lambda ours: [part.flatten() for part in ours[0].unbind()], _SPLIT.to_ours)
HEADS = Form(lambda ours: [_by_heads(ours[0])], lambda theirs, shapes: [_from_heads(theirs[0], shapes[0])])
_JOINED = Form(lambda ours: [torch.cat([_flat(value) for value in ours])], _unjoined)
_JOINED_BIAS = Form(
    lambda ours: [torch.cat([value.flatten() for value in ours])],
    lambda theirs, shapes: _reshaped(_cut(theirs[0], [math.prod(shape) for shape in shapes]), shapes),
)


class FamilyRow(NamedTuple):
    """Parameters of megazero and those of transformers that hold the same; in a block both without its name."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    form: Form


def row(ours: str, theirs: str, form: Form = SAME) -> FamilyRow:
    return FamilyRow(tuple(ours.split()), tuple(theirs.split()), form)


def both(ours: str, theirs: str, form: Form = SAME, bias: Form = SAME) -> tuple[FamilyRow, FamilyRow]:
    """Return the rows of a layer's weight and bias."""
    ends = (("weight", form), ("bias", bias))
    weight, bias_row = (
        FamilyRow(
            tuple(f"{name}.{end}" for name in ours.split()),
            tuple(f"{name}.{end}" for name in theirs.split()),
            kind,
        )
        for end, kind in ends
    )
    return weight, bias_row


_HEAD = row("head.weight", "lm_head.weight")


class Family(NamedTuple):
    """A family of transformers' models.

    model_type, architecture: transformers' names.  traits: what a model of megazero must have, the legal values of each
    trait.  ends, block: rows of what is outside of blocks, and of a block; a row without a parameter here is passed
    over.  prefix: of transformers' names outside of blocks, as in a file of the bare model without it.  layers: the
    name of the list of blocks.  fixed: what its configurations have for all models that megazero has.  described,
    settings: a configuration made of a model's settings, and the settings made of it; ValueError for a model that
    megazero hasn't.  defaults: transformers' own for what a configuration leaves out, where fixed has another value.
    ties: whether transformers ties the head where a configuration doesn't set it.
    """

    model_type: str
    architecture: str
    traits: Mapping[str, tuple[object, ...]]
    ends: tuple[FamilyRow, ...]
    block: tuple[FamilyRow, ...]
    prefix: str
    layers: str
    fixed: Mapping[str, Any]
    described: Callable[[ModelConfig], dict[str, Any]]
    settings: Callable[[Mapping[str, Any]], dict[str, Any]]
    defaults: Mapping[str, Any] = MappingProxyType({})
    ties: bool = True

    def rows(self, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[FamilyRow]:
        """Yield every row of a model, by the shapes of megazero's parameters."""
        ends = (each._replace(theirs=tuple(f"{self.prefix}.{name}" for name in each.theirs)) for each in self.ends)
        yield from rows_of(shapes, (*ends, _HEAD), self.block, layers=f"{self.prefix}.{self.layers}")


def rows_of(
    shapes: Mapping[str, tuple[int, ...]], ends: Sequence[FamilyRow], block: Sequence[FamilyRow], *, layers: str
) -> Iterator[FamilyRow]:
    """Yield those rows whose parameters a model has, of what is outside of blocks, and of each block.

    layers: the name of the list of blocks.
    """
    for each in ends:
        if each.ours[0] in shapes:
            yield each
    for index in range(1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))):
        for each in block:
            ours = tuple(f"layers.{index}.{name}" for name in each.ours)
            if all(name in shapes for name in ours):
                yield FamilyRow(ours, tuple(f"{layers}.{index}.{name}" for name in each.theirs), each.form)


def traits(model: ModelConfig) -> dict[str, object]:
    """Return what distinguishes families, under names that messages show."""
    heads, groups = model.num_attention_heads, derived.num_key_value_heads(model)
    return {
        "position_embedding_type": model.position_embedding_type,
        "normalization": model.normalization,
        "activation": "swiglu" if model.swiglu else "squared_relu" if model.squared_relu else "gelu",
        "biases": not model.disable_bias_linear,
        "biases of queries, keys and values": derived.has_qkv_bias(model),
        "qk_layernorm": model.qk_layernorm,
        "embed_layernorm": model.embed_layernorm,
        "heads of keys and values": "all" if groups == heads else "one" if groups == 1 else "some",
        "head's width": "h / a" if derived.head_width(model) * heads == model.hidden_size else "another",
        "feed-forward width": "4 h" if derived.ffn_hidden_size(model) == 4 * model.hidden_size else "another",
        "rotary_percent": model.rotary_percent,
        "scaled rotary positions": model.use_rope_scaling or model.rotary_seq_len_interpolation_factor != 1,
    }


def family_of(model: ModelConfig) -> Family:
    """Return the family that has this model; raises CheckpointError with what keeps it out of the nearest."""
    found = traits(model)
    missed = {
        name: [f"{trait} {found[trait]}" for trait, legal in family.traits.items() if found[trait] not in legal]
        for name, family in FAMILIES.items()
    }
    name = min(missed, key=lambda each: len(missed[each]))
    if missed[name]:
        rule = (
            f"transformers has no class for such a model; the nearest, {FAMILIES[name].architecture}, is without that"
        )
        raise CheckpointError(Problem(f"a model with {', '.join(missed[name])}", rule))
    return FAMILIES[name]


# --- GPT-2 -----------------------------------------------------------------------------------------------------------

_PLAIN: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "normalization": ("LayerNorm",),
        "activation": ("gelu",),
        "biases": (True,),
        "qk_layernorm": (False,),
        "embed_layernorm": (False,),
        "heads of keys and values": ("all",),
        "head's width": ("h / a",),
        "scaled rotary positions": (False,),
        "rotary_percent": (1.0,),
    }
)


def _gpt2_described(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_positions": derived.max_position_embeddings(model),
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_inner": derived.ffn_hidden_size(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _gpt2_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": given["n_layer"],
        "hidden_size": given["n_embd"],
        "num_attention_heads": given["n_head"],
        "seq_length": given.get("n_positions", 1024),
        "ffn_hidden_size": given.get("n_inner"),
        "hidden_dropout": given.get("resid_pdrop", 0.1),
        "attention_dropout": given.get("attn_pdrop", 0.1),
        "norm_epsilon": given.get("layer_norm_epsilon", 1e-5),
    }


_GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    MappingProxyType({**_PLAIN, "position_embedding_type": ("learned_absolute",)}),
    (
        row("embedding.word.weight", "wte.weight"),
        row("embedding.position.weight", "wpe.weight"),
        *both("final_norm", "ln_f"),
    ),
    (
        *both("input_norm", "ln_1"),
        *both("attention.qkv", "attn.c_attn", _CONV1D, _FLAT),
        *both("attention.projection", "attn.c_proj", _CONV1D),
        *both("post_attention_norm", "ln_2"),
        *both("mlp.up", "mlp.c_fc", _CONV1D),
        *both("mlp.down", "mlp.c_proj", _CONV1D),
    ),
    "transformer",
    "h",
    MappingProxyType(
        {
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        }
    ),
    _gpt2_described,
    _gpt2_settings,
)


# --- Llama and its kin -----------------------------------------------------------------------------------------------

_OLD_CONTEXT = 8192
_LLAMA_TRAITS: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "position_embedding_type": ("rope",),
        "normalization": ("RMSNorm",),
        "activation": ("swiglu",),
        "biases": (False,),
        "biases of queries, keys and values": (False,),
        "qk_layernorm": (False,),
        "embed_layernorm": (False,),
        "rotary_percent": (1.0,),
    }
)


def _rope_described(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of rotary positions, as transformers of all versions reads them."""
    scaling: dict[str, Any] | None = None
    if model.use_rope_scaling:
        scaling = {"rope_type": "llama3", "factor": model.rope_scaling_factor}
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _OLD_CONTEXT}
    elif model.rotary_seq_len_interpolation_factor != 1:
        scaling = {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def _rope_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions; raises ValueError for a kind that megazero hasn't."""
    found = {**(given.get("rope_scaling") or {}), **(given.get("rope_parameters") or {})}
    kind = found.get("rope_type", found.get("type", "default"))
    settings: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": float(found.get("rope_theta", given.get("rope_theta", 10_000.0))),
    }
    if kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = float(found["factor"])
    elif kind == "llama3":
        constants = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": _OLD_CONTEXT}
        if other := {name: found.get(name) for name, value in constants.items() if found.get(name) != value}:
            raise ValueError(f"rope_scaling with {other}, where Llama 3 has {constants}")
        settings |= {"use_rope_scaling": True, "rope_scaling_factor": float(found["factor"])}
    elif kind != "default":
        raise ValueError(f"rope_type {kind!r}: rotary positions are default, linear or llama3")
    return settings


def _llama_described(model: ModelConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": derived.max_position_embeddings(model),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": derived.num_key_value_heads(model),
        "head_dim": derived.head_width(model),
        "intermediate_size": derived.ffn_hidden_size(model),
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        **_rope_described(model),
    }


def _llama_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    if given.get("sliding_window") is not None and given.get("use_sliding_window", True):
        raise ValueError(f"sliding_window {given['sliding_window']}: attention sees whole sequences")
    groups = given.get("num_key_value_heads") or heads
    return {
        "num_layers": given["num_hidden_layers"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else 1,
        "kv_channels": given.get("head_dim") or hidden // heads,
        "seq_length": given.get("max_position_embeddings", 2048),
        "ffn_hidden_size": given["intermediate_size"],
        "hidden_dropout": 0.0,
        "attention_dropout": given.get("attention_dropout", 0.0),
        "norm_epsilon": given.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        **_rope_settings(given),
    }


_LLAMA_ENDS = (
    row("embedding.word.weight", "embed_tokens.weight"),
    row("final_norm.weight", "norm.weight"),
)
_LLAMA_BLOCK = (
    row("input_norm.weight", "input_layernorm.weight"),
    *both("attention.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj", _SPLIT, _SPLIT_BIAS),
    *both("attention.query", "self_attn.q_proj", ROWS, _FLAT),
    *both("attention.key_value", "self_attn.k_proj self_attn.v_proj", _SPLIT, _SPLIT_BIAS),
    row("attention.query_norm.weight", "self_attn.q_norm.weight"),
    row("attention.key_norm.weight", "self_attn.k_norm.weight"),
    row("attention.projection.weight", "self_attn.o_proj.weight"),
    row("post_attention_norm.weight", "post_attention_layernorm.weight"),
    row("mlp.up.weight", "mlp.gate_proj.weight mlp.up_proj.weight", _SPLIT),
    row("mlp.down.weight", "mlp.down_proj.weight"),
)
_LLAMA_FIXED = MappingProxyType({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False})
_LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _LLAMA_TRAITS,
    _LLAMA_ENDS,
    _LLAMA_BLOCK,
    "model",
    "layers",
    _LLAMA_FIXED,
    _llama_described,
    _llama_settings,
    ties=False,
)
# Without a sliding window, a Llama by another name.
_MISTRAL = _LLAMA._replace(model_type="mistral", architecture="MistralForCausalLM")
_QWEN_FIXED = MappingProxyType({"hidden_act": "silu", "use_sliding_window": False})
_QWEN2 = _LLAMA._replace(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    traits=MappingProxyType(
        {**_LLAMA_TRAITS, "biases of queries, keys and values": (True,), "head's width": ("h / a",)}
    ),
    fixed=_QWEN_FIXED,
    settings=lambda given: {**_llama_settings(given), "add_qkv_bias": True},
)
_QWEN3 = _LLAMA._replace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    traits=MappingProxyType({**_LLAMA_TRAITS, "qk_layernorm": (True,)}),
    fixed=MappingProxyType({**_QWEN_FIXED, "attention_bias": False}),
    settings=lambda given: {
        **_llama_settings({**given, "head_dim": given.get("head_dim", 128)}),
        "qk_layernorm": True,
    },
)


# --- BLOOM and Falcon ------------------------------------------------------------------------------------------------


def _bloom_described(model: ModelConfig) -> dict[str, Any]:
    return {
        "seq_length": derived.max_position_embeddings(model),
        "hidden_size": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "layer_norm_epsilon": model.norm_epsilon,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _bloom_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_layers": given.get("n_layer", given.get("num_hidden_layers")),
        "hidden_size": given.get("hidden_size", given.get("n_embed")),
        "num_attention_heads": given.get("n_head", given.get("num_attention_heads")),
        "seq_length": given.get("seq_length") or 2048,
        "hidden_dropout": given.get("hidden_dropout", 0.0),
        "attention_dropout": given.get("attention_dropout", 0.0),
        "norm_epsilon": given.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
    }


def _bloom_block(attention: tuple[FamilyRow, ...]) -> tuple[FamilyRow, ...]:
    return (
        *both("input_norm", "input_layernorm"),
        *attention,
        *both("attention.projection", "self_attention.dense"),
        *both("post_attention_norm", "post_attention_layernorm"),
        *both("mlp.up", "mlp.dense_h_to_4h"),
        *both("mlp.down", "mlp.dense_4h_to_h"),
    )


_FUSED = both("attention.qkv", "self_attention.query_key_value", HEADS, HEADS)
_BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    MappingProxyType(
        {
            **_PLAIN,
            "position_embedding_type": ("alibi",),
            "embed_layernorm": (True,),
            "feed-forward width": ("4 h",),
        }
    ),
    (
        row("embedding.word.weight", "word_embeddings.weight"),
        *both("embedding.norm", "word_embeddings_layernorm"),
        *both("final_norm", "ln_f"),
    ),
    _bloom_block(_FUSED),
    "transformer",
    "h",
    MappingProxyType({"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}),
    _bloom_described,
    _bloom_settings,
)


def _falcon_described(model: ModelConfig) -> dict[str, Any]:
    return {
        "max_position_embeddings": derived.max_position_embeddings(model),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "multi_query": derived.num_key_value_heads(model) == 1,
        "bias": not model.disable_bias_linear,
        "ffn_hidden_size": derived.ffn_hidden_size(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        **_rope_described(model),
    }


def _falcon_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    is_multi_query = given.get("multi_query", True) and given["num_attention_heads"] > 1
    return {
        "num_layers": given["num_hidden_layers"],
        "hidden_size": given["hidden_size"],
        "num_attention_heads": given["num_attention_heads"],
        "group_query_attention": is_multi_query,
        "seq_length": given.get("max_position_embeddings", 2048),
        "ffn_hidden_size": given.get("ffn_hidden_size"),
        "hidden_dropout": given.get("hidden_dropout", 0.0),
        "attention_dropout": given.get("attention_dropout", 0.0),
        "norm_epsilon": given.get("layer_norm_epsilon", 1e-5),
        "disable_bias_linear": not given.get("bias", False),
        **_rope_settings(given),
    }


_FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    MappingProxyType(
        {
            **{name: legal for name, legal in _PLAIN.items() if name not in ("biases", "scaled rotary positions")},
            "position_embedding_type": ("rope",),
            "heads of keys and values": ("all", "one"),
        }
    ),
    (row("embedding.word.weight", "word_embeddings.weight"), *both("final_norm", "ln_f")),
    _bloom_block(
        (
            *_FUSED,
            *both("attention.query attention.key_value", "self_attention.query_key_value", _JOINED, _JOINED_BIAS),
        )
    ),
    "transformer",
    "h",
    MappingProxyType(
        {
            "activation": "gelu_pytorch_tanh",
            "alibi": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
        }
    ),
    _falcon_described,
    _falcon_settings,
    MappingProxyType({"activation": "gelu", "parallel_attn": True}),
)

# By transformers' model_type; Mistral's models are exported as Llama's, which comes first.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.model_type: family for family in (_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _BLOOM, _FALCON)}
)
