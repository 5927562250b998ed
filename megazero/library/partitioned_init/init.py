"""Defines zero.Init, which partitions a model larger than one process's memory while the model is being made.

    with megazero.zero.Init():
        model = Model()

A parameter is *whole* on every rank until the constructor of its module returns.  Then rank 0's values are
partitioned, each rank retains its *slice*, and the memory is freed.  So only the modules under construction are whole,
beside the slices.  The model equals one that is made on rank 0 and partitioned afterwards: a constructor that uses a
partitioned parameter (to draw values anew, to tie, to compare) finds it whole for the length of the call.

    whole --its module is made--> slice --touched, or gathered--> whole --the call, the block ends--> slice

A call may return an *alias* of a parameter's memory (`p.data`, `p[0]`, `p.t()`).  While an alias exists the parameter
stays whole, and writes to the alias change the parameter.  An alias that still exists when the block of Init ends is an
error: later writes to it would be lost.

Only torch's own hooks are used: on the registration of modules and parameters, and a function mode, which observes the
ends of calls and allocations of memory.  An engine gets the values by `first_value`.
"""

import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
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
from megazero.config.engine_sections import LimitConfig
from megazero.config.values import shown
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.library.adopted.group import adopt_group, group_or_all, is_group, own_device
from megazero.library.adopted.mesh import find_groups
from megazero.library.config import EngineConfig, load_engine_config
from megazero.library.partitioned_init.constructors import ConstructorCalls, innermost, is_running, under_construction
from megazero.library.partitioned_init.parameters import GATHERED, SlicedParameter, WholeParameters
from megazero.library.partitioned_init.slices import FileSlices, MemorySlices, SliceStore
from megazero.library.partitioned_init.wires import (
    GivenWires,
    check_groups,
    wires_of_arguments,
    wires_of_config,
    with_wires,
)
from megazero.memory.homes import DeviceHome, HostHome
from megazero.parallel.param_spec import ParamSpec
from megazero.zero.parameters.gathered import raise_changes
from megazero.zero.parameters.guard import attach_handle, detach_handle, handle_of
from megazero.zero.parameters.module_apply import gather_around_apply, restore_apply
from megazero.zero.plan import resolve

OVERRIDES = ("dtype", "device")


def first_value(spec: ParamSpec, parameter: nn.Parameter) -> Tensor:
    """Return a parameter's initial value, for an engine; one that an Init has partitioned is gathered and detached.

    A collective call.  A detached parameter has no memory until the engine attaches its own.
    """
    handle = handle_of(parameter)
    if handle is None or not isinstance(handle.owner, Init):
        return parameter.detach()
    return handle.owner.detach_parameter(handle.name)


def given_wires(model: nn.Module) -> set[GivenWires]:
    """Return the wires that the Inits of a model's parameters were given, for an engine."""
    owners = {handle.owner for parameter in model.parameters() if (handle := handle_of(parameter)) is not None}
    return {wires for owner in owners if isinstance(owner, Init) for wires in owner._wires}


