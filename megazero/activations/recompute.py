"""Recomputation: a function's saved tensors are dropped, and computed again when backward needs them.

An activation *checkpoint* is what a call starts from: its tensor inputs (stored by `checkpoints.py`), its other
arguments, the random states, autocast, context variables.  While the function runs, every tensor that autograd would
save is replaced by a *placeholder*.  The first placeholder that backward unpacks restores the checkpoint and runs the
function again; the tensors saved by that run, in the same order, fill the placeholders, and it stops with the last one.
So backward goes through the graph of the first run, gradients are added up in the same order and to the same bits as
without recomputation, and a parameter gets its whole gradient at once, however often it is used.

    forward    x0 --layer 0--> x1 --layer 1--> x2      retained: x0, x1
    backward   restore x1, prefetch x0, run layer 1 again, backward through it; run layer 0 again, ...

The method is from Chen et al., arXiv 1604.06174; partitioned and host-memory checkpoints are from ZeRO, section 6.1.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from megazero.activations.checkpoints import ActivationCheckpoints
from megazero.errors import Problem, UsageError
from megazero.memory.ledger_interface import AnyLedger, NullLedger


class RandomSource(Protocol):
    """The generators that the recomputed function draws from."""

    def get_state(self) -> Any:
        """Return a state with which `set_state` makes the same numbers be drawn again."""

    def set_state(self, state: Any) -> None: ...


class Stopwatch(Protocol):
    """A timer for named parts of a step."""

    def measure(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Recomputation:
    """The settings with which functions are recomputed.

    random: the generators whose states are restored, so that recomputed dropout is the same dropout.
    checkpoints: stores the inputs.
    stopwatch: measures "checkpoint-forward" and "checkpoint-recompute".
    synchronizes: the CUDA device whose queue is emptied before and after every run, if any.
    """

    random: RandomSource
    checkpoints: ActivationCheckpoints = field(default_factory=ActivationCheckpoints)
    ledger: AnyLedger = field(default_factory=NullLedger)
    stopwatch: Stopwatch | None = None
    synchronizes: torch.device | None = None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call function(*args, **kwargs), which is called again in backward; any arguments, any result.

        The function must do the same in both runs, and must not write to its inputs; backward raises UsageError where
        it detects a difference.  Without autograd the function is called and nothing is retained.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        call = _Call(self, function, args, kwargs)
        with self.measured("checkpoint-forward"), saved_tensors_hooks(call.pack, call.unpack):
            result = function(*args, **kwargs)
        call.end_forward()
        return result

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Time one run of a function."""
        self._synchronize()
        with nullcontext() if self.stopwatch is None else self.stopwatch.measure(name):
            yield
            self._synchronize()

    def _synchronize(self) -> None:
        if self.synchronizes is not None:
            torch.cuda.current_stream(self.synchronizes).synchronize()  # waits for no receive that is posted ahead


class _Placeholder:
    """The graph's stand-in for the saved tensor number `index`; it dies with the node that saved it."""

    __slots__ = ("__weakref__", "_version", "index", "shape", "value")

    def __init__(self, index: int, tensor: Tensor) -> None:
        self.index = index
        self.shape = (tensor.shape, tensor.dtype)
        self.value: Tensor | None = None
        self._version = 0

    def fill(self, value: Tensor) -> None:
        self.value, self._version = value, value._version

    def checked(self) -> Tensor:
        """Return the value; UsageError if it has been written to since it was computed."""
        assert self.value is not None, "a run fills every placeholder, or raises"
        if self.value._version != self._version:
            given = f"recomputation: a tensor of {list(self.value.shape)} that backward needs has been written to"
            rule = "a tensor that autograd has saved is not written to until backward"
            raise UsageError(Problem(given, rule, "clone it, or write elsewhere"))
        return self.value


class _AllFilled(Exception):
    """Raised to end the second run, which has saved as many tensors as the first: every placeholder alive is filled."""


