"""What those who allocate, resize and compute tell a ledger (`ledger.py`), and the ledger that is not kept."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from megazero.memory.ledger_figures import Category, Phase, StepMemory


class AnyLedger(Protocol):
    """What those who allocate tell, whether a ledger is kept or not; kept while entered as a context."""

    def __enter__(self) -> "AnyLedger": ...

    def __exit__(self, *exc: object) -> None: ...

    def tag(self, tensor: Tensor, category: Category) -> None:
        """The tensor's storage is of this category; one that the ledger has not seen yet is entered."""

    def category(self, category: Category) -> AbstractContextManager[None]:
        """What is allocated inside is of this category; the innermost one counts."""

    def resized(self, tensor: Tensor) -> None:
        """The tensor's storage has been resized in place."""

    def elsewhere(self, tensor: Tensor) -> None:
        """The tensor's storage is not the device's: from now on it is not counted, whatever happens to it."""

    def phase(self, phase: Phase) -> None:
        """Another part of the step begins."""

    def reset(self) -> None:
        """A step begins: forget changes, not what is alive."""

    def take(self) -> StepMemory | None:
        """What happened since the last `reset` or `take`, and start over; None where no ledger is kept."""


class NullLedger:
    """No ledger is kept, at no cost."""

    def __enter__(self) -> "NullLedger":
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def tag(self, tensor: Tensor, category: Category) -> None:
        return None

    def category(self, category: Category) -> AbstractContextManager[None]:
        return nullcontext()

    def resized(self, tensor: Tensor) -> None:
        return None

    def elsewhere(self, tensor: Tensor) -> None:
        return None

    def phase(self, phase: Phase) -> None:
        return None

    def reset(self) -> None:
        return None

    def take(self) -> None:
        return None
