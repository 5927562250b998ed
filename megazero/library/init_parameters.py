"""The parameters that an Init keeps: their slices on this rank, and when they are whole.

    whole --take, empty--> slice --fill--> whole

A parameter that is filled gets new memory each time.  Somebody who still refers to the old (an *alias*: a view of the
parameter, a tensor that shares its values) keeps it, with the values of that time.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megazero.comm.interface import Communicator
from megazero.errors import Problem, UsageError, raise_problems
from megazero.zero.guard import guard, unguard

GATHERED = "with megazero.zero.GatheredParameters([parameter], modifier_rank=0): ..."
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
        step = min(max(_GATHERED_NUMEL // ranks, 1), numel)
        buffer = whole.new_empty(ranks * step)
        for start in range(0, numel, step):
            mine = self._slice[start : start + step]
            pieces = buffer[: ranks * mine.numel()]
            self._communicator.all_gather_into(pieces, mine).wait()
            for rank, piece in enumerate(pieces.view(ranks, -1)):
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
class _Whole:
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


class WholeParameters:
    """The parameters of an Init that are whole now, new ones and those filled for a call: when they are put away."""

    def __init__(self, communicator: Communicator, device: torch.device, then: Callable[[Kept], None]) -> None:
        """then: is called with each parameter that has been put away."""
        self._communicator, self._device = communicator, device
        self._then = then
        self._whole: dict[Kept, _Whole] = {}

    def __contains__(self, kept: Kept) -> bool:
        return kept in self._whole

    def made(self, kept: Kept, parameter: nn.Parameter, module: nn.Module) -> None:
        """There is a new parameter, which is whole as long as the module that it was made for is in the making."""
        self._whole[kept] = _Whole(kept, parameter, made_for=module)

    def fill(self, kept: Kept, call: str) -> None:
        """Make a parameter whole for a call."""
        kept.fill()
        parameter = kept.parameter
        self._whole[kept] = _Whole(kept, parameter, call=call, version=parameter._version, memory=address(parameter))

    def call_ended(self) -> None:
        """Put away what was filled for a call that is over, unless an alias of it has been handed out."""
        for whole in [whole for whole in self._whole.values() if whole.call and not whole.was_aliased]:
            if address(whole.parameter) != whole.memory:  # it has been given other memory
                self._put_away(whole)
            elif has_alias(whole.parameter):
                whole.was_aliased = True
            else:
                self._put_away(whole, changed=whole.parameter._version != whole.version)

    def settle(self, in_the_making: set[int]) -> None:
        """Put away what is whole for no reason any more; in_the_making: identities of modules."""
        for whole in self._not_held(filled=False):
            if id(whole.made_for) not in in_the_making:
                self._put_away(whole)
        if filled := self._not_held(filled=True):
            # These are the same on all ranks.  Whether they have aliases is not, where garbage waits to be collected.
            aliased = torch.tensor([int(has_alias(whole.parameter)) for whole in filled], device=self._device)
            self._communicator.all_reduce_scalars(aliased, "max").wait()
            for whole, is_aliased in zip(filled, aliased.tolist(), strict=True):
                if not is_aliased:
                    self._put_away(whole)

    def finish(self) -> None:
        """Put everything away; raises UsageError for what has aliases still."""
        if self._not_held(filled=True):
            gc.collect()
        self.settle(set())
        raise_problems(UsageError, [_problem_of_alias(whole) for whole in self._not_held(filled=True)])

    def drop_new(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Forget everything; tells which parameters have not been partitioned yet."""
        yield from [(kept.name, whole.parameter) for kept, whole in self._whole.items() if not whole.call]
        self._whole.clear()

    def pack(self, tensor: Tensor) -> Tensor:
        """What autograd saves of a parameter must outlive the time in which it is whole."""
        if not torch._C._has_storage(tensor):
            return tensor
        memory = address(tensor)
        is_ours = any(address(whole.parameter) == memory for whole in self._whole.values())
        return tensor.detach().clone() if is_ours else tensor

    def _not_held(self, *, filled: bool) -> list[_Whole]:
        """Those filled for a call, or those that are new, as far as nobody holds them gathered."""
        return [whole for whole in self._whole.values() if bool(whole.call) == filled and not whole.kept.pins]

    def _put_away(self, whole: _Whole, *, changed: bool = True) -> None:
        del self._whole[whole.kept]
        if changed:
            whole.kept.take(0)
        whole.kept.empty(just_taken=changed)
        self._then(whole.kept)


def _problem_of_alias(whole: _Whole) -> Problem:
    given = f"{whole.call} of parameter {whole.kept.name} is still used at the end of zero.Init"
    rule = "the parameter is partitioned from here on: what is written to its old memory would be lost"
    return Problem(given, rule, f"{GATHERED}; or a copy of the values (clone())")


def address(tensor: Tensor) -> int:
    """Identity of the memory that a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)


def has_alias(tensor: Tensor, names: int = 1) -> bool:
    """Whether more than `names` tensors, this one included, lie in its memory."""
    uses: int = torch._C._storage_Use_Count(address(tensor))
    return uses > names + 1
