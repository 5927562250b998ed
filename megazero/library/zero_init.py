"""zero.Init: a model larger than one process's memory, partitioned while it is being made.

    with megazero.zero.Init():
        model = Model()

A parameter is *whole* on every rank from its making until its module has been made; then rank 0's values are shared
out, each rank keeps its *slice*, and the memory goes.  So at most the modules in the making are whole beside the
slices, and the model comes out as if it had been made on rank 0 and partitioned afterwards: what its constructors do
with partitioned parameters (they draw values anew, tie, compare) finds them whole for the length of the call.

    whole --its module is made--> slice --touched, or gathered--> whole --the call, the block is over--> slice

A call may hand out another name for a parameter's memory (`p.data`, `p[0]`, `p.t()`).  As long as such an *alias* is
used the parameter is whole, and what is written through it counts.  One that is still there when the block of Init ends
is an error: what is written to it later would be lost.

Only torch's own hooks are used: on the registration of modules and parameters, and a function mode, which tells where a
call ends and where memory is about to be asked for.  An engine takes the values over by `first_value`.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.library.adopted_group import adopt_group, own_device
from megazero.library.adopted_mesh import find_groups
from megazero.library.config import EngineConfig, load_engine_config
from megazero.library.constructors import CallsOfConstructors, in_the_making, innermost, is_running
from megazero.library.init_parameters import GATHERED, Kept, WholeParameters
from megazero.parallel.param_spec import ParamSpec
from megazero.zero.guard import attach_handle, detach_handle, handle_of
from megazero.zero.module_apply import gather_around_apply, restore_apply
from megazero.zero.plan import resolve


def first_value(spec: ParamSpec, parameter: nn.Parameter) -> Tensor:
    """The first value of any parameter, for an engine; one that an Init keeps is gathered and given up to the engine.

    A collective call.  Until it has memory of the engine's, such a parameter has none.
    """
    handle = handle_of(parameter)
    if handle is None or not isinstance(handle.owner, Init):
        return parameter.detach()
    return handle.owner.give_up(handle.name)


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
        self._kept: dict[str, Kept] = {}
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those that are registered in others
        self._hooks: list[RemovableHandle] = []
        self._block = ExitStack()
        if self.enabled:
            raise_problems(ConfigError, _problems(self))
            self._read_config()
            self._communicator, self._device = _axis_of(self)
            self._whole = WholeParameters(self._communicator, self._device, self._is_put_away)
            if self.module is not None:
                module, self.module = self.module, None
                with torch._C.DisableTorchFunction():
                    self._note_all(module)
                    self._finish()

    def __enter__(self) -> Self:
        if self._hooks:
            raise UsageError(
                Problem("an Init entered inside its own block", "a block has an Init of its own", "Init()")
            )
        if self.enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._parameter_registered),
                register_module_module_registration_hook(self._module_registered),
                register_module_buffer_registration_hook(self._buffer_registered),
            ]
            self._block.enter_context(CallsOfConstructors(self))
            self._block.enter_context(saved_tensors_hooks(self._whole.pack, lambda tensor: tensor))
        return self

    def __exit__(self, *exc: Any) -> None:
        if not self.enabled:
            return
        self._block.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        with torch._C.DisableTorchFunction():
            if exc[0] is not None:
                self._leave()
                return
            self._finish()
            if (outer := _block()) is not None:
                outer._take_over(self)

    # --- what guard.py's Owner is asked for ---------------------------------------------------------------------------

    def touched(self, name: str, call: str) -> None:
        """In the block of Init: make the parameter whole for the call.  Raises UsageError elsewhere."""
        if not self._hooks:
            rule = f"{name} is partitioned until an engine takes it over: it is whole inside zero.Init's block only"
            raise UsageError(Problem(f"{call} of parameter {name} after zero.Init", rule, f"{GATHERED} to change it"))
        if not self._gathers_for_apply and is_running(nn.Module.apply):
            rule = f"{name} is partitioned, and override_module_apply is false: Module.apply shows what is there"
            raise UsageError(Problem(f"{call} of parameter {name} in Module.apply", rule, GATHERED))
        with torch._C.DisableTorchFunction():
            self._whole.fill(self._kept[name], call)

    def gather(self, names: Iterable[str], why: str) -> None:
        """Make parameters whole on every rank until `release`; a collective call."""
        with torch._C.DisableTorchFunction():
            for kept in (self._kept[name] for name in names):
                if not kept.pins and kept not in self._whole:
                    kept.fill()
                kept.pins += 1

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Let parameters go; with modifier_rank every rank keeps what they are on that rank."""
        with torch._C.DisableTorchFunction():
            for kept in (self._kept[name] for name in names):
                if modifier_rank is not None:
                    kept.take(modifier_rank)
                kept.pins = max(kept.pins - 1, 0)  # 0: the block began before it was a parameter of ours
                if not kept.pins and kept not in self._whole:
                    kept.empty(just_taken=modifier_rank is not None)

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
            detach_handle(kept.parameter)
            for module in kept.modules:
                restore_apply(module)
            return values

    # --- while modules are being made ---------------------------------------------------------------------------------

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if _block() is self:
            with torch._C.DisableTorchFunction():
                self.settle()
                self._note(module, name, parameter)

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if _block() is self:
            with torch._C.DisableTorchFunction():
                self._modules.add(module)
                if child is not None:
                    self._inner.add(child)
                    self._note_all(child)
                self.settle()

    def _buffer_registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if _block() is self:
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
        if handle is None:
            if not _has_values(parameter):
                return
            kept = Kept("", parameter, self._communicator, self._device)
            self._own(kept, f"{type(module).__name__}.{name}")
            self._whole.made(kept, parameter, module)
        elif isinstance(handle.owner, Init) and (handle.owner is self or not handle.owner._hooks):
            kept = handle.owner._kept[handle.name]
            if handle.owner is not self:
                self._own(handle.owner._kept.pop(handle.name), handle.name)
        else:
            return
        kept.modules.add(module)
        if self._gathers_for_apply and kept not in self._whole:
            gather_around_apply(module)

    def _take_over(self, inner: "Init") -> None:
        """What has been made in a block within this one is at home in this one from now on."""
        self._modules.update(inner._modules)
        self._inner.update(inner._inner)
        while inner._kept:
            name, kept = inner._kept.popitem()
            self._own(kept, name)

    def _own(self, kept: Kept, wish: str) -> None:
        """Keep a parameter under the name wished for, or one like it."""
        number, name = 1, wish
        while name in self._kept:
            number += 1
            name = f"{wish} ({number})"
        kept.name, self._kept[name] = name, kept
        attach_handle(kept.parameter, name, self)

    def settle(self) -> None:
        """Put away what is whole for no reason any more."""
        self._whole.settle(in_the_making())

    def call_ended(self) -> None:
        """Put away what was filled for a call that is over."""
        self._whole.call_ended()

    def _is_put_away(self, kept: Kept) -> None:
        if self._gathers_for_apply:
            for module in kept.modules:
                gather_around_apply(module)

    # --- when they have been made -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._whole.finish()
        self._kept = {name: kept for name, kept in self._kept.items() if kept.is_alive}
        for kept in self._kept.values():
            if self.dtype is not None:
                kept.convert(self.dtype)
        outer = _block()
        for module in self._modules:
            if outer is None or module not in outer._modules:
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
        for name, parameter in self._whole.drop_new():
            del self._kept[name]
            detach_handle(parameter)

    def _read_config(self) -> None:
        said = self.config if self.config_dict_or_path is None else self.config_dict_or_path
        if said is not None:
            config = load_engine_config(said)
            self._gathers_for_apply = config.zero.override_module_apply
            self.dtype = self.dtype or resolve(config.zero, config.precision).parameter.dtype


