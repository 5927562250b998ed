"""The optimizer of an engine: the configuration's, or one that the user has made."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.config.choices import OptimizerChoice
from megazero.errors import ConfigError, Problem, UsageError
from megazero.optim.inner import AdamWSettings, Elementwise, FusedAdamW, InnerOptimizer
from megazero.optim.torch_optimizer import TorchOptimizer

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

_ADAMW_SETTINGS = {"betas", "eps", "weight_decay"}


class EngineOptimizer(NamedTuple):
    """inner: what updates flat pieces.  groups: its param groups, whose "lr" hold.  template: the torch optimizer."""

    inner: InnerOptimizer
    groups: list[dict[str, Any]]
    template: Optimizer | None = None


def choose(given: Optimizer | MakeOptimizer | None, choice: OptimizerChoice, model: nn.Module) -> EngineOptimizer:
    """What the user has given, or else the configuration's choice over all of the model's parameters.

    Raises ConfigError when it does not work on flat pieces, or updates something else than the model.
    """
    if given is None:
        return _configured(choice, model)
    template = given if isinstance(given, Optimizer) else given(_trainable(model))
    _check_is_for(template, model)
    return _over(template)


def _configured(choice: OptimizerChoice, model: nn.Module) -> EngineOptimizer:
    others = {name for name, value in choice.params.items() if name not in _ADAMW_SETTINGS and value}
    if choice.type == "AdamW" and not others:
        # Without a word about them, torch's own defaults.
        standard = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=choice.lr, **choice.params).defaults
        (beta1, beta2), eps, weight_decay = standard["betas"], standard["eps"], standard["weight_decay"]
        return EngineOptimizer(FusedAdamW(AdamWSettings(beta1, beta2, eps, weight_decay)), [{"lr": choice.lr}])
    kind: Callable[..., Optimizer] = getattr(torch.optim, choice.type)
    with torch._C.DisableTorchFunctionSubclass():  # Adagrad makes state of its parameters' shapes, not of their values
        return _over(kind(_trainable(model), lr=choice.lr, **choice.params))


def _over(template: Optimizer) -> EngineOptimizer:
    inner = Elementwise(TorchOptimizer(template))
    template.register_step_pre_hook(_refuse_to_step)
    return EngineOptimizer(inner, template.param_groups, template)


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


def _refuse_to_step(template: Optimizer, _arguments: Any, _options: Any) -> None:
    given = f"step() of the {type(template).__name__} that an engine was initialized with"
    rule = "every rank updates its share of the optimizer's state, together with the others"
    raise UsageError(Problem(given, rule, "engine.step()"))
