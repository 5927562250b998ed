"""The families of models, small and of inconvenient sizes, as settings of a run."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

ROPE: Mapping[str, Any] = MappingProxyType({"position_embedding_type": "rope"})
LLAMA: Mapping[str, Any] = MappingProxyType(
    {
        **ROPE,
        "normalization": "RMSNorm",
        "swiglu": True,
        "ffn_hidden_size": 168,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "norm_epsilon": 1e-6,
    }
)
GROUPED: Mapping[str, Any] = MappingProxyType({"group_query_attention": True, "num_query_groups": 2})

# Heads are 12 of 5 elements where nothing else is said, which rotary positions cannot turn.
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gpt2": MappingProxyType({}),
        "llama2": MappingProxyType({**LLAMA, "kv_channels": 6}),
        "llama3": MappingProxyType(
            {
                **LLAMA,
                **GROUPED,
                "kv_channels": 6,
                "rotary_base": 500_000.0,
                "use_rope_scaling": True,
                "rope_scaling_factor": 32.0,
            }
        ),
        "qwen2": MappingProxyType({**LLAMA, **GROUPED, "kv_channels": 6, "add_qkv_bias": True}),
        "qwen3": MappingProxyType({**LLAMA, **GROUPED, "kv_channels": 8, "qk_layernorm": True}),
        "bloom": MappingProxyType({"position_embedding_type": "alibi", "embed_layernorm": True}),
        "falcon": MappingProxyType(
            {
                **ROPE,
                "group_query_attention": True,
                "disable_bias_linear": True,
                "kv_channels": 6,
                "rotary_percent": 0.7,
                "rotary_seq_len_interpolation_factor": 2.0,
            }
        ),
        "nope": MappingProxyType(
            {
                "position_embedding_type": "none",
                "squared_relu": True,
                "normalization": "RMSNorm",
                "qk_layernorm": True,
                "group_query_attention": True,
                "num_query_groups": 6,
            }
        ),
    }
)
