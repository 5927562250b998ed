"""The tensors of activation checkpoints between forward and backward: whole or in slices, on the device or the host.

Three choices, independent of each other (ZeRO, sections 6.1 and 6.3):

    partitioned (Pa)      every tensor-parallel rank stores one slice of the elements; all-gathered for backward
    on the host (Pa+cpu)  copies go to host memory while the layers after them compute
    contiguous (MD)       copies on the device lie in one pre-allocated arena

Without any of them a checkpoint is the tensor itself, at no cost.  With one, activations are copied as soon as the
function that reads them begins, so that their own memory is free when it ends.  In backward, copies return ahead of
their use: when a checkpoint is restored, the one before it in its pass begins to be gathered, and the one before that
to be copied from the host.  A user's model may make checkpoints that no backward restores, so its slices are gathered
only when they are needed.

Pa needs inputs that are the same on every tensor-parallel rank, as those of a transformer layer are.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.activations.copy_stores import CopyStore, DeviceStore, ReleaseQueue
from megazero.comm.interface import Communicator, Work
from megazero.errors import Problem, UsageError
from megazero.memory.ledger_interface import AnyLedger, NullLedger


class CheckpointedTensor(Protocol):
    """One tensor of an activation checkpoint."""

    def release_source(self) -> None:
        """Wait until the tensor's own memory may be overwritten or freed, if there is a copy."""

    def prefetch(self) -> None:
        """Begin to copy the stored elements to the device."""

    def gather(self) -> None:
        """Begin to gather the whole tensor."""

    def restore(self) -> Tensor:
        """Return the tensor with its old values, shape and strides, detached."""


class ActivationCheckpoint:
    """The tensors that one recomputed function starts from."""

    def __init__(
        self,
        tensors: Sequence[CheckpointedTensor],
        before: "ActivationCheckpoint | None",
        *,
        releases: ReleaseQueue,
        gathers_ahead: bool,
    ) -> None:
        """Link the checkpoint to the one `before` it; a copied tensor may occur in `tensors` several times."""
        self._tensors = tensors
        self._releases = releases
        self._gathers_ahead = gathers_ahead
        self._before = None if before is None else weakref.ref(before)

    def restore(self) -> list[Tensor]:
        """Return the tensors with their old values; begin to restore those of the checkpoints before."""
        with self._releases.deferred():
            self.gather()
            before = self._earlier()
            further = None if before is None else before._earlier()
            if before is not None and self._gathers_ahead:
                before.gather()
            for earlier in (before, further):
                if earlier is not None:
                    earlier.prefetch()
            restored = {id(saved): saved.restore() for saved in self._tensors}
        return [restored[id(saved)] for saved in self._tensors]

    def release_source(self) -> None:
        """Wait until the memory of copied tensors may be overwritten or freed; the function has ended."""
        for saved in self._tensors:
            saved.release_source()

    def prefetch(self) -> None:
        """Begin to copy the stored elements to the device."""
        for saved in self._tensors:
            saved.prefetch()

    def gather(self) -> None:
        """Begin to gather the whole tensors."""
        for saved in self._tensors:
            saved.gather()

    def _earlier(self) -> "ActivationCheckpoint | None":
        return None if self._before is None else self._before()


