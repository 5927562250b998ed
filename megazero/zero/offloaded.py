"""State that leaves the device between two steps and comes back, so that a program may use its memory meanwhile."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.errors import Problem, UsageError
from megazero.memory.homes import HostHome
from megazero.memory.ledger_interface import AnyLedger


class _Away(NamedTuple):
    """Memory of the device that has been freed, and a copy of its bytes in host memory."""

    tensor: Tensor
    copy: Tensor


class OffloadedStates:
    """The memory of one engine's tensors that is in host memory now; the tensors themselves stay, without memory."""

    def __init__(self, home: HostHome, ledger: AnyLedger) -> None:
        self._home = home
        self._ledger = ledger
        self._away: dict[int, _Away] = {}  # by storage

    def move(self, tensors: Iterable[Tensor]) -> int:
        """Copy the tensors' storages to host memory and free them; return the bytes freed."""
        storages = ((tensor, tensor.untyped_storage()) for tensor in tensors)
        # A CPU's memory that NumPy has referred to, as to write a checkpoint, cannot be freed.
        found = {storage._cdata: tensor for tensor, storage in storages if storage.nbytes() and storage.resizable()}
        copies = {
            key: self._home.zeros(tensor.untyped_storage().nbytes(), torch.uint8) for key, tensor in found.items()
        }
        arrivals = [self._home.store(copies[key], _bytes_of(tensor)) for key, tensor in found.items()]
        for arrival in arrivals:
            arrival.finish()
        for key, tensor in found.items():
            tensor.untyped_storage().resize_(0)
            self._ledger.resized(tensor)
            self._away[key] = _Away(tensor, copies[key])
        return sum(copy.nbytes for copy in copies.values())

    def move_back(self) -> None:
        """Allocate the memory anew, and copy what it held back to it."""
        arrivals = []
        for tensor, copy in self._away.values():
            tensor.untyped_storage().resize_(copy.nbytes)
            self._ledger.resized(tensor)
            arrivals.append(self._home.load(_bytes_of(tensor), copy))
        for arrival in arrivals:
            arrival.finish()  # before the copies are freed
        self._away.clear()

    def check_back(self, call: str) -> None:
        """Raise UsageError for a call that needs the states while some are away."""
        if self._away:
            rule = "it needs the states that engine.offload_states() has moved to host memory"
            raise UsageError(Problem(call, rule, f"engine.reload_states() before {call}"))


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
