"""Finds where forward and backward need partitioned parameters.

A *frame* is a forward in progress of a module that has units to pin, or of a module around such modules.  Units are
pinned when their module's forward begins and unpinned when it ends.  Three nets catch every other use:

    a parameter touched outside its module    is pinned to the innermost frame (`guard.py` catches the touch)
    a parameter, or a view of one, returned   moves to the frame around
    a tensor saved for backward               is stored with its unit, which is gathered when backward needs it

so what a model does between its modules needs no declaration.  Where saved tensors would go elsewhere (activation
recomputation and offloading have hooks of their own), the frame's hooks come first for those of units.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megazero.comm.faults.flight_record import FlightRecord
from megazero.errors import Problem, UsageError
from megazero.zero.parameters.eagerly import eagerly
from megazero.zero.parameters.gather import ParameterGather, in_backward
from megazero.zero.parameters.publish import ParameterPublisher
from megazero.zero.parameters.unit_memory import GatheredUnit

_Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]
# What stands in a graph for a saved tensor: another tensor on its memory, its unit, and how often the unit's memory has
# been left to such tensors.  A tensor elsewhere has no unit, and its version in the last place; where there are other
# hooks, what they have packed is in the first.
_Packed = tuple[Any, GatheredUnit | None, int]


@dataclass
class _Frame:
    """A forward in progress.  saving: hooks that catch what is saved in it, if those around it would not."""

    module: nn.Module
    saving: "_SavedTensors | None"
    pinned: list[str] = field(default_factory=list)


class ModuleHook(partial[Any]):
    """A hook on a module that belongs to the module's engine: a copy of the module has one that does nothing."""

    def __reduce__(self) -> tuple[type["ModuleHook"], tuple[Callable[..., None]]]:
        return ModuleHook, (_do_nothing,)


