"""Where autograd calls the engine: a parameter's gradient is complete.

Only PyTorch's own hooks are used.  Removing the handles leaves the module as it was.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def on_gradient(parameters: Mapping[str, nn.Parameter], ready: Callable[[str], None]) -> list[RemovableHandle]:
    """Call ready(name) whenever autograd has finished accumulating into a trainable parameter's `.grad`."""

    def hook_for(name: str) -> Callable[[Tensor], None]:
        return lambda _: ready(name)

    handles = []
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            when_accumulated: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
            handles.append(when_accumulated(hook_for(name)))
    return handles
