"""The settings of the model's shape and of its initial values."""

from typing import Literal

from pydantic.dataclasses import dataclass

from megazero.config.fields import STRICT, setting

LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The shape of a decoder of pre-norm blocks; without further settings it is GPT-2's.

    GPT-2 has layer norms, learned positions, tanh GELU, biases, and keys and values for every head.  Llama, BLOOM, Qwen
    and Falcon differ from it by settings alone (docs/models.md).
    """

    num_layers: int = setting(help="transformer blocks", unit="blocks", ge=1)
    hidden_size: int = setting(help="width of the residual stream", unit="elements", ge=1)
    num_attention_heads: int = setting(help="attention heads of a block", unit="heads", ge=1)
    seq_length: int = setting(help="tokens of one training sample", unit="tokens", ge=1)
    max_position_embeddings: int | None = setting(
        None,
        help="the longest sequence that the model takes, with learned positions their number; without it, seq_length",
        unit="tokens",
        ge=1,
    )
    ffn_hidden_size: int | None = setting(
        None,
        help="inner width of the feed-forward layer; without it, 4 x hidden_size, and with swiglu two thirds of that,"
        " down to a multiple of 64",
        unit="elements",
        ge=1,
    )
    kv_channels: int | None = setting(
        None,
        help="width of an attention head; without it, hidden_size / num_attention_heads",
        unit="elements",
        ge=1,
    )
    group_query_attention: bool = setting(
        False, help="groups of attention heads share keys and values (Ainslie et al., arXiv 2305.13245)"
    )
    num_query_groups: int = setting(
        1,
        help="heads of keys and values that group_query_attention leaves; 1: all heads share them (multi-query)",
        aliases=("num-key-value-heads",),
        unit="groups",
        ge=1,
    )
    position_embedding_type: Literal["learned_absolute", "rope", "alibi", "none"] = setting(
        "learned_absolute",
        help="positions as learned vectors of the embedding, as rotations of queries and keys (rope, arXiv 2104.09864),"
        " as a bias of attention that grows with the distance (alibi, arXiv 2108.12409), or not at all",
    )
    rotary_base: float = setting(
        10000.0,
        help="the base of rotary positions' wavelengths",
        aliases=("rotary-position-embeddings-theta",),
        gt=0,
    )
    rotary_percent: float = setting(
        1.0, help="the part of a head's width that rotary positions turn", unit="of the width", gt=0, le=1
    )
    rotary_seq_len_interpolation_factor: float = setting(
        1.0, help="rotary positions are divided by this, so that longer sequences have the positions of shorter", gt=0
    )
    use_rope_scaling: bool = setting(
        False,
        help="stretch the long wavelengths of rotary positions by rope_scaling_factor, as Llama 3.1 does from 8192"
        " positions on",
    )
    rope_scaling_factor: float = setting(
        8.0, help="how far use_rope_scaling stretches the wavelengths that the first 8192 positions don't fill", ge=1
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = setting(
        "LayerNorm", help="the norms: RMSNorm (arXiv 1910.07467) subtracts no mean and has no bias"
    )
    qk_layernorm: bool = setting(False, help="normalise every head's queries and keys")
    embed_layernorm: bool = setting(False, help="normalise the embedding's output")
    swiglu: bool = setting(
        False,
        help="the feed-forward layer multiplies SiLU of one inner layer with another (SwiGLU, arXiv 2002.05202)",
    )
    squared_relu: bool = setting(
        False, help="the feed-forward layer's activation is the square of ReLU (arXiv 2109.08668) in place of GELU"
    )
    disable_bias_linear: bool = setting(False, help="linear layers have no biases")
    add_qkv_bias: bool = setting(
        False, help="beside disable_bias_linear, queries, keys and values keep their biases, as in Qwen 2"
    )
    vocab_size: int | None = setting(
        None,
        help="ids of the model before padding, at least the corpus's; without it, as many as the corpus's tokenizer",
        unit="ids",
        ge=2,
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        help="the vocabulary is padded to a multiple of this x tensor_model_parallel_size; padding never has a loss",
        unit="ids",
        ge=1,
    )
    pad_vocab_size_to: int | None = setting(
        None,
        help="ids that the vocabulary is padded to, over all tensor-parallel processes; without it,"
        " make_vocab_size_divisible_by asks for",
        unit="ids",
        ge=2,
    )
    hidden_dropout: float = setting(
        0.1, help="dropout after the embedding and before each residual addition", unit="probability", ge=0, lt=1
    )
    attention_dropout: float = setting(0.1, help="dropout of attention weights", unit="probability", ge=0, lt=1)
    init_method_std: float = setting(
        0.02, help="standard deviation of initial weights; output projections get it / sqrt(2 x num_layers)", gt=0
    )
    norm_epsilon: float = setting(1e-5, help="added to the variance in norms", aliases=("layernorm-epsilon",), gt=0)
    untie_embeddings_and_output_weights: bool = setting(
        False, help="give the LM head a matrix of its own instead of the token embedding's"
    )
    lora_rank: int = setting(
        0,
        help="rank of adapters (LoRA, arXiv 2106.09685): two thin matrices beside each targeted layer, which alone are"
        " trained while all other parameters are frozen; 0: there are none, and every parameter is trained",
        unit="elements",
        ge=0,
    )
    lora_alpha: float | None = setting(
        None, help="an adapter's output is multiplied by lora_alpha / lora_rank; without it, lora_rank", gt=0
    )
    lora_dropout: float = setting(0.0, help="dropout of an adapter's input", unit="probability", ge=0, lt=1)
    lora_targets: tuple[str, ...] = setting(
        LORA_TARGETS,
        help="layers that have adapters: linear_qkv (queries, keys and values), linear_proj (attention's output),"
        " linear_fc1 and linear_fc2 (the feed-forward layers)",
    )
