"""The state_dict of an engine's module, whole in every ZeRO stage: what it holds, and how it is loaded.

It has the names, tensors and extra state of the module's own state_dict: parameters in working precision, and buffers.
Where parameters are partitioned they are gathered unit by unit, and copied to host memory.

Loading is torch's own, with its hooks and its checks of names and shapes, but for where the values go: torch registers
the given tensors in place of the module's (`assign=True`), and they are then copied to the engine's state, to master
weights first, so that values of float32 lose no digit.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megazero.parallel.param_spec import Unit
from megazero.zero.engine import Engine
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.parameters.guard import handle_of
from megazero.zero.plan import Placement


def whole_state_dict(module: nn.Module, engine: Engine, units: Sequence[Unit], prefix: str) -> dict[str, Any]:
    """Return the module's state_dict; a collective call where parameters are partitioned.

    The tensors are the module's own, as in torch, but for gathered parameters, which are copies.
    """
    if engine.plan.parameter.placement is not Placement.PARTITIONED:
        return module.state_dict(prefix=prefix)
    state = module.state_dict(prefix=prefix, keep_vars=True)
    gathered: dict[str, Tensor] = {}
    names: dict[str, list[nn.Parameter]] = {}
    unit_of = {name: unit.name for unit in units for name in unit.parameters}
    for value in state.values():
        if isinstance(value, nn.Parameter) and (handle := handle_of(value)) is not None:
            names.setdefault(unit_of[handle.name], []).append(value)
    for parameters in names.values():
        with GatheredParameters(parameters):
            for parameter in parameters:
                handle = handle_of(parameter)
                assert handle is not None, "it had one above"
                gathered[handle.name] = parameter.detach().to("cpu", copy=True)
    for name, value in state.items():
        if isinstance(value, nn.Parameter) and (handle := handle_of(value)) is not None:
            state[name] = gathered[handle.name]
        elif isinstance(value, Tensor):
            state[name] = value.detach()
    return state


def load_module(module: nn.Module, engine: Engine, state: Mapping[str, Any], *, strict: bool) -> Any:
    """Load a state_dict, the same on every rank, and return the keys that are missing and unexpected, as torch does.

    Raises torch's RuntimeError with everything that does not fit, and has changed nothing then.
    """
    own = [
        (part, name, tensor)
        for part in module.modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    ]
    given = OrderedDict((key, value.detach() if isinstance(value, Tensor) else value) for key, value in state.items())
    if hasattr(state, "_metadata"):
        vars(given)["_metadata"] = state._metadata
    loaded: list[tuple[Tensor, Tensor]] = []
    try:
        with torch._C.DisableTorchFunctionSubclass():
            result = module.load_state_dict(given, strict=strict, assign=True)
        found = ((tensor, getattr(part, name)) for part, name, tensor in own)
        loaded = [(tensor, new.detach()) for tensor, new in found if new is not tensor]
    finally:
        for part, name, tensor in own:
            setattr(part, name, tensor)
    _fill(engine, {_name_of(tensor): new for tensor, new in loaded if isinstance(tensor, nn.Parameter)})
    with torch.no_grad():
        for tensor, new in loaded:
            if not isinstance(tensor, nn.Parameter):
                tensor.copy_(new)
    return result


def _fill(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """Set parameters of the engine to whole values by name, master weights and working parameters alike."""
    for fragment in engine.wanted_state(with_optimizer=False):
        value = values.get(fragment.spec.name)
        if value is not None:
            fragment.tensor.copy_(value.reshape(-1)[fragment.start : fragment.stop])
    engine.state_loaded(names=values)


def _name_of(parameter: Tensor) -> str:
    handle = handle_of(parameter) if isinstance(parameter, nn.Parameter) else None
    assert handle is not None, "the module's parameters are the engine's"
    return handle.name
