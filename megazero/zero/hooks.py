"""Where modules and autograd call the engine: a parameter's gradient is complete; a module is about to run.

Only PyTorch's own hooks are used.  Removing the handles leaves the module as it was.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def on_gradient(parameters: Mapping[str, nn.Parameter], ready: Callable[[str], None]) -> list[RemovableHandle]:
    """Call ready(name) whenever autograd has finished accumulating into a trainable parameter's `.grad`."""

    def hook_for(name: str) -> Callable[[Tensor], None]:
        return lambda _: ready(name)

    return [
        parameter.register_post_accumulate_grad_hook(hook_for(name))  # type: ignore[no-untyped-call]
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]


def before_forward(consumers: Sequence[tuple[str, nn.Module]], ensure: Callable[[str], None]) -> list[RemovableHandle]:
    """Call ensure(unit) before every forward of a module that reads the unit's parameters."""

    def hook_for(unit: str) -> Callable[[nn.Module, Any], None]:
        return lambda _module, _inputs: ensure(unit)

    return [module.register_forward_pre_hook(hook_for(unit)) for unit, module in consumers]
