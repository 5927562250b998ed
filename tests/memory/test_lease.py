"""Tests that every pool of temporary memory offers the same way to lease."""

import inspect

import pytest

from megazero.memory.arena_scratch import ArenaScratch
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.lease import Scratch


@pytest.mark.parametrize("kind", [FusedBuffers, ArenaScratch])
def test_every_pool_takes_the_same_arguments(kind: type[FusedBuffers] | type[ArenaScratch]) -> None:
    ours, theirs = inspect.signature(kind.lease), inspect.signature(Scratch.lease)
    assert ours.parameters == theirs.parameters
