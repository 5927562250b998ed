"""Makes the inner optimizer of a configuration for the parameters of a model, in runs and in the library."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.config.choices import OptimizerChoice, defaults_of
from megazero.config.optimizers import OPTIMIZERS
from megazero.config.param_groups import ParamGroup
from megazero.optim.adafactor import Adafactor
from megazero.optim.eight_bit import KERNELS, EightBit
from megazero.optim.grouping import DECAYED, UNDECAYED, Grouping
from megazero.optim.inner import AdamWSettings, Elementwise, FusedAdamW, InnerOptimizer
from megazero.optim.lamb import Lamb
from megazero.optim.lion import Lion
from megazero.optim.torch_optimizer import TorchOptimizer
from megazero.parallel.param_spec import named_specs

_OWN: Mapping[str, type[Optimizer]] = MappingProxyType({"Lion": Lion})  # those that torch has not got
_MEASURING: Mapping[str, type[Lamb | Adafactor]] = MappingProxyType({"Lamb": Lamb, "Adafactor": Adafactor})
Configured = FusedAdamW | Lamb | Adafactor | EightBit | Elementwise
_KERNEL_PARAMS = {"betas", "eps", "weight_decay"}


def make_optimizer(
    choice: OptimizerChoice,
    model: nn.Module,
    decoupled: frozenset[str] = frozenset(),
    *,
    compile: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
) -> Configured:
    """Make AdamW with the fused kernel, LAMB, Adafactor, one of 8 bits or a torch optimizer, with the param groups.

    decoupled: names of parameters with weight decay that have a param group, and a learning rate, of their own.
    compile: what compiles AdamW for GPUs.
    """
    grouping = Grouping(decoupled, choice.param_groups)
    table = OPTIMIZERS[choice.type].params
    params = defaults_of(table) | dict(choice.params)
    if choice.type in _MEASURING:
        return _MEASURING[choice.type](params, grouping)
    if choice.type in KERNELS:
        return EightBit(choice.type, params, grouping)
    if choice.type == "AdamW" and not {name for name in params.keys() - _KERNEL_PARAMS if params[name]}:
        # Not by a torch optimizer: to make one would import torch._dynamo, which takes a second.
        beta1, beta2 = params["betas"]
        settings = AdamWSettings(beta1, beta2, params["eps"], params["weight_decay"])
        return FusedAdamW(settings, grouping, compile=compile)
    decays = grouping.weight_decays(params.get("weight_decay", 0.0))
    members: list[list[nn.Parameter]] = [[] for _ in decays]
    for spec, parameter in named_specs(model):
        if parameter.requires_grad:
            members[grouping.group_of(spec)].append(parameter)
    own = [{"weight_decay": decay} if "weight_decay" in table else {} for decay in decays]
    groups = [{"params": members[group], **own[group]} for group in (DECAYED, UNDECAYED, *range(2, len(decays)))]
    trained = [group for group in groups if group["params"]]
    # A pipeline stage beside adapters may have nothing to train; torch takes a group that is empty, but no lack of one.
    return Elementwise(TorchOptimizer(make_torch_optimizer(choice, trained or groups[:1])))


def patterns_of(choice: OptimizerChoice, model: nn.Module, optimizer: InnerOptimizer) -> dict[int, ParamGroup]:
    """Return the choice's param groups by the number that the optimizer made of it has for them, where it has some."""
    grouping = Grouping(patterns=choice.param_groups)
    found = ((spec, parameter, grouping.pattern_of(spec)) for spec, parameter in named_specs(model))
    return {
        optimizer.group_of(spec, parameter): pattern
        for spec, parameter, pattern in found
        if pattern is not None and parameter.requires_grad
    }


def make_torch_optimizer(choice: OptimizerChoice, params: Iterable[Any]) -> Optimizer:
    """Make the torch optimizer of a configuration over parameters or param groups."""
    kind: Callable[..., Optimizer] = _OWN.get(choice.type) or getattr(torch.optim, choice.type)
    with torch._C.DisableTorchFunctionSubclass():  # Adagrad makes its state at once, from the shapes alone
        return kind(params, lr=choice.lr, **choice.params)


def saved_kinds(choice: OptimizerChoice) -> tuple[str, ...]:
    """Return the kinds of state of elements, beside the weights, in a checkpoint after the optimizer's first step."""
    optimizer = make_optimizer(choice, nn.Linear(1, 1))
    return optimizer.optimizer.state_names(0) if isinstance(optimizer, Elementwise) else optimizer.moments
