"""Chooses the optimizer of an engine: the one that the configuration describes, or one that the user has made."""

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.config.choices import OptimizerChoice
from megazero.config.param_groups import unmatched
from megazero.errors import ConfigError, Problem, UsageError, raise_problems
from megazero.library.module.formats import matching
from megazero.optim.adafactor import Adafactor
from megazero.optim.configured import Configured, make_optimizer, patterns_of
from megazero.optim.grouping import DECOUPLED
from megazero.optim.inner import Elementwise, InnerOptimizer
from megazero.optim.schedules import write_rate
from megazero.optim.torch_optimizer import TorchOptimizer
from megazero.parallel.param_spec import named_specs

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


class EngineOptimizer(NamedTuple):
    """An engine's optimizer.

    inner: the optimizer of flat pieces.  groups: its param groups, whose options every update reads.
    kind: the name of its class ("AdamW"), `NO_OPTIMIZER` without one.  given: the torch optimizer from which it was
    made, None for a configuration's AdamW, LAMB or Adafactor.  decoupled: the positions of groups whose rate is
    decoupled.
    factors: by position, the multiple of the configuration's rate that a group has.  decays_itself: the positions of
    groups whose weight decay no schedule moves.
    """

    inner: InnerOptimizer
    groups: list[dict[str, Any]]
    kind: str
    given: Optimizer | None = None
    decoupled: frozenset[int] = frozenset()
    factors: Mapping[int, float] = MappingProxyType({})
    decays_itself: frozenset[int] = frozenset()

    @property
    def exists(self) -> bool:
        """False if neither the user nor the configuration has named an optimizer."""
        return self.kind != NO_OPTIMIZER


NO_OPTIMIZER = "none"


def freeze_untrained(model: nn.Module, *, trains: bool) -> list[nn.Parameter]:
    """Freeze all parameters unless the engine trains; return those that were not frozen before.

    What is frozen has neither gradients nor master weights nor moments, and autograd saves nothing for it.
    """
    frozen = [] if trains else _trainable(model)
    for parameter in frozen:
        parameter.requires_grad_(False)
    return frozen


def choose(
    given: Optimizer | MakeOptimizer | None, choice: OptimizerChoice | None, model: nn.Module
) -> EngineOptimizer:
    """Return the optimizer that the user has given, or else the configuration's over all of the model's parameters.

    A frozen model, and an engine without an optimizer, get one that never steps.  Raises ConfigError if the optimizer
    does not work on flat pieces, or updates tensors that are not the model's parameters; UsageError if one is given for
    a frozen model.
    """
    if not _trainable(model):
        if given is not None:
            rule = "an optimizer updates parameters that require a gradient, and the model has none"
            raise UsageError(Problem("an optimizer for a frozen model", rule, "initialize(model, config) without one"))
        never_steps = OptimizerChoice()
        inner = make_optimizer(never_steps, model)
        if choice is None:
            return EngineOptimizer(inner, [], NO_OPTIMIZER)
        groups: list[dict[str, Any]] = [{"params": [], "lr": choice.lr}]
        return EngineOptimizer(inner, groups, never_steps.type)
    if given is None:
        assert choice is not None, "parameters are frozen where nothing updates them"
        return _configured(choice, model)
    template = given(_trainable(model)) if callable(given) and not isinstance(given, Optimizer) else given
    _check_is_for(template, model)
    if type(template) is torch.optim.Adafactor:
        kept = Adafactor({}, template=template)
        return EngineOptimizer(kept, template.param_groups, "Adafactor", template)
    return _with_groups(Elementwise(TorchOptimizer(template)))


