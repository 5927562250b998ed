"""Homes of model states: the memory in which flat tensors of state live between their uses.

At home on the device, a state is used where it is.  At home in host memory (ZeRO-Offload, arXiv 2101.06840), the
optimizer's states are updated there by the host's processors, and only gradients and updated weights travel; a
parameter's partition travels to the device ahead of its gather (ZeRO-Infinity, arXiv 2104.07857).  Everything that
crosses between a home and the device goes through `store`, `load` and `bring`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from megazero.memory.copies import ARRIVED, Arrival, copy_stream
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.host import host_bytes
from megazero.memory.lease import Scratch
from megazero.memory.ledger_interface import AnyLedger, NullLedger


class StateHome(Protocol):
    """Memory of one kind, and the copies between it and the device."""

    @property
    def device(self) -> torch.device:
        """The device of this memory's tensors, by which they are updated."""

    @property
    def is_device(self) -> bool:
        """True if this memory is that of the device which computes the model."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate a flat tensor of zeros, [numel]."""

    def scratch(self, of_device: Scratch) -> Scratch:
        """Return a pool of temporaries beside this memory's tensors; of_device: the pool of the device."""

    def store(self, target: Tensor, source: Tensor) -> Arrival:
        """Begin to copy from the device to this memory; dtypes are the same."""

    def load(self, target: Tensor, source: Tensor) -> Arrival:
        """Begin to copy from this memory to the device, in the dtype of `target`."""

    def bring(self, source: Tensor, into: Tensor) -> tuple[Tensor, Arrival]:
        """Return a tensor on the device with the values of `source`: itself, or `into`, to which a copy has begun."""


class DeviceHome:
    """The memory of the device that computes the model."""

    is_device = True

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def scratch(self, of_device: Scratch) -> Scratch:
        return of_device

    def store(self, target: Tensor, source: Tensor) -> Arrival:
        target.copy_(source)
        return ARRIVED

    def load(self, target: Tensor, source: Tensor) -> Arrival:
        target.copy_(source)
        return ARRIVED

    def bring(self, source: Tensor, into: Tensor) -> tuple[Tensor, Arrival]:
        return source, ARRIVED


class _Narrowed(NamedTuple):
    """Weights narrowed to the working parameters' format, and the end of their last copy to the device."""

    values: Tensor
    arrival: Arrival


class HostHome:
    """The host's memory, an allocation of its own beside the device's, on a CPU too."""

    is_device = False

    def __init__(
        self,
        device: torch.device,
        *,
        is_pinned: bool = True,
        ledger: AnyLedger | None = None,
        record: Callable[[Literal["store", "load"], int], None] = lambda way, nbytes: None,
    ) -> None:
        """device: the one that computes the model.  is_pinned: whether the system may not move the memory.

        record: called with the way and the bytes of every copy.
        """
        self.device = torch.device("cpu")
        self._is_pinned = is_pinned and device.type == "cuda"
        self._converts_while_copying = device.type != "cuda"
        self._ledger = ledger or NullLedger()
        self._away, self._back = copy_stream(device), copy_stream(device)
        self._pool = FusedBuffers(0, self.device, allocate=self._bytes)
        self._narrowed: dict[tuple[int, int], _Narrowed] = {}  # by address and elements of what is narrowed
        self._record = record

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._bytes(numel * dtype.itemsize).zero_().view(dtype)

    def scratch(self, of_device: Scratch) -> Scratch:
        return self._pool

    def reserve(self, nbytes: int) -> None:
        """Let temporaries have up to `nbytes`, before any is leased."""
        if nbytes > self._pool.buffer_bytes:
            self._pool.resize(nbytes)

    def store(self, target: Tensor, source: Tensor) -> Arrival:
        assert target.dtype == source.dtype, "a gradient is converted on the device, before it travels"
        self._record("store", source.nbytes)
        return self._away.copy(target, source)

    def load(self, target: Tensor, source: Tensor) -> Arrival:
        self._record("load", target.nbytes)
        if target.dtype == source.dtype or self._converts_while_copying:
            return self._back.copy(target, source)
        # All that an update narrows may travel at once: the host would wait for memory otherwise, over a slow link.
        key = (source.data_ptr(), source.numel())
        before = self._narrowed.get(key)
        if before is None:
            values = self.zeros(target.numel(), target.dtype)
        else:
            values = before.values
            before.arrival.finish()
        arrival = self._back.copy(target, values.copy_(source))
        self._narrowed[key] = _Narrowed(values, arrival)
        return arrival

    def bring(self, source: Tensor, into: Tensor) -> tuple[Tensor, Arrival]:
        return into, self.load(into, source)

    def _bytes(self, nbytes: int) -> Tensor:
        return host_bytes(nbytes, is_pinned=self._is_pinned, ledger=self._ledger)
