"""Causal self-attention, with keys and values for every head or for groups of heads.

A rank has a/t heads.  Where every head has keys and values, they and the queries are one fused matrix.  Grouped-query
attention (Ainslie et al., arXiv 2305.13245) has keys and values for g heads, in a matrix of their own: g/t of them are
on a rank.  Where t does not divide g, each rank has all of the matrix, and computes the one head that its queries
share, or, where they belong to several groups, a head for each of its queries.

    n = tokens in rows, b = micro-batch, s = sequence, h = hidden, a = heads, g = heads of keys and values,
    d = a head's width, t = tensor-parallel degree
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megazero.activations.recompute import Recomputation
from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.model.initial_values import output_init
from megazero.model.norms import Norm
from megazero.model.positions import rotate
from megazero.model.sequences import Sequences
from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.bias_gradients import biased_heads
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedKeyValueLinear,
    RowParallelLinear,
    TensorParallel,
    column_linears,
)


class SelfAttention(nn.Module):
    """A layer of causal self-attention, within documents where `sequences` has a mask.

    core_recomputation: recomputes `core`; None where it is not recomputed on its own.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallel, core_recomputation: Recomputation | None) -> None:
        super().__init__()
        self._recomputation = core_recomputation
        hidden, heads, groups = config.hidden_size, config.num_attention_heads, derived.num_key_value_heads(config)
        self._width = width = derived.head_width(config)
        self._dropout = config.attention_dropout
        self._tp = tp
        column = partial(ColumnParallelLinear, tp, init=InitialValue("normal", config.init_method_std))
        column = partial(column, has_bias=derived.has_qkv_bias(config))
        self._is_fused = groups == heads
        if self._is_fused:
            self.qkv = column(logical_shape=(3, heads, width, hidden), split_dim=1)
        else:
            self.query = column(logical_shape=(heads, width, hidden), split_dim=0)
            self.key_value = _key_value_linear(config, tp)
        has_norms = config.qk_layernorm
        self.query_norm = Norm(config, tp, width, is_inside=True) if has_norms else None
        self.key_norm = Norm(config, tp, width, is_inside=True) if has_norms else None
        self._changes_heads = has_norms or config.position_embedding_type == "rope"
        self.projection = RowParallelLinear(
            tp,
            logical_shape=(hidden, heads * width),
            init=output_init(config),
            has_bias=not config.disable_bias_linear,
        )

    @property
    def entries(self) -> tuple[ColumnParallelLinear | ReplicatedKeyValueLinear, ...]:
        """The layers that read the input: of queries, keys and values, or of queries and of keys and values."""
        return (self.qkv,) if self._is_fused else (self.query, self.key_value)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        # Of all tokens, also where the sequence is split: [b s, 3 a d/t], or [b s, a d/t] and [b s, 2 g d/t].
        left = self._left_bias
        leaves = left is not None
        projected = (self.qkv(x, leaves_bias_gradient=leaves),) if self._is_fused else self._queries_and_pairs(x)
        # No argument of what is recomputed, for it is no activation.
        core = partial(self.core, None if left is None else self._tp.use(left))
        attend = core if self._recomputation is None else partial(self._recomputation.run, core)
        y: Tensor = self.projection(attend(sequences, *projected))
        return y

    @property
    def _left_bias(self) -> nn.Parameter | None:
        """The bias of the fused layer, if `core` makes its gradient with that of the layer's output.

        It doesn't where queries and keys are rotated or normalised: a compiler fuses the pass that makes the output's
        gradient with the backward of these.
        """
        if not self._is_fused or self._changes_heads:
            return None
        bias = self.qkv.bias
        return bias if bias is not None and bias.requires_grad else None

    def _queries_and_pairs(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the two layers of queries, and of keys and values."""
        outputs = column_linears(x, [layer.operands() for layer in self.entries])
        adapted = zip(self.entries, outputs, strict=True)
        return tuple(y if layer.adapter is None else y + layer.adapter(x) for layer, y in adapted)

    @property
    def is_compilable(self) -> bool:
        """True if `core` and its backward only compute: they draw no random numbers, and defer no gradients."""
        # Random numbers come from the random state of sharded regions.
        return self._dropout == 0 and (self.query_norm is None or self._tp.deferred is None)

    def parameters_of_core(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that `core` reads."""
        for norm in (self.query_norm, self.key_norm):
            yield from () if norm is None else norm.parameters()
        if self._left_bias is not None:
            yield self._left_bias

    def core(self, bias: Tensor | None, sequences: Sequences, *projected: Tensor) -> Tensor:
        """Compute attention between the linear layers, from the outputs of the first to [b s, a d/t].

        bias: the bias in the fused layer's output whose gradient the layer has left to this function.
        """
        query, key, value = self._heads(bias, sequences.length, *projected)
        query, key = self._normed(query, key)
        if sequences.rotation is not None:
            query, key = rotate(query, sequences.rotation), rotate(key, sequences.rotation)
        if sequences.cache is not None:
            key, value = sequences.cache.update(self, key, value, sequences.positions)
        dropout = self._dropout if self.training else 0.0
        with self._dropout_region(dropout):
            mixed = F.scaled_dot_product_attention(
                query.transpose(1, 2),
                key.transpose(1, 2),
                value.transpose(1, 2),
                attn_mask=sequences.mask,
                dropout_p=dropout,
                is_causal=sequences.mask is None,
                enable_gqa=not self._is_fused,
            )  # [b, a/t, s, d]
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    def _heads(
        self, bias: Tensor | None, length: int, first: Tensor, pairs: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return views: query, [b, s, a/t, d], and key and value, [b, s, a/t, d] or [b, s, g/t, d]."""
        if pairs is None:
            packed = first.view(-1, length, 3, first.shape[-1] // (3 * self._width), self._width)
            # Cut along the dim of three before anything is transposed: torch's kernels return gradients laid out as
            # [b, s, a/t, d], and one copy of them into [b, s, 3, a/t, d], which adds up the bias's gradient, is then
            # that of qkv.  No kernel of torch's but the memory-efficient one can write them there itself.
            query, key, value = packed.unbind(2) if bias is None else biased_heads(packed, bias)
            return query, key, value
        query = first.view(-1, length, first.shape[-1] // self._width, self._width)
        key, value = pairs.view(-1, length, 2, pairs.shape[-1] // (2 * self._width), self._width).unbind(2)
        return query, key, value

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise every head's query and key, if the model does."""
        if self.query_norm is None or self.key_norm is None:
            return query, key
        return self.query_norm(query), self.key_norm(key)

    def _dropout_region(self, dropout: float) -> AbstractContextManager[None]:
        """Enter the random state of sharded regions: each rank has other heads, so it needs other dropout masks."""
        is_drawn = dropout > 0 and not torch.compiler.is_compiling()  # compiled code draws from the current state
        return self._tp.random.sharded() if is_drawn else nullcontext()


def _key_value_linear(config: ModelConfig, tp: TensorParallel) -> ColumnParallelLinear | ReplicatedKeyValueLinear:
    """Make the layer of keys and values with fewer heads than queries have."""
    heads, groups, size = config.num_attention_heads, config.num_query_groups, tp.communicator.size
    shape = (2, groups, derived.head_width(config), config.hidden_size)
    init, has_bias = InitialValue("normal", config.init_method_std), derived.has_qkv_bias(config)
    if groups % size == 0:
        return ColumnParallelLinear(tp, logical_shape=shape, split_dim=1, init=init, has_bias=has_bias)
    first = tp.communicator.rank * (heads // size)
    of_queries = [head * groups // heads for head in range(first, first + heads // size)]
    used = of_queries[: derived.key_value_heads_of_rank(config, size)]
    return ReplicatedKeyValueLinear(tp, logical_shape=shape, used=used, init=init, has_bias=has_bias)