class _Call:
    """One call of a recomputed function, until its graph is gone."""

    def __init__(
        self, settings: Recomputation, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._settings = settings
        self._function = function
        self._arguments = _Arguments(settings.checkpoints, args, kwargs)
        self._random_state = settings.random.get_state()
        self._autocast = _Autocast()
        self._context = copy_context()
        self._placeholders: list[weakref.ref[_Placeholder]] = []

    def end_forward(self) -> None:
        self._arguments.checkpoint.release_source()

    def pack(self, tensor: Tensor) -> _Placeholder:
        """Replace a tensor that autograd saves in the first run; the pack hook."""
        placeholder = _Placeholder(len(self._placeholders), tensor)
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def unpack(self, placeholder: _Placeholder) -> Tensor:
        """Return the tensor that backward reads, running the function again if need be; the unpack hook."""
        if placeholder.value is None:
            self._run_again()
        value = placeholder.checked()
        if _keeps_graph():
            placeholder.value = None  # computed once more when backward runs through the graph once more
        if torch.is_grad_enabled():
            return value.clone()  # this backward makes a graph itself, which may outlive the inputs' memory
        return value

    def _run_again(self) -> None:
        needed = {index: alive for index, ref in enumerate(self._placeholders) if (alive := ref()) is not None}
        refill = _Refill(needed, len(self._placeholders))
        args, kwargs = self._arguments.restore()
        ledger, random = self._settings.ledger, self._settings.random
        present = random.get_state()
        random.set_state(self._random_state)
        ledger.phase("forward")
        try:
            with self._settings.measured("checkpoint-recompute"), self._autocast.restored(), refill.filling():
                self._context.copy().run(self._function, *args, **kwargs)
        finally:
            random.set_state(present)
            ledger.phase("backward")
        refill.check()


class _Arguments:
    """The arguments of a call: tensors in an activation checkpoint, everything else as it is.

    A tensor that is passed several times is copied once and stays one tensor: code may test arguments with `is`.
    """

    def __init__(self, checkpoints: ActivationCheckpoints, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        first: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            first.setdefault(id(tensor), index)
        self._tensor_at = {at: first[id(leaf)] for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._others = [None if at in self._tensor_at else leaf for at, leaf in enumerate(leaves)]
        self._needs_gradient = [tensor.requires_grad for tensor in tensors]
        # Every occurrence is saved: an enclosing recomputation may pass one tensor in its first run, two in its second.
        self.checkpoint = checkpoints.save(tensors)

    def restore(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the second run; gradients of its tensors are not passed on."""
        restored = zip(self.checkpoint.restore(), self._needs_gradient, strict=True)
        tensors = [_attached(tensor) if needs_gradient else tensor for tensor, needs_gradient in restored]
        leaves = list(self._others)
        for at, index in self._tensor_at.items():
            leaves[at] = tensors[index]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


def _attached(tensor: Tensor) -> Tensor:
    """Return the detached tensor as part of a graph again, so that nested calls treat it as in the first run."""
    if tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        return tensor.requires_grad_().view_as(tensor)


class _Refill:
    """The second run, which fills placeholders in the order in which tensors are saved."""

    def __init__(self, needed: dict[int, _Placeholder], total: int) -> None:
        self._needed = needed
        self._total = total  # the run ends there, not at the last one needed: ranks free graphs at different times
        self._index = 0

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Fill placeholders with the tensors saved inside; the code inside is cut off after the last one."""
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._fill, lambda tensor: tensor):
                yield
        except _AllFilled as end:
            # Its frames have all that was computed again, and from Python 3.12 on they refer to the exception in turn,
            # so that only the next collection of garbage would free them.
            end.__traceback__ = None

    def check(self) -> None:
        """Raise UsageError if the second run has saved less than the first."""
        if self._index <= max(self._needed):
            self._raise_difference(f"{self._index} tensors saved where there had been {self._total}")

    def _fill(self, tensor: Tensor) -> Tensor:
        value = tensor.detach()
        placeholder = self._needed.get(self._index)
        if placeholder is not None:
            found = (value.shape, value.dtype)
            if found != placeholder.shape:
                self._raise_difference(f"{_describe(found)} saved where there had been {_describe(placeholder.shape)}")
            placeholder.fill(value)
        self._index += 1
        if self._index >= self._total:
            raise _AllFilled
        return value

    def _raise_difference(self, given: str) -> None:
        rule = "a recomputed function does the same in both of its runs"
        legal = "a function without anything that differs from run to run"
        raise UsageError(Problem(f"recomputation: {given}", rule, legal))


def _describe(shape: tuple[torch.Size, torch.dtype]) -> str:
    return f"{list(shape[0])} of {str(shape[1]).removeprefix('torch.')}"


class _Autocast:
    """The state of autocast at construction."""

    def __init__(self) -> None:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._was = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state inside."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._was:
                if enabled or torch.is_autocast_enabled(kind):
                    cast = torch.amp.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                    stack.enter_context(cast)
            yield


def _keeps_graph() -> bool:
    """Return True if the running backward retains its graph; outside a backward every graph is retained."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
