"""The settings of the GPT's shape and of its initial values."""

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The shape of a GPT-2 model: pre-LN blocks, learned positions, tanh GELU, biases."""

    num_layers: int = setting(help="transformer blocks", unit="blocks", ge=1)
    hidden_size: int = setting(help="width of the residual stream", unit="elements", ge=1)
    num_attention_heads: int = setting(help="attention heads of a block", unit="heads", ge=1)
    seq_length: int = setting(help="tokens of one training sample", unit="tokens", ge=1)
    max_position_embeddings: int | None = setting(
        None, help="rows of the position table; without it, seq_length", unit="tokens", ge=1
    )
    ffn_hidden_size: int | None = setting(
        None, help="inner width of the feed-forward layer; without it, 4 x hidden_size", unit="elements", ge=1
    )
    vocab_size: int | None = setting(
        None,
        help="ids the model knows before padding, at least the corpus's; without it, as many as the corpus's tokenizer",
        unit="ids",
        ge=2,
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        help="the vocabulary is padded to a multiple of this x tensor_model_parallel_size; padding never has a loss",
        unit="ids",
        ge=1,
    )
    hidden_dropout: float = setting(
        0.1, help="dropout after the embedding and before each residual addition", unit="probability", ge=0, lt=1
    )
    attention_dropout: float = setting(0.1, help="dropout of attention weights", unit="probability", ge=0, lt=1)
    init_method_std: float = setting(
        0.02, help="standard deviation of initial weights; output projections get it / sqrt(2 x num_layers)", gt=0
    )
    norm_epsilon: float = setting(
        1e-5, help="added to the variance in layer norms", aliases=("layernorm-epsilon",), gt=0
    )
    untie_embeddings_and_output_weights: bool = setting(
        False, help="give the LM head a matrix of its own instead of the token embedding's"
    )
