"""Tests of what the wires of a rank remember.  The bytes of errors are compared in `tests/checkpoint/test_wires.py`."""

import torch

from megazero.comm.wires.wire_state import NOTHING_REMEMBERED, WireState


def test_draws_are_taken_over() -> None:
    one, two = (
        WireState(generators={key: torch.Generator().manual_seed(seed) for seed, key in enumerate("ab", start=first)})
        for first in (1, 5)
    )
    for generator in one.generators.values():
        torch.rand(3, generator=generator)
    two.restore_draws(one.draws())
    for key, generator in one.generators.items():
        assert torch.equal(torch.rand(5, generator=generator), torch.rand(5, generator=two.generators[key]))


def test_wires_that_remember_nothing() -> None:
    assert NOTHING_REMEMBERED.largest_error_bytes([100]) == 0
    NOTHING_REMEMBERED.restore_draws(NOTHING_REMEMBERED.draws())
