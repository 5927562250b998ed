"""zero.Init: a model larger than one process's memory, partitioned while it is being made.

    with megazero.zero.Init():
        model = Model()

A parameter is *whole* on every rank from its making until its module has been made; then rank 0's values are shared
out, each rank keeps its *slice*, and the memory goes.  So at most the modules in the making are whole beside the slices,
and the model comes out as if it had been made on rank 0 and partitioned afterwards: what the model's constructors do
with partitioned parameters (they draw values anew, tie, compare) finds them whole for the length of the call.

    whole --its module is made--> slice --touched, or gathered--> whole --the call, the block is over--> slice

A call may hand out another name for a parameter's memory (`p.data`, `p[0]`, `p.t()`).  As long as such an *alias* is
used the parameter is whole, and what is written through it counts.  One that is still there when the block of Init ends
is an error: what is written to it later would be lost.

Only torch's own hooks are used: on the registration of modules and parameters, and a function mode, which tells where a
call ends and where memory is about to be asked for.  An engine takes the values over by `first_value`.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from megazero.comm.adopt import adopt_group, own_device
from megazero.comm.adopt_groups import find_groups
from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.config.engine import EngineConfig, load_engine_config
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.parallel.param_spec import ParamSpec
from megazero.zero.guard import PartitionedParameter, give_handle, guard, handle_of, take_handle, unguard
from megazero.zero.module_apply import gather_around_apply, leave_apply
from megazero.zero.plan import resolve

_GATHERED = "with megazero.zero.GatheredParameters([parameter], modifier_rank=0): ..."
# Functions with which modules ask for the memory of new parameters.
_ASKS_FOR_MEMORY = frozenset({torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.tensor})


def first_value(spec: ParamSpec, parameter: nn.Parameter) -> Tensor:
    """The first value of any parameter, for an engine; one that an Init keeps is gathered and given up to the engine.

    A collective call.  Until it has memory of the engine's, such a parameter has none.
    """
    handle = handle_of(parameter)
    if handle is None or not isinstance(handle.owner, Init):
        return parameter.detach()
    return handle.owner.give_up(handle.name)


class _Kept:
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
        """The whole parameter's values on rank `source` are everyone's, and of them this rank keeps its slice."""
        parameter = self.parameter
        values = parameter.detach().to(self._device)
        if not values.is_contiguous() or (values.data_ptr() == parameter.data_ptr() and _has_alias(parameter, names=2)):
            values = values.contiguous().clone()
        flat = values.view(-1)
        self._communicator.broadcast(flat, source).wait()
        if values.data_ptr() != parameter.data_ptr():
            parameter.data = values
        size = -(-flat.numel() // self._communicator.size)
        mine = flat[self._communicator.rank * size :][:size]
        self._slice = flat.new_zeros(size)
        self._slice[: mine.numel()].copy_(mine)
        self._shape = parameter.shape

    def empty(self) -> None:
        """The parameter has no memory any more; touches come to its owner."""
        assert self._slice is not None, "what is emptied has been taken before"
        parameter, dtype = self.parameter, self._slice.dtype
        unguard(parameter)
        parameter.data = self._slice.new_empty(0)  # what it held goes before the next line asks for as much
        hollow = torch.empty(self._shape, dtype=dtype, device=self._device)
        hollow.untyped_storage().resize_(0)
        parameter.data = hollow
        guard(parameter)

    def values(self) -> Tensor:
        """All values of an emptied parameter, [numel], gathered from all ranks."""
        assert self._slice is not None, "what is gathered has been taken before"
        flat = self._slice.new_empty(self._slice.numel() * self._communicator.size)
        self._communicator.all_gather_into(flat, self._slice).wait()
        return flat[: self._shape.numel()]

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

    kept: _Kept
    parameter: nn.Parameter
    made_for: nn.Module | None = None
    call: str = ""
    version: int = 0
    memory: int = 0
    was_aliased: bool = False


@dataclass(eq=False)
class Init:
    """Partitions the parameters of modules made in its block over the data-parallel ranks; all ranks do the same.

    module: a module that is there already, which is partitioned at once; no block is needed then.
    mesh: a megazero Mesh, torch's DeviceMesh, or an object like Megatron-LM's mpu; or DeepSpeed's ways to say over
    which processes: sequence_data_parallel_group, data_parallel_group, mpu.  By default over all of the job.
    dtype: of all floating-point parameters and buffers when the block has ended; by default that of the configuration,
    or else what they were made in.  Values are drawn in the latter, so they are those of `model.to(dtype)`.
    config_dict_or_path (config is an older name): what the engine will be given.
    enabled: False makes all this do nothing.
    mem_efficient_linear: accepted; how backward comes by weights is the engine's business.
    remote_device, pin_memory, param_swapper, zero_param_parallel_group, zero_quantized_*: refused, not there.
    """

    module: nn.Module | None = None
    data_parallel_group: Any = None
    mem_efficient_linear: bool = True
    remote_device: str | None = None
    pin_memory: bool = False
    config_dict_or_path: EngineConfig | Mapping[str, Any] | str | Path | None = None
    config: EngineConfig | Mapping[str, Any] | str | Path | None = None
    enabled: bool = True
    dtype: torch.dtype | None = None
    mpu: Any = None
    zero_param_parallel_group: Any = None
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    sequence_data_parallel_group: Any = None
    param_swapper: Any = None
    mesh: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._gathers_for_apply = True
        self._kept: dict[str, _Kept] = {}
        self._whole: dict[str, _Whole] = {}
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that are registered in others
        self._hooks: list[RemovableHandle] = []
        self._mode = _CallsOfConstructors(self)
        if self.enabled:
            raise_problems(ConfigError, _problems(self))
            self._read_config()
            self._communicator, self._device = _axis_of(self)
            if self.module is not None:
                module, self.module = self.module, None
                with torch._C.DisableTorchFunction():
                    self._note_all(module)
                    self._finish()

    def __enter__(self) -> Self:
        if self._hooks:
            raise UsageError(Problem("an Init entered inside its own block", "a block has an Init of its own", "Init()"))
        if self.enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._parameter_registered),
                register_module_module_registration_hook(self._module_registered),
                register_module_buffer_registration_hook(self._buffer_registered),
            ]
            self._mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self.enabled:
            return
        self._mode.__exit__(*exc)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        with torch._C.DisableTorchFunction():
            if exc[0] is None:
                self._finish()
            else:
                self._leave()

    # --- what guard.py's Owner is asked for ---------------------------------------------------------------------------

    def touched(self, name: str, call: str) -> None:
        """In the block of Init: make the parameter whole for the call.  Raises UsageError elsewhere."""
        if not self._hooks:
            rule = f"{name} is partitioned until an engine takes it over: it is whole inside zero.Init's block only"
            raise UsageError(Problem(f"{call} of parameter {name} after zero.Init", rule, f"{_GATHERED} to change it"))
        if not self._gathers_for_apply and _is_running(nn.Module.apply):
            rule = f"{name} is partitioned, and override_module_apply is false: Module.apply shows what is there"
            raise UsageError(Problem(f"{call} of parameter {name} in Module.apply", rule, _GATHERED))
        with torch._C.DisableTorchFunction():
            kept = self._kept[name]
            kept.fill()
            parameter = kept.parameter
            self._whole[name] = _Whole(
                kept, parameter, call=call, version=parameter._version, memory=parameter.data_ptr()
            )

    def hold(self, names: Iterable[str], why: str) -> None:
        """Make parameters whole on every rank until `hand_back`; a collective call."""
        with torch._C.DisableTorchFunction():
            for kept in (self._kept[name] for name in names):
                if not kept.pins and kept.name not in self._whole:
                    kept.fill()
                kept.pins += 1

    def hand_back(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Let parameters go; with modifier_rank every rank keeps what they are on that rank."""
        with torch._C.DisableTorchFunction():
            for kept in (self._kept[name] for name in names):
                if modifier_rank is not None:
                    kept.take(modifier_rank)
                kept.pins -= 1
                if not kept.pins and kept.name not in self._whole:
                    kept.empty()

    def register_external(self, module: nn.Module, name: str) -> None:
        """Nothing to do before there are forwards; the engine finds such parameters when they are touched."""

    def give_up(self, name: str) -> Tensor:
        """All values of a parameter, [numel], which is nobody's and without memory afterwards; a collective call."""
        if self._hooks or self._kept[name].pins:
            given = f"an engine that takes over {name} inside a block of zero.Init or GatheredParameters"
            raise UsageError(Problem(given, "an engine is made of parameters that nobody holds", "after the block"))
        with torch._C.DisableTorchFunction():
            kept = self._kept.pop(name)
            values = kept.values()
            take_handle(kept.parameter)
            for module in kept.modules:
                leave_apply(module)
            return values

    # --- while modules are being made ---------------------------------------------------------------------------------

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if _innermost() is self:
            with torch._C.DisableTorchFunction():
                self.settle()
                self._note(module, name, parameter)

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if _innermost() is self:
            with torch._C.DisableTorchFunction():
                self._modules.add(module)
                if child is not None:
                    self._inner.add(child)
                    self._note_all(child)
                self.settle()

    def _buffer_registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if _innermost() is self:
            self._modules.add(module)

    def _note_all(self, module: nn.Module) -> None:
        """Note the parameters below a module; those of a copied one have not been registered one by one."""
        for part in module.modules():
            self._modules.add(part)
            self._inner.update(part.children())
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._note(part, name, parameter)

    def _note(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """`module` has a parameter, new or not; one of an earlier Init changes hands."""
        self._modules.add(module)
        handle = handle_of(parameter)
        if handle is None and isinstance(parameter, PartitionedParameter):
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # a copy of a guarded one, with values
        if handle is None:
            if not _has_values(parameter):
                return
            kept = _Kept("", parameter, self._communicator, self._device)
            self._own(kept, f"{type(module).__name__}.{name}")
            self._whole[kept.name] = _Whole(kept, parameter, made_for=module)
        elif isinstance(handle.owner, Init) and (handle.owner is self or not handle.owner._hooks):
            kept = handle.owner._kept[handle.name]
            if handle.owner is not self:
                self._own(handle.owner._kept.pop(handle.name), handle.name)
        else:
            return
        kept.modules.add(module)
        if self._gathers_for_apply and kept.name not in self._whole:
            gather_around_apply(module)

    def _own(self, kept: _Kept, wish: str) -> None:
        """Keep a parameter under the name wished for, or one like it."""
        number, name = 1, wish
        while name in self._kept:
            number += 1
            name = f"{wish} ({number})"
        kept.name, self._kept[name] = name, kept
        give_handle(kept.parameter, name, self)

    def settle(self) -> None:
        """Put away what is whole for no reason any more."""
        if not self._whole:
            return
        in_the_making = set(_in_the_making())
        for whole in [whole for whole in self._whole.values() if not whole.call and not whole.kept.pins]:
            if id(whole.made_for) not in in_the_making:
                self._put_away(whole)
        lent = [whole for whole in self._whole.values() if whole.call and not whole.kept.pins]
        if lent:  # the same on all ranks; whether there are aliases need not be, where garbage waits to be collected
            aliased = torch.tensor([int(_has_alias(whole.parameter)) for whole in lent], device=self._device)
            self._communicator.all_reduce_scalars(aliased, "max").wait()
            for whole, is_aliased in zip(lent, aliased.tolist(), strict=True):
                if not is_aliased:
                    self._put_away(whole)

    def call_ended(self) -> None:
        """Put away what was filled for a call that is over, unless an alias of it has been handed out."""
        for whole in [whole for whole in self._whole.values() if whole.call and not whole.was_aliased]:
            if whole.parameter.data_ptr() != whole.memory:  # it has been given other memory
                whole.call, whole.made_for = "", None
                self._put_away(whole)
            elif _has_alias(whole.parameter):
                whole.was_aliased = True
            else:
                self._put_away(whole, changed=whole.parameter._version != whole.version)

    def is_lent(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in the memory of a parameter that is whole for a call."""
        memory = tensor.untyped_storage().data_ptr()
        return any(whole.call and whole.memory == memory for whole in self._whole.values())

    def _put_away(self, whole: _Whole, *, changed: bool = True) -> None:
        del self._whole[whole.kept.name]
        if changed:
            whole.kept.take(0)
        whole.kept.empty()
        if self._gathers_for_apply:
            for module in whole.kept.modules:
                gather_around_apply(module)

    # --- when they have been made -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        for whole in self._whole.values():
            whole.made_for = None
        if any(whole.call for whole in self._whole.values()):
            gc.collect()
        self.settle()
        raise_problems(UsageError, [_problem_of_alias(whole) for whole in self._whole.values() if whole.call])
        self._kept = {name: kept for name, kept in self._kept.items() if kept.is_alive}
        for kept in self._kept.values():
            if self.dtype is not None:
                kept.convert(self.dtype)
        for module in self._modules:
            self._convert_buffers(module)
        self._use_full_names()

    def _convert_buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                dtype = self.dtype if buffer.is_floating_point() else None
                module._buffers[name] = buffer.to(device=self._device, dtype=dtype)

    def _use_full_names(self) -> None:
        """Parameters are called by their places in the model, now that there is one."""
        for root in [module for module in self._modules if module not in self._inner]:
            for name, parameter in root.named_parameters():
                handle = handle_of(parameter)
                if handle is not None and handle.owner is self and handle.name != name:
                    self._own(self._kept.pop(handle.name), name)

    def _leave(self) -> None:
        """The block has failed: what was whole is an ordinary parameter again."""
        for name, whole in self._whole.items():
            if not whole.call:
                del self._kept[name]
                take_handle(whole.parameter)
        self._whole.clear()

    def _read_config(self) -> None:
        said = self.config if self.config_dict_or_path is None else self.config_dict_or_path
        if said is not None:
            config = load_engine_config(said)
            self._gathers_for_apply = config.zero.override_module_apply
            self.dtype = self.dtype or resolve(config.zero, config.precision).parameter.dtype


class _CallsOfConstructors(TorchFunctionMode):
    """Sees every call of a torch function in the block of an Init."""

    def __init__(self, init: Init) -> None:
        super().__init__()
        self.init = weakref.proxy(init)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        touches = PartitionedParameter in types
        if touches or func in _ASKS_FOR_MEMORY:
            with torch._C.DisableTorchFunction():
                self.init.settle()
        if not touches:
            return func(*args, **(kwargs or {}))
        with self._graphs_with_copies():
            result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            self.init.call_ended()
        return result

    def _graphs_with_copies(self) -> AbstractContextManager[Any]:
        """What autograd saves of parameters that are whole for a call must outlive the call."""
        if not torch.is_grad_enabled():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if self.init.is_lent(tensor) else tensor
