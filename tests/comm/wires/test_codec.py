"""Tests of quantization by blocks: its error, its bytes, and numbers that are not finite, against plain arithmetic."""

import math
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from torch import Tensor

from megazero.comm.wires import codec as codec_module
from megazero.comm.wires.codec import BlockCodec

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
Bits = Literal[8, 4]
BITS: tuple[Bits, ...] = (8, 4)
LIMITS = {8: 127, 4: 7}
ARITHMETIC = 2.0**-15  # of a scale


def encoded(codec: BlockCodec, source: Tensor, seed: int = 0) -> Tensor:
    """Return the encoded rows; bytes that are not written to hold a pattern."""
    shape = (*source.shape[:-1], codec.encoded_bytes(source.shape[-1]))
    output = torch.full(shape, 0xA5, dtype=torch.uint8)
    codec.encode(source, output, torch.Generator().manual_seed(seed))
    return output


def round_trip(codec: BlockCodec, source: Tensor, seed: int = 0) -> Tensor:
    output = torch.full(source.shape, -99.0, dtype=source.dtype)
    codec.decode(encoded(codec, source, seed), output)
    return output


def scales_of(codec: BlockCodec, row: Tensor) -> list[float]:
    """Return the scale of each element, by the definition."""
    values = row.tolist()
    scales = []
    for begin in range(0, len(values), codec.block):
        block = values[begin : begin + codec.block]
        scale = max(max(map(abs, block)) / LIMITS[codec.bits], 2.0**-126)
        scales += [scale] * len(block)
    return scales


def rounding(value: float, dtype: torch.dtype) -> float:
    """Return half the distance between numbers of the dtype around a value."""
    found = torch.finfo(dtype)
    return max(abs(value) * found.eps, found.smallest_normal * found.eps) / 2


NUMBERS = st.one_of(
    st.floats(-6e4, 6e4, width=32),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 6e4, 1.0, -1.0, 0.5]),
)
ROWS = st.lists(NUMBERS, min_size=1, max_size=70)


@given(ROWS, st.sampled_from(FLOATS), st.sampled_from(BITS), st.sampled_from([2, 8, 64]), st.booleans())
def test_error(values: list[float], dtype: torch.dtype, bits: Bits, block: int, stochastic: bool) -> None:
    codec = BlockCodec(bits, block, stochastic)
    row = torch.tensor(values, dtype=dtype)
    decoded = round_trip(codec, row)
    assert decoded.dtype is dtype
    for value, found, scale in zip(row.tolist(), decoded.tolist(), scales_of(codec, row), strict=True):
        most = scale * ((1 if stochastic else 0.5) + ARITHMETIC) + rounding(found, dtype)
        assert abs(value - found) <= most, (value, found, scale)


@given(ROWS, st.sampled_from(BITS), st.sampled_from([2, 8, 64]))
def test_rounding_to_nearest_is_that_of_python(values: list[float], bits: Bits, block: int) -> None:
    """Python's `round` takes ties to even too; float64 leaves no doubt about what is nearest."""
    row = torch.tensor(values, dtype=torch.float64)
    codec = BlockCodec(bits, block)
    scales = torch.tensor(scales_of(codec, row)).float().double().tolist()
    limit = LIMITS[bits]
    expected = [
        max(-limit, min(limit, round(value / scale))) * scale for value, scale in zip(values, scales, strict=True)
    ]
    assert round_trip(codec, row).tolist() == expected


@each("bits", BITS)
@each("n", [0, 1, 2, 7, 8, 9, 16, 33])
def test_bytes(bits: Bits, n: int) -> None:
    codec = BlockCodec(bits, 8)
    numbers = math.ceil(n * bits / 8)
    assert codec.encoded_bytes(n) == math.ceil(numbers / 4) * 4 + 4 * math.ceil(n / 8)
    assert encoded(codec, torch.ones(3, n)).shape == (3, codec.encoded_bytes(n))


def test_what_is_stored() -> None:
    """Whole numbers, in order, then scales: two blocks of two numbers, one of a single one."""
    row = torch.tensor([7.0, -14.0, 3.0, 3.5, -21.0])
    stored = encoded(BlockCodec(4, 2), row)
    quotients = [4, -7, 6, 7, -7, 0]  # 3.5 and 6 are halfway and exact: 7/2 rounds to 4, 3/0.5 is 6
    packed = [(low + 8) | (high + 8) << 4 for low, high in zip(quotients[::2], quotients[1::2], strict=True)]
    assert stored[:3].tolist() == packed
    assert stored[4:].view(torch.float32).tolist() == [2.0, 0.5, 3.0]
    row = torch.tensor([254.0, -127.0, 1.0])
    stored = encoded(BlockCodec(8, 2), row)
    assert stored[:3].view(torch.int8).tolist() == [127, -64, 127]  # -63.5 rounds to even
    assert stored[4:].view(torch.float32).tolist() == [2.0, torch.tensor(1 / 127).item()]


@given(ROWS, st.sampled_from(FLOATS), st.sampled_from(BITS), st.sampled_from([2, 8, 64]))
def test_what_has_been_rounded_is_not_rounded_again(
    values: list[float], dtype: torch.dtype, bits: Bits, block: int
) -> None:
    codec = BlockCodec(bits, block)
    decoded = round_trip(codec, torch.tensor(values, dtype=dtype))
    assert torch.equal(round_trip(codec, decoded), decoded)


