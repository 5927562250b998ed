"""The inner optimizer that a configuration has chosen, over a model: the same for a run and for the library."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from megazero.config.choices import OptimizerChoice
from megazero.optim.inner import AdamWSettings, Elementwise, FusedAdamW
from megazero.optim.torch_optimizer import TorchOptimizer
from megazero.parallel.param_spec import named_specs

_OF_THE_KERNEL = {"betas", "eps", "weight_decay"}


def make_optimizer(choice: OptimizerChoice, model: nn.Module) -> FusedAdamW | Elementwise:
    """AdamW by the fused kernel; any other one as torch has it, in a group with weight decay and one without."""
    others = {name for name, value in choice.params.items() if name not in _OF_THE_KERNEL and value}
    if choice.type == "AdamW" and not others:
        # For arguments that were left out, torch's own defaults.
        standard = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=choice.lr, **choice.params).defaults
        (beta1, beta2), eps, weight_decay = standard["betas"], standard["eps"], standard["weight_decay"]
        return FusedAdamW(AdamWSettings(beta1, beta2, eps, weight_decay))
    trained = [(spec, parameter) for spec, parameter in named_specs(model) if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [parameter for spec, parameter in trained if spec.decay]}]
    undecayed = [parameter for spec, parameter in trained if not spec.decay]
    if undecayed:
        groups.append({"params": undecayed} | ({"weight_decay": 0.0} if "weight_decay" in choice.params else {}))
    kind: Callable[..., Optimizer] = getattr(torch.optim, choice.type)
    with torch._C.DisableTorchFunctionSubclass():  # Adagrad makes state of its parameters' shapes, not of their values
        return Elementwise(TorchOptimizer(kind([g for g in groups if g["params"]], lr=choice.lr, **choice.params)))


def saved_kinds(choice: OptimizerChoice) -> tuple[str, ...]:
    """The kinds of state, beside the weights, that a checkpoint of this optimizer has once it has stepped."""
    optimizer = make_optimizer(choice, nn.Linear(1, 1))
    return optimizer.optimizer.state_names(0) if isinstance(optimizer, Elementwise) else optimizer.moments