class Frames:
    """A follower of one model's forwards; `consumers` lists the units that each module's forward reads.

    leaves: those consumers that ranks may compute differently in (`Unit.is_leaf`).
    """

    def __init__(
        self,
        model: nn.Module,
        consumers: Mapping[nn.Module, list[str]],
        leaves: Collection[nn.Module],
        gather: ParameterGather,
        publisher: ParameterPublisher,
        flight: FlightRecord,
        *,
        enter_leaf: Callable[[Sequence[str]], None],
    ) -> None:
        """enter_leaf: called with the units of a leaf module when backward comes to its output, to gather them."""
        self._enter_leaf = enter_leaf
        self._consumers = {module: list(units) for module, units in consumers.items()}
        self._leaves = frozenset(leaves)
        self._is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
        self._names = {module: name or "the model" for name, module in model.named_modules()}
        self._gather = gather
        self._publisher = publisher
        self._flight = flight
        self._stack: list[_Frame] = []
        self._handles: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}
        for module in self._modules_to_follow(model):
            self._follow(module)

    def register(self, module: nn.Module, unit: str) -> None:
        """Pin the unit in `module`'s forward too."""
        units = self._consumers.setdefault(module, [])
        if unit not in units:
            units.append(unit)
        self._follow(module)

    @eagerly
    def touched(self, name: str, call: str) -> None:
        """Gather a guarded parameter that is about to be read; raise UsageError outside forward and backward."""
        unit = self._gather.unit_of(name)
        assert unit is not None, f"{name} is guarded and has no unit"
        if self._stack:
            self._stack[-1].pinned.append(unit)
            self._gather.pin(unit, f"{call} in {self._names[self._stack[-1].module]}")
        elif in_backward():
            self._gather.gather_for_recomputation(unit)
        else:
            rule = f"{name} is partitioned: its values are whole inside its module's forward only"
            legal = (
                "with megazero.zero.GatheredParameters([parameter]): ... to read it, with modifier_rank=0 to change it;"
                " or megazero.zero.safe_get_full_fp32_param(parameter)"
            )
            raise UsageError(Problem(f"{call} of parameter {name} outside a forward", rule, legal))

    def reset(self) -> None:
        """Unpin all units after a failure, perhaps one after which torch calls no hooks (Ctrl-C)."""
        while self._stack:
            frame = self._stack.pop()
            if frame.saving is not None:
                frame.saving.stop()
            for unit in frame.pinned:
                self._gather.unpin(unit)
        self._gather.reset_pass()

    def close(self) -> None:
        """Remove the hooks from the modules."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()

    def _follow(self, module: nn.Module) -> None:
        if module not in self._handles:
            before = module.register_forward_pre_hook(ModuleHook(self._enter), prepend=True)
            self._handles[module] = (before, module.register_forward_hook(ModuleHook(self._leave), always_call=True))

    def _modules_to_follow(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the consumers of units; where something is partitioned, every module around one too."""
        for module in model.modules():
            inner = module.modules() if self._gather.is_needed else (module,)
            if any(part in self._consumers for part in inner):
                yield module

    @eagerly
    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        if not self._stack and not in_backward():
            self._gather.begin_pass(with_backward=torch.is_grad_enabled())
        saves = self._gather.is_needed and torch.is_grad_enabled()
        saving = _SavedTensors(self._gather) if saves and not _SavedTensors.are_caught(self._gather) else None
        self._flight.unit = self._names[module]
        frame = _Frame(module, saving)
        self._stack.append(frame)
        for unit in self._consumers.get(module, ()):
            self._publisher.ensure(unit)
            if self._gather.has(unit):
                frame.pinned.append(unit)
                self._gather.pin(unit, f"the forward of {self._names[module]}")

    @eagerly
    def _leave(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if not self._stack or self._stack[-1].module is not module:
            return  # its forward was not entered: an error came before
        frame = self._stack.pop()
        if frame.saving is not None:
            frame.saving.stop()
        if module in self._leaves and self._gather.is_needed:
            self._gather_before_backward(module, output)
        found = map(self._gather.memory.unit_of, tensors_in(output)) if frame.pinned else ()
        returned = {unit.name for unit in found if unit is not None}
        for unit in frame.pinned:
            if unit in returned and self._stack:
                self._stack[-1].pinned.append(unit)
                continue
            if unit in returned:
                self._gather.share(unit)
            self._gather.unpin(unit)
        if not self._stack and self._gather.is_needed and not in_backward():
            self._end_forward(output)

    def _gather_before_backward(self, leaf: nn.Module, output: Any) -> None:
        """Have the leaf module's units gathered as soon as backward comes to its output."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                call_on_gradient(tensor, lambda _: self._enter_leaf(self._consumers[leaf]))

    def _end_forward(self, output: Any) -> None:
        if output is None and sys.exception() is not None:  # torch calls hooks so when a forward has raised it
            self._gather.reset_pass()
            return
        if not torch.is_grad_enabled():
            self._gather.end_pass(with_backward=False)
        elif self._is_frozen and not any(tensor.requires_grad for tensor in tensors_in(output)):
            self._gather.end_pass(with_backward=True)  # begun as one with a backward, of which there is none


def _do_nothing(*_inputs: Any) -> None:
    """Stand for an engine's hook in a copy of its module."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output: in sequences, mappings and dataclasses, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_in(getattr(value, part.name))


class _SavedTensors:
    """Hooks that gather a unit when backward needs what was saved of it, and pass other tensors to the hooks below."""

    def __init__(self, gather: ParameterGather) -> None:
        """Catch the tensors that are saved from here on, until `stop`."""
        self._gather = gather
        self._unit_of = gather.memory.unit_of
        self._others = _top_hooks()
        self._stack = ExitStack()
        self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))

    def stop(self) -> None:
        """Catch no more tensors.  The graph refers to the hooks, but not they to it: no garbage collector is needed."""
        self._stack.close()

    @staticmethod
    def are_caught(gather: ParameterGather) -> bool:
        """Return True if hooks of the same gather catch the tensors that are saved now."""
        top = _top_hooks()
        owner = None if top is None else getattr(top[0], "__self__", None)
        return isinstance(owner, _SavedTensors) and owner._gather is gather

    @eagerly
    def _pack(self, tensor: Tensor) -> _Packed:
        """Return a detached tensor.

        A node that saves its own output, and a hook that returned that very output, would hold each other for ever if
        no backward came.
        """
        unit = self._unit_of(tensor)
        if unit is not None:
            return tensor.detach(), unit, unit.num_left
        if self._others is not None:
            return self._others[0](tensor), None, 0
        return tensor.detach(), None, tensor._version

    @eagerly
    def _unpack(self, packed: _Packed) -> Any:
        """Return the tensor; raise RuntimeError if it has changed, which torch checks where there are no hooks."""
        tensor, unit, version = packed
        if unit is not None:
            if unit.num_left == version:  # else the tensor has retained its memory
                self._gather.gather_for_backward(unit)
                if torch.is_grad_enabled():  # this backward makes a graph itself, whose saved tensors no hook catches
                    unit.shared = True
        elif self._others is not None:
            return self._others[1](tensor)
        elif tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
            )
        return tensor


def _top_hooks() -> _Hooks | None:
    """Return the hooks that pack tensors saved now, and unpack them when backward needs them; None without hooks."""
    hooks: _Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def call_on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with every gradient of `tensor` (torch's method has no annotations)."""
    register: Callable[..., RemovableHandle] = tensor.register_hook
    register(hook)


def on_gradient(parameters: Mapping[str, nn.Parameter], ready: Callable[[str, Tensor], None]) -> list[RemovableHandle]:
    """Call ready(name, parameter) whenever autograd has finished accumulating into a trainable parameter's `.grad`."""
    handles = []
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            when_accumulated: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            handles.append(when_accumulated(partial(ready, name)))
    return handles
