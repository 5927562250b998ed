"""A GPT-2 or a Llama of torch's own modules with the first values of megazero's, which others train in comparisons.

Pre-LN blocks, causal scaled-dot-product attention, and the cross-entropy of all logits at once.  By the settings of
megazero's model they have layer norms or RMSNorm, learned or rotary positions, heads of keys and values for every head
or for groups of them, tanh GELU or SwiGLU, biases or none, and a head tied to the word embedding or of its own.
Parameters have the names and shapes of `megazero.model.gpt`: the fused query, key and value matrix has the rows [3,
heads, width], the one of keys and values [2, groups, width], and SwiGLU's [2, inner width], the gate first.

Shapes, in comments: b = samples, s = sequence, h = hidden, a = heads, g = heads of keys and values, d = a head's width,
f = inner width, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from megazero.comm.local import LocalCommunicator
from megazero.config.derived import ffn_hidden_size, head_width, num_key_value_heads
from megazero.config.model import ModelConfig
from megazero.model.gpt import GPT
from megazero.model.initial_values import initial_value
from megazero.optim.inner import AdamWSettings
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

ADAMW = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CLIP = 1.0


# Settings of megazero's model that the plain one has only the default of.
_ABSENT = (
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "qk_layernorm",
    "embed_layernorm",
    "squared_relu",
    "add_qkv_bias",
    "lora_rank",
)


def beside_gpt2(config: ModelConfig) -> dict[str, Any]:
    """Return the settings, by name, in which a model differs from a GPT-2 of its size."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    gpt2 = ModelConfig(**{name: getattr(config, name) for name in sizes}, hidden_dropout=0.0, attention_dropout=0.0)
    return {name: value for name, value in asdict(config).items() if value != getattr(gpt2, name)}


def absent_from_plain(config: ModelConfig) -> list[str]:
    """Return the settings of a model, as flags, that the plain model has not got."""
    given = beside_gpt2(config)
    named = [name for name in _ABSENT if name in given]
    named += ["position_embedding_type"] if config.position_embedding_type in ("alibi", "none") else []
    return [f"--{name.replace('_', '-')} {given[name]}" for name in named]


class PlainGPT(nn.Module):
    """A model that maps tokens and labels [b, s] to the mean loss []; values are torch's until `fill_` is called."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
        hidden = config.hidden_size
        self.embedding = nn.ModuleDict({"word": nn.Embedding(config.vocab_size, hidden)})
        self._rotates = config.position_embedding_type == "rope"
        if not self._rotates:
            self.embedding["position"] = nn.Embedding(config.seq_length, hidden)
        self.layers = nn.ModuleDict({str(index): Block(config) for index in range(config.num_layers)})
        self.final_norm = _norm(config)
        has_head = config.untie_embeddings_and_output_weights
        self.head = nn.Linear(hidden, config.vocab_size, bias=False) if has_head else None
        self._base, self._width = config.rotary_base, head_width(config)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding["word"](tokens)  # [b, s, h]
        rotation = self._rotation(positions, x.dtype) if self._rotates else None
        x = x if self._rotates else x + self.embedding["position"](positions)
        for block in self.layers.values():
            x = block(x, rotation)
        x = self.final_norm(x)
        logits = F.linear(x, self.embedding["word"].weight) if self.head is None else self.head(x)  # [b, s, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of the angles of every token, [s, 1, d / 2]."""
        numbers = torch.arange(0, self._width, 2, device=positions.device)
        angles = torch.outer(positions.float(), self._base ** (-numbers.float() / self._width)).unsqueeze(1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)); [b, s, h]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_norm = _norm(config)
        self.attention = Attention(config)
        self.post_attention_norm = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.input_norm(x), rotation)
        return x + self.mlp(self.post_attention_norm(x))


class Attention(nn.Module):
    """Causal self-attention, [b, s, h]; rotation: of queries and keys, None where positions are the embedding's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, has_bias = config.hidden_size, not config.disable_bias_linear
        heads, groups, self._width = config.num_attention_heads, num_key_value_heads(config), head_width(config)
        self._is_grouped = groups != heads
        if self._is_grouped:
            self.query = nn.Linear(hidden, heads * self._width, bias=has_bias)
            self.key_value = nn.Linear(hidden, 2 * groups * self._width, bias=has_bias)
        else:
            self.qkv = nn.Linear(hidden, 3 * heads * self._width, bias=has_bias)
        self.projection = nn.Linear(heads * self._width, hidden, bias=has_bias)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None = None) -> Tensor:
        if self._is_grouped:
            query = self.query(x).unflatten(-1, (-1, self._width))  # [b, s, a, d]
            key, value = self.key_value(x).unflatten(-1, (2, -1, self._width)).unbind(2)  # each [b, s, g, d]
        else:
            query, key, value = self.qkv(x).unflatten(-1, (3, -1, self._width)).unbind(2)
        if rotation is not None:
            query, key = _rotated(query, *rotation), _rotated(key, *rotation)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self._is_grouped)
        y: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """A block's feed-forward layer, down(gelu(up(x))) or SwiGLU's down(silu(gate) * up); [b, s, h]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, has_bias = config.hidden_size, ffn_hidden_size(config), not config.disable_bias_linear
        self._has_gate = config.swiglu
        self.up = nn.Linear(hidden, 2 * inner if config.swiglu else inner, bias=has_bias)
        self.down = nn.Linear(inner, hidden, bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)  # [b, s, f], or [b, s, 2 f]
        if self._has_gate:
            gate, inner = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * inner
        else:
            inner = F.gelu(inner, approximate="tanh")
        y: Tensor = self.down(inner)
        return y


def _norm(config: ModelConfig) -> nn.Module:
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    return kind(config.hidden_size, eps=config.norm_epsilon)


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (i, i + d / 2) of every head's elements; x [b, s, heads, d]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def plain_gpt(config: ModelConfig, seed: int, device: torch.device) -> PlainGPT:
    """Make the model with the first values of the seed."""
    model = hollow_gpt(config).to_empty(device=device)
    fill_(model, config, seed)
    return model


def hollow_gpt(config: ModelConfig) -> PlainGPT:
    """Make the model on the meta device, without memory."""
    with torch.device("meta"):
        return PlainGPT(config)


def fill_(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Write the first values of megazero's model into a PlainGPT, whole or cut by `fully_shard`, by name."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, drawn in first_values(config, seed):
            parameter = parameters.pop(name)
            value = drawn.view(parameter.shape).to(parameter.device)
            if isinstance(parameter, DTensor):  # every process draws all of it, and keeps its part
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
    assert not parameters, f"{', '.join(parameters)} of the plain model only"


def first_values(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the first value of each of megazero's parameters, one after the other."""
    for spec, _ in named_specs(_megazero_model(config)):
        yield spec.name, initial_value(spec, seed)


def _megazero_model(config: ModelConfig) -> GPT:
    """Make megazero's model on the meta device, to learn which parameters it has and how their values are drawn."""
    assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
    random = RandomRegions(0, 0, torch.device("cpu"))
    tp = TensorParallel(LocalCommunicator(), random, torch.float32, torch.device("meta"))
    return GPT(config, vocab_size=config.vocab_size, tp=tp, padded_vocab_size=config.vocab_size)


def adamw(model: nn.Module, lr: float, make: Callable[..., Optimizer] = AdamW) -> Optimizer:
    """Make an optimizer by `make` with megazero's settings and torch's fused kernel.

    Only matrices and embeddings have weight decay.
    """
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return make(groups, lr=lr, betas=(ADAMW.beta1, ADAMW.beta2), eps=ADAMW.eps, fused=True)
