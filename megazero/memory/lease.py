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

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        """Lease a tensor of `numel` elements of `dtype`, contents undefined, until it is released."""


class _NoScratch:
    """A scratch for communicators that sum nothing up but scalars, which need none."""

    def lease(self, numel: int, dtype: torch.dtype) -> Lease:
        raise AssertionError("this communicator has no scratch memory: it gathers, and reduces scalars")


NO_SCRATCH: Scratch = _NoScratch()
