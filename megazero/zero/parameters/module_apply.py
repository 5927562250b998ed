"""Makes `Module.apply` gather partitioned parameters, so that the applied function gets them whole.

A module gets an `apply` of its own, an attribute beside the class's method, which gathers the module's direct
parameters around the call and stores the values that data-parallel rank 0 gives them.  A module whose class overrides
`apply` is left alone.
"""

from collections.abc import Callable
from types import MethodType

from torch import nn

from megazero.zero.parameters.gathered import GatheredParameters

_NAME = "apply"


def apply(self: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """Call fn on every module below, then on the module itself, each with its own parameters whole; a collective call.

    It has the name of the method that it replaces, so that a module with it can be copied and pickled: a bound method
    is looked up by the name of its function.
    """
    for child in self.children():
        child.apply(fn)
    with GatheredParameters(list(self.parameters(recurse=False)), modifier_rank=0):
        fn(self)
    return self


def gather_around_apply(module: nn.Module) -> None:
    """Make `module.apply` gather the module's own parameters; a second call changes nothing."""
    if type(module).apply is nn.Module.apply and _NAME not in vars(module):
        setattr(module, _NAME, MethodType(apply, module))


def restore_apply(module: nn.Module) -> None:
    """Undo `gather_around_apply`, if it was called."""
    own = vars(module).get(_NAME)
    if isinstance(own, MethodType) and own.__func__ is apply:
        delattr(module, _NAME)
