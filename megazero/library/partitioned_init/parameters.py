"""Holds the parameters that a zero.Init has partitioned: their slices on this rank, and the time they are whole.

    whole --partition, release--> slice --gather--> whole

A parameter that is gathered gets new memory each time.  An *alias* of the old memory (a view of the parameter, a tensor
that shares its values) retains that memory, with the values of that time.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.comm.interface import Communicator
from megazero.errors import Problem, UsageError, raise_problems
from megazero.library.partitioned_init.slices import SliceStore, StoredSlice
from megazero.zero.parameters.guard import guard, unguard

GATHERED = "with megazero.zero.GatheredParameters([parameter], modifier_rank=0): ..."
# The number of elements gathered by one collective.  They are copied from a separate buffer into the parameter: a
# backend may refer to its output for longer than the collective lasts, which would look like an alias.
_GATHERED_NUMEL = 1 << 22


class SlicedParameter:
    """A parameter with this rank's slice of it; it changes between being whole and being this slice only."""

    def __init__(
        self, name: str, parameter: nn.Parameter, communicator: Communicator, device: torch.device, store: SliceStore
    ) -> None:
        """device: that of the whole parameter.  store: that of the slice."""
        self.name = name
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.pins = 0  # the number of blocks that need it whole
        self.as_gathered: Tensor | None = None  # its bytes when the innermost of these blocks began, where checked
        self._communicator, self._device, self._store = communicator, device, store
        self._parameter = weakref.ref(parameter)
        self._slice: StoredSlice | None = None
        self._shape = parameter.shape

    @property
    def is_alive(self) -> bool:
        return self._parameter() is not None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self._parameter()
        assert parameter is not None, f"{self.name} is still in use"
        return parameter

    def partition(self, source: int) -> None:
        """Broadcast the whole parameter's values from rank `source`, and copy this rank's slice of them.

        Memory that has an alias is not written to.
        """
        parameter = self.parameter
        values = parameter.detach().to(self._device).contiguous()
        if address(values) == address(parameter) and has_alias(parameter, names=2):
            values = values.clone()
        flat = values.view(-1)
        self._communicator.broadcast(flat, source).wait()
        if address(values) != address(parameter):
            parameter.data = values
        size = -(-flat.numel() // self._communicator.size)
        mine = flat[self._communicator.rank * size :][:size]
        if self._slice is None or (self._slice.numel(), self._slice.dtype) != (size, flat.dtype):
            self.free()  # before the next line allocates as much
            self._slice = self._store.allocate(size, flat.dtype)
        self._slice.store(0, mine)
        self._shape = parameter.shape

    def release(self, *, just_partitioned: bool = False) -> None:
        """Free the parameter's memory, and guard it: its owner's `touched` is called at its next use.

        just_partitioned: True directly after `partition`, which leaves the memory without aliases.
        """
        assert self._slice is not None, "a parameter is partitioned before it is released"
        parameter = self.parameter
        unguard(parameter)
        is_unchanged = parameter.shape == self._shape and parameter.dtype == self._slice.dtype
        if is_unchanged and (just_partitioned or not has_alias(parameter)) and parameter.untyped_storage().resizable():
            parameter.untyped_storage().resize_(0)
        else:
            # The memory is freed before the next line allocates as much.
            parameter.data = torch.empty(0, dtype=self._slice.dtype, device=self._device)
            hollow = torch.empty(self._shape, dtype=self._slice.dtype, device=self._device)
            hollow.untyped_storage().resize_(0)
            parameter.data = hollow
        guard(parameter)

    def values(self) -> Tensor:
        """Return all values of a released parameter, [numel], gathered from all ranks in pieces of their slices."""
        assert self._slice is not None, "a parameter is partitioned before it is gathered"
        whole = torch.empty(self._shape.numel(), dtype=self._slice.dtype, device=self._device)
        ranks, numel = self._communicator.size, self._slice.numel()
        step = min(max(_GATHERED_NUMEL // ranks, 1), numel)
        buffer = whole.new_empty(ranks * step)
        num_full = whole.numel() // numel
        full = whole[: num_full * numel].view(num_full, numel)
        for start in range(0, numel, step):
            pieces = buffer[: ranks * min(step, numel - start)]
            mine = self._slice.load(start, pieces.view(ranks, -1)[self._communicator.rank])
            self._communicator.all_gather_into(pieces, mine).wait()
            found = pieces.view(ranks, -1)
            full[:, start : start + mine.numel()].copy_(found[: len(full)])
            if len(full) < ranks:  # the slices of the ranks behind these are shorter, or empty
                rest = whole[full.numel() + start :][: mine.numel()]
                rest.copy_(found[len(full)][: rest.numel()])
        return whole

    def gather(self) -> None:
        """Make the parameter whole again, in new memory, and unguarded; a collective call."""
        values = self.values()
        unguard(self.parameter)
        self.parameter.data = values.view(self._shape)

    def content(self) -> Tensor:
        """Return the bytes of the whole parameter."""
        return self.parameter.detach().contiguous().view(-1).view(torch.uint8)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert a released floating-point parameter to another number format."""
        if self._slice is not None and self._slice.dtype.is_floating_point and self._slice.dtype != dtype:
            before, self._slice = self._slice, self._store.allocate(self._slice.numel(), dtype)
            for start in range(0, before.numel(), _GATHERED_NUMEL):
                numel = min(_GATHERED_NUMEL, before.numel() - start)
                piece = torch.empty(numel, dtype=before.dtype, device=self._device)
                self._slice.store(start, before.load(start, piece).to(dtype))
            before.free()
            self.release()

    def free(self) -> None:
        """Free the slice, if there is one."""
        if self._slice is not None:
            self._slice.free()
            self._slice = None


@dataclass
class _WholeParameter:
    """A parameter that is whole now.

    made_for: the module that registered a new parameter, which stays whole while the module is under construction.
    call: the function for which the parameter was gathered; version, memory: the parameter's at that time.
    was_aliased: True if the parameter had an alias when the call returned.
    """

    sliced: SlicedParameter
    parameter: nn.Parameter
    made_for: nn.Module | None = None
    call: str = ""
    version: int = 0
    memory: int = 0
    was_aliased: bool = False


class WholeParameters:
    """The parameters of an Init that are whole now: new ones, and those gathered for a call."""

    def __init__(
        self, communicator: Communicator, device: torch.device, on_release: Callable[[SlicedParameter], None]
    ) -> None:
        """on_release: called with each parameter after its release."""
        self._communicator, self._device = communicator, device
        self._on_release = on_release
        self._whole: dict[SlicedParameter, _WholeParameter] = {}

    def __contains__(self, sliced: SlicedParameter) -> bool:
        return sliced in self._whole

    def add_new(self, sliced: SlicedParameter, parameter: nn.Parameter, module: nn.Module) -> None:
        """Add a new parameter, which is whole while the module that registered it is under construction."""
        self._whole[sliced] = _WholeParameter(sliced, parameter, made_for=module)

    def gather_for_call(self, sliced: SlicedParameter, call: str) -> None:
        """Gather a parameter for a call; a collective call."""
        sliced.gather()
        parameter = sliced.parameter
        self._whole[sliced] = _WholeParameter(
            sliced, parameter, call=call, version=parameter._version, memory=address(parameter)
        )

    def call_ended(self) -> None:
        """Release the parameters gathered for a call that has returned, except those with an alias."""
        for whole in [whole for whole in self._whole.values() if whole.call and not whole.was_aliased]:
            if address(whole.parameter) != whole.memory:  # the call has replaced the memory
                self._release(whole)
            elif has_alias(whole.parameter):
                whole.was_aliased = True
            else:
                self._release(whole, changed=whole.parameter._version != whole.version)

    def release_unused(self, under_construction: set[int]) -> None:
        """Release the parameters that need not be whole any more.  under_construction: identities of modules."""
        for whole in self._unpinned(gathered=False):
            if id(whole.made_for) not in under_construction:
                self._release(whole)
        if gathered := self._unpinned(gathered=True):
            # These are the same on all ranks.  Their aliases are not, as garbage may be collected at different times.
            aliased = torch.tensor([int(has_alias(whole.parameter)) for whole in gathered], device=self._device)
            self._communicator.all_reduce_scalars(aliased, "max").wait()
            for whole, is_aliased in zip(gathered, aliased.tolist(), strict=True):
                if not is_aliased:
                    self._release(whole)

    def release_all(self) -> None:
        """Release all parameters; raises UsageError for those that still have aliases."""
        if self._unpinned(gathered=True):
            gc.collect()
        self.release_unused(set())
        raise_problems(UsageError, [_problem_of_alias(whole) for whole in self._unpinned(gathered=True)])

    def reset(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Clear the collection, and yield the new parameters, which have not been partitioned yet."""
        yield from [(sliced.name, whole.parameter) for sliced, whole in self._whole.items() if not whole.call]
        self._whole.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        """Return a tensor that autograd saves, copied if it shares a parameter's memory, which may be freed early."""
        if not torch._C._has_storage(tensor):
            return tensor
        memory = address(tensor)
        is_parameter = any(address(whole.parameter) == memory for whole in self._whole.values())
        return tensor.detach().clone() if is_parameter else tensor

    def _unpinned(self, *, gathered: bool) -> list[_WholeParameter]:
        """Return the parameters without pins: those gathered for a call or, if not `gathered`, the new ones."""
        return [whole for whole in self._whole.values() if bool(whole.call) == gathered and not whole.sliced.pins]

    def _release(self, whole: _WholeParameter, *, changed: bool = True) -> None:
        del self._whole[whole.sliced]
        if changed:
            whole.sliced.partition(0)
        whole.sliced.release(just_partitioned=changed)
        self._on_release(whole.sliced)


def _problem_of_alias(whole: _WholeParameter) -> Problem:
    given = f"{whole.call} of parameter {whole.sliced.name} is still used at the end of zero.Init"
    rule = "the parameter is partitioned from here on: what is written to its old memory would be lost"
    return Problem(given, rule, f"{GATHERED}; or a copy of the values (clone())")


def address(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def has_alias(tensor: Tensor, names: int = 1) -> bool:
    """Return True if more than `names` tensors, this one included, share its memory."""
    uses: int = torch._C._storage_Use_Count(address(tensor))
    return uses > names + 1