@each("bits", BITS)
def test_no_scale_of_float32_changes_when_it_is_computed_again(bits: Bits) -> None:
    """All mantissas near each other in three places, as largest magnitudes of blocks: every remainder of 127 and 7."""
    codec = BlockCodec(bits, 2)
    for first in (1.0, 1.4142135, 1.9921875):
        magnitudes = torch.tensor(first).view(torch.int32) + torch.arange(1 << 14, dtype=torch.int32)
        row = magnitudes.view(torch.float32).repeat_interleave(2)
        row[1::2] *= -0.37
        decoded = round_trip(codec, row)
        assert torch.equal(encoded(codec, decoded), encoded(codec, row))


@each("bits", BITS)
@each("stochastic", [False, True])
def test_multiples_of_the_scale_are_exact(bits: Bits, stochastic: bool) -> None:
    limit = LIMITS[bits]
    row = torch.arange(-limit, limit + 1, dtype=torch.float32) * 0.25
    codec = BlockCodec(bits, 256, stochastic)
    assert torch.equal(round_trip(codec, row), row)
    for constant in (0.0, 3.0, -(2.0**-126), 2.0**100):
        row = torch.full((9,), constant)
        torch.testing.assert_close(round_trip(codec, row), row, rtol=2**-22, atol=2.0**-127)


@each("bits", BITS)
@each("dtype", FLOATS)
@each("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so(bits: Bits, dtype: torch.dtype, bad: float) -> None:
    for stochastic in (False, True):
        for place in (0, 7, 12):
            row = torch.linspace(-1, 1, 13, dtype=torch.float64).to(dtype)
            row[place] = bad
            found = round_trip(BlockCodec(bits, 8, stochastic), row)
            of_block = slice(8, 13) if place >= 8 else slice(0, 8)
            assert not found[of_block].isfinite().any()
            assert found.isfinite().sum() == 13 - found[of_block].numel(), "the other block is what it was"


@each("bits", BITS)
def test_rows_are_encoded_apart(bits: Bits) -> None:
    codec = BlockCodec(bits, 8)
    source = torch.randn(2, 3, 21, generator=torch.Generator().manual_seed(1))
    rows = encoded(codec, source)
    transposed = encoded(codec, source.transpose(0, 1))
    for i in range(2):
        for j in range(3):
            expected = encoded(codec, source[i, j])
            used = [*range(21 if bits == 8 else 11), *range(len(expected) - 12, len(expected))]
            assert torch.equal(rows[i, j][used], expected[used])
            assert torch.equal(transposed[j, i][used], expected[used])


@each("bits", BITS)
def test_pieces_change_nothing(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = BlockCodec(bits, 1 << 10)
    source = torch.randn(2, (1 << 17) + 1_025, generator=torch.Generator().manual_seed(1))
    at_once = encoded(codec, source)
    assert len(list(codec.pieces(at_once, source.shape[-1]))) == 1
    with monkeypatch.context() as patched:
        patched.setattr(codec_module, "_PIECE", 1)
        in_pieces = encoded(codec, source)
        assert len(list(codec.pieces(in_pieces, source.shape[-1]))) == 3
    assert torch.equal(in_pieces, at_once)
    decoded, added = torch.empty_like(source), torch.ones_like(source, dtype=torch.float64)
    codec.decode(at_once, decoded)
    assert (decoded - source).abs().max() < source.abs().max() / LIMITS[bits]
    codec.add_decoded(at_once, added)
    exact = torch.empty_like(added)
    codec.decode(at_once, exact)
    assert torch.equal(added, exact + 1)


@each("bits", BITS)
def test_rounding_at_random_has_no_bias(bits: Bits) -> None:
    """The mean of 40 000 errors, each uniform below one scale, has a standard deviation under scale / 400."""
    codec = BlockCodec(bits, 2, stochastic=True)
    for value in (0.1, 1.7, -2.45, 5.99):
        row = torch.tensor([value, float(LIMITS[bits])]).repeat(40_000)  # so that the scale is 1
        found = round_trip(codec, row, seed=3)[::2]
        assert set(found.tolist()) == {math.floor(value), math.ceil(value)}
        assert abs(found.double().mean().item() - value) < 4 / 400
    nearest = round_trip(BlockCodec(bits, 2), torch.tensor([0.1, float(LIMITS[bits])]))
    assert nearest[0].item() == 0.0, "rounding to nearest has one"


def test_the_generator_decides() -> None:
    row = torch.randn(100, generator=torch.Generator().manual_seed(1))
    codec = BlockCodec(8, 16, stochastic=True)
    assert torch.equal(round_trip(codec, row, seed=5), round_trip(codec, row, seed=5))
    assert not torch.equal(round_trip(codec, row, seed=5), round_trip(codec, row, seed=6))
    assert torch.equal(round_trip(BlockCodec(8, 16), row, seed=5), round_trip(BlockCodec(8, 16), row, seed=6))


@each("block", [0, 1, 3, 24, 1 << 17])
def test_blocks_are_powers_of_two(block: int) -> None:
    with pytest.raises(AssertionError, match="power of two"):
        BlockCodec(8, block)
