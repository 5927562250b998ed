"""The interface to a ledger (`ledger.py`) for code that allocates, resizes and computes, and the null ledger."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from megazero.memory.address_book import AddressBook
from megazero.memory.ledger_figures import Category, Phase, StepMemory


class AnyLedger(Protocol):
    """A ledger as code that allocates calls it, whether one is kept or not; it is kept while entered as a context."""

    @property
    def is_kept(self) -> bool:
        """True if it records what is allocated, operation by operation."""

    def __enter__(self) -> "AnyLedger": ...

    def __exit__(self, *exc: object) -> None: ...

    def tag(self, tensor: Tensor, category: Category) -> None:
        """Set the category of the tensor's storage; count one that is new to the ledger."""

    def category(self, category: Category) -> AbstractContextManager[None]:
        """Assign this category to the storages allocated inside; the innermost category counts."""

    def resized(self, tensor: Tensor) -> None:
        """Measure the tensor's storage again, which has been resized in place."""

    def elsewhere(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        """Count the tensor's storage apart from here on: it is the host's, pinned or not, and not the device's."""

    def phase(self, phase: Phase) -> None:
        """Begin another phase of the step."""

    def reset(self) -> None:
        """Begin a step: forget changes, not live storages."""

    def address_book(self, capacity: int, *, alignment: int) -> AddressBook:
        """Return the addresses of an arena that is made; a ledger may keep them, to look at the arena's figures."""

    def take(self) -> StepMemory | None:
        """Return the figures since the last `reset` or `take`, and begin a step; None where no ledger is kept."""


class NullLedger:
    """A ledger that records nothing, at no cost."""

    is_kept = False

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

    def elsewhere(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        return None

    def phase(self, phase: Phase) -> None:
        return None

    def reset(self) -> None:
        return None

    def address_book(self, capacity: int, *, alignment: int) -> AddressBook:
        return AddressBook(capacity, alignment=alignment)

    def take(self) -> None:
        return None
