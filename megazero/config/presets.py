"""Named groups of settings: models, `--preset gpt2-124m`, and the ZeRO paper's configurations, `--zero-config C4`.

A preset fills in settings of the model: the shape, the sequence length and GPT-2's vocabulary; dropout and initial
values are the defaults.  The shapes are OpenAI's GPT-2 and GPT-3 (of whose table two rows have one width: 16 heads of
128 in 1.3B, 40 heads of 128 in 13B), those that the ZeRO paper measures (table 4 and its appendix), Megatron-LM's 8.3B
and Turing-NLG.  The paper runs two shapes with 40 and 60 billion parameters, of which the wider is named so; zero-dp
are those that it trains by data parallelism alone.  Names have the papers' rounded sizes; `num_parameters`
(config/derived.py) counts them.

A ZeRO configuration fills in the states that are partitioned and the place of activation checkpoints (ZeRO, table 3);
the buffers of constant size, which every configuration of that table has, are always there.  A file and flags that name
the same setting take precedence over both.
"""

from collections.abc import Mapping
from types import MappingProxyType

GPT2_VOCABULARY = 50_257
GPT2_CONTEXT = 1024
GPT3_CONTEXT = 2048


def _model(num_layers: int, hidden_size: int, num_attention_heads: int, context: int) -> Mapping[str, int]:
    row = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": context,
        "max_position_embeddings": context,
        "vocab_size": GPT2_VOCABULARY,
    }
    return MappingProxyType(row)


def _models(context: int, shapes: Mapping[str, tuple[int, int, int]]) -> dict[str, Mapping[str, int]]:
    """Return the settings of models by name, from (layers, width, heads) and the sequence length that they share."""
    return {name: _model(*shape, context) for name, shape in shapes.items()}


PRESETS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
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