@dataclass(eq=False)
class Init:
    """A context that partitions the parameters of modules made in its block over the data-parallel ranks.

    All ranks make the same modules.

    module: an existing module, which is partitioned at once; no block is needed then.
    mesh: a megazero Mesh, torch's DeviceMesh, or an object like Megatron-LM's mpu; or one of
    DeepSpeed's arguments: sequence_data_parallel_group, data_parallel_group, mpu.  By default all processes of the job.
    dtype: the type of all floating-point parameters and buffers after the block; by default that of the configuration,
    or else the one they were made in.  Values are drawn in the latter, so they are those of `model.to(dtype)`.
    config_dict_or_path (config is an older name): the configuration that the engine will be given.  Its
    enable_sanity_checks makes changes in `GatheredParameters` without a modifier_rank an error here too.
    enabled: False makes the block do nothing.
    tensor_overrides: the words, or DeepSpeed's enum members, "dtype" and "device"; both are the default.  Without
    "dtype" parameters and buffers keep the format they were made in, without "device" buffers stay where they are.
    mem_efficient_linear: accepted without effect; the engine gathers weights for backward in any case.
    remote_device: "cpu" keeps this rank's slices in host memory until an engine takes them over; its configuration sets
    where they live then (offload_param).  "nvme" keeps them in files, for a model that host memory could not hold
    either: in the folder that the configuration given here names (nvme_path, in DeepSpeed's form
    zero_optimization.offload_param.nvme_path).  Slices share files, which have no names there; each is
    closed once the engine has taken over all that is in it.  Host memory holds three blocks of 8 MiB of them.
    pin_memory: whether a GPU copies to and from host memory, or those buffers, beside its computation.
    zero_quantized_weights: the engine gathers parameters as blocks of integers, as if configured so.
    zero_quantized_nontrainable_weights: it stores frozen ones so, likewise.
    zero_param_parallel_group: the torch group of the neighbours over which the engine partitions gathered parameters a
    second time, as if its configuration's zero_hpz_partition_size were the group's size.  These three, and the same
    keys of a configuration given here, may not contradict the engine's configuration (`comm/wires/shard_group.py`).
    param_swapper: refused, not implemented.
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
    tensor_overrides: Collection[Any] = OVERRIDES
    mesh: Any = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._gathers_for_apply = True
        self._limits: LimitConfig | None = None
        self._checks_changes = False
        self._overrides = [_word_of(each) for each in self.tensor_overrides]
        self._sliced: dict[str, SlicedParameter] = {}
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the modules that are children of others
        self._hooks: list[RemovableHandle] = []
        self._wires: set[GivenWires] = set()  # also those of other Inits whose parameters have been moved here
        self._block = ExitStack()
        if self.enabled:
            given = self.config if self.config_dict_or_path is None else self.config_dict_or_path
            config = None if given is None else load_engine_config(given)
            raise_problems(ConfigError, _problems(self, config))
            if config is not None:
                self._apply_config(config)
            self._communicator, self._device = _communicator_of(self, self._limits)
            self._take_wires(config)
            self._store = _store_of(self, config, self._device)
            self._whole = WholeParameters(self._communicator, self._device, self._on_release)
            if self.module is not None:
                module, self.module = self.module, None
                with torch._C.DisableTorchFunction():
                    self._register_all(module)
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
            self._block.enter_context(ConstructorCalls(self))
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
                self._abort()
                return
            self._finish()
            if (outer := _innermost_init()) is not None:
                outer._merge(self)

    # --- the processes over which parameters are partitioned ----------------------------------------------------------

    def get_partition_rank(self) -> int:
        """Return this process's rank among those over which parameters are partitioned."""
        return self._communicator.rank

    @property
    def num_partitions(self) -> int:
        """The number of processes over which parameters are partitioned."""
        return self._communicator.size

    def get_dp_process_group(self) -> Any:
        """Return torch's group of the processes over which parameters are partitioned; None for a lone process."""
        if isinstance(self.mesh, Mesh):
            given = "get_dp_process_group() of an Init with a megazero Mesh"
            raise UsageError(Problem(given, "a mesh's axes need no groups of torch", "mesh.axis('dp')"))
        return group_or_all(_given_group(self))

    # --- the interface of guard.py's Owner ----------------------------------------------------------------------------

    def touched(self, name: str, call: str) -> None:
        """Gather the parameter for the call, inside the block of Init; raise UsageError outside of it."""
        if not self._hooks:
            rule = f"{name} is partitioned until an engine takes it over: it is whole inside zero.Init's block only"
            raise UsageError(Problem(f"{call} of parameter {name} after zero.Init", rule, f"{GATHERED} to change it"))
        if not self._gathers_for_apply and is_running(nn.Module.apply):
            rule = f"{name} is partitioned, and override_module_apply is false: Module.apply shows what is there"
            raise UsageError(Problem(f"{call} of parameter {name} in Module.apply", rule, GATHERED))
        with torch._C.DisableTorchFunction():
            self._whole.gather_for_call(self._sliced[name], call)

    def lists_partitioned(self) -> bool:
        """Return True outside the block: a program reads names and shapes in the model's state_dict, but no values."""
        return not self._hooks

    def gather(self, names: Iterable[str], why: str, *, is_modified: bool) -> None:
        """Gather parameters, and pin them on every rank until `release`; a collective call."""
        with torch._C.DisableTorchFunction():
            for sliced in (self._sliced[name] for name in names):
                if not sliced.pins and sliced not in self._whole:
                    sliced.gather()
                sliced.pins += 1
                if self._checks_changes and sliced not in self._whole:
                    sliced.as_gathered = sliced.content().clone()

    def release(self, names: Iterable[str], *, modifier_rank: int | None) -> None:
        """Unpin parameters, and release those without pins.

        modifier_rank: the rank whose values are broadcast to all ranks before; None if nothing has been modified.
        """
        with torch._C.DisableTorchFunction():
            for sliced in (self._sliced[name] for name in names):
                if modifier_rank is not None:
                    sliced.partition(modifier_rank)
                sliced.as_gathered = None
                sliced.pins = max(sliced.pins - 1, 0)  # 0 if the block began before this Init had the parameter
                if not sliced.pins and sliced not in self._whole:
                    sliced.release(just_partitioned=modifier_rank is not None)

    def check_unchanged(self, names: Iterable[str]) -> None:
        """Raise UsageError on every rank if one has changed gathered parameters, where the configuration checks that.

        A parameter that is under construction is not lost, so that it may be changed.
        """
        if not self._checks_changes:
            return
        with torch._C.DisableTorchFunction():
            before = {name: self._sliced[name].as_gathered for name in names}
            changed = {
                name: copy is not None and not torch.equal(copy, self._sliced[name].content())
                for name, copy in before.items()
            }
            raise_changes(changed, self._communicator, self._device)

    def register_external(self, module: nn.Module, name: str) -> None:
        """Do nothing: the engine finds such parameters at their first use in a forward."""

    def detach_parameter(self, name: str) -> Tensor:
        """Return a parameter's gathered values, [numel], and detach it, without memory; a collective call."""
        if self._hooks or self._sliced[name].pins:
            given = f"an engine that takes over {name} inside a block of zero.Init or GatheredParameters"
            raise UsageError(Problem(given, "an engine is made of parameters that are not gathered", "after the block"))
        with torch._C.DisableTorchFunction():
            sliced = self._sliced.pop(name)
            values = sliced.values()
            detach_handle(sliced.parameter)
            sliced.free()
            for module in sliced.modules:
                restore_apply(module)
            return values

    # --- construction of modules --------------------------------------------------------------------------------------

    def _parameter_registered(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if _innermost_init() is self:
            with torch._C.DisableTorchFunction():
                self.release_unused()
                self._register(module, name, parameter)

    def _module_registered(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if _innermost_init() is self:
            with torch._C.DisableTorchFunction():
                self._modules.add(module)
                if child is not None:
                    self._inner.add(child)
                    self._register_all(child)
                self.release_unused()

    def _buffer_registered(self, module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if _innermost_init() is self:
            self._modules.add(module)

    def _register_all(self, module: nn.Module) -> None:
        """Register the parameters of a module and its children, which a copied module has without registration."""
        for part in module.modules():
            self._modules.add(part)
            self._inner.update(part.children())
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    self._register(part, name, parameter)

    def _register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Register a parameter of `module`; one of an earlier Init is moved to this one."""
        self._modules.add(module)
        handle = handle_of(parameter)
        if handle is None:
            if not _has_values(parameter):
                return
            sliced = SlicedParameter("", parameter, self._communicator, self._device, self._store)
            self._attach(sliced, f"{type(module).__name__}.{name}")
            self._whole.add_new(sliced, parameter, module)
        elif isinstance(handle.owner, Init) and (handle.owner is self or not handle.owner._hooks):
            sliced = handle.owner._sliced[handle.name]
            if handle.owner is not self:
                self._wires |= handle.owner._wires
                self._attach(handle.owner._sliced.pop(handle.name), handle.name)
        else:
            return
        sliced.modules.add(module)
        if self._gathers_for_apply and sliced not in self._whole:
            gather_around_apply(module)

    def _merge(self, inner: "Init") -> None:
        """Move the modules and parameters of a block within this one to this one."""
        self._modules.update(inner._modules)
        self._inner.update(inner._inner)
        self._wires |= inner._wires
        while inner._sliced:
            name, sliced = inner._sliced.popitem()
            self._attach(sliced, name)

    def _attach(self, sliced: SlicedParameter, base: str) -> None:
        """Attach a parameter to this Init under the name `base`, with a number if the name is used already."""
        number, name = 1, base
        while name in self._sliced:
            number += 1
            name = f"{base} ({number})"
        sliced.name, self._sliced[name] = name, sliced
        attach_handle(sliced.parameter, name, self)

    def release_unused(self) -> None:
        """Release the parameters that need not be whole any more."""
        self._whole.release_unused(under_construction())

    def call_ended(self) -> None:
        """Release the parameters gathered for a call that has returned."""
        self._whole.call_ended()

    def _on_release(self, sliced: SlicedParameter) -> None:
        if self._gathers_for_apply:
            for module in sliced.modules:
                gather_around_apply(module)

    # --- the end of the block -----------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self._whole.release_all()
        for name, sliced in list(self._sliced.items()):
            if not sliced.is_alive:
                self._sliced.pop(name).free()
        for sliced in self._sliced.values():
            if self.dtype is not None and "dtype" in self._overrides:
                sliced.convert(self.dtype)
        outer = _innermost_init()
        for module in self._modules:
            if outer is None or module not in outer._modules:
                self._convert_buffers(module)
        self._use_full_names()

    def _convert_buffers(self, module: nn.Module) -> None:
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                dtype = self.dtype if buffer.is_floating_point() and "dtype" in self._overrides else None
                device = self._device if "device" in self._overrides else None
                module._buffers[name] = buffer.to(device=device, dtype=dtype)

    def _use_full_names(self) -> None:
        """Rename parameters to their full names in the model, which has been made."""
        for root in [module for module in self._modules if module not in self._inner]:
            for name, parameter in root.named_parameters():
                handle = handle_of(parameter)
                if handle is not None and handle.owner is self and handle.name != name:
                    self._attach(self._sliced.pop(handle.name), name)

    def _abort(self) -> None:
        """Detach the new parameters after an error in the block; they are ordinary parameters again."""
        for name, parameter in self._whole.reset():
            self._sliced.pop(name).free()
            detach_handle(parameter)

    def _apply_config(self, config: EngineConfig) -> None:
        self._gathers_for_apply = config.zero.override_module_apply
        self._limits = config.limits
        self._checks_changes = config.zero.enable_sanity_checks
        self.dtype = self.dtype or resolve(config.zero, config.precision).parameter.dtype

    def _take_wires(self, config: EngineConfig | None) -> None:
        """Take the wires of the arguments and of the configuration, which agree; a collective call with a group."""
        switches = {
            "zero_quantized_weights": self.zero_quantized_weights,
            "zero_quantized_nontrainable_weights": self.zero_quantized_nontrainable_weights,
        }
        self._wires = {wires_of_arguments(switches, self.zero_param_parallel_group)}
        check_groups(self._wires, self._communicator, self._device)
        if config is not None:
            self._wires.add(wires_of_config(with_wires(config, self._wires).zero))


def _innermost_init() -> Init | None:
    """Return the Init of the innermost block of this thread, or None outside of a block."""
    hooks = innermost()
    return hooks if isinstance(hooks, Init) else None


def _problems(init: Init, config: EngineConfig | None) -> Iterator[Problem]:
    """Yield a problem for every argument that is not implemented, or contradicts another one."""
    given = f"Init(remote_device={init.remote_device!r})"
    if init.remote_device not in (None, "none", "cpu", "nvme"):
        rule = "slices of parameters live on the device that computes with them, in host memory, or in files"
        yield Problem(given, rule, 'remote_device="cpu", "nvme", or leave it out')
    if init.remote_device == "nvme" and (config is None or config.zero.nvme_path is None):
        lack = "without a configuration" if config is None else "with a configuration without nvme_path"
        rule = "slices live in files of the folder that the configuration names"
        zero = '{"stage": 3, "offload_param": {"device": "nvme", "nvme_path": FOLDER}}'
        yield Problem(f"{given} {lack}", rule, f'config_dict_or_path={{"zero_optimization": {zero}, ...}}')
    if init.pin_memory and init.remote_device in (None, "none"):
        rule = "memory is pinned of slices that live in host memory, or pass through it"
        yield Problem("Init(pin_memory=True)", rule, 'Init(remote_device="cpu", pin_memory=True)')
    if init.zero_param_parallel_group is not None and not is_group(init.zero_param_parallel_group):
        given = f"Init(zero_param_parallel_group={shown(init.zero_param_parallel_group)})"
        yield Problem(given, "it is a process group of torch that this process belongs to", "new_group(...)")
    if init.param_swapper is not None:
        yield Problem("Init(param_swapper=...)", "there is nothing yet that needs it", "leave param_swapper out")
    if init.config is not None and init.config_dict_or_path is not None:
        yield Problem("Init(config_dict_or_path=..., config=...)", "both mean the same", "one of them")
    ways = ("mesh", "sequence_data_parallel_group", "data_parallel_group", "mpu")
    groups = [name for name in ways if getattr(init, name) is not None]
    if len(groups) > 1:
        given = f"Init({', '.join(f'{name}=...' for name in groups)})"
        yield Problem(given, "parameters are partitioned over one group of processes", "one of them")
    overrides = [_word_of(each) for each in init.tensor_overrides]
    if unknown := [each for each in overrides if each not in OVERRIDES]:
        yield Problem(f"Init(tensor_overrides={unknown})", "no other attributes are overridden", ", ".join(OVERRIDES))
    if init.dtype is not None and "dtype" not in overrides:
        given = f"Init(dtype={init.dtype}, tensor_overrides={overrides})"
        yield Problem(given, "number formats are kept without the override", 'tensor_overrides=["dtype", ...]')
    if init.dtype is not None and not init.dtype.is_floating_point:
        yield Problem(f"Init(dtype={init.dtype})", "parameters are floating-point numbers", "torch.float32, ...")


def _store_of(init: Init, config: EngineConfig | None, device: torch.device) -> SliceStore:
    """Return the store of this process's slices, which remote_device names."""
    if init.remote_device == "nvme":
        assert config is not None and config.zero.nvme_path is not None, "the arguments have been checked"
        zero = config.zero
        return FileSlices(
            config.zero.nvme_path,
            device,
            is_pinned=init.pin_memory,
            io_block_bytes=zero.aio_block_size,
            queue_depth=zero.aio_queue_depth,
            notify=partial(_print_once, init._communicator.rank),
        )
    if init.remote_device == "cpu":
        return MemorySlices(HostHome(device, is_pinned=init.pin_memory))
    return MemorySlices(DeviceHome(device))


def _print_once(rank: int, line: str) -> None:
    """Print a line of all processes by rank 0, to standard error as `initialize` does."""
    if rank == 0:
        print(line, file=sys.stderr, flush=True)


def _communicator_of(init: Init, limits: LimitConfig | None) -> tuple[Communicator, torch.device]:
    """Return the communicator over which parameters are partitioned, and the device of this process."""
    if isinstance(init.mesh, Mesh):
        return init.mesh.gathering, init.mesh.device
    return adopt_group(_given_group(init), limits), own_device()


def _given_group(init: Init) -> Any:
    """Return the process group that an argument names, None if none does."""
    foreign = init.mpu if init.mesh is None else init.mesh
    group = init.data_parallel_group if init.sequence_data_parallel_group is None else init.sequence_data_parallel_group
    return group if foreign is None else find_groups(foreign).data


def _word_of(override: Any) -> str:
    """Return the name of a member of DeepSpeed's DeepSpeedTensorOverride, and a word as it is."""
    return str(getattr(override, "name", override))


def _has_values(parameter: nn.Parameter) -> bool:
    return not is_lazy(parameter) and not parameter.is_meta and parameter.numel() > 0
