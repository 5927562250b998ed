"""Copies of a few figures from the device to the host, which wait for nothing but the work queued before them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_event: Callable[[], torch.cuda.Event] = torch.cuda.Event


class HostCopy:
    """A copy of figures to the host, queued behind the work that computes them and before what follows."""

    def __init__(self, figures: Sequence[Tensor]) -> None:
        """figures: tensors without dimensions, of one dtype."""
        stacked = torch.stack(list(figures))
        self._host = stacked.to("cpu", non_blocking=True)
        self._arrived = _event() if stacked.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Return the figures, in order; wait for the work before the copy only."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
