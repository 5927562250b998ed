"""The ledger: live bytes by category through a step, storage by storage, as the run allocates and frees them.

A *storage* is what occupies memory, however many tensors are views of it; it is counted once, from its first use until
the last tensor on it is freed.  A `TorchDispatchMode` passes the ledger the result of every operation, a weak reference
calls it when a storage dies, and code that allocates state tags it.  The categories of a storage without a tag:

    activations    made during a forward and still alive when that forward ends: what it leaves for backward
    temporary      everything else

Both, and the first `tag` of a storage made in the same step, count from the storage's birth, not from the moment they
are known; a storage that had been tagged before changes category at the tag.  So the categories add up to the total at
every moment.  A storage that is *elsewhere* (in host memory, which on a CPU looks like the device's) is in none.

With a limit, the operation after which more is alive than that raises MemoryLimitError (`ledger_limit.py`).

Memory that passes no dispatch mode is not counted: scratch inside kernels (0 to 4 % of small steps on a CPU), the CUDA
context, NCCL's buffers, cuBLAS's workspace.  On CUDA the mode follows backward into the engine's own threads, because
autograd takes thread-local state along.  While any mode watches, autograd adds two gradients of one tensor out of place
instead of in place; the ledger counts that sum, which a run without a ledger does not make.  Compiled code runs
no single operations, so nothing is compiled while a ledger is kept.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.memory.address_book import AddressBook
from megazero.memory.ledger_figures import (
    CATEGORIES,
    AllocatorSample,
    Category,
    HostMemoryKind,
    MemoryTimeline,
    Phase,
    PhaseMark,
    StepMemory,
    UnitMark,
)
from megazero.memory.ledger_interface import AnyLedger, NullLedger
from megazero.memory.ledger_limit import MIB, MemoryLimit, limit_error

# PyTorch's CUDA allocator gives out multiples of this.
_CUDA_UNIT_BYTES = 512


class _Label:
    """The category of a storage, shared by all its changes; until it is fixed by a tag, it may be corrected.

    from_forward: True if made in the forward that is running; it becomes an activation if it outlives that.
    """

    __slots__ = ("category", "from_forward", "is_fixed")

    def __init__(self, category: Category, *, is_fixed: bool = False, from_forward: bool = False) -> None:
        self.category = category
        self.is_fixed = is_fixed
        self.from_forward = from_forward


class _Entry(weakref.ref[torch.UntypedStorage]):
    """A live storage, which the entry does not keep alive; without a label it is elsewhere."""

    __slots__ = ("is_pinned", "key", "label", "nbytes")

    key: int
    is_pinned: bool
    label: _Label | None
    nbytes: int


class _Change(NamedTuple):
    """Bytes that were allocated or, if negative, freed after so many operations."""

    nbytes: int
    label: _Label
    operation: int


class _Watch(TorchDispatchMode):
    """A dispatch mode that passes the result of every operation to the ledger."""

    show: Callable[[Any], None]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled while a ledger is kept, and torch's guard takes microseconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # a subclass has seen the call already, if it was Python's
            result = func(*args, **(kwargs or {}))
        self.show(result)
        return result


class Ledger:
    """The ledger of this process's memory on `device` (named as its tensors name it), kept while entered as a context.

    allocator: returns the bytes that the device's allocator has allocated, and is called at every phase; by default
    PyTorch's on CUDA, none elsewhere.  On CUDA a storage counts as the multiple of 512 bytes that it occupies.
    limit_bytes: the most that may be alive; beyond it operations and calls raise MemoryLimitError, once a step.
    unit: returns the module or the parameter that forward or backward has come to, for pictures.
    rounds_to: the bytes whose multiple a storage counts as; by default the 512 of CUDA there, 1 elsewhere.
    watch: called with the key of a storage on the device and its bytes from now on, 0 when it is freed.
    """

    is_kept = True

    def __init__(
        self,
        device: torch.device,
        *,
        limit_bytes: int | None = None,
        allocator: Callable[[], int] | None = None,
        unit: Callable[[], str] = str,
        rounds_to: int | None = None,
        watch: Callable[[int, int], None] | None = None,
    ) -> None:
        on_cuda = device.type == "cuda"
        self._device = device
        self._unit = rounds_to or (_CUDA_UNIT_BYTES if on_cuda else 1)
        self._changed_size = watch or _ignore
        self._allocator = allocator or ((lambda: torch.cuda.memory_allocated(device)) if on_cuda else None)
        self._limit = None if limit_bytes is None else MemoryLimit(limit_bytes)
        self._watch = _Watch()
        self._watch.show = self.operation_done
        self._labels: dict[Category, _Label] = {name: _Label(name, is_fixed=True) for name in CATEGORIES}
        self._inside: list[Category] = []
        self._live: dict[int, _Entry] = {}
        self._start = np.zeros(len(CATEGORIES), np.int64)
        self._changes: list[_Change] = []
        self._phases: list[PhaseMark] = []
        self._unit_now = unit
        self._units: list[UnitMark] = []
        self._samples: list[tuple[int, int]] = []  # (changes so far, bytes by the allocator)
        self._num_operations = 0
        self.passes_over_new = False
        """True while operations make what no memory is for: the registers of compiled code, in a dry run."""

    def __enter__(self) -> "Ledger":
        self._watch.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._watch.__exit__(*exc)

    def tag(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        entry, label = self._live.get(storage._cdata), self._labels[category]
        if entry is None:
            self._enter(tensor, storage, label)
            self._check_limit()
        elif entry.label is None:
            return
        elif not entry.label.is_fixed:
            entry.label.category, entry.label.is_fixed = category, True
        elif entry.label.category != category:
            self._changed(-entry.nbytes, entry.label)
            self._changed(entry.nbytes, label)
            entry.label = label

    @contextmanager
    def category(self, category: Category) -> Iterator[None]:
        self._inside.append(category)
        try:
            yield
        finally:
            self._inside.pop()

    def operation_done(self, result: Any) -> None:
        """Count what an operation has made or resized; the ledger's own mode calls this, where it is entered."""
        name, units = self._unit_now(), self._units
        if not units or name is not units[-1].name:
            units.append(UnitMark(self._num_operations, name))
        self._num_operations += 1
        if isinstance(result, Tensor):  # as nearly always
            self._meet(result)
        else:
            self._look_through(result)
        if self._limit is not None:
            self._check_limit()

    def resized(self, tensor: Tensor) -> None:
        self._meet(tensor)
        self._check_limit()

    def counts(self, tensor: Tensor) -> bool:
        """Return True if the tensor's storage is known here, on the device or elsewhere."""
        return tensor.untyped_storage()._cdata in self._live

    def enter(self, storage: torch.UntypedStorage) -> None:
        """Count a storage on the device that has been passed over, if nothing has tagged it since."""
        if storage._cdata not in self._live:
            self._add(storage, self._label_of_new())
            self._check_limit()

    def storage_resized(self, storage: torch.UntypedStorage) -> None:
        """Measure a storage again that has changed its size without an operation."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            self._measure(entry, storage)
            self._check_limit()

    def elsewhere(self, tensor: Tensor, *, is_pinned: bool = False) -> None:
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata) or self._new_entry(storage, None)
        entry.is_pinned = is_pinned
        if entry.label is not None:
            self._changed(-entry.nbytes, entry.label)
            self._changed_size(entry.key, 0)
            entry.label = None

    def is_elsewhere(self, tensor: Tensor) -> bool:
        """Return True if the tensor's storage is the host's."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        return entry is not None and entry.label is None

    @property
    def current_phase(self) -> Phase | None:
        """The phase of the step that has begun last; None before the first one."""
        return self._phases[-1].phase if self._phases else None

    def phase(self, phase: Phase) -> None:
        self._end_phase()
        self._phases.append(PhaseMark(self._num_operations, phase))

    def address_book(self, capacity: int, *, alignment: int) -> AddressBook:
        return AddressBook(capacity, alignment=alignment)

    def reset(self) -> None:
        self.take()

    def take(self) -> StepMemory:
        self._end_phase()
        for entry in list(self._live.values()):
            if entry.label is not None:
                entry.label.is_fixed = True  # this step's figures are final
        # Swapped at once: a storage may die at any moment, and its change belongs to this step or to the next.
        changes, self._changes = self._changes, []
        rows = ((change.nbytes, change.label.category, change.operation) for change in changes)
        timeline = MemoryTimeline.of_changes(self._start, rows, self._phases, self._num_operations, self._units)
        totals = timeline.totals
        samples = tuple(AllocatorSample(int(totals[point]), nbytes) for point, nbytes in self._samples)
        self._start, self._phases, self._samples, self._num_operations = timeline.live[-1].copy(), [], [], 0
        self._units = []
        if self._limit is not None:
            self._limit.start(int(self._start.sum()))
        return StepMemory(timeline, samples, self.elsewhere_by_kind())

    def live_bytes(self) -> dict[Category, int]:
        """Return the bytes alive now, by category."""
        totals = dict.fromkeys(CATEGORIES, 0)
        for entry in list(self._live.values()):
            if entry.label is not None:
                totals[entry.label.category] += entry.nbytes
        return totals

    def elsewhere_bytes(self) -> int:
        """Return the bytes of the storages that are elsewhere and alive now."""
        return sum(self.elsewhere_by_kind().values())

    def elsewhere_by_kind(self) -> dict[HostMemoryKind, int]:
        """Return the bytes of the host's storages that are alive now, by kind."""
        found: dict[HostMemoryKind, int] = {"pinned_host": 0, "host": 0}
        for entry in list(self._live.values()):
            storage = entry()
            if entry.label is None and storage is not None:
                found["pinned_host" if entry.is_pinned else "host"] += storage.nbytes()
        return found

    def _look_through(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._meet(result)
        elif isinstance(result, (list, tuple)):
            for part in result:
                self._look_through(part)

    def _meet(self, tensor: Tensor) -> None:
        """Enter a storage that is new, and measure again one that is not: an operation may have resized it."""
        if tensor.layout is not torch.strided:  # made of several tensors, without a storage of its own
            return
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is not None:
            self._measure(entry, storage)
        elif not self.passes_over_new:
            self._enter(tensor, storage, self._label_of_new())

    def _measure(self, entry: _Entry, storage: torch.UntypedStorage) -> None:
        if entry.label is None:
            return
        nbytes = self._occupied(storage)
        if nbytes != entry.nbytes:
            self._changed(nbytes - entry.nbytes, entry.label)
            self._changed_size(entry.key, nbytes)
            entry.nbytes = nbytes

    def _label_of_new(self) -> _Label:
        if self._inside:
            return self._labels[self._inside[-1]]
        return _Label("temporary", from_forward=bool(self._phases) and self._phases[-1].phase == "forward")

    def _enter(self, tensor: Tensor, storage: torch.UntypedStorage, label: _Label) -> None:
        if tensor.device == self._device:
            self._add(storage, label)

    def _add(self, storage: torch.UntypedStorage, label: _Label) -> None:
        entry = self._new_entry(storage, label)
        self._changed(entry.nbytes, label)
        self._changed_size(entry.key, entry.nbytes)

    def _new_entry(self, storage: torch.UntypedStorage, label: _Label | None) -> _Entry:
        entry = _Entry(storage, self._died)
        entry.key, entry.label, entry.nbytes = storage._cdata, label, self._occupied(storage)
        entry.is_pinned = False
        self._live[entry.key] = entry
        return entry

    def _died(self, entry: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(entry, _Entry)
        del self._live[entry.key]
        if entry.label is not None:
            self._changed(-entry.nbytes, entry.label)
            self._changed_size(entry.key, 0)

    def _changed(self, nbytes: int, label: _Label) -> None:
        """Record a change in one append, so that a storage's death meanwhile, in any thread, does no harm."""
        self._changes.append(_Change(nbytes, label, self._num_operations))

    def _end_phase(self) -> None:
        """Count what a forward has left alive as activations, and sample the allocator."""
        self._name_activations()
        if self._allocator is not None:
            self._samples.append((len(self._changes), self._allocator()))

    def _name_activations(self) -> None:
        for entry in list(self._live.values()):
            if entry.label is not None and entry.label.from_forward and not entry.label.is_fixed:
                entry.label.category = "activations"

    def _check_limit(self) -> None:
        if self._limit is not None and self._limit.is_newly_exceeded(self._changes):
            self._name_activations()  # the forward that is running will not finish
            raise limit_error(self._limit.nbytes, self.live_bytes(), self.current_phase)

    def _occupied(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self._unit) * self._unit


def _ignore(key: int, nbytes: int) -> None:
    """Stand for a watch that there is none of."""


def open_ledger(
    device: torch.device, *, kept: bool, limit_mib: float | None = None, unit: Callable[[], str] = str
) -> AnyLedger:
    """Return the ledger of a run on `device`, or a null ledger; one with a limit (MiB) is always kept."""
    if limit_mib is not None:
        return Ledger(device, limit_bytes=round(limit_mib * MIB), unit=unit)
    return Ledger(device, unit=unit) if kept else NullLedger()
