"""Names and layouts of parameters in Megatron-LM and Megatron-DeepSpeed: one table for all their dialects.

The dialects are those of Megatron-core (with layers of its own, and with Transformer Engine's), of older versions of
Megatron-LM, and of Megatron-DeepSpeed's pipeline.  `RENAMED` turns all of them into Megatron-core's own; `ENDS` and
`BLOCK` pair these with megazero's, as the tables of families do; `CUT` has the dim along which tensor parallelism cuts.

    heads     [3, a, d, in] here, rows in the order of heads there, each with its query, key and value
    groups    [a, d, in] and [2, g, d, in] here; there rows in the order of groups, each with its queries, key and value
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from megazero.checkpoint.hugging_face.families import HEADS, ROWS, FamilyRow, Form, both, row

WORDS, HEAD, LAYERS = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.layers"
VOCABULARY = frozenset({WORDS, HEAD})


def _joined(ours: list[Tensor]) -> list[Tensor]:
    query, pairs = ours
    groups = pairs.shape[1]
    queries = query.reshape(groups, -1, *query.shape[1:])
    return [torch.cat((queries, pairs.transpose(0, 1)), dim=1).flatten(0, 2)]


def _parted(theirs: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    (heads, width, *rest), groups = shapes[0], shapes[1][1]
    packed = theirs[0].reshape(groups, heads // groups + 2, width, *rest)
    return [packed[:, :-2].reshape(shapes[0]), packed[:, -2:].transpose(0, 1).contiguous()]


_GROUPS = Form(_joined, _parted)
_FLAT = Form(lambda ours: [ours[0].flatten()], ROWS.to_ours)

ENDS: tuple[FamilyRow, ...] = (
    row("embedding.word.weight", WORDS),
    row("embedding.position.weight", "embedding.position_embeddings.weight"),
    *both("embedding.norm", "embedding.norm"),
    *both("final_norm", "decoder.final_layernorm"),
    row("head.weight", HEAD),
)
BLOCK: tuple[FamilyRow, ...] = (
    *both("input_norm", "input_layernorm"),
    *both("attention.qkv", "self_attention.linear_qkv", HEADS, HEADS),
    *both("attention.query attention.key_value", "self_attention.linear_qkv", _GROUPS, _GROUPS),
    *both("attention.query_norm", "self_attention.q_layernorm"),
    *both("attention.key_norm", "self_attention.k_layernorm"),
    *both("attention.projection", "self_attention.linear_proj"),
    *both("post_attention_norm", "pre_mlp_layernorm"),
    *both("mlp.up", "mlp.linear_fc1", ROWS, _FLAT),
    *both("mlp.down", "mlp.linear_fc2"),
)

# {the end of a name: the dim along which tensor parallelism cuts it}; all others are whole on every process.
CUT: Mapping[str, int] = MappingProxyType(
    {
        "word_embeddings.weight": 0,
        "output_layer.weight": 0,
        "linear_qkv.weight": 0,
        "linear_qkv.bias": 0,
        "linear_fc1.weight": 0,
        "linear_fc1.bias": 0,
        "linear_proj.weight": 1,
        "linear_fc2.weight": 1,
    }
)

# (what a name has, what is there in Megatron-core's), in the order in which they are replaced.
RENAMED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), text)
    for pattern, text in (
        (r"^(?:(?:module|model|language_model)\.)+", ""),
        # A pipeline of DeepSpeed numbers its modules; the tied embedding has a name.
        (r"^(?:tied_modules\.embed|\d+)\.(?=(?:word|position)_embeddings\.)", "embedding."),
        (r"^(\d+)\.(?=(?:input|post_attention)_(?:layer)?norm\.|(?:self_)?attention\.|mlp\.)", rf"{LAYERS}.\1."),
        (r"^\d+\.(?=(?:weight|bias)$)", "decoder.final_layernorm."),
        (r"^(?:\d+\.)?lm_head\.", "output_layer."),
        (r"^embedding\.word_embeddings\.norm\.", "embedding.norm."),
        (r"^(?:encoder|transformer)\.", "decoder."),
        (r"(?<=\.)final_norm\.", "final_layernorm."),
        (r"(?<=\d)\.attention\.", ".self_attention."),
        (r"(?<=\.)input_norm\.", "input_layernorm."),
        (r"(?<=\.)post_attention_(?:layer)?norm\.", "pre_mlp_layernorm."),
        (r"(?<=\.)query_key_value\.", "linear_qkv."),
        (r"(?<=self_attention)\.dense\.", ".linear_proj."),
        (r"(?<=\.)dense_h_to_4h\.", "linear_fc1."),
        (r"(?<=\.)dense_4h_to_h\.", "linear_fc2."),
        # Transformer Engine's layers have the norm before them.
        (r"(?<=\.)self_attention\.linear_qkv\.layer_norm_(?=(?:weight|bias)$)", "input_layernorm."),
        (r"(?<=\.)mlp\.linear_fc1\.layer_norm_(?=(?:weight|bias)$)", "pre_mlp_layernorm."),
    )
)

# What holds no parameter, or one that is stored elsewhere too.
_WITHOUT = re.compile(
    r"_extra_state|rotary_pos_emb|inv_freq|word_embeddings_for_head|position_ids|_float8_|masked_bias"
)
_LAYER = re.compile(rf"{re.escape(LAYERS)}\.(\d+)\.(.+)")


def core_name(name: str) -> str | None:
    """Return Megatron-core's name of a parameter; None for what is none."""
    if _WITHOUT.search(name):
        return None
    for pattern, text in RENAMED:
        name = pattern.sub(text, name)
    return name


def layer_of(name: str) -> tuple[int, str] | None:
    """Return the layer of one of Megatron-core's names and the name in it; None outside of blocks."""
    found = _LAYER.fullmatch(name)
    return None if found is None else (int(found[1]), found[2])


def in_layer(number: int, name: str) -> str:
    """Return Megatron-core's name of a parameter of a layer."""
    return f"{LAYERS}.{number}.{name}"


def cut_dim(name: str) -> int | None:
    """Return the dim along which tensor parallelism cuts a parameter; None if it does not."""
    return next((dim for end, dim in CUT.items() if name.endswith(end)), None)