class ActivationCheckpoints:
    """The activation checkpoints of one rank.

    partition_over: the axis over whose ranks activations are partitioned; None leaves them whole.
    is_replicated: True if activations are certain to be the same on these ranks; else the first pass compares them.
    copies: the store for copies; None retains the tensors themselves, or slices in memory of their own.
    device: only tensors on it are copied, others are retained themselves; None copies those of all devices.
    """

    def __init__(
        self,
        *,
        partition_over: Communicator | None = None,
        is_replicated: bool = True,
        copies: CopyStore | None = None,
        device: torch.device | None = None,
        ledger: AnyLedger | None = None,
    ) -> None:
        self._device = device
        self._partition_over = partition_over if partition_over is not None and partition_over.size > 1 else None
        self.copies = copies
        self._ledger = ledger or NullLedger()
        self._latest: weakref.ref[ActivationCheckpoint] | None = None
        self._checks_replication, self._is_replicated = not is_replicated, is_replicated
        self._has_copied = False
        self._releases = ReleaseQueue()

    def begin_pass(self) -> None:
        """Begin a forward; its backward goes through the checkpoints from the last to the first."""
        self._latest = None
        self._checks_replication = self._checks_replication and not self._has_copied
        if self.copies is not None:
            with self._releases.deferred():
                self.copies.begin_pass()

    def save(self, tensors: Sequence[Tensor]) -> ActivationCheckpoint:
        """Make a checkpoint of the current values of these tensors."""
        before = None if self._latest is None else self._latest()
        copies: dict[int, CheckpointedTensor] = {}
        saved: list[CheckpointedTensor] = []
        with self._releases.deferred():
            for tensor in tensors:
                if not self._is_copied(tensor):
                    # Saved once for each time it is passed: an enclosing recomputation may save it once in its first
                    # run, and twice (as its own input, and from elsewhere) in its second.
                    saved.append(_ReferencedTensor(tensor, self._ledger))
                    continue
                if id(tensor) not in copies:
                    copies[id(tensor)] = self._copy(tensor)
                saved.append(copies[id(tensor)])
        # Ranks must gather the same checkpoints.  A graph without a backward is freed at a different time on each rank,
        # so a checkpoint is gathered ahead only where every graph has its backward.
        gathers_ahead = self._partition_over is None or self._is_replicated
        checkpoint = ActivationCheckpoint(saved, before, releases=self._releases, gathers_ahead=gathers_ahead)
        self._latest = weakref.ref(checkpoint)
        return checkpoint

    def _is_copied(self, tensor: Tensor) -> bool:
        if self._partition_over is None and self.copies is None:
            return False
        is_here = self._device is None or tensor.device.type == self._device.type
        return is_here and tensor.ndim > 0 and _is_activation(tensor)

    def _copy(self, tensor: Tensor) -> "_CopiedTensor":
        if self._partition_over is not None and self._checks_replication:
            _compare(tensor, self._partition_over)
        self._has_copied = True
        copies = self.copies or DeviceStore(tensor.device, ledger=self._ledger)
        return _CopiedTensor(tensor, self._partition_over, copies, self._releases)


def _compare(tensor: Tensor, ranks: Communicator) -> None:
    """Raise UsageError on all ranks if their tensors differ: slices of different tensors make no whole one."""
    figures = torch.stack([tensor.detach().double().sum(), tensor.detach().double().abs().sum()])
    figures = torch.nan_to_num(torch.cat([figures, -figures]))  # one reduction for the least and the largest
    ranks.all_reduce_scalars(figures, "max").wait()
    most, negated_least = figures.view(2, 2).unbind()
    if not bool(torch.equal(most, -negated_least)):
        rule = (
            "partition_activations stores a slice of each input on every tensor-parallel rank: they hold the same input"
        )
        legal = "partition_activations: false, or inputs that are not sliced themselves"
        given = f"recompute: an input of {list(tensor.shape)} that differs between tensor-parallel ranks"
        raise UsageError(Problem(given, rule, legal))


