"""Temporary memory: a tensor that is leased from a pool until it is released."""

from typing import Protocol

import torch
from torch import Tensor


class Lease(Protocol):
    """A tensor leased from a pool."""

    @property
    def tensor(self) -> Tensor: ...

    def release(self) -> None:
        """Give the memory back to the pool, once."""


class Scratch(Protocol):
    """A pool of temporary memory: constant-size buffers, or the slots of an arena."""

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the largest tensor that can be leased."""

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        """Lease a tensor of `numel` elements of `dtype`, contents undefined, until it is released."""

    def keep(self, nbytes: int) -> Tensor:
        """Allocate memory beside the pool's that is never returned, uint8 [nbytes], contents undefined."""


class _NoScratch:
    """A scratch for communicators that sum nothing up but scalars, which need none."""

    buffer_bytes = 0

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        raise AssertionError("this communicator has no scratch memory: it gathers, and reduces scalars")

    def keep(self, nbytes: int) -> Tensor:
        raise AssertionError("this communicator keeps nothing")


NO_SCRATCH: Scratch = _NoScratch()
