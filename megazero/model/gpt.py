"""A decoder of pre-norm blocks in plain modules: GPT-2, Llama, BLOOM and others, which differ by settings alone.

Shapes, in comments: b = micro-batch, s = sequence, n = b s tokens in rows, or n = b s / t of them where the sequence is
split, h = hidden, V = vocabulary, Vp = padded vocabulary, t = tensor-parallel degree.

Nothing here communicates: the layers of `tensor_parallel/` do, at the borders of a block's two sharded regions
(attention and feed-forward).  A *unit* is a group of parameters that is used at one place and time, by which ZeRO lays
out, reduces and gathers.  Radford et al. 2019, section 2.3; Shoeybi et al. 2019, section 3.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.activations.recompute_plan import NO_RECOMPUTATION, ActivationPlan, Segment
from megazero.config.derived import head_width, key_value_heads_of_rank, max_position_embeddings
from megazero.config.model import ModelConfig
from megazero.model.block import TransformerBlock
from megazero.model.key_value_cache import KeyValueCache
from megazero.model.norms import Norm
from megazero.model.positions import Positions
from megazero.model.sequences import Sequences
from megazero.parallel.layer_split import Chunk, whole_model
from megazero.parallel.param_spec import InitialValue, Unit, share_between_ends
from megazero.tensor_parallel.adapters import train_adapters_alone
from megazero.tensor_parallel.head_loss import Targets
from megazero.tensor_parallel.layers import TensorParallel, replicated_parameter
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
        self._key_value_heads = key_value_heads_of_rank(config, tp.communicator.size)
        self._head_width = head_width(config)
        self._tp = tp
        self.max_positions = max_position_embeddings(config)
        self._positions = Positions(config, tp)
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
            self.final_norm = Norm(config, tp)
            self.head = TiedHead(tp) if is_tied else _vocabulary_matrix(VocabParallelHead, config, tp, sizes)
        if is_last and is_tied and not is_first:
            self.embedding = EmbeddingCopy(config, tp, sizes)
        if is_tied and is_first != is_last:
            share_between_ends(self.embedding.word.weight)
        if config.lora_rank:
            train_adapters_alone(self)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [b, s] to this rank's logits [b, s, Vp/t]; s is at most `max_positions`.  For an uncut model."""
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map tokens [b, s] to the head's input, [b, s, h]; for a model that is not cut in any way."""
        sequences = self.sequences(tokens.shape[1])
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

    def sequences(self, length: int, *, positions: Tensor | None = None, documents: Tensor | None = None) -> Sequences:
        """Return a micro-batch's rows of `length` tokens, for its embedding and its layers (`Positions.sequences`)."""
        return self._positions.sequences(length, positions=positions, documents=documents)

    def new_cache(self, *, rows: int, positions: int) -> KeyValueCache:
        """Allocate a cache of the keys and values of this rank's layers, for texts that are computed without grad."""
        return KeyValueCache(
            [block.get_submodule("attention") for block in self.layers.values()],
            rows=rows,
            positions=positions,
            heads=self._key_value_heads,
            width=self._head_width,
            dtype=self._tp.dtype,
            device=self._tp.device,
        )

    def first_tokens(self, length: int, cache: KeyValueCache) -> Sequences:
        """Return rows of the first `length` tokens, or padding behind them, of texts that are new to the cache."""
        return replace(self.sequences(length), cache=cache)

    def next_tokens(self, cache: KeyValueCache) -> Sequences:
        """Return rows of one token each, which go on the texts of the cache."""
        return self._positions.next_tokens(cache)

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
        sequences = sequences or self.sequences(tokens.shape[1])
        return self.loss(self.through(0, self.embed(tokens, sequences), sequences), labels, loss_mask)

    def _head_matrix(self) -> tuple[Tensor, ...]:
        """Return the embedding's matrix for a head without a matrix of its own."""
        return (self.embedding.word.weight,) if isinstance(self.head, TiedHead) else ()

    def units(self) -> list[Unit]:
        """Return every parameter once, in the order of use; the word embedding, which two modules use, is alone."""
        found = []
        for part, chunk in enumerate(self.chunks):
            names = [f"embedding.{name}" for name, _ in self.embedding.named_children()] if chunk.is_first else []
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
        init=InitialValue("normal", config.init_method_std),
    )


class Embedding(nn.Module):
    """Word vectors, with learned position vectors and a norm where the model has them, then dropout.

    It maps ids [b, s] to [n, h].
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, sizes: _VocabularySizes) -> None:
        super().__init__()
        self.word = _vocabulary_matrix(VocabParallelEmbedding, config, tp, sizes)
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionEmbedding(config, tp) if learned else None
        self.norm = Norm(config, tp) if config.embed_layernorm else None
        self._dropout = config.hidden_dropout
        self._tp = tp

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.word(tokens.flatten())  # [n, h]
        if self.position is not None:
            x = self.position(x, tokens.shape, positions)
        if self.norm is not None:
            x = self.norm(x)
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
        self.weight = replicated_parameter(tp, shape, init=InitialValue("normal", config.init_method_std), decay=True)
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


class BlockGroup(nn.Module):
    """Consecutive blocks that run one after the other as one module, [n, h] to [n, h]; the model owns them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)  # no submodules, so that every parameter has one name

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._blocks

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return _through(self._blocks, x, sequences)
