"""Named groups of settings: models, `--preset gpt2-124m`, and the ZeRO paper's configurations, `--zero-config C4`.

A preset fills in settings of the model: the shape, the sequence length and the vocabulary.  Llama's (2, 3 and 3.1),
Qwen's and BLOOM's are those of their published configurations.  Of the others, GPT-2s with its vocabulary, dropout and
initial values are the defaults; the shapes are OpenAI's GPT-2 and GPT-3 (of whose table two rows have one width: 16
heads of 128 in 1.3B, 40 heads of 128 in 13B), those that the ZeRO paper measures (table 4 and its appendix), Megatron-
LM's 8.3B and Turing-NLG.  The paper runs two shapes with 40 and 60 billion parameters, of which the wider is named so;
zero-dp are those that it trains by data parallelism alone.  Names have the papers' rounded sizes; `num_parameters`
(config/derived.py) counts them.

A ZeRO configuration fills in the states that are partitioned and the place of activation checkpoints (ZeRO, table 3);
the buffers of constant size, which every configuration of that table has, are always there.  A file and flags that name
the same setting take precedence over both.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

GPT2_VOCABULARY = 50_257
GPT2_CONTEXT = 1024
GPT3_CONTEXT = 2048


Row = Mapping[str, int | float | bool | str]


def _model(num_layers: int, hidden_size: int, num_attention_heads: int, context: int) -> Row:
    row = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": context,
        "max_position_embeddings": context,
        "vocab_size": GPT2_VOCABULARY,
    }
    return MappingProxyType(row)


def _models(context: int, shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, Row]:
    """Return the settings of models by name, from (layers, width, heads) and the sequence length that they share."""
    return {name: _model(*shape, context) for name, shape in shapes.items()}


_NO_DROPOUT: Row = MappingProxyType({"hidden_dropout": 0.0, "attention_dropout": 0.0})
_LLAMA: Row = MappingProxyType(
    {
        **_NO_DROPOUT,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
    }
)


def _llama(
    num_layers: int,
    hidden_size: int,
    heads: int,
    groups: int,
    inner: int,
    *,
    context: int,
    vocabulary: int,
    **more: Any,
) -> Row:
    """Return a model of Llama's kind; groups: heads of keys and values."""
    row = {**_model(num_layers, hidden_size, heads, context), **_LLAMA, "ffn_hidden_size": inner}
    grouped = {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}
    return MappingProxyType({**row, "vocab_size": vocabulary, **grouped, **more})


_LLAMA_3 = partial(_llama, context=8192, vocabulary=128_256, rotary_base=500_000.0)
_LLAMA_31 = partial(_llama, context=131_072, vocabulary=128_256, rotary_base=500_000.0, use_rope_scaling=True)
_QWEN = partial(_llama, rotary_base=1_000_000.0, norm_epsilon=1e-6)


def _bloom(num_layers: int, hidden_size: int, heads: int, std: float) -> Row:
    more: Row = {
        "position_embedding_type": "alibi",
        "embed_layernorm": True,
        "vocab_size": 250_880,
        "init_method_std": std,
    }
    return MappingProxyType(
        {**_model(num_layers, hidden_size, heads, GPT3_CONTEXT), **_NO_DROPOUT, **more, "vocab_size": 250_880}
    )


PRESETS: Mapping[str, Row] = MappingProxyType(
    {
        "llama2-7b": _llama(32, 4096, 32, 32, 11_008, context=4096, vocabulary=32_000),
        "llama2-70b": _llama(80, 8192, 64, 8, 28_672, context=4096, vocabulary=32_000),
        "llama3-8b": _LLAMA_3(32, 4096, 32, 8, 14_336),
        "llama3-70b": _LLAMA_3(80, 8192, 64, 8, 28_672),
        "llama3.1-405b": _LLAMA_31(126, 16_384, 128, 8, 53_248),
        "qwen2.5-7b": _QWEN(28, 3584, 28, 4, 18_944, context=131_072, vocabulary=152_064, add_qkv_bias=True),
        "qwen3-8b": _QWEN(
            36, 4096, 32, 8, 12_288, context=40_960, vocabulary=151_936, qk_layernorm=True, kv_channels=128
        ),
        "bloom-560m": _bloom(24, 1024, 16, 0.02),
        "bloom-176b": _bloom(70, 14_336, 112, 0.0048),
        **_models(
            GPT2_CONTEXT,
            {
                "gpt2-124m": (12, 768, 12),
                "gpt2-355m": (24, 1024, 16),
                "gpt2-774m": (36, 1280, 20),
                "gpt2-1.5b": (48, 1600, 25),
            },
        ),
        **_models(
            GPT3_CONTEXT,
            {
                "gpt3-125m": (12, 768, 12),
                "gpt3-350m": (24, 1024, 16),
                "gpt3-760m": (24, 1536, 16),
                "gpt3-1.3b": (24, 2048, 16),
                "gpt3-2.7b": (32, 2560, 32),
                "gpt3-6.7b": (32, 4096, 32),
                "gpt3-13b": (40, 5120, 40),
                "gpt3-175b": (96, 12288, 96),
            },
        ),
        **_models(
            GPT2_CONTEXT,
            {
                "zero-1.5b": (48, 1600, 16),
                "zero-8b": (72, 3072, 24),
                "zero-20b": (98, 4096, 32),
                "zero-40b": (88, 6144, 32),
                "zero-40b-wide": (50, 8192, 32),
                "zero-60b": (132, 6144, 32),
                "zero-60b-wide": (75, 8192, 32),
                "zero-80b": (100, 8192, 64),
                "zero-100b": (125, 8192, 64),
                "zero-120b": (150, 8192, 64),
                "zero-140b": (175, 8192, 64),
                "zero-150b": (187, 8192, 64),
                "zero-170b": (212, 8192, 64),
                "zero-dp-1.5b": (34, 1920, 16),
                "zero-dp-2.5b": (54, 1920, 16),
                "zero-dp-4b": (64, 2304, 24),
                "zero-dp-6b": (52, 3072, 24),
                "zero-dp-8b": (72, 3072, 24),
                "zero-dp-10b": (50, 4096, 32),
                "zero-dp-11b": (54, 4096, 32),
                "zero-dp-12b": (58, 4096, 32),
                "zero-dp-13b": (62, 4096, 32),
                "megatron-8.3b": (72, 3072, 32),
                "turing-nlg-17b": (78, 4256, 28),
            },
        ),
    }
)


def _zero(stage: int, *, partitioned: bool = False, in_cpu: bool = False) -> Mapping[str, int | str | bool]:
    """Return a ZeRO configuration's settings; all of them set the same names, so a later one replaces it whole."""
    row: dict[str, int | str | bool] = {
        "zero_stage": stage,
        "contiguous_gradients": True,
        "recompute_granularity": "full",
        "contiguous_checkpointing": True,
        "partition_activations": partitioned,
        "checkpoint_in_cpu": in_cpu,
    }
    return MappingProxyType(row)


ZERO_CONFIGS: Mapping[str, Mapping[str, int | str | bool]] = MappingProxyType(
    {
        "C1": _zero(1),
        "C2": _zero(1, partitioned=True),
        "C3": _zero(2),
        "C4": _zero(2, partitioned=True),
        "C5": _zero(2, partitioned=True, in_cpu=True),
    }
)
