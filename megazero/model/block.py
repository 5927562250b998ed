"""A pre-norm block: attention, then feed-forward layers, each added to its input.

n = tokens in rows, h = hidden, f = feed-forward width, t = tensor-parallel degree
"""

from torch import Tensor, nn

from megazero.activations.recompute import Recomputation
from megazero.config.derived import ffn_hidden_size, lora_scale
from megazero.config.model import ModelConfig
from megazero.model.attention import SelfAttention
from megazero.model.initial_values import output_init
from megazero.model.norms import Norm
from megazero.model.sequences import Sequences
from megazero.parallel.param_spec import InitialValue, mark_block
from megazero.tensor_parallel.activation import ACTIVATIONS, FusedActivation
from megazero.tensor_parallel.adapters import LowRank, adapt_column, adapt_row
from megazero.tensor_parallel.bias_gradients import biased_gelu
from megazero.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel


class TransformerBlock(nn.Module):
    """A pre-LN block: x + attention(norm(x)), then x + mlp(norm(x)); [n, h] to [n, h]."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, core_recomputation: Recomputation | None) -> None:
        super().__init__()
        self.input_norm = Norm(config, tp)
        self.attention = SelfAttention(config, tp, core_recomputation)
        self.post_attention_norm = Norm(config, tp)
        self.mlp = FeedForward(config, tp)
        self._dropout = config.hidden_dropout
        self._tp = tp
        if config.lora_rank:
            self._adapt(config)
        if tp.within_compiled:
            mark_block(self)

    def _adapt(self, config: ModelConfig) -> None:
        """Give the targeted layers adapters."""
        form, attention = LowRank(config.lora_rank, lora_scale(config), config.lora_dropout), self.attention
        columns = {"linear_qkv": attention.entries, "linear_fc1": (self.mlp.up,)}
        rows = {"linear_proj": attention.projection, "linear_fc2": self.mlp.down}
        for target in config.lora_targets:
            for layer in columns.get(target, ()):
                adapt_column(self._tp, layer, form)
            if target in rows:
                adapt_row(self._tp, rows[target], form)

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


class FeedForward(nn.Module):
    """The feed-forward layers, down(activation(up(x))), with f/t of the inner elements on each rank.

    SwiGLU's two inner layers are one matrix, [2, f, h]: first the gate, then what it multiplies.

    fused: the compiled activation; None where it is an operation by itself, or compiled with its block.
    """

    fused: FusedActivation | None = None

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        self._tp = tp
        hidden = config.hidden_size
        inner = ffn_hidden_size(config)
        has_bias = not config.disable_bias_linear
        self.activation = "swiglu" if config.swiglu else "squared-relu" if config.squared_relu else "gelu"
        shape = (2, inner, hidden) if config.swiglu else (inner, hidden)
        self.up = ColumnParallelLinear(
            tp,
            logical_shape=shape,
            split_dim=len(shape) - 2,
            init=InitialValue("normal", config.init_method_std),
            has_bias=has_bias,
        )
        self.down = RowParallelLinear(tp, logical_shape=(hidden, inner), init=output_init(config), has_bias=has_bias)

    def forward(self, x: Tensor) -> Tensor:
        trained = self._bias_of_gelu
        inner = self.up(x, leaves_bias_gradient=trained is not None)
        bias = None if trained is None else self._tp.use(trained)
        if self.fused is not None and self.down.adapter is None:
            y: Tensor = self.down(inner, self.fused, bias)
        elif bias is not None:
            y = self.down(biased_gelu(inner, bias))
        else:
            y = self.down(ACTIVATIONS[self.activation].output(inner))
        return y

    @property
    def _bias_of_gelu(self) -> nn.Parameter | None:
        """The bias before GELU, if it is trained: GELU's backward makes its gradient."""
        bias = self.up.bias if self.activation == "gelu" else None
        return bias if bias is not None and bias.requires_grad else None
