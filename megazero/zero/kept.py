"""One parameter that an Init keeps: its slice on this rank, and when it is whole.

    whole --take, empty--> slice --fill--> whole

A parameter that is filled gets new memory each time.  Somebody who still refers to the old (an *alias*: a view of the
parameter, a tensor that shares its values) keeps it, with the values of that time.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.comm.interface import Communicator
from megazero.zero.guard import guard, unguard

# Elements that are gathered at once.  They are copied to where they belong: a backend may refer to the memory that it
# has worked on for longer than it works, which would look like an alias.
_GATHERED_NUMEL = 1 << 22


class Kept:
    """A parameter whose slice an Init keeps, and what can happen to it."""

    def __init__(self, name: str, parameter: nn.Parameter, communicator: Communicator, device: torch.device) -> None:
        self.name = name
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.pins = 0  # how many hold it gathered
        self._communicator, self._device = communicator, device
        self._parameter = weakref.ref(parameter)
        self._slice: Tensor | None = None
        self._shape = parameter.shape

    @property
    def is_alive(self) -> bool:
        return self._parameter() is not None

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self._parameter()
        assert parameter is not None, f"somebody asks for {self.name}"
        return parameter

    def take(self, source: int) -> None:
        """The whole parameter's values on rank `source` are everyone's, and of them this rank keeps its slice.

        Memory that others refer to is left to them.
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
        self._slice = flat.new_zeros(size)
        self._slice[: mine.numel()].copy_(mine)
        self._shape = parameter.shape

    def empty(self, *, just_taken: bool = False) -> None:
        """The parameter has no memory any more; touches come to its owner.

        just_taken: `take` has just seen to it that nobody else refers to the memory.
        """
        assert self._slice is not None, "what is emptied has been taken before"
        parameter = self.parameter
        unguard(parameter)
        is_as_kept = parameter.shape == self._shape and parameter.dtype == self._slice.dtype
        if is_as_kept and (just_taken or not has_alias(parameter)) and parameter.untyped_storage().resizable():
            parameter.untyped_storage().resize_(0)
        else:
            parameter.data = self._slice.new_empty(0)  # what it held goes before the next line asks for as much
            hollow = torch.empty(self._shape, dtype=self._slice.dtype, device=self._device)
            hollow.untyped_storage().resize_(0)
            parameter.data = hollow
        guard(parameter)

    def values(self) -> Tensor:
        """All values of an emptied parameter, [numel], gathered from all ranks, piece by piece of their slices."""
        assert self._slice is not None, "what is gathered has been taken before"
        whole = self._slice.new_empty(self._shape.numel())
        ranks, numel = self._communicator.size, self._slice.numel()
        step = max(_GATHERED_NUMEL // ranks, 1)
        for start in range(0, numel, step):
            mine = self._slice[start : start + step]
            pieces = mine.new_empty(ranks, mine.numel())
            self._communicator.all_gather_into(pieces.view(-1), mine).wait()
            for rank, piece in enumerate(pieces):
                target = whole[rank * numel + start :][: mine.numel()]
                target.copy_(piece[: target.numel()])
        return whole

    def fill(self) -> None:
        """The parameter is whole, in memory of its own, and unguarded."""
        values = self.values()
        unguard(self.parameter)
        self.parameter.data = values.view(self._shape)

    def convert(self, dtype: torch.dtype) -> None:
        """Keep an emptied floating-point parameter in another number format."""
        if self._slice is not None and self._slice.is_floating_point() and self._slice.dtype != dtype:
            self._slice = self._slice.to(dtype)
            self.empty()


@dataclass
class Whole:
    """A parameter that is whole until further notice.

    made_for: the module that it was made for, as long as this may be in the making.
    call: the function for which it was filled; version, memory: of the parameter at that time.
    """

    kept: Kept
    parameter: nn.Parameter
    made_for: nn.Module | None = None
    call: str = ""
    version: int = 0
    memory: int = 0
    was_aliased: bool = False


def address(tensor: Tensor) -> int:
    """Identity of the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def has_alias(tensor: Tensor, names: int = 1) -> bool:
    """Whether more than `names` tensors, this one included, lie in its memory."""
    uses: int = torch._C._storage_Use_Count(address(tensor))
    return uses > names + 1
