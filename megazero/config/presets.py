"""Named models, one row each: `--preset gpt2-124m`.

A preset fills in settings of the model; a file and flags that name the same setting win over it.  Shapes are OpenAI's
published GPT-2 ones (the 124M and 1.5B models), dropout and initial values are the defaults.
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
