"""Divides any module into units, whose parameters are gathered and released together, if the model defines none.

A *block* is an element of an `nn.ModuleList` or `nn.Sequential`, or one of an `nn.ModuleDict` that has modules inside,
that is not cut further: it has a forward, and holds no list of its own with two or more such elements that have
parameters.  The parameters of a block are one unit.  Outside of
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

In a *leaf module* (`leaf_modules.py`) ranks may compute different things, so all parameters in it are one unit, which
is read where the leaf's forward begins.  For a list, which has no forward of its own, the module around it is the leaf.

Units stand in the order in which their first parameters are registered, which is assumed to be the order of use.
"""

from collections.abc import Iterable, Iterator, Mapping

from torch import nn

from megazero.parallel.param_spec import Unit

_WHOLE_MODEL = "the model"


def choose_units(model: nn.Module, leaves: Iterable[nn.Module] = ()) -> list[Unit]:
    """Return units that hold every parameter of `model` once, under the name of its first registration."""
    module_names = {module: name or _WHOLE_MODEL for name, module in model.named_modules()}
    leaf_of: dict[nn.Module, nn.Module] = {}
    marked = {_entered(leaf, module_names) for leaf in leaves}
    for leaf in (module for module in module_names if module in marked):  # the outermost first
        for part in leaf.modules():
            leaf_of.setdefault(part, leaf)
    owners = {p: tuple(dict.fromkeys(leaf_of.get(m, m) for m in modules)) for p, modules in _owners(model).items()}
    block_of = {part: block for block in _blocks(model) for part in block.modules()} | leaf_of
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
    return [
        Unit(unit, tuple(names), consumers[unit], is_leaf=any(module in marked for module in consumers[unit]))
        for unit, names in members.items()
    ]


def _entered(leaf: nn.Module, names: Mapping[nn.Module, str]) -> nn.Module:
    """Return the module, or for one without a forward of its own the innermost module around it that has one."""
    name, modules = names[leaf], {name: module for module, name in names.items()}
    while type(leaf).forward is nn.Module.forward and name != _WHOLE_MODEL:
        name = name.rpartition(".")[0] or _WHOLE_MODEL
        leaf = modules[name]
    return leaf


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
    elements = set(_elements(model))
    for module in model.children():
        if module in elements and not _is_cut_further(module):
            yield module
        else:
            yield from _blocks(module)


def _is_cut_further(module: nn.Module) -> bool:
    if type(module).forward is nn.Module.forward:  # a list of lists, which has no forward of its own
        return True
    return any(sum(map(_has_parameters, _elements(part))) > 1 for part in module.modules())


def _elements(module: nn.Module) -> list[nn.Module]:
    """Return the elements of a list of blocks; none of another module.

    Dictionaries often hold a block's layers by name, so one without modules inside is no block.
    """
    if isinstance(module, nn.ModuleDict):
        return [element for element in module.values() if next(element.children(), None) is not None]
    return list(module) if isinstance(module, nn.ModuleList | nn.Sequential) else []


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