def _is_activation(tensor: Tensor) -> bool:
    """Return True if the tensor is a forward's result and freed with its last reference: no parameter, ids or masks."""
    if _is_leaf(tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0


def _is_leaf(tensor: Tensor) -> bool:
    """Return True if autograd accumulates gradients in the tensor itself."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


class _ReferencedTensor:
    """A tensor that is retained by reference, uncopied.

    Like any tensor that backward needs, it goes through the hooks on saved tensors that are installed: ZeRO stage 3's
    for views of gathered parameters, offloading's, those of an enclosing recomputation.
    """

    def __init__(self, tensor: Tensor, ledger: AnyLedger) -> None:
        hooks = None if _is_leaf(tensor) else torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = hooks or (_identity, _identity)
        saved = tensor if _is_leaf(tensor) else tensor.detach()
        self._packed: Any = pack(saved)
        self._unpack: Callable[[Any], Tensor] = unpack
        self._version = _version(saved) if self._packed is saved else None
        if self._packed is saved and _is_activation(tensor) and not isinstance(tensor._base, nn.Parameter):
            ledger.tag(tensor, "activation_checkpoints")

    def release_source(self) -> None:
        """Do nothing: there is no copy."""

    def prefetch(self) -> None:
        """Do nothing: the tensor is on the device."""

    def gather(self) -> None:
        """Do nothing: the tensor is whole."""

    def restore(self) -> Tensor:
        with torch.enable_grad():  # a graph made from it may save it where hooks are not called
            tensor: Tensor = self._unpack(self._packed)
        if self._version is not None and tensor._version != self._version:
            given = f"recomputation: an input of {list(tensor.shape)} has been written to since it was read"
            rule = "an input of a recomputed function is not written to until backward"
            raise UsageError(Problem(given, rule, "clone it, or write elsewhere"))
        return tensor if _is_leaf(tensor) else tensor.detach()


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _version(tensor: Tensor) -> int | None:
    """Return how often the tensor has been written to; None where autograd keeps no count."""
    # A parameter may be partitioned, and then has no version.
    return None if isinstance(tensor, nn.Parameter) or tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _MemoryLayout:
    """The memory layout of a tensor: the flat elements [numel] are seen as `shape` with `strides`.

    gaps: the strides of a tensor that doesn't fill its memory, or shows elements twice; `restore` spreads them again.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    gaps: tuple[int, ...] | None = None

    def restore(self, flat: Tensor) -> Tensor:
        """Return the tensor with its old strides, by which kernels are chosen."""
        tensor = flat.as_strided(self.shape, self.strides)
        if self.gaps is None:
            return tensor
        once = [slice(None) if stride else slice(0, 1) for stride in self.gaps]
        sizes = [size if stride else 1 for size, stride in zip(self.shape, self.gaps, strict=True)]
        spread = torch.empty_strided(sizes, self.gaps, dtype=flat.dtype, device=flat.device)
        return spread.copy_(tensor[tuple(once)]).expand(self.shape)


def _flatten(tensor: Tensor) -> tuple[Tensor, _MemoryLayout]:
    """Return all elements in the order of memory, [numel], and the layout; a tensor with gaps is copied first."""
    tensor, gaps = tensor.detach(), None
    if not _is_dense(tensor):
        tensor, gaps = tensor.contiguous(), tensor.stride()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat, _MemoryLayout(tensor.shape, tensor.stride(), gaps)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _CopiedTensor:
    """A tensor of which a copy is stored: all of it, or this rank's slice.

    A slice holds ceil(numel / ranks) elements, the last ones filled up with zeros.
    """

    def __init__(
        self, tensor: Tensor, partition_over: Communicator | None, copies: CopyStore, releases: ReleaseQueue
    ) -> None:
        flat, self._form = _flatten(tensor)
        self._numel = flat.numel()
        self._partition_over = partition_over
        self._whole: Tensor | None = None
        self._work: Work | None = None
        self._copy = copies.store(flat if partition_over is None else _slice(flat, partition_over))
        # The copy is released when the graph is freed, after its backward or without one.
        weakref.finalize(self, releases.add, self._copy).atexit = False

    def release_source(self) -> None:
        self._copy.release_source()

    def prefetch(self) -> None:
        self._copy.prefetch()

    def gather(self) -> None:
        if self._whole is not None:
            return
        stored = self._copy.tensor()
        if self._partition_over is None:
            self._whole = stored
            return
        self._whole = torch.empty(self._partition_over.size * stored.numel(), dtype=stored.dtype, device=stored.device)
        self._work = self._partition_over.all_gather_into(self._whole, stored)

    def restore(self) -> Tensor:
        self.gather()
        if self._work is not None:
            self._work.wait()
        whole, self._whole, self._work = self._whole, None, None
        assert whole is not None, "gather() has made it"
        if self._partition_over is not None:
            self._copy.unpin()  # the gather has copied it
        return self._form.restore(whole[: self._numel])


def _slice(flat: Tensor, ranks: Communicator) -> Tensor:
    """Return this rank's slice of flat [numel]: a view, or a copy where it has to be padded."""
    length = -(-flat.numel() // ranks.size)
    start = ranks.rank * length
    part = flat[start : start + length]
    return part if part.numel() == length else torch.nn.functional.pad(part, (0, length - part.numel()))
