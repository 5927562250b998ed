"""What is kept of a checkpoint between forward and backward: whole tensors, or slices of them, and where.

Three choices, each on its own (paper section 6.1 and 6.3):

    partitioned (Pa)      every tensor-parallel rank keeps one slice of the elements; all-gathered on the way back
    on the host (Pa+cpu)  what is kept goes to host memory while the layers after it compute
    contiguous (MD)       what is kept on the device lies in one pre-allocated arena

Without any of them a checkpoint is the tensor itself, at no cost.  With one, activations are copied as soon as the
function that reads them begins, so that their own memory is free when it ends.  On the way back things happen ahead:
when a checkpoint is brought back, the one before it in its pass begins to be gathered, and the one before that to be
copied from the host.  A model that nobody knows may make checkpoints that no backward asks for; its slices are
gathered when they are needed.

Pa needs inputs that are the same on every tensor-parallel rank, as those of a transformer layer are.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megazero.activations.places import GivenUp, OnDevice, Places
from megazero.comm.interface import Communicator, Work
from megazero.errors import Problem, UsageError
from megazero.memory.ledger_interface import AnyLedger, NullLedger


class Kept(Protocol):
    """One tensor of a checkpoint."""

    def leave(self) -> None:
        """From here on the tensor's own memory may be overwritten or freed, if a copy is kept."""

    def fetch(self) -> None:
        """Begin to bring what is kept to the device."""

    def gather(self) -> None:
        """Begin to make the whole tensor of it."""

    def bring(self) -> Tensor:
        """The tensor as it was, detached."""


class Checkpoint:
    """The tensors that one recomputed function starts from."""

    def __init__(
        self, tensors: Sequence[Kept], before: "Checkpoint | None", *, given_up: GivenUp, gathers_ahead: bool
    ) -> None:
        """tensors: one that is kept in a copy may stand there several times."""
        self._tensors = tensors
        self._given_up = given_up
        self._gathers_ahead = gathers_ahead
        self._before = None if before is None else weakref.ref(before)

    def bring(self) -> list[Tensor]:
        """The tensors as they were; those of the checkpoints before are set on their way."""
        with self._given_up.hold():
            self.gather()
            before = self._earlier()
            further = None if before is None else before._earlier()
            if before is not None and self._gathers_ahead:
                before.gather()
            for earlier in (before, further):
                if earlier is not None:
                    earlier.fetch()
            brought = {id(kept): kept.bring() for kept in self._tensors}
        return [brought[id(kept)] for kept in self._tensors]

    def leave(self) -> None:
        """The function has ended: what a copy is kept of may go."""
        for kept in self._tensors:
            kept.leave()

    def fetch(self) -> None:
        """Begin to bring what is kept to the device."""
        for kept in self._tensors:
            kept.fetch()

    def gather(self) -> None:
        """Begin to make whole tensors of it."""
        for kept in self._tensors:
            kept.gather()

    def _earlier(self) -> "Checkpoint | None":
        return None if self._before is None else self._before()


