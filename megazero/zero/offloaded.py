"""State that leaves the device between two steps and comes back, so that a program may use its memory meanwhile."""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from megazero.errors import Problem, UsageError
from megazero.memory.homes import HostHome
from megazero.memory.ledger_interface import AnyLedger


class StateKind(StrEnum):
    """The kinds of state that may leave the device for a while, by DeepSpeed's names.

    PARTITIONS are those of working parameters, where they are partitioned; GRADIENTS partitions of reduced gradients.
    """

    MOMENTS = "optim_states"
    MASTERS = "hp_params"
    PARTITIONS = "lp_params"
    GRADIENTS = "lp_grads"


class _Away(NamedTuple):
    """Memory of the device that has been freed, of a kind of state, and a copy of its bytes in host memory.

    copy: None if what the memory held is computed anew.
    """

    tensor: Tensor
    kind: StateKind
    nbytes: int
    copy: Tensor | None


class OffloadedStates:
    """The memory of one engine's tensors that is in host memory now; the tensors themselves stay, without memory."""

    def __init__(self, home: HostHome, ledger: AnyLedger) -> None:
        self._home = home
        self._ledger = ledger
        self._away: dict[int, _Away] = {}  # by storage

    def move(self, tensors: Mapping[StateKind, Iterable[Tensor]], *, computed: Iterable[Tensor] = ()) -> int:
        """Copy the tensors' storages to host memory and free them; return the bytes freed.

        computed: partitions that are freed without a copy, since they are computed anew once they are back.
        """
        found = {
            key: _Away(tensor, kind, nbytes, self._home.zeros(nbytes, torch.uint8))
            for kind, of_kind in tensors.items()
            for key, tensor, nbytes in _storages(of_kind)
        }
        arrivals = [self._home.store(one.copy, _bytes_of(one.tensor)) for one in found.values() if one.copy is not None]
        for arrival in arrivals:
            arrival.finish()
        found |= {key: _Away(tensor, StateKind.PARTITIONS, nbytes, None) for key, tensor, nbytes in _storages(computed)}
        for one in found.values():
            one.tensor.untyped_storage().resize_(0)
            self._ledger.resized(one.tensor)
        self._away |= found
        return sum(one.nbytes for one in found.values())

    def move_back(self) -> None:
        """Allocate the memory anew, and copy what it held back to it."""
        arrivals = []
        for tensor, _, nbytes, copy in self._away.values():
            tensor.untyped_storage().resize_(nbytes)
            self._ledger.resized(tensor)
            if copy is not None:
                arrivals.append(self._home.load(_bytes_of(tensor), copy))
        for arrival in arrivals:
            arrival.finish()  # before the copies are freed
        self._away.clear()

    def check_back(self, call: str, needed: Collection[StateKind]) -> None:
        """Raise UsageError for a call while states that it needs are away."""
        if not self._away:
            return
        away = {one.kind for one in self._away.values()}
        if missing := ", ".join(kind for kind in StateKind if kind in away and kind in needed):
            given = f"{call} while engine.offload_states() has {missing} in host memory"
            raise UsageError(
                Problem(given, f"it needs {missing} on the device", f"engine.reload_states() before {call}")
            )


def _storages(tensors: Iterable[Tensor]) -> list[tuple[int, Tensor, int]]:
    """Return the storages that can be freed: the key of each, one of its tensors, and its bytes."""
    storages = ((tensor, tensor.untyped_storage()) for tensor in tensors)
    # A CPU's memory that NumPy has referred to, as to write a checkpoint, cannot be freed.
    found = {storage._cdata: tensor for tensor, storage in storages if storage.nbytes() and storage.resizable()}
    return [(key, tensor, tensor.untyped_storage().nbytes()) for key, tensor in found.items()]


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of the tensor's whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
