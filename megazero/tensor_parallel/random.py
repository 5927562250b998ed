"""Dropout's random states: one for replicated, one for sharded regions, both set anew for every micro-batch.

In a *replicated* region all tensor-parallel ranks hold the same activation and must drop the same elements; in a
*sharded* region each holds a different part and must draw on its own.  Both states are pure functions of (seed, first
sample of the micro-batch, region and, when sharded, rank), so no state needs saving, a resumed run draws the numbers of
an uninterrupted one, and a micro-batch has the same replicated masks whichever data-parallel rank computes it.

Outside `sharded()` the device's default generator is in the replicated state, so plain dropout is right there.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megazero.generators import default_generator


class RandomRegions:
    """The two random states of one rank on `device`; `tp_rank` is its position on the tensor-parallel axis."""

    def __init__(self, seed: int, tp_rank: int, device: torch.device) -> None:
        self._seed = seed
        self._tp_rank = tp_rank
        self._generator = default_generator(device)
        self._inactive: Tensor | None = None  # the sharded state while outside the region, the replicated one inside

    def begin_micro_batch(self, first_sample: int, part: int = 0) -> None:
        """Set both states for the micro-batch whose first sample is number `first_sample`.

        part: the chunk of a model that is cut into several, each with random numbers of its own.
        """
        suffix = f" part {part}" if part else ""
        self._generator.manual_seed(region_seed(self._seed, first_sample, f"sharded {self._tp_rank}{suffix}"))
        self._inactive = self._generator.get_state()
        self._generator.manual_seed(region_seed(self._seed, first_sample, f"replicated{suffix}"))

    def get_state(self) -> tuple[Tensor, Tensor | None]:
        """Return both states, for `set_state`."""
        return self._generator.get_state(), self._inactive

    def set_state(self, state: tuple[Tensor, Tensor | None]) -> None:
        """Restore both states, to draw the same numbers again; not inside `sharded`, unless `get_state` was too."""
        active, self._inactive = state
        self._generator.set_state(active)

    @contextmanager
    def sharded(self) -> Iterator[None]:
        """Draw from the sharded state inside; each state continues after its own last draw."""
        assert self._inactive is not None, "begin_micro_batch() comes before dropout"
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        assert self._inactive is not None
        active = self._generator.get_state()
        self._generator.set_state(self._inactive)
        self._inactive = active


def region_seed(seed: int, first_sample: int, region: str) -> int:
    """Return 63 bits that differ for every seed, sample and region."""
    digest = hashlib.blake2b(f"dropout {seed} {first_sample} {region}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
