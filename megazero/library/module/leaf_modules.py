"""Leaf modules of ZeRO stage 3, whose parameters are gathered and reduced together on every rank.

In a mixture of experts, and wherever else its data decide what a rank computes, ranks would gather different units.  A
leaf module contains all of that: every rank enters it, and gathers all parameters in it, in forward and, when the
gradient of its output comes, in backward; those that a rank has not used have zero gradients there.  The functions have
DeepSpeed's names, and mark modules before `megazero.initialize`; the configuration's zero.leaf_module_... (DeepSpeed's
leaf_module) marks some too.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from megazero.config.engine_sections import ZeroConfig
from megazero.errors import Problem, UsageError
from megazero.zero.engine import Engine
from megazero.zero.parameters.guard import handle_of
from megazero.zero.plan import Placement, ZeroPlan

_MARK = "_z3_leaf"  # DeepSpeed's, so that models that mark their own modules are understood


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes, or class names, as leaf modules, and return them.

    Raises UsageError if there are none, or if the model has an engine already.
    """
    return _mark(model, leaf_module_classes, _is_of_class, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark of a leaf module from the modules of these classes, and return them."""
    return _mark(model, leaf_module_classes, _is_of_class, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules with these names as leaf modules; return them, and the names that no module has."""
    found = _mark(model, module_names, _is_named, flag, raise_if_not_found)
    return found, [name for name in module_names if not _find(model, [name], _is_named)]


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so as leaf modules; return them, and the suffixes that no name has."""
    found = _mark(model, module_name_suffixes, _ends_in, flag, raise_if_not_found)
    return found, [suffix for suffix in module_name_suffixes if not _find(model, [suffix], _ends_in)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module as a leaf module, or take the mark from it."""
    _check_has_no_engine(model)
    setattr(model, _MARK, flag)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are marked as leaf modules."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_module(model: nn.Module) -> bool:
    """Return True if the module is marked as a leaf module."""
    return bool(getattr(model, _MARK, False))


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Return True if an engine gathers the parameter with a leaf module."""
    handle = handle_of(model)
    return handle is not None and isinstance(handle.owner, Engine) and handle.owner.is_in_leaf(handle.name)


def choose_leaves(model: nn.Module, zero: ZeroConfig, plan: ZeroPlan) -> list[nn.Module]:
    """Return the leaf modules that are marked or that the configuration names; none where parameters are whole.

    Warns of a name or class in the configuration that no module has, except for classes that are listed by default.
    """
    if plan.parameter.placement is not Placement.PARTITIONED:
        return []
    chosen = dict.fromkeys(get_z3_leaf_modules(model))
    default = ZeroConfig().leaf_module_classes
    given: tuple[tuple[str, tuple[str, ...], _Matches], ...] = (
        ("leaf_module_classes", zero.leaf_module_classes, _is_of_class),
        ("leaf_module_names", zero.leaf_module_names, _is_named),
        ("leaf_module_name_suffixes", zero.leaf_module_name_suffixes, _ends_in),
    )
    for setting, wanted, matches in given:
        for one in wanted:
            found = _find(model, [one], matches)
            chosen |= dict.fromkeys(found)
            if not found and not (matches is _is_of_class and one in default):
                warnings.warn(f"zero.{setting}: no module of the model is {one!r}", stacklevel=4)
    return list(chosen)


_Matches = Callable[[str, nn.Module, object], bool]


def _is_of_class(_name: str, module: nn.Module, wanted: object) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    cls = type(module)
    return wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")


def _is_named(name: str, _module: nn.Module, wanted: object) -> bool:
    return name == wanted


def _ends_in(name: str, _module: nn.Module, wanted: object) -> bool:
    return isinstance(wanted, str) and name.endswith(wanted)


def _find(model: nn.Module, wanted: Iterable[object], matches: _Matches) -> list[nn.Module]:
    wanted = list(wanted)
    return [module for name, module in model.named_modules() if any(matches(name, module, one) for one in wanted)]


def _mark(
    model: nn.Module, wanted: Sequence[object], matches: _Matches, flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    _check_has_no_engine(model)
    found = _find(model, wanted, matches)
    if not found and raise_if_not_found:
        names = ", ".join(one.__name__ if isinstance(one, type) else str(one) for one in wanted)
        rule = "a leaf module is one of the model's modules"
        raise UsageError(Problem(f"no module of {type(model).__name__} is {names}", rule, "its class, or its name"))
    for module in found:
        setattr(module, _MARK, flag)
    return found


def _check_has_no_engine(model: nn.Module) -> None:
    handles = (handle_of(parameter) for parameter in model.parameters())
    if any(handle is not None and isinstance(handle.owner, Engine) for handle in handles):
        given, rule = "leaf modules of a model with an engine", "an engine lays parameters out when it is made"
        raise UsageError(Problem(given, rule, "before megazero.initialize"))
