"""Adapts models whose parameters are DTensors: those with tensor parallelism by torch's `parallelize_module`.

The engine lays out plain tensors, so each DTensor parameter is replaced by an ordinary parameter, this rank's *local
tensor*.  While its module's forward runs, the module has the DTensor again, made from the local tensor so that
gradients reach it.  The spec of a parameter records whether it is a slice, or the same on every rank.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from megazero.comm.mesh import Mesh
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.parallel.param_spec import ParamSpec, attach_spec


class _Wrapping(NamedTuple):
    """The DTensor that a local tensor is a part of."""

    mesh: DeviceMesh
    placements: Sequence[Placement]
    shape: torch.Size
    stride: tuple[int, ...]


def unwrap_dtensors(model: nn.Module, mesh: Mesh) -> None:
    """Replace the model's DTensor parameters by local tensors, permanently.

    A collective call where there are any.  Raises ConfigError where a parameter is distributed over other ranks than
    the mesh's tensor-parallel axis, or is a partial sum.
    """
    found = list(_dtensor_parameters(model))
    if not found:
        return
    raise_problems(ConfigError, _problems(model, _ranks_of_axis(mesh)))
    local_of: dict[nn.Parameter, nn.Parameter] = {}
    for module, name, parameter in found:
        if parameter not in local_of:
            local_of[parameter] = _local_parameter(parameter)
        module._parameters[name] = local_of[parameter]
        wrapping = _Wrapping(parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride())
        _wrap_in_forward(module, name, wrapping)


def _dtensor_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                yield module, name, parameter


def _ranks_of_axis(mesh: Mesh) -> list[int]:
    """Return the ranks in the job of this process's tensor-parallel axis; a collective call."""
    axis = mesh.axis("tp")
    ranks = torch.empty(axis.size, dtype=torch.int64, device=mesh.device)
    axis.all_gather_into(ranks, torch.tensor([dist.get_rank()], device=mesh.device)).wait()
    return ranks.tolist()


def _problems(model: nn.Module, ranks: list[int]) -> Iterator[Problem]:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        over = parameter.device_mesh.mesh.flatten().tolist()
        given = f"parameter {name}, a DTensor {tuple(parameter.placements)} over ranks {over}"
        if over != ranks:
            rule = f"DTensor parameters are distributed over the tensor-parallel axis, ranks {ranks} here"
            yield Problem(given, rule, 'mesh=DeviceMesh(..., mesh_dim_names=("dp", "tp")), parallelized over its "tp"')
        elif not isinstance(parameter.placements[0], (Shard, Replicate)):
            yield Problem(given, "a parameter is whole or a slice on every rank", "Shard(dim) or Replicate()")


def _local_parameter(parameter: Any) -> nn.Parameter:
    """Return this rank's local tensor as a parameter of its own, with its spec."""
    local = nn.Parameter(parameter.to_local().detach().clone(), requires_grad=parameter.requires_grad)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    axes = ("tp",) if isinstance(parameter.placements[0], Shard) else ()
    attach_spec(local, ParamSpec("", tuple(parameter.shape), tuple(shape), tuple(offset), sharded_axes=axes))
    return local


def _wrap_in_forward(module: nn.Module, name: str, wrapping: _Wrapping) -> None:
    """Register hooks that, during a forward, shadow the registered parameter by an attribute of the instance."""

    def wrap(owner: nn.Module, _inputs: Any) -> None:
        local = owner._parameters[name]
        assert local is not None, f"{name} exists as long as its module"
        owner.__dict__[name] = DTensor.from_local(
            local,
            wrapping.mesh,
            wrapping.placements,
            run_check=False,
            shape=wrapping.shape,
            stride=wrapping.stride,
        )

    def unwrap(owner: nn.Module, _inputs: Any, _output: Any) -> None:
        owner.__dict__.pop(name, None)

    module.register_forward_pre_hook(wrap)
    module.register_forward_hook(unwrap, always_call=True)
