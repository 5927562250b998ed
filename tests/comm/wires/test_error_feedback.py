"""Tests of error feedback: its formula against plain arithmetic, what it does to sums of many calls, and its memory."""

import math

import pytest
import torch
from support.each import each
from torch import Tensor

from megazero.comm.wires.codec import BlockCodec
from megazero.comm.wires.error_feedback import ErrorFeedback
from megazero.memory.fused_buffers import FusedBuffers

CODEC, SCRATCH = BlockCodec(4, 64), FusedBuffers(0, torch.device("cpu"))
N = 150
NEVER = 10**9


def numbers(seed: int = 0, rows: int = 2) -> Tensor:
    return torch.randn(rows, N, generator=torch.Generator().manual_seed(seed))


def encode_with(feedback: ErrorFeedback, source: Tensor, key: int = 0, codec: BlockCodec = CODEC) -> Tensor:
    """Return what is decoded of a call with a key."""
    encoded = torch.empty(*source.shape[:-1], codec.encoded_bytes(source.shape[-1]), dtype=torch.uint8)
    feedback.encode(codec, source, encoded, (key, 0), None)
    decoded = torch.empty_like(source)
    codec.decode(encoded, decoded)
    return decoded


def plainly(codec: BlockCodec, source: Tensor) -> Tensor:
    encoded = torch.empty(*source.shape[:-1], codec.encoded_bytes(source.shape[-1]), dtype=torch.uint8)
    codec.encode(source, encoded)
    decoded = torch.empty_like(source)
    codec.decode(encoded, decoded)
    return decoded


@each("beta", [0.0, 0.8])
def test_formula(beta: float) -> None:
    """The same in two lines, over calls with other numbers each and a reset after the third."""
    kept = BlockCodec(8, 16)
    feedback, error = ErrorFeedback(beta, 3, SCRATCH.keep, codec=kept), torch.zeros(2, N)
    for call in range(7):
        if call % 3 == 0:
            error = torch.zeros(2, N)
        x = numbers(call)
        sent = plainly(CODEC, x + error)
        error = plainly(kept, beta * error + (1 - beta) * (x + error - sent))
        found = encode_with(feedback, x)
        # The reference may round a product with beta another way than a fused one does, which moves few numbers.
        assert (found - sent).ne(0).sum() <= 2
        torch.testing.assert_close(found, sent, rtol=0, atol=0.6)
        assert torch.equal(found, plainly(CODEC, x)) == (call % 3 == 0), "without an error, and only then"


@each("beta", [0.0, 0.5, 0.8])
def test_sums_of_many_calls(beta: float) -> None:
    """Feedback's difference is bounded by e / (1 - beta), a scale or two; without, it grows with each call."""
    x, feedback = numbers(rows=1), ErrorFeedback(beta, NEVER, SCRATCH.keep)
    scale = x.abs().max().item() / 7
    total, without = torch.zeros_like(x), torch.zeros_like(x)
    for call in range(1, 301):
        total += encode_with(feedback, x)
        without += plainly(CODEC, x)
        assert (total - call * x).abs().max().item() < scale * 0.8 / (1 - beta)
    assert (without - 300 * x).abs().max().item() > 100 * scale


def test_keys_are_apart() -> None:
    feedback, alone = ErrorFeedback(0.5, NEVER, SCRATCH.keep), ErrorFeedback(0.5, NEVER, SCRATCH.keep)
    for call in range(4):
        encode_with(feedback, numbers(100 + call), key=1)
        assert torch.equal(encode_with(feedback, numbers(call)), encode_with(alone, numbers(call)))
    with pytest.raises(AssertionError, match="key 1 is another tensor's"):
        encode_with(feedback, numbers(rows=3), key=1)


def test_state_goes_on_in_another_feedback() -> None:
    """Errors and calls of keys are taken over; at a reset in between both forget."""
    first, second = ErrorFeedback(0.5, 3, SCRATCH.keep), ErrorFeedback(0.5, 3, SCRATCH.keep)
    for call in range(5):
        encode_with(first, numbers(call), key=call % 2)
    encode_with(second, numbers(rows=3), key=1)  # which restoring forgets
    calls = first.calls()
    assert calls[:, :3].tolist() == [[0, 0, 3], [1, 0, 2]], "key, hop, calls"
    second.restore(calls.tolist())
    assert not any(bool(errors.any()) for errors in second.errors())
    for kept, errors in zip(first.errors(), second.errors(), strict=True):
        errors.copy_(kept)
    for call in range(5, 9):
        for key in range(2):
            assert torch.equal(encode_with(first, numbers(call), key), encode_with(second, numbers(call), key))


def test_memory() -> None:
    feedback = ErrorFeedback(0.5, NEVER, SCRATCH.keep)
    assert feedback.nbytes == 0
    for key in (1, 2, 1):
        encode_with(feedback, numbers(), key=key)
    assert feedback.nbytes == 2 * 2 * (152 + 4), "two keys of two rows of one block each, a byte a number"


@each("bad", [math.inf, math.nan])
def test_an_overflow_is_no_part_of_later_calls(bad: float) -> None:
    feedback, overflowed = ErrorFeedback(0.5, NEVER, SCRATCH.keep), numbers()
    encode_with(feedback, numbers(7))
    overflowed[0, 3] = bad
    assert not encode_with(feedback, overflowed)[0, 3].isfinite()
    found = encode_with(feedback, numbers(1))
    assert found.isfinite().all()
    assert torch.equal(found[0, :64], plainly(CODEC, numbers(1))[0, :64]), "no error is left in the block"


@each("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_sources_of_every_dtype_stay_as_they_were(dtype: torch.dtype) -> None:
    x = numbers().to(dtype)
    before, feedback = x.clone(), ErrorFeedback(0.5, NEVER, SCRATCH.keep)
    total = torch.zeros(2, N, dtype=torch.float64)
    for _ in range(100):
        total += encode_with(feedback, x.transpose(0, 0)).double()
    assert torch.equal(x, before)
    assert (total / 100 - x.double()).abs().max() < 0.03
