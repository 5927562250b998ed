"""Prepares a user's module for the engine: device, number format, equal values on all ranks, specs.

Parameters that `zero.Init` has partitioned are on the device, with equal values, already.  Only their number format
changes: they have no memory, so a new empty tensor of the format is enough.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from megazero.comm.interface import Communicator
from megazero.comm.mesh import Mesh
from megazero.errors import Problem, UsageError, raise_problems
from megazero.library.module.formats import choose_formats
from megazero.parallel.param_spec import ParamSpec, attach_spec
from megazero.zero.engine import Engine
from megazero.zero.parameters.guard import guard, handle_of, unguard

# Attributes by which tensor-parallel libraries mark a parameter of which every rank has another slice.
_SHARDED = ("tensor_model_parallel", "model_parallel")


def prepare(
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype,
    *,
    buffer_dtype: torch.dtype | None = None,
    keep_in_fp32: Sequence[str] = (),
) -> None:
    """Move `model` to the mesh's device and into its formats, with data-parallel rank 0's values on all ranks.

    dtype: the type of floating-point parameters; the rest is for `choose_formats`.  Raises UsageError with all reasons
    why the model cannot be trained.
    """
    raise_problems(UsageError, _problems(model))
    formats = choose_formats(model, dtype, buffer_dtype=buffer_dtype, keep_in_fp32=keep_in_fp32)
    own = [parameter for parameter in model.parameters() if handle_of(parameter) is None]
    for parameter in model.parameters():
        wanted = formats.get(id(parameter), parameter.dtype)
        if handle_of(parameter) is not None and parameter.dtype != wanted:
            _convert_hollow(parameter, wanted)
    for tensor in (*own, *model.buffers()):
        tensor.data = tensor.data.to(mesh.device, formats.get(id(tensor), tensor.dtype))
    for parameter in own:
        parameter.grad = None
    broadcast([*own, *model.buffers()], mesh.axis("dp"))
    for parameter in model.parameters():
        describe(parameter, mesh)


def broadcast(tensors: list[Tensor], communicator: Communicator) -> None:
    """Set the tensors to rank 0's values on every rank."""
    with torch.no_grad():
        dense = [tensor.detach().contiguous() for tensor in tensors]
        for work in [communicator.broadcast(tensor, 0) for tensor in dense]:
            work.wait()
        for tensor, sent in zip(tensors, dense, strict=True):
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)


def describe(parameter: nn.Parameter, mesh: Mesh) -> None:
    """Attach a spec to a parameter without one: whole, or one of its tensor-parallel slices; weight decay applies.

    The sliced dim is the parameter's attribute `partition_dim`, else 0.
    """
    if isinstance(getattr(parameter, "megazero_spec", None), ParamSpec):
        return
    shape = tuple(parameter.shape)
    full, offset, size = list(shape), [0] * len(shape), mesh.axis("tp").size
    is_sharded = size > 1 and any(getattr(parameter, name, False) for name in _SHARDED)
    if is_sharded:
        dim = max(getattr(parameter, "partition_dim", 0), 0)
        full[dim], offset[dim] = full[dim] * size, mesh.axis("tp").rank * full[dim]
    axes = ("tp",) if is_sharded else ()
    attach_spec(parameter, ParamSpec("", tuple(full), shape, tuple(offset), sharded_axes=axes))


def _convert_hollow(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter without memory another number format; its values are converted when they are gathered."""
    hollow = torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    hollow.untyped_storage().resize_(0)
    unguard(parameter)
    parameter.data = hollow
    guard(parameter)


def _problems(model: nn.Module) -> Iterator[Problem]:
    named = list(model.named_parameters())
    for name, parameter in named:
        if not issubclass(type(parameter), nn.Parameter):
            rule = "parameters are plain tensors, since each one becomes a view of a flat tensor"
            yield Problem(f"parameter {name} of type {type(parameter).__name__}", rule, "torch.nn.Parameter")
        elif is_lazy(parameter):
            rule = "every parameter has its shape: a lazy module makes them in its first forward"
            yield Problem(f"parameter {name} without a shape", rule, "one forward of the model before initialize")
        elif handle_of(parameter) is None and parameter.is_meta:
            rule = "parameters have values"
            yield Problem(f"parameter {name} on the meta device", rule, "a model made under megazero.zero.Init")
        elif parameter.is_complex():
            yield Problem(f"parameter {name} of {parameter.dtype}", "parameters are real", "torch.view_as_real of it")
    if any(isinstance(handle.owner, Engine) for _, p in named if (handle := handle_of(p)) is not None):
        rule = "a model has one engine, which its parameters belong to"
        yield Problem(
            "a model with an engine", rule, "engine.close() of the other one, where no parameter is partitioned"
        )
    if not named:
        yield Problem("a model without parameters", "an engine partitions a model's parameters, and trains them")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            rule = "gradients are dense: they travel in flat buffers"
            yield Problem(f"embedding {name} with sparse=True", rule, "sparse=False")
