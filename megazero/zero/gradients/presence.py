"""Finds the parameters that no rank has a gradient of in a step, which the optimizer leaves alone, as torch does.

A rank that has a gradient of a parameter needs no answer from the others: the parameter is updated.  So flags of what
each rank has travel with the step's figures, and only ranks that miss some read the sums, on the device.
"""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

NOTHING: Mapping[str, Tensor] = MappingProxyType({})
"""The absent gradients of a step in which all parameters are updated."""


class GradientPresence:
    """The flags of one rank's gradients, and what the sums of all ranks' flags mean for it."""

    def __init__(
        self, names: Sequence[str], own: Collection[str], present: Collection[str], device: torch.device
    ) -> None:
        """names: the parameters in the order of the flags, the same on all ranks.  own: those that this rank has.

        present: those with a gradient in the step so far, which the reducer counts.
        """
        self._positions = {name: position for position, name in enumerate(names) if name in own}
        self._present = present
        self._device = device
        self._values = [float(name in self._positions) for name in names]
        self._all = self._on_device(self._values)

    def flags(self) -> Tensor:
        """Return 1 for every parameter of which this rank has a gradient, float64 [parameters]; not to be written."""
        missing = self._missing()
        if not missing:
            return self._all
        values = list(self._values)
        for name in missing:
            values[self._positions[name]] = 0.0
        return self._on_device(values)

    def absent(self, counts: Tensor) -> dict[str, Tensor]:
        """Return 1 for a parameter without a gradient on any rank, float32, by those that this rank has none of."""
        missing = self._missing()
        if not missing:
            return {}
        flags = (counts == 0).float().unbind()
        return {name: flags[self._positions[name]] for name in missing}

    def _missing(self) -> list[str]:
        if len(self._present) == len(self._positions):
            return []
        return [name for name in self._positions if name not in self._present]

    def _on_device(self, values: Sequence[float]) -> Tensor:
        """Return the values on the device; on a GPU from pinned memory, so that the host does not wait."""
        host = torch.tensor(values, dtype=torch.float64)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host
