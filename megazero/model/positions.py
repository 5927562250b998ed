"""The positions of tokens in attention: rotary tables and ALiBi's bias, made once for all layers of a rank.

*Rotary* positions turn pairs of a head's elements, (i, i + r / 2) of the first r, by an angle that grows with the
token's position p (Su et al., arXiv 2104.09864):

    angle(p, i) = p / base^(2 i / r)         r = rotary_percent of d

so that a score depends on the distance of its two tokens.  *Interpolation* divides p (Chen et al., arXiv 2306.15595).
*Llama 3's scaling* makes the long wavelengths longer by a factor, those of more than a whole context of 8192 positions,
leaves those that fit four times or more, and interpolates between the two.  Tables are computed in float32 whatever
the dtype of activations, as other implementations compute them.

*ALiBi* adds slope x (column - row) to the scores of a head (Press et al., arXiv 2108.12409).  The bias and the causal
mask are one tensor, [1, a/t, s, s].

    b = micro-batch, s = sequence, a = heads, t = tensor-parallel degree, d = a head's width, r = its rotated part
"""

import math

import torch
from torch import Tensor

from megazero.config.derived import max_position_embeddings, rotary_width
from megazero.config.model import ModelConfig
from megazero.model.key_value_cache import KeyValueCache
from megazero.model.sequences import Rotation, Sequences, document_mask
from megazero.tensor_parallel.layers import TensorParallel

# Llama 3.1's constants, which no published model and no flag of Megatron-LM changes.
_OLD_CONTEXT = 8192
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0


class Positions:
    """Makes the `Sequences` of micro-batches, with what the model's attention needs of positions."""

    def __init__(self, config: ModelConfig, tp: TensorParallel) -> None:
        kind = config.position_embedding_type
        self._dtype, self._device = tp.dtype, tp.device
        self._rotation = rotation_table(config, tp.dtype, tp.device) if kind == "rope" else None
        heads = config.num_attention_heads // tp.communicator.size
        first = tp.communicator.rank * heads
        slopes = alibi_slopes(config.num_attention_heads)[first : first + heads]
        self._slopes = slopes if kind == "alibi" else None
        self._bias: Tensor | None = None

    def sequences(self, length: int, *, positions: Tensor | None = None, documents: Tensor | None = None) -> Sequences:
        """Return rows of `length` tokens.

        positions: int64 [b, s], None: 0 to s - 1 in every row.  documents: [b, s], the number of each token's document,
        to which its attention is confined; None: a token attends to all before it in its row.
        """
        mask = None if documents is None else document_mask(documents, self._dtype)
        if self._slopes is not None:
            bias = self._alibi_bias(length)
            mask = bias if mask is None else bias + mask
        rotation = self._rotation
        if rotation is not None:
            rows: Tensor | slice = slice(length) if positions is None else positions
            rotation = Rotation(rotation.cosine[rows], rotation.sine[rows])
        return Sequences(length, positions, mask, rotation)

    def next_tokens(self, cache: KeyValueCache) -> Sequences:
        """Return rows of one token each, which go on the texts of the cache, and attend to them and themselves."""
        positions = torch.tensor(cache.lengths, device=self._device).unsqueeze(1)  # [b, 1]
        distances = torch.arange(max(cache.lengths) + 1, device=self._device) - positions  # [b, length of the longest]
        bias = distances.to(self._dtype)[:, None, None]
        slopes = [0.0] if self._slopes is None else self._slopes
        mask = torch.tensor(slopes, dtype=self._dtype, device=self._device).view(-1, 1, 1) * bias
        mask = mask.masked_fill_((distances > 0)[:, None, None], -torch.inf)  # [b, 1 or a/t, 1, length of the longest]
        rotation = self._rotation
        if rotation is not None:
            rotation = Rotation(rotation.cosine[positions], rotation.sine[positions])
        return Sequences(1, positions, mask, rotation, cache)

    def _alibi_bias(self, length: int) -> Tensor:
        """Return the bias of this rank's heads and the causal mask, [1, a/t, s, s]; the longest made serves all."""
        assert self._slopes is not None
        if self._bias is None or self._bias.shape[-1] < length:
            self._bias = alibi_bias(self._slopes, length, self._dtype, self._device)
        return self._bias[..., :length, :length]


def rotation_table(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Rotation:
    """Return the rotation of every position that the model has, [positions, r / 2]."""
    width = rotary_width(config)
    numbers = torch.arange(max_position_embeddings(config), dtype=torch.float32, device=device)
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rotary_base ** (steps / width)
    frequencies = frequencies / config.rotary_seq_len_interpolation_factor
    if config.use_rope_scaling:
        frequencies = stretched(frequencies, config.rope_scaling_factor)
    angles = torch.outer(numbers, frequencies)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def stretched(frequencies: Tensor, factor: float) -> Tensor:
    """Return the frequencies of rotary positions after Llama 3.1's scaling."""
    wavelengths = 2 * math.pi / frequencies
    # How often a wavelength fits the context: at most once is stretched, four times or more is left as it is.
    share = (_OLD_CONTEXT / wavelengths - _LOW_FREQUENCY_FACTOR) / (_HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR)
    between = (1 - share) * frequencies / factor + share * frequencies
    long, short = (_OLD_CONTEXT / factor for factor in (_LOW_FREQUENCY_FACTOR, _HIGH_FREQUENCY_FACTOR))
    scaled = torch.where(wavelengths > long, frequencies / factor, between)
    return torch.where(wavelengths < short, frequencies, scaled)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn the first r elements of every head by its token's angles; x [b, s, heads, d]."""
    cosine, sine = (part.unsqueeze(-2) for part in rotation)  # [s or b s, 1, r / 2]
    half = cosine.shape[-1]
    first, second, rest = x.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)


def alibi_slopes(num_heads: int) -> list[float]:
    """Return every head's slope.

    For a power of two they are the powers of 2^(-8 / a); other numbers have those of the next smaller power of two, and
    then those in between, every second one of twice as many heads.
    """
    whole = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / whole) for head in range(whole)]
    return slopes + [2.0 ** (-4.0 * (2 * head + 1) / whole) for head in range(num_heads - whole)]


def alibi_bias(slopes: list[float], length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return slope x (column - row), and -inf where a token would attend to a later one, [1, heads, s, s]."""
    numbers = torch.arange(length, device=device)
    distances = (numbers - numbers.unsqueeze(1)).to(dtype)
    bias = torch.tensor(slopes, dtype=dtype, device=device).view(-1, 1, 1) * distances
    return bias.masked_fill_(distances > 0, -torch.inf).unsqueeze(0)
