"""GPT-2 in plain modules: pre-LN blocks, learned positions, tanh GELU, biases, a head tied to the embedding.

Shapes, as suffixes and comments: b = micro-batch, s = sequence, h = hidden, n = heads, d = head_dim = h / n,
f = feed-forward width, V = vocabulary, Vp = padded vocabulary, t = tensor-parallel degree.

Nothing here communicates: the layers of `tensor_parallel/` do, at the borders of a block's two sharded regions
(attention and feed-forward).  A *unit* is a group of parameters that is used at one place and time, the grain at which
ZeRO lays out, reduces and gathers.  Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 3.
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from megazero.activations.plan import KEEP_ALL, ActivationPlan
from megazero.activations.recompute import Recomputation
from megazero.config.derived import ffn_hidden_size, max_position_embeddings
from megazero.config.model import ModelConfig
from megazero.parallel.param_spec import Init
from megazero.tensor_parallel.head_loss import Targets
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    replicated_parameter,
)
from megazero.tensor_parallel.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead


class Unit(NamedTuple):
    """A group of parameters that is needed at once, and the modules whose forwards read it."""

    name: str
    parameters: list[str]
    consumers: tuple[nn.Module, ...]


class GPT(nn.Module):
    """The model as one tensor-parallel rank holds it; every parameter is left uninitialised.

    vocab_size counts the real ids, padded_vocab_size the rows that the ranks hold together.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        tp: TensorParallel,
        padded_vocab_size: int,
        activations: ActivationPlan = KEEP_ALL,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.max_positions = max_position_embeddings(config)
        self._logits_chunk_bytes = activations.logits_chunk_bytes
        self._recomputation = activations.recomputation
        self._segments = activations.segments(config.num_layers)
        self.embedding = Embedding(config, tp, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size)
        self.layers = nn.ModuleList(Block(config, tp, activations.core) for _ in range(config.num_layers))
        self.final_norm = LayerNorm(config, tp)
        self.head: TiedHead | VocabParallelHead = TiedHead(tp)
        if config.untie_embeddings_and_output_weights:
            self.head = VocabParallelHead(
                tp,
                vocab_size=vocab_size,
                padded_vocab_size=padded_vocab_size,
                hidden_size=config.hidden_size,
                init=Init("normal", config.init_method_std),
            )

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] to this rank's logits [b, s, Vp/t]; s is at most `max_positions`."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads: tokens [b, s] to [b, s, h]."""
        if self._recomputation is not None:
            self._recomputation.checkpoints.begin_pass()
        x: Tensor = self.embedding(tokens)
        for segment in self._segments:
            layers = list(self.layers)[segment.start : segment.stop]
            if segment.is_recomputed and self._recomputation is not None:
                x = self._recomputation.run(_through, layers, x)
            else:
                x = _through(layers, x)
        return self.final_norm(x)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """[b, s, h] to this rank's logits [b, s, Vp/t]."""
        return self.head(hidden, *self._head_matrix())  # type: ignore[no-any-return]

    def summed_loss(self, tokens: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """The sum of all positions' cross-entropies, each times its mask, without dimensions; in float32 or float64.

        tokens, labels and loss_mask [b, s]; without a mask every position counts 1.
        """
        targets = Targets(labels, loss_mask, self.vocab_size, self._logits_chunk_bytes)
        return self.head(self.hidden(tokens), *self._head_matrix(), targets=targets)  # type: ignore[no-any-return]

    def _head_matrix(self) -> tuple[Tensor, ...]:
        """What a head without a matrix of its own must be given."""
        return (self.embedding.word.weight,) if isinstance(self.head, TiedHead) else ()

    def units(self) -> list[Unit]:
        """Every parameter once, in the order of use; the word embedding is alone, since the tied head needs it too."""
        modules: list[tuple[str, nn.Module]] = [
            ("embedding.word", self.embedding.word),
            ("embedding.position", self.embedding.position),
        ]
        modules += [(f"layers.{index}", layer) for index, layer in enumerate(self.layers)]
        modules.append(("final_norm", self.final_norm))
        if isinstance(self.head, VocabParallelHead):
            modules.append(("head", self.head))
        also = {"embedding.word": (self.head,)} if isinstance(self.head, TiedHead) else {}
        return [
            Unit(name, [f"{name}.{key}" for key, _ in module.named_parameters()], (module, *also.get(name, ())))
            for name, module in modules
        ]


def _through(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """One layer after the other, [b, s, h] to [b, s, h]."""
    for layer in layers:
        x = layer(x)
    return x


class Embedding(nn.Module):
    """Word plus position vectors, then dropout."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, *, vocab_size: int, padded_vocab_size: int) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            tp,
            vocab_size=vocab_size,
            padded_vocab_size=padded_vocab_size,
            hidden_size=config.hidden_size,
            init=Init("normal", config.init_method_std),
        )
        self.position = PositionEmbedding(config, tp)
        self._dropout = config.hidden_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) + self.position(tokens.shape[1])  # [b, s, h] + [s, h]
        return F.dropout(x, self._dropout, self.training)


class PositionEmbedding(nn.Module):
    """A learned vector for each of the first s positions."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (max_position_embeddings(config), config.hidden_size)
        self.weight = replicated_parameter(tp, shape, init=Init("normal", config.init_method_std), decay=True)

    def forward(self, length: int) -> Tensor:
        assert length <= self.weight.shape[0], f"{length} tokens, {self.weight.shape[0]} positions"
        return self.weight[:length]  # [s, h]


class LayerNorm(nn.Module):
    """nn.LayerNorm over h, with a weight that is left uninitialised."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self._epsilon = config.norm_epsilon
        self.weight = replicated_parameter(tp, (config.hidden_size,), init=Init("ones"), decay=False)
        self.bias = replicated_parameter(tp, (config.hidden_size,), init=Init("zeros"), decay=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._epsilon)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); [b, s, h] to [b, s, h]."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, core: Recomputation | None) -> None:
        super().__init__()
        self.input_norm = LayerNorm(config, tp)
        self.attention = Attention(config, tp, core)
        self.post_attention_norm = LayerNorm(config, tp)
        self.mlp = FeedForward(config, tp)
        self._dropout = config.hidden_dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.input_norm(x)), self._dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_norm(x)), self._dropout, self.training)


class Attention(nn.Module):
    """Causal self-attention; a rank has n/t heads, from its part of the fused query, key and value matrix.

    core: recomputes what is between these three and the projection, if anything does.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, core: Recomputation | None) -> None:
        super().__init__()
        self._core = core
        hidden, heads = config.hidden_size, config.num_attention_heads
        self._head_dim = hidden // heads
        self._dropout = config.attention_dropout
        self._random = tp.random
        self.qkv = ColumnParallelLinear(
            tp,
            logical_shape=(3, heads, self._head_dim, hidden),
            split_dim=1,
            init=Init("normal", config.init_method_std),
        )
        self.projection = RowParallelLinear(tp, logical_shape=(hidden, hidden), init=_output_init(config))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, -1, self._head_dim))  # [b, s, 3, n/t, d]
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each [b, n/t, s, d]
        attend = self._attend if self._core is None else partial(self._core.run, self._attend)
        return self.projection(attend(query, key, value))  # type: ignore[no-any-return]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The core: [b, n/t, s, d] three times to [b, s, h/t]."""
        dropout = self._dropout if self.training else 0.0
        with self._dropout_region(dropout):
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)

    def _dropout_region(self, dropout: float) -> AbstractContextManager[None]:
        """Each rank has other heads, so it needs other masks; without dropout nothing is drawn."""
        return self._random.sharded() if dropout > 0 else nullcontext()


class FeedForward(nn.Module):
    """down(gelu(up(x))) with f/t of the inner elements on each rank."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = ffn_hidden_size(config)
        init = Init("normal", config.init_method_std)
        self.up = ColumnParallelLinear(tp, logical_shape=(inner, hidden), split_dim=0, init=init)
        self.down = RowParallelLinear(tp, logical_shape=(hidden, inner), init=_output_init(config))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


def _output_init(config: ModelConfig) -> Init:
    """The two matrices that write into the residual stream start smaller, so that its variance stays near 1."""
    return Init("normal", config.init_method_std / math.sqrt(2.0 * config.num_layers))
