"""Guarded gradients: what stands in `.grad` where a rank has no whole gradient, or no average yet.

Autograd adds gradients to `.grad` in C++, which looks at the memory alone.  User code goes through torch's functions,
and there a `GuardedGradient` calls its owner.  Where a step's gradients are whole on every rank, the owner turns the
sums into averages on the first touch and from then on the tensor is an ordinary one, so that a step in which nothing
reads `.grad` pays nothing.  Elsewhere a touch is an error that names the remedy, where clip_grad_norm_ would find no
gradients and return 0.0.

Between two passes the guard is a sparse tensor without elements.  Autograd adds to it out of place, so what it leaves
in `.grad` is the new gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext

from megazero.zero.parameters.guard import instances_in, name_of

# Functions and attributes that neither read nor write values.
_HARMLESS = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_sparse_csr", "is_leaf", "requires_grad"),
        *("is_cuda", "is_cpu", "is_meta", "is_mkldnn", "is_quantized", "is_nested", "grad_fn", "grad", "itemsize"),
        *("size", "dim", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex"),
        *("requires_grad_", "detach_", "__hash__", "_has_compatible_shallow_copy_type"),
    }
)
# The conversions by which `module.to(...)` and the like give gradients another form, after the parameters.
_CONVERSIONS = frozenset(
    {"to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "to_empty", "empty_like", "share_memory_"}
)
_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__
# The functions of zero_grad(set_to_none=False).
_ZEROING = frozenset({"zero_", "_foreach_zero_"})


class GradientOwner(Protocol):
    """The owner of guarded gradients: an engine."""

    @property
    def has_whole_gradients(self) -> bool:
        """True if user code may read and write the gradients now."""

    def gradient_touched(self, name: str, call: str) -> None:
        """Turn the gradients into averages, for `call`; or raise UsageError."""

    def zero_gradient(self, name: str) -> None:
        """Zero a parameter's gradient, as zero_grad(set_to_none=False) requests it."""


class GuardedGradient(Tensor):
    """A gradient whose values must not be read or written before its owner has been called."""

    owner: GradientOwner
    parameter_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call, arguments = name_of(func), dict(kwargs or {})
        if call in _ZEROING:
            for gradient in instances_in(args, GuardedGradient):
                gradient.owner.zero_gradient(gradient.parameter_name)
            return args[0]
        if call in _CONVERSIONS and isinstance(args[0], GuardedGradient) and not args[0].owner.has_whole_gradients:
            return args[0]  # nothing else may be done with it, and the engine needs it in the form that it gave it
        if func == _SET_DATA and args[0] is args[1]:
            return None
        if call == "__repr__":
            return f"GuardedGradient({args[0].parameter_name}, shape={tuple(args[0].shape)}, dtype={args[0].dtype})"
        # torch.compile looks at the layout of whatever a compiled forward refers to.
        if call not in _HARMLESS and TracingContext.try_get() is None:
            for gradient in instances_in((args, arguments), GuardedGradient):
                gradient.owner.gradient_touched(gradient.parameter_name, call)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **arguments)


class GradientGuards:
    """The guards of an engine's trainable parameters, which stand in `.grad` from the end of a pass to the next one."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owner: GradientOwner,
        *,
        whole: Mapping[str, Tensor],
    ) -> None:
        """Make the guards, which make way in a pass.

        whole: the memory of gradients that are whole on this rank at the end of a step, empty where none are.
        """
        self._parameters = parameters
        self._owner = owner
        self._kept: dict[str, Tensor] = {}  # gradients that accumulate in tensors of torch's own
        self.whole = whole
        placed = {name: self._placeholder(parameter) for name, parameter in parameters.items()}
        self.between: Mapping[str, Tensor] = {name: self._wrap(name, memory) for name, memory in placed.items()}
        """The guards between two passes of a step."""
        at_end = {name: self._wrap(name, memory) for name, memory in whole.items()}
        self._at_end = at_end or self.between

    def _wrap(self, name: str, memory: Tensor) -> GuardedGradient:
        guard = torch.Tensor._make_subclass(GuardedGradient, memory)
        guard.owner, guard.parameter_name = self._owner, name
        return guard

    def put(self, *, at_end: bool) -> None:
        """Put the guards into `.grad`; at_end: those of a complete step."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, guard in (self._at_end if at_end else self.between).items():
                parameter = self._parameters[name]
                gradient = parameter.grad
                if gradient is guard or not may_have(parameter, guard):
                    continue
                if gradient is not None and not isinstance(gradient, GuardedGradient):
                    self._kept[name] = gradient
                parameter.grad = guard

    def forget(self) -> None:
        """Take the guards away, with all that has accumulated, before a step."""
        self._kept.clear()
        self._move_back()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters.values():
                parameter.grad = None

    def accumulated(self, name: str) -> Tensor | None:
        """Return what autograd has added up for a parameter between two passes, if it lies in torch's own tensors."""
        return self._kept.get(name)

    def remove(self) -> None:
        """Take the guards away for a pass, whose first gradient may have come already."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in self._parameters.items():
                kept, gradient = self._kept.pop(name, None), parameter.grad
                if isinstance(gradient, GuardedGradient):
                    parameter.grad = kept
                elif kept is not None:
                    parameter.grad = kept if gradient is None else kept.add_(gradient)

    def changes(self) -> tuple[list[str], dict[str, Tensor]]:
        """Return the parameters whose `.grad` user code has set to None since the step's end, and what it has set.

        What `module.to(...)` has moved counts as set.
        """
        removed, written = [], {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, guard in self._at_end.items():
                gradient = self._parameters[name].grad
                if gradient is None:
                    removed.append(name)
                elif gradient is not guard:
                    written[name] = gradient
            written |= self._move_back()
        return removed, written

    def _move_back(self) -> dict[str, Tensor]:
        """Let guards that `module.to(...)` has moved lie where they belong; return the values that they had.

        That happens to gradients that are whole, from the end of a step's last pass.
        """
        moved = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, memory in self.whole.items():
                guard = self._at_end[name]
                if guard.data_ptr() != memory.data_ptr():
                    moved[name] = guard.detach()
                    guard.data = memory
        return moved

    def _placeholder(self, parameter: nn.Parameter) -> Tensor:
        dtype = parameter.grad_dtype or parameter.dtype
        indices = torch.empty((parameter.dim(), 0), dtype=torch.int64, device=parameter.device)
        values = torch.empty(0, dtype=dtype, device=parameter.device)
        return torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)


def may_have(parameter: nn.Parameter, gradient: Tensor) -> bool:
    """Return True if torch lets the parameter have this gradient.

    It doesn't if the user has given the parameter another form, which is refused before the next step.
    """
    has_place = parameter.shape == gradient.shape and parameter.device == gradient.device
    return has_place and parameter.grad_dtype in (None, gradient.dtype)
