"""Rules about 8-bit matrix products, whose dims are multiples of 16; `rules.check` tries them.

A linear layer of a block has 8-bit products if the tokens of a micro-batch and this rank's inputs and outputs of the
layer are all multiples of 16, and otherwise those of the working precision.  `advice` names the layers without
8-bit products.  If no layer has them, the setting has no effect, and that is a problem.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from megazero.config import derived
from megazero.config.nearest import flags, neighbours
from megazero.config.run import RunConfig
from megazero.errors import Problem

MULTIPLE = 16  # of which every dim is a multiple, as the libraries of 8-bit products require


def has_8bit_products(*dims: int) -> bool:
    """True if a product of these dims can be computed from 8-bit numbers."""
    return all(dim > 0 and dim % MULTIPLE == 0 for dim in dims)


class _Layer(NamedTuple):
    """A linear layer of a block and its sizes on one tensor-parallel rank."""

    name: str
    inputs: int
    outputs: int

    @property
    def fits(self) -> bool:
        return has_8bit_products(self.inputs, self.outputs)


def advice(config: RunConfig) -> Iterator[str]:
    """Yield a notice that names the layers whose products remain in the working precision, if there are any."""
    if config.precision.fp8_format is None:
        return
    left_out = [layer for layer in _layers(config) if not layer.fits]
    if left_out:
        named = ", ".join(f"{layer.name} ({layer.inputs} to {layer.outputs})" for layer in left_out)
        yield (
            f"{_flag(config)}: {config.precision.precision} products remain in {named} of every block: 8-bit products"
            f" need multiples of {MULTIPLE}"
        )


def products_are_beside_bf16(config: RunConfig, world_size: int) -> Iterator[Problem]:
    precision = config.precision.precision
    if config.precision.fp8_format is not None and precision != "bf16":
        yield Problem(
            f"{_flag(config)} with --precision {precision}",
            "what is made of 8-bit products is kept in bf16",
            "--precision bf16, or leave out --fp8-format",
        )


def micro_batch_fits_products(config: RunConfig, world_size: int) -> Iterator[Problem]:
    tokens = _tokens(config)
    if config.precision.fp8_format is None or has_8bit_products(tokens):
        return
    micro, length = config.training.micro_batch_size, config.model.seq_length
    yield Problem(
        f"{_flag(config)} with --micro-batch-size {micro} --seq-length {length}",
        f"8-bit products are of multiples of {MULTIPLE} tokens, and a micro-batch has {tokens}",
        flags("--micro-batch-size", neighbours(micro, MULTIPLE // math.gcd(MULTIPLE, length)))
        + ", "
        + flags("--seq-length", neighbours(length, MULTIPLE // math.gcd(MULTIPLE, micro))),
    )


def a_layer_fits_products(config: RunConfig, world_size: int) -> Iterator[Problem]:
    hidden, degree = config.model.hidden_size, config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads
    is_cut = (
        heads % degree == 0
        and heads % derived.num_key_value_heads(config.model) == 0
        and derived.ffn_hidden_size(config.model) % degree == 0
    )
    if config.precision.fp8_format is None or not is_cut:
        return
    layers = _layers(config)
    if not any(layer.fits for layer in layers):
        sizes = ", ".join(f"{layer.name} has {layer.inputs} to {layer.outputs}" for layer in layers)
        step = math.lcm(MULTIPLE * degree, heads)
        yield Problem(
            f"{_flag(config)} with --hidden-size {hidden} --tensor-model-parallel-size {degree}",
            f"8-bit products are of multiples of {MULTIPLE} inputs and outputs, and on a process {sizes}",
            flags("--hidden-size", neighbours(hidden, step)),
        )


def _flag(config: RunConfig) -> str:
    return f"--fp8-format {config.precision.fp8_format}"


def _tokens(config: RunConfig) -> int:
    """Return the number of tokens in a micro-batch, a dim of every product, with or without sequence parallelism."""
    return config.training.micro_batch_size * config.model.seq_length


def _layers(config: RunConfig) -> tuple[_Layer, ...]:
    """Return the linear layers of a block, with their names in `model/gpt.py`."""
    degree, hidden = config.parallel.tensor_model_parallel_size, config.model.hidden_size
    heads, groups = config.model.num_attention_heads, derived.num_key_value_heads(config.model)
    head, inner = derived.head_width(config.model), derived.ffn_hidden_size(config.model) // degree
    width = heads * head // degree
    if groups == heads:
        projected = [_Layer("qkv", hidden, 3 * width)]
    else:
        projected = [_Layer("query", hidden, width)]
        # Without whole groups on a process the product is never of 8-bit numbers (`ReplicatedKeyValueLinear`).
        projected += [_Layer("key_value", hidden, 2 * groups * head // degree)] if groups % degree == 0 else []
    return (
        *projected,
        _Layer("projection", width, hidden),
        _Layer("up", hidden, (1 + config.model.swiglu) * inner),
        _Layer("down", inner, hidden),
    )


RULES = (products_are_beside_bf16, micro_batch_fits_products, a_layer_fits_products)
