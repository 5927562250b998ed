"""Makes the inner optimizer of a configuration for the parameters of a model, in runs and in the library."""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.config.choices import OptimizerChoice, defaults_of
from megazero.config.optimizers import OPTIMIZERS
from megazero.optim.inner import AdamWSettings, Elementwise, FusedAdamW
from megazero.optim.lamb import Lamb
from megazero.optim.lion import Lion
from megazero.optim.torch_optimizer import TorchOptimizer
from megazero.parallel.param_spec import named_specs

_OWN: Mapping[str, type[Optimizer]] = MappingProxyType({"Lion": Lion})  # those that torch has not got
_KERNEL_PARAMS = {"betas", "eps", "weight_decay"}


def make_optimizer(
    choice: OptimizerChoice, model: nn.Module, decoupled: frozenset[str] = frozenset()
) -> FusedAdamW | Lamb | Elementwise:
    """Make AdamW with the fused kernel, LAMB, or a torch optimizer with a decayed and an undecayed param group.

    decoupled: names of parameters with weight decay that have a param group, and a learning rate, of their own.
    """
    if choice.type == "Lamb":
        return Lamb(defaults_of(OPTIMIZERS[choice.type].params) | dict(choice.params), decoupled)
    others = {name for name, value in choice.params.items() if name not in _KERNEL_PARAMS and value}
    if choice.type == "AdamW" and not others:
        # torch's defaults for arguments that were left out, read from its signature: to make a torch optimizer would
        # import torch._dynamo, which takes a second.
        standard = {name: argument.default for name, argument in signature(torch.optim.AdamW).parameters.items()}
        params = {**standard, **choice.params}
        beta1, beta2 = params["betas"]
        return FusedAdamW(AdamWSettings(beta1, beta2, params["eps"], params["weight_decay"]), decoupled)
    trained = [(spec, parameter) for spec, parameter in named_specs(model) if parameter.requires_grad]
    own = [parameter for spec, parameter in trained if spec.name in decoupled]
    decayed = [parameter for spec, parameter in trained if spec.decay and spec.name not in decoupled]
    groups: list[dict[str, Any]] = [{"params": decayed}]
    undecayed = [parameter for spec, parameter in trained if not spec.decay]
    if undecayed:
        groups.append({"params": undecayed} | ({"weight_decay": 0.0} if "weight_decay" in choice.params else {}))
    groups.append({"params": own})
    return Elementwise(TorchOptimizer(make_torch_optimizer(choice, [group for group in groups if group["params"]])))


def make_torch_optimizer(choice: OptimizerChoice, params: Iterable[Any]) -> Optimizer:
    """Make the torch optimizer of a configuration over parameters or param groups."""
    kind: Callable[..., Optimizer] = _OWN.get(choice.type) or getattr(torch.optim, choice.type)
    with torch._C.DisableTorchFunctionSubclass():  # Adagrad makes its state at once, from the shapes alone
        return kind(params, lr=choice.lr, **choice.params)


def saved_kinds(choice: OptimizerChoice) -> tuple[str, ...]:
    """Return the kinds of state, beside the weights, in a checkpoint of this optimizer after its first step."""
    optimizer = make_optimizer(choice, nn.Linear(1, 1))
    return optimizer.optimizer.state_names(0) if isinstance(optimizer, Elementwise) else optimizer.moments