def _block() -> Init | None:
    """The Init in whose block this thread is, the innermost one."""
    keeper = innermost()
    return keeper if isinstance(keeper, Init) else None


def _problems(init: Init) -> Iterator[Problem]:
    """What is said that is not there, or contradicts itself."""
    if init.remote_device not in (None, "none"):
        rule = "parameters stay on the device that computes with them"
        yield Problem(f"Init(remote_device={init.remote_device!r})", rule, "leave remote_device out")
    for name in ("pin_memory", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(init, name):
            yield Problem(f"Init({name}=True)", "gathers carry parameters as they are", f"{name}=False")
    for name in ("zero_param_parallel_group", "param_swapper"):
        if getattr(init, name) is not None:
            yield Problem(f"Init({name}=...)", f"there is nothing yet that needs a {name}", f"leave {name} out")
    if init.config is not None and init.config_dict_or_path is not None:
        yield Problem("Init(config_dict_or_path=..., config=...)", "both mean the same", "one of them")
    ways = ("mesh", "sequence_data_parallel_group", "data_parallel_group", "mpu")
    groups = [name for name in ways if getattr(init, name) is not None]
    if len(groups) > 1:
        given = f"Init({', '.join(f'{name}=...' for name in groups)})"
        yield Problem(given, "parameters are partitioned over one group of processes", "one of them")
    if init.dtype is not None and not init.dtype.is_floating_point:
        yield Problem(f"Init(dtype={init.dtype})", "parameters are floating-point numbers", "torch.float32, ...")


def _axis_of(init: Init) -> tuple[Communicator, torch.device]:
    """The processes over which parameters are partitioned, and where this one computes."""
    if isinstance(init.mesh, Mesh):
        return init.mesh.gathering, init.mesh.device
    foreign = init.mpu if init.mesh is None else init.mesh
    group = init.data_parallel_group if init.sequence_data_parallel_group is None else init.sequence_data_parallel_group
    return adopt_group(group if foreign is None else find_groups(foreign).data), own_device()


def _has_values(parameter: nn.Parameter) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta and parameter.numel() > 0