class Checkpoints:
    """Keeps the checkpoints of one rank.

    slices: the axis over whose ranks activations are partitioned; None keeps them whole.
    trusts: whether activations are known to be the same on all of these; if not, those of the first pass are compared.
    places: where copies are kept; None keeps the tensors themselves, or slices in memory of their own.
    device: the one whose tensors are copied; others are kept themselves.  None copies all.
    """

    def __init__(
        self,
        *,
        slices: Communicator | None = None,
        trusts: bool = True,
        places: Places | None = None,
        device: torch.device | None = None,
        ledger: AnyLedger | None = None,
    ) -> None:
        self._device = device
        self._slices = slices if slices is not None and slices.size > 1 else None
        self.places = places
        self._ledger = ledger or NullLedger()
        self._latest: weakref.ref[Checkpoint] | None = None
        self._compares, self._trusts = not trusts, trusts
        self._has_kept = False
        self._given_up = GivenUp()

    def begin_pass(self) -> None:
        """A forward begins; backward goes through its checkpoints from the last to the first."""
        self._latest = None
        self._compares = self._compares and not self._has_kept
        if self.places is not None:
            with self._given_up.hold():
                self.places.begin_pass()

    def keep(self, tensors: Sequence[Tensor]) -> Checkpoint:
        """A checkpoint of these tensors, as they are now."""
        before = None if self._latest is None else self._latest()
        copies: dict[int, Kept] = {}
        kept: list[Kept] = []
        with self._given_up.hold():
            for tensor in tensors:
                if not self._is_copied(tensor):
                    # Every time it is given: a recomputation around this one may meet it once in its first run, twice
                    # (as its own input, and from elsewhere) in its second.
                    kept.append(_Itself(tensor, self._ledger))
                    continue
                if id(tensor) not in copies:
                    copies[id(tensor)] = self._copy(tensor)
                kept.append(copies[id(tensor)])
        # Ranks must gather the same ones, and when a graph that nobody walks goes differs from rank to rank; so one is
        # gathered ahead only where every graph is walked.
        gathers_ahead = self._slices is None or self._trusts
        checkpoint = Checkpoint(kept, before, given_up=self._given_up, gathers_ahead=gathers_ahead)
        self._latest = weakref.ref(checkpoint)
        return checkpoint

    def _is_copied(self, tensor: Tensor) -> bool:
        if self._slices is None and self.places is None:
            return False
        is_here = self._device is None or tensor.device.type == self._device.type
        return is_here and tensor.ndim > 0 and _is_activation(tensor)

    def _copy(self, tensor: Tensor) -> "_Copy":
        if self._slices is not None and self._compares:
            _compare(tensor, self._slices)
        self._has_kept = True
        places = self.places or OnDevice(tensor.device, ledger=self._ledger)
        return _Copy(tensor, self._slices, places, self._given_up)


def _compare(tensor: Tensor, ranks: Communicator) -> None:
    """Raise UsageError, on all ranks, when they hold different tensors: slices of those would be put together."""
    figures = torch.stack([tensor.detach().double().sum(), tensor.detach().double().abs().sum()])
    figures = torch.nan_to_num(torch.cat([figures, -figures]))  # one reduction for the least and the most
    ranks.all_reduce_scalars(figures, "max").wait()
    most, negated_least = figures.view(2, 2).unbind()
    if not bool(torch.equal(most, -negated_least)):
        rule = (
            "partition_activations keeps a slice of each input on every tensor-parallel rank: they hold the same input"
        )
        legal = "partition_activations: false, or inputs that are no slices themselves"
        given = f"recompute: an input of {list(tensor.shape)} that differs between tensor-parallel ranks"
        raise UsageError(Problem(given, rule, legal))


