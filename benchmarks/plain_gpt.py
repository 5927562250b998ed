"""A GPT-2 of torch's own modules with the first values of megazero's model, which other systems train in comparisons.

Pre-LN blocks, learned positions, tanh GELU, causal scaled-dot-product attention, a head tied to the word embedding, and
the cross-entropy of all logits at once.  Parameters have the names and shapes of `megazero.model.gpt`: the fused query,
key and value matrix has the rows [3, heads, head_dim].

Shapes, in comments: b = samples, s = sequence, h = hidden, a = heads, d = h / a, V = vocabulary.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW, Optimizer

from megazero.comm.local import LocalCommunicator
from megazero.config.model import ModelConfig
from megazero.model.gpt import GPT
from megazero.model.initial_values import initial_value
from megazero.optim.inner import AdamWSettings
from megazero.parallel.param_spec import named_specs
from megazero.tensor_parallel.layers import TensorParallel
from megazero.tensor_parallel.random import RandomRegions

ADAMW = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CLIP = 1.0


class PlainGPT(nn.Module):
    """A GPT-2 that maps tokens and labels [b, s] to the mean loss []; values are torch's until `fill_` is called."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
        hidden = config.hidden_size
        self.embedding = nn.ModuleDict(
            {"word": nn.Embedding(config.vocab_size, hidden), "position": nn.Embedding(config.seq_length, hidden)}
        )
        blocks = {str(index): Block(hidden, config.num_attention_heads) for index in range(config.num_layers)}
        self.layers = nn.ModuleDict(blocks)
        self.final_norm = nn.LayerNorm(hidden)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding["word"](tokens) + self.embedding["position"](positions)  # [b, s, h]
        for block in self.layers.values():
            x = block(x)
        logits = F.linear(self.final_norm(x), self.embedding["word"].weight)  # [b, s, V]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class Block(nn.Module):
    """A transformer block: x + attention(norm(x)), then x + mlp(norm(x)); [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.post_attention_norm = nn.LayerNorm(hidden)
        self.mlp = FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_attention_norm(x))


class Attention(nn.Module):
    """Causal self-attention, [b, s, h]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).view(*x.shape[:2], 3, self._heads, -1)  # [b, s, 3, a, d]
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [b, a, s, d]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """A block's feed-forward layer: down(gelu(up(x))), four times as wide inside; [b, s, h]."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


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
