"""GPT-2 in plain modules: pre-LN blocks, learned positions, tanh GELU, biases, a head tied to the embedding.

Shapes, in comments: b = micro-batch, s = sequence, n = b s tokens in rows, or n = b s / t of them where the sequence is
split, h = hidden, a = heads, d = head_dim = h / a, f = feed-forward width, V = vocabulary, Vp = padded vocabulary,
t = tensor-parallel degree.

Nothing here communicates: the layers of `tensor_parallel/` do, at the borders of a block's two sharded regions
(attention and feed-forward).  A *unit* is a group of parameters that is used at one place and time, by which ZeRO lays
out, reduces and gathers.  Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 3.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.activations.recompute import Recomputation
from megazero.activations.recompute_plan import NO_RECOMPUTATION, ActivationPlan, Segment
from megazero.config.derived import ffn_hidden_size, max_position_embeddings
from megazero.config.model import ModelConfig
from megazero.model.sequences import Sequences
from megazero.parallel.layer_split import Chunk, whole_model
from megazero.parallel.param_spec import Init, Unit, mark_block, share_between_ends
from megazero.tensor_parallel.activation import FusedGelu, gelu
from megazero.tensor_parallel.head_loss import Targets
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    replicated_parameter,
)
from megazero.tensor_parallel.vocab import TiedHead, VocabParallelEmbedding, VocabParallelHead

M = TypeVar("M", bound=nn.Module)


# The word embedding and a head with a matrix of its own.
INPUT_AND_OUTPUT = frozenset({"embedding.word.weight", "head.weight"})


class GPT(nn.Module):
    """The chunks of the model that one rank holds; every parameter is left uninitialised.

    vocab_size counts the real ids, padded_vocab_size the rows that the tensor-parallel ranks hold together.  chunks:
    all of the model if None; names are the whole model's.  Between chunks activations are [n, h].  group_layers: how
    many layers run as one module, which is compiled as one graph and whose parameters ZeRO gathers together.

    A tied head on another pipeline stage than the embedding has its own copy of the matrix, under the same name; the
    gradients of both are summed over the "ends", and only the first is counted and saved.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        vocab_size: int,
        tp: TensorParallel,
        padded_vocab_size: int,
        activations: ActivationPlan = NO_RECOMPUTATION,
        chunks: Sequence[Chunk] | None = None,
        group_layers: int = 1,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self._hidden_size = config.hidden_size
        self._tp = tp
        self.max_positions = max_position_embeddings(config)
        self.chunks = whole_model(config.num_layers) if chunks is None else tuple(chunks)
        self._logits_chunk_bytes = activations.logits_chunk_bytes
        self._recomputation = activations.recomputation
        self._segments = [activations.segments(len(chunk.layers)) for chunk in self.chunks]
        self._group_layers = group_layers
        is_first, is_last = (any(getattr(chunk, end) for chunk in self.chunks) for end in ("is_first", "is_last"))
        is_tied = not config.untie_embeddings_and_output_weights
        sizes = _VocabularySizes(vocab_size, padded_vocab_size)
        if is_first:
            self.embedding: Embedding | EmbeddingCopy = Embedding(config, tp, sizes)
        held = [index for chunk in self.chunks for index in chunk.layers]
        self.layers = nn.ModuleDict(
            {str(index): TransformerBlock(config, tp, activations.core_recomputation) for index in held}
        )
        self.groups = nn.ModuleDict(dict(self._grouped_layers()) if group_layers > 1 else {})
        if is_last:
            self.final_norm = LayerNorm(config, tp)
            self.head = TiedHead(tp) if is_tied else _vocabulary_matrix(VocabParallelHead, config, tp, sizes)
        if is_last and is_tied and not is_first:
            self.embedding = EmbeddingCopy(config, tp, sizes)
        if is_tied and is_first != is_last:
            share_between_ends(self.embedding.word.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [b, s] to this rank's logits [b, s, Vp/t]; s is at most `max_positions`.  For an uncut model."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map tokens [b, s] to the head's input, [b, s, h]; for a model that is not cut in any way."""
        sequences = Sequences(tokens.shape[1])
        x = self.through(0, self.embed(tokens, sequences), sequences)
        normed: Tensor = self.final_norm(x)
        return normed.view(*tokens.shape, -1)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations, which is that of parameters."""
        return self._tp.dtype

    def activation_shape(self, num_tokens: int) -> tuple[int, int]:
        """Return the shape of this rank's activations of so many tokens between layers: [n, h]."""
        rows = self._tp.local_rows(num_tokens)
        return rows.stop - rows.start, self._hidden_size

    def embed(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        """Embed tokens [b, s] as the first chunk's input, [n, h]."""
        x: Tensor = self.embedding(tokens, sequences.positions)
        return x

    def through(self, index: int, x: Tensor, sequences: Sequences) -> Tensor:
        """Run the layers of chunk `index` of this rank, [n, h] to [n, h]."""
        if self._recomputation is not None:
            self._recomputation.checkpoints.begin_pass()
        modules = self.groups or self.layers
        for segment in self._segments[index]:
            layers = [modules[str(held[0])] for held in self._groups_of(index, segment)]
            if segment.is_recomputed and self._recomputation is not None:
                x = self._recomputation.run(_through, layers, x, sequences)
            else:
                x = _through(layers, x, sequences)
        return x

    def _groups_of(self, index: int, segment: Segment) -> Iterator[range]:
        """Yield the layers of a segment of chunk `index`, cut into groups; the last one may be smaller."""
        held = self.chunks[index].layers[segment.start : segment.stop]
        for start in range(0, len(held), self._group_layers):
            yield held[start : start + self._group_layers]

    def _grouped_layers(self) -> Iterator[tuple[str, "BlockGroup"]]:
        """Yield every group of layers, under the number of its first layer."""
        for index, segments in enumerate(self._segments):
            for segment in segments:
                for held in self._groups_of(index, segment):
                    yield str(held[0]), BlockGroup([self.layers[str(layer)] for layer in held])

    def consumers(self) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
        """Yield every module that `through` runs, with its blocks."""
        blocks = list(self.layers.values())
        for module in (self.groups or self.layers).values():
            yield module, [block for block in blocks if isinstance(module, BlockGroup) and block in module] or [module]

    def logits(self, hidden: Tensor) -> Tensor:
        """Map the normed [..., h] to this rank's logits [..., Vp/t] (of all tokens, if they are split)."""
        logits: Tensor = self.head(hidden, *self._head_matrix())
        return logits

    def logits_of(self, x: Tensor, token: int) -> Tensor:
        """Return this rank's logits [Vp/t] of one of a micro-batch's tokens.  x [n, h]: of the last layer."""
        return self.logits(self.final_norm(self._tp.row(x, token).unsqueeze(0)))[0]

    def loss(self, x: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        """Return the sum of all positions' cross-entropies, each times its mask, a scalar in float32 or float64.

        x [n, h]: of the last chunk's last layer.  labels and loss_mask [b, s]; without a mask every position counts 1.
        """
        targets = Targets(labels, loss_mask, self.vocab_size, self._logits_chunk_bytes)
        loss: Tensor = self.head(self.final_norm(x), *self._head_matrix(), targets=targets)
        return loss

    def summed_loss(
        self,
        tokens: Tensor,
        labels: Tensor,
        loss_mask: Tensor | None = None,
        sequences: Sequences | None = None,
    ) -> Tensor:
        """Return the loss of tokens [b, s], for a model that is not cut into chunks.  sequences: plain rows if None."""
        sequences = sequences or Sequences(tokens.shape[1])
        return self.loss(self.through(0, self.embed(tokens, sequences), sequences), labels, loss_mask)

    def _head_matrix(self) -> tuple[Tensor, ...]:
        """Return the embedding's matrix for a head without a matrix of its own."""
        return (self.embedding.word.weight,) if isinstance(self.head, TiedHead) else ()

    def units(self) -> list[Unit]:
        """Return every parameter once, in the order of use; the word embedding, which two modules use, is alone."""
        found = []
        for part, chunk in enumerate(self.chunks):
            names = ["embedding.word", "embedding.position"] if chunk.is_first else []
            names += [f"layers.{index}" for index in chunk.layers]
            if chunk.is_last:
                names += ["final_norm"] if isinstance(self.head, TiedHead) else ["final_norm", "head"]
            if isinstance(getattr(self, "embedding", None), EmbeddingCopy) and chunk.is_last:
                names.append("embedding.word")
            found += [self._unit(name, part) for name in names]
        return found

    def _unit(self, name: str, part: int) -> Unit:
        module = self.get_submodule(name)
        head = getattr(self, "head", None)
        parameters = tuple(f"{name}.{key}" for key, _ in module.named_parameters())
        consumers = tuple(group for group in self.groups.values() if isinstance(group, BlockGroup) and module in group)
        also = (head,) if name == "embedding.word" and isinstance(head, TiedHead) else ()
        return Unit(name, parameters, (*(consumers or (module,)), *also), part)


def _through(layers: Iterable[nn.Module], x: Tensor, sequences: Sequences) -> Tensor:
    """Run one layer after the other, [n, h] to [n, h]."""
    for layer in layers:
        x = layer(x, sequences)
    return x


class _VocabularySizes(NamedTuple):
    """The rows of a matrix as wide as the vocabulary: the real ones, and all with padding."""

    real: int
    padded: int


def _vocabulary_matrix(kind: Callable[..., M], config: ModelConfig, tp: TensorParallel, sizes: _VocabularySizes) -> M:
    """Make the word embedding, or a head with a matrix of its own."""
    return kind(
        tp,
        vocab_size=sizes.real,
        padded_vocab_size=sizes.padded,
        hidden_size=config.hidden_size,
        init=Init("normal", config.init_method_std),
    )


class Embedding(nn.Module):
    """The sum of word and position vectors, then dropout; ids [b, s] to [n, h]."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, sizes: _VocabularySizes) -> None:
        super().__init__()
        self.word = _vocabulary_matrix(VocabParallelEmbedding, config, tp, sizes)
        self.position = PositionEmbedding(config, tp)
        self._dropout = config.hidden_dropout
        self._tp = tp

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.position(self.word(tokens.flatten()), tokens.shape, positions)  # [n, h]
        return self._tp.residual_dropout(x, self._dropout, self.training)


class EmbeddingCopy(nn.Module):
    """The word vectors alone, for a tied head on another pipeline stage than the embedding."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, sizes: _VocabularySizes) -> None:
        super().__init__()
        self.word = _vocabulary_matrix(VocabParallelEmbedding, config, tp, sizes)


class PositionEmbedding(nn.Module):
    """A layer that adds a learned vector for its position to each token of [n, h]; shape: that of the ids, [b, s].

    positions: int64 [b, s], the position of each token; None: 0 to s - 1 in every row.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        shape = (max_position_embeddings(config), config.hidden_size)
        self.weight = replicated_parameter(tp, shape, init=Init("normal", config.init_method_std), decay=True)
        self._tp = tp

    def forward(self, x: Tensor, shape: torch.Size, positions: Tensor | None = None) -> Tensor:
        number, length = shape
        assert length <= self.weight.shape[0], f"{length} tokens, {self.weight.shape[0]} positions"
        weight, rows = self._tp.use(self.weight), self._tp.local_rows(number * length)
        if positions is not None:
            return x + F.embedding(positions.flatten()[rows], weight)
        if x.shape[0] == number * length:
            return (x.view(number, length, -1) + weight[:length]).flatten(0, 1)
        return x + F.embedding(torch.arange(rows.start, rows.stop, device=x.device) % length, weight)


class LayerNorm(nn.Module):
    """A layer norm over h, whose weight and bias are left uninitialised."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self._epsilon = config.norm_epsilon
        self._tp = tp
        self.weight = replicated_parameter(tp, (config.hidden_size,), init=Init("ones"), decay=False)
        self.bias = replicated_parameter(tp, (config.hidden_size,), init=Init("zeros"), decay=False)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._tp.use(self.weight), self._tp.use(self.bias)
        return F.layer_norm(x, weight.shape, weight, bias, self._epsilon)


class TransformerBlock(nn.Module):
    """A pre-LN block: x + attention(norm(x)), then x + mlp(norm(x)); [n, h] to [n, h]."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, core_recomputation: Recomputation | None) -> None:
        super().__init__()
        self.input_norm = LayerNorm(config, tp)
        self.attention = SelfAttention(config, tp, core_recomputation)
        self.post_attention_norm = LayerNorm(config, tp)
        self.mlp = FeedForward(config, tp)
        self._dropout = config.hidden_dropout
        self._tp = tp
        if tp.within_compiled:
            mark_block(self)

    @property
    def adds_without_effects(self) -> bool:
        """True if `between`, `add` and their backward change no state, so that they can be compiled."""
        draws = self._dropout > 0 and self._tp.border.splits_sequence
        return self._tp.deferred is None and not draws

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        x, normed = self.between(x, self.attention(self.input_norm(x), sequences))
        return self.add(x, self.mlp(normed), self.mlp.down.left_bias)

    def leave_biases(self) -> None:
        """Have `between` and `add` add the biases that come after the collectives of several ranks."""
        for layer in (self.attention.projection, self.mlp.down):
            layer.leaves_bias = self._tp.communicator.size > 1

    def between(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Add the output of attention; return the sum, and the input of the feed-forward layers."""
        x = self.add(x, y, self.attention.projection.left_bias)
        return x, self.post_attention_norm(x)

    def add(self, x: Tensor, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x + dropout(y + bias)."""
        y = y if bias is None else y + bias
        return x + self._tp.residual_dropout(y, self._dropout, self.training)


class BlockGroup(nn.Module):
    """Consecutive blocks that run one after the other as one module, [n, h] to [n, h]; the model owns them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)  # no submodules, so that every parameter has one name

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._blocks

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return _through(self._blocks, x, sequences)


class SelfAttention(nn.Module):
    """A layer of causal self-attention, within documents where `sequences` has a mask.

    A rank has a/t heads, from its part of the fused query, key and value matrix.

    core_recomputation: recomputes `core`; None where it is not recomputed on its own.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, core_recomputation: Recomputation | None) -> None:
        super().__init__()
        self._recomputation = core_recomputation
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

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(x)  # of all tokens, also where the sequence is split: [b s, 3 h/t]
        attend = self.core if self._recomputation is None else partial(self._recomputation.run, self.core)
        y: Tensor = self.projection(attend(qkv, sequences))
        return y

    @property
    def draws(self) -> bool:
        """True if `core` draws random numbers, which come from the random state of sharded regions."""
        return self._dropout > 0

    def core(self, qkv: Tensor, sequences: Sequences) -> Tensor:
        """Compute attention between the two linear layers: [b s, 3 h/t] to [b s, h/t]."""
        heads = qkv.shape[-1] // (3 * self._head_dim)
        packed = qkv.view(-1, sequences.length, 3, heads, self._head_dim)
        # Cut along the dim of three before anything is transposed: torch's kernels return gradients laid out as
        # [b, s, a/t, d], and one copy of them into [b, s, 3, a/t, d] is then the gradient of qkv.  No kernel of torch's
        # but the memory-efficient one can write them there itself.
        query, key, value = (part.transpose(1, 2) for part in packed.unbind(2))  # each [b, a/t, s, d]
        dropout = self._dropout if self.training else 0.0
        with self._dropout_region(dropout):
            mixed = F.scaled_dot_product_attention(
                query, key, value, attn_mask=sequences.mask, dropout_p=dropout, is_causal=sequences.mask is None
            )
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    def _dropout_region(self, dropout: float) -> AbstractContextManager[None]:
        """Enter the random state of sharded regions: each rank has other heads, so it needs other dropout masks."""
        is_drawn = dropout > 0 and not torch.compiler.is_compiling()  # compiled code draws from the current state
        return self._random.sharded() if is_drawn else nullcontext()


class FeedForward(nn.Module):
    """The feed-forward layers, down(gelu(up(x))), with f/t of the inner elements on each rank.

    fused: the compiled GELU; None where it is an operation by itself, or compiled with its block.
    """

    fused: FusedGelu | None = None

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = ffn_hidden_size(config)
        init = Init("normal", config.init_method_std)
        self.up = ColumnParallelLinear(tp, logical_shape=(inner, hidden), split_dim=0, init=init)
        self.down = RowParallelLinear(tp, logical_shape=(hidden, inner), init=_output_init(config))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.up(x)
        y: Tensor = self.down(gelu(inner)) if self.fused is None else self.down(inner, self.fused)
        return y


def _output_init(config: ModelConfig) -> Init:
    """Return the initialisation of the two matrices that write into the residual stream."""
    # Smaller than the others, so that the residual stream's variance stays near 1.
    return Init("normal", config.init_method_std / math.sqrt(2.0 * config.num_layers))
