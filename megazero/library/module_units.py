"""Divides any module into units, whose parameters are gathered and released together, if the model defines none.

A *block* is an element of an `nn.ModuleList` or `nn.Sequential` that is not cut further: it has a forward, and holds no
list of its own with two or more elements that have parameters.  The parameters of a block are one unit.  Outside of
blocks every module with parameters of its own is a unit; parameters that several modules share are a unit too, since
they are used in several places.  The *consumers* of a unit are the modules whose forwards read it.

    model                      units                 consumers
    |- embed.weight  <-----+   embed.weight          embed, head
    |- stages (ModuleList) |
    |   |- 0 (ModuleList)  |
    |   |   |- 0  a block  |   stages.0.0            stages.0.0
    |   |   `- 1  a block  |   stages.0.1            stages.0.1
    |   `- 1 (Sequential)  |
    |       `- 0           |   stages.1              stages.1
    |- norm                |   norm                  norm
    `- head.weight  -------+

Units stand in the order in which their first parameters are registered, which is assumed to be the order of use.
"""

from collections.abc import Iterator, Mapping

from torch import nn

from megazero.parallel.param_spec import Unit

_WHOLE_MODEL = "the model"


def choose_units(model: nn.Module) -> list[Unit]:
    """Return units that hold every parameter of `model` once, under the name of its first registration."""
    owners = _owners(model)
    block_of = {part: block for block in _blocks(model) for part in block.modules()}
    module_names = {module: name or _WHOLE_MODEL for name, module in model.named_modules()}
    members: dict[str, list[str]] = {}
    consumers: dict[str, tuple[nn.Module, ...]] = {}
    by_owners: dict[tuple[nn.Module, ...], str] = {}
    for name, parameter in model.named_parameters():
        modules = owners[parameter]
        if len(modules) > 1:
            unit = by_owners.setdefault(modules, name)
        else:
            modules = (block_of.get(modules[0], modules[0]),)
            unit = module_names[modules[0]]
        members.setdefault(unit, []).append(name)
        consumers[unit] = modules
    return [Unit(unit, tuple(names), consumers[unit]) for unit, names in members.items()]


def _owners(model: nn.Module) -> Mapping[nn.Parameter, tuple[nn.Module, ...]]:
    """Return, for each parameter, the modules that register it themselves; parameters are compared by identity."""
    found: dict[nn.Parameter, dict[nn.Module, None]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(parameter, {})[module] = None
    return {parameter: tuple(modules) for parameter, modules in found.items()}


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks in the model, none of which is part of another one."""
    for module in model.children():
        if isinstance(model, nn.ModuleList | nn.Sequential) and not _is_cut_further(module):
            yield module
        else:
            yield from _blocks(module)


def _is_cut_further(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward:  # a list of lists, which has no forward of its own
        return True
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    return any(sum(1 for element in part if _has_parameters(element)) > 1 for part in lists)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