def _is_activation(tensor: Tensor) -> bool:
    """Whether a forward has made the tensor, so that it goes when nobody refers to it: no parameter, ids or masks."""
    if _is_leaf(tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
        return False
    return tensor.numel() > 0


def _is_leaf(tensor: Tensor) -> bool:
    """Whether gradients are gathered in the tensor itself."""
    return isinstance(tensor, nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)


class _Itself:
    """The tensor itself is kept.

    Whoever has hooks on saved tensors (ZeRO stage 3 for what lies in gathered memory, offloading, a recomputation
    around this one) is asked to keep it, as for any tensor that backward needs.
    """

    def __init__(self, tensor: Tensor, ledger: AnyLedger) -> None:
        hooks = None if _is_leaf(tensor) else torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = hooks or (_as_it_is, _as_it_is)
        kept = tensor if _is_leaf(tensor) else tensor.detach()
        self._packed: Any = pack(kept)
        self._unpack: Callable[[Any], Tensor] = unpack
        self._version = _version(kept) if self._packed is kept else None
        if self._packed is kept and _is_activation(tensor) and not isinstance(tensor._base, nn.Parameter):
            ledger.tag(tensor, "activation_checkpoints")

    def leave(self) -> None:
        """It stays."""

    def fetch(self) -> None:
        """It is there."""

    def gather(self) -> None:
        """It is whole."""

    def bring(self) -> Tensor:
        with torch.enable_grad():  # the graph that is made with it may save it where hooks don't see it
            tensor: Tensor = self._unpack(self._packed)
        if self._version is not None and tensor._version != self._version:
            given = f"recomputation: an input of {list(tensor.shape)} has been written to since it was read"
            rule = "what a recomputed function reads stays as it is until backward"
            raise UsageError(Problem(given, rule, "clone it, or write elsewhere"))
        return tensor if _is_leaf(tensor) else tensor.detach()


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _version(tensor: Tensor) -> int | None:
    """How often the tensor has been written to; None where nobody counts."""
    # A parameter may be partitioned, and then has nothing to ask.
    return None if isinstance(tensor, nn.Parameter) or tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class _Form:
    """How a tensor lies in memory: the flat elements [numel] are seen as `shape` with `strides`.

    gaps: the strides of one that doesn't fill its memory, or shows elements twice; its elements are spread again.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    gaps: tuple[int, ...] | None = None

    def restore(self, flat: Tensor) -> Tensor:
        """The tensor with the strides it had: kernels are chosen by them."""
        tensor = flat.as_strided(self.shape, self.strides)
        if self.gaps is None:
            return tensor
        once = [slice(None) if stride else slice(0, 1) for stride in self.gaps]
        sizes = [size if stride else 1 for size, stride in zip(self.shape, self.gaps, strict=True)]
        spread = torch.empty_strided(sizes, self.gaps, dtype=flat.dtype, device=flat.device)
        return spread.copy_(tensor[tuple(once)]).expand(self.shape)


def _flatten(tensor: Tensor) -> tuple[Tensor, _Form]:
    """All elements in the order of memory, [numel], and the way back; a tensor with gaps is copied first."""
    tensor, gaps = tensor.detach(), None
    if not _is_dense(tensor):
        tensor, gaps = tensor.contiguous(), tensor.stride()
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat, _Form(tensor.shape, tensor.stride(), gaps)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Copy:
    """A copy of the tensor, or of this rank's slice of it, in a place.

    A slice holds ceil(numel / ranks) elements, the last ones filled up with zeros.
    """

    def __init__(self, tensor: Tensor, slices: Communicator | None, places: Places, given_up: GivenUp) -> None:
        flat, self._form = _flatten(tensor)
        self._numel = flat.numel()
        self._slices = slices
        self._whole: Tensor | None = None
        self._work: Work | None = None
        self._place = places.put(flat if slices is None else _slice(flat, slices))
        # When the graph is gone, after its backward or without one.
        weakref.finalize(self, given_up.add, self._place).atexit = False

    def leave(self) -> None:
        self._place.leave()

    def fetch(self) -> None:
        self._place.fetch()

    def gather(self) -> None:
        if self._whole is not None:
            return
        kept = self._place.tensor()
        if self._slices is None:
            self._whole = kept
            return
        self._whole = torch.empty(self._slices.size * kept.numel(), dtype=kept.dtype, device=kept.device)
        self._work = self._slices.all_gather_into(self._whole, kept)

    def bring(self) -> Tensor:
        self.gather()
        if self._work is not None:
            self._work.wait()
        whole, self._whole, self._work = self._whole, None, None
        assert whole is not None, "gather() has made it"
        if self._slices is not None:
            self._place.read()  # what is gathered has been copied
        return self._form.restore(whole[: self._numel])


def _slice(flat: Tensor, ranks: Communicator) -> Tensor:
    """This rank's slice of flat [numel]: a view, or a copy where it has to be filled up."""
    length = -(-flat.numel() // ranks.size)
    start = ranks.rank * length
    part = flat[start : start + length]
    return part if part.numel() == length else torch.nn.functional.pad(part, (0, length - part.numel()))
