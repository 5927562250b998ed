"""Named groups of settings: models, `--preset gpt2-124m`, and the ZeRO paper's configurations, `--zero-config C4`.

A preset fills in settings of the model; shapes are those of OpenAI's published GPT-2 models with 124M and 1.5B
parameters, dropout and initial values are the defaults.  A ZeRO configuration fills in the states that are partitioned
and the place of activation checkpoints (ZeRO, table 3); the buffers of constant size, which every configuration of that
table has, are always there.  A file and flags that name the same setting take precedence over both.
"""

from collections.abc import Mapping
from types import MappingProxyType

GPT2_VOCABULARY = 50_257
GPT2_CONTEXT = 1024


def _gpt2(num_layers: int, hidden_size: int, num_attention_heads: int) -> Mapping[str, int]:
    row = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": GPT2_CONTEXT,
        "max_position_embeddings": GPT2_CONTEXT,
        "vocab_size": GPT2_VOCABULARY,
    }
    return MappingProxyType(row)


PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "gpt2-124m": _gpt2(12, 768, 12),
        "gpt2-1.5b": _gpt2(48, 1600, 25),
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
