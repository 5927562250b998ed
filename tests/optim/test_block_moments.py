"""Tests of moments in 8 bits: they are read as bitsandbytes reads them, and what has been read is written as it was."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.each import each
from torch import Tensor

from megazero.optim.block_moments import BLOCK, BlockElements, BlockMoment

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the reference is bitsandbytes itself")
NUMEL = 600 * BLOCK


def functional() -> Any:
    """Return the reference, which is slow to import, so that no other test waits for it."""
    return import_module("bitsandbytes.functional")


def values(*, signed: bool) -> Tensor:
    found: Tensor = functional().create_dynamic_map(signed=signed)
    return found


def elements(*, signed: bool, size: float = 1.0) -> Tensor:
    """Return elements of many sizes, with blocks of zeros, of one sign, of ties and with one element that is not 0."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(NUMEL, generator=generator) * torch.randn(NUMEL, generator=generator).exp() * size
    found[:BLOCK] = 0.0
    found[BLOCK : 2 * BLOCK].clamp_(max=0.0)
    found[2 * BLOCK : 3 * BLOCK] = found[2 * BLOCK : 3 * BLOCK].sign() * size
    found[3 * BLOCK : 4 * BLOCK] = 0.0
    found[3 * BLOCK + 7] = -size
    return found if signed else found.abs()


def empty(*, signed: bool, numel: int = NUMEL) -> BlockMoment:
    return BlockMoment(torch.zeros(numel, dtype=torch.uint8), torch.zeros(numel // BLOCK), values(signed=signed))


def quantized(*, signed: bool, size: float = 1.0) -> BlockMoment:
    """Return the moment that bitsandbytes makes of elements."""
    codes, state = functional().quantize_blockwise(
        elements(signed=signed, size=size), values(signed=signed), blocksize=BLOCK
    )
    return BlockMoment(codes, state.absmax, values(signed=signed))


@each("signed", [True, False])
def test_it_is_read_as_bitsandbytes_does(signed: bool) -> None:
    moment = quantized(signed=signed)
    expected = functional().dequantize_blockwise(
        moment.codes, absmax=moment.maxima, code=moment.values, blocksize=BLOCK
    )
    assert torch.equal(moment.read(), expected)


@each("signed", [True, False])
@each("size", [1.0, 1e-20, 1e-36, 1e20])
def test_what_has_been_read_is_written_as_it_was(signed: bool, size: float) -> None:
    """That holds for what bitsandbytes has rounded, and for what is rounded here."""
    for made in (quantized(signed=signed, size=size), empty(signed=signed)):
        if not made.maxima.any():
            made.write(elements(signed=signed, size=size))
        again = empty(signed=signed)
        again.write(made.read())
        assert torch.equal(again.read(), made.read())


def test_the_package_itself_does_not_write_it_so() -> None:
    """The values have 1 but not -1: a block whose largest element is negative is smaller each time."""
    moment = quantized(signed=True)
    codes, state = functional().quantize_blockwise(moment.read(), moment.values, blocksize=BLOCK)
    assert not torch.equal(BlockMoment(codes, state.absmax, moment.values).read(), moment.read())


@each("signed", [True, False])
def test_elements_are_rounded_to_the_nearest(signed: bool) -> None:
    moment, given = empty(signed=signed), elements(signed=signed)
    moment.write(given)
    scaled = given.view(-1, BLOCK) / given.view(-1, BLOCK).abs().amax(1, keepdim=True).clamp(min=1e-30)
    nearest = (scaled.unsqueeze(-1) - moment.values).abs().amin(-1)
    largest = given.view(-1, BLOCK).abs().amax(1, keepdim=True)
    error = (moment.read().view(-1, BLOCK) - given.view(-1, BLOCK)).abs()
    assert bool((error <= nearest * largest * (1 + 1e-5) + 1e-6 * largest).all())


def test_padding_behind_short_parameters_becomes_zeros() -> None:
    moment = empty(signed=True, numel=3 * BLOCK)
    assert moment.codes[0] == 0 and moment.values[0] < 0, "a code of zero is no zero"
    moment[slice(BLOCK, 2 * BLOCK)].write(torch.full((5,), -2.0))
    found = moment.read()
    assert torch.equal(found[BLOCK : BLOCK + 5], torch.full((5,), -2.0 * -moment.values[0])) or torch.equal(
        found[BLOCK : BLOCK + 5], torch.full((5,), -2.0)
    )
    found[BLOCK : BLOCK + 5] = 0
    assert not found.any()


def test_elements_that_were_opened_are_stored_by_close() -> None:
    moment, given = empty(signed=True, numel=3 * BLOCK), elements(signed=True)[: BLOCK + 9]
    part = BlockElements(moment, slice(BLOCK, 2 * BLOCK + 9), is_written=True)
    part.view()[:300] = given[:300]
    assert not moment.read().any()
    part.view()[300:] = given[300:]
    moment.close()
    expected = empty(signed=True, numel=3 * BLOCK)
    expected[slice(BLOCK, 3 * BLOCK)].write(given)
    assert torch.equal(moment.read(), expected.read())
    BlockElements(moment, part.within, is_written=False).view().zero_()
    moment.close()
    assert torch.equal(moment.read(), expected.read()), "elements that are read are a copy"