def _configured(choice: OptimizerChoice, model: nn.Module) -> EngineOptimizer:
    decoupled = _decoupled(choice, model)
    names = [spec.name for spec, parameter in named_specs(model) if parameter.requires_grad]
    raise_problems(ConfigError, unmatched(choice.param_groups, names, "optimizer.param_groups"))
    inner = make_optimizer(choice, model, decoupled)
    made = _with_members(inner, choice, model, decoupled)
    number_of = {id(group): number for number, group in enumerate(inner.options)}
    own = patterns_of(choice, model, inner)
    patterns = {place: own.get(number_of[id(group)]) for place, group in enumerate(made.groups)}
    factors = {
        place: pattern.lr / choice.lr
        for place, pattern in patterns.items()
        if pattern is not None and pattern.lr is not None
    }
    for place, factor in factors.items():
        write_rate([made.groups[place]], factor * choice.lr)
    fixed = (place for place, pattern in patterns.items() if pattern is not None and pattern.weight_decay is not None)
    return made._replace(factors=factors, decays_itself=frozenset(fixed))


def _with_members(
    inner: Configured,
    choice: OptimizerChoice,
    model: nn.Module,
    decoupled: frozenset[str],
) -> EngineOptimizer:
    """Return the optimizer of a choice, with its parameters and rates in the param groups that have some."""
    if isinstance(inner, Elementwise):
        made = _with_groups(inner)
        own = {id(parameter) for spec, parameter in named_specs(model) if spec.name in decoupled}
        places = [place for place, group in enumerate(made.groups) if own & {id(each) for each in group["params"]}]
        write_rate([made.groups[place] for place in places], choice.decoupled_lr or choice.lr)
        return made._replace(decoupled=frozenset(places))
    members: dict[int, list[nn.Parameter]] = {group: [] for group in (1, 0, *range(2, len(inner.groups)))}
    for spec, parameter in named_specs(model):
        if parameter.requires_grad:
            members[inner.group_of(spec, parameter)].append(parameter)
    used = [group for group, found in members.items() if found]
    for group in members:
        rate = choice.decoupled_lr if decoupled and group == DECOUPLED else choice.lr
        inner.groups[group].update(params=members[group], lr=rate)
    aside = frozenset(place for place, group in enumerate(used) if decoupled and group == DECOUPLED)
    return EngineOptimizer(inner, [inner.groups[group] for group in used], choice.type, decoupled=aside)


def _decoupled(choice: OptimizerChoice, model: nn.Module) -> frozenset[str]:
    """Return the parameters that the choice's names mean; raise ConfigError for a name that means none."""
    specs = {spec.name: spec for spec, parameter in named_specs(model) if parameter.requires_grad}
    found = matching(specs, choice.decoupled_parameters)
    rule = "it names parameters that are trained, or modules with some"
    problems = [
        Problem(f'optimizer.decoupled_parameters: "{name}"', rule, ", ".join([*specs][:3]) + ", ...")
        for name, names in found.items()
        if not names
    ]
    rule = "a decoupled rate is for parameters with weight decay"
    legal = _first([name for name, spec in specs.items() if spec.decay]) or "leave out decoupled_lr"
    problems += [
        Problem(f"optimizer.decoupled_parameters: {name}", rule, legal)
        for name in sorted({name for names in found.values() for name in names})
        if not specs[name].decay
    ]
    raise_problems(ConfigError, problems)
    return frozenset(name for names in found.values() for name in names)


def _first(names: Collection[str]) -> str:
    """Return the first names as a text that shows whether there are more."""
    return ", ".join([*names][:3]) + (", ..." if len(names) > 3 else "")


def _with_groups(inner: Elementwise) -> EngineOptimizer:
    template = inner.optimizer.template
    return EngineOptimizer(inner, template.param_groups, type(template).__name__, template)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _check_is_for(template: Optimizer, model: nn.Module) -> None:
    if not isinstance(template, Optimizer):
        given = f"optimizer of type {type(template).__name__}"
        rule = "an optimizer is a torch.optim.Optimizer, or a function that makes one of the model's parameters"
        raise ConfigError(Problem(given, rule, "torch.optim.AdamW(model.parameters(), lr=1e-3)"))
    known = set(model.parameters())
    foreign = [p for group in template.param_groups for p in group["params"] if p not in known]
    if foreign:
        given = f"{type(template).__name__} over {len(foreign)} tensors that are no parameters of the model"
        rule = "an optimizer updates parameters of the model that it is initialized with"
        raise ConfigError(Problem(given, rule, "one made from its parameters(); of a model of DTensors, a function"))
