"""Recomputation: a function's saved tensors are dropped, and made again when backward asks for them.

A *checkpoint* is what a call starts from: its tensor inputs (kept as `checkpoints.py` says), its other arguments, the
random states, autocast, context variables.  While the function runs, every tensor that autograd would save is replaced
by a *placeholder*.  The first placeholder that backward opens brings the checkpoint back and runs the function again;
what that saves, in the same order, fills the placeholders, and it stops with the last one that is needed.  So the graph
of the first run is the one that backward walks, gradients are added up in the same order and to the same bits as
without recomputation, and a parameter gets its whole gradient at once, however often and wherever it is used.

    forward    x0 --layer 0--> x1 --layer 1--> x2      kept: x0, x1
    backward   fetch x1, begin to fetch x0, run layer 1 again, backward through it; run layer 0 again, ...

Chen et al., arXiv 1604.06174; what is kept of a checkpoint is the ZeRO paper's section 6.1.
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

from megazero.activations.checkpoints import Checkpoints
from megazero.errors import Problem, UsageError
from megazero.memory.ledger_interface import AnyLedger, NullLedger


class RandomSource(Protocol):
    """Where the function's random numbers come from."""

    def get_state(self) -> Any:
        """What `set_state` takes to draw the same numbers again."""

    def set_state(self, state: Any) -> None: ...


class Stopwatch(Protocol):
    """Counts the time of named parts."""

    def measure(self, name: str) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Recomputation:
    """How functions are recomputed.

    random: the states to bring back, so that recomputed dropout is the same dropout.
    checkpoints: keeps their inputs.
    stopwatch: measures "checkpoint-forward" and "checkpoint-recompute".
    synchronizes: the CUDA device whose queue is emptied before and after every run, if any.
    """

    random: RandomSource
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    ledger: AnyLedger = field(default_factory=NullLedger)
    stopwatch: Stopwatch | None = None
    synchronizes: torch.device | None = None

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """function(*args, **kwargs), to be run again in backward; any arguments, any result.

        The function must do the same in both runs, and leave its inputs as they are; backward raises UsageError where
        it sees that it did not.  Without autograd it is just called.
        """
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        call = _Call(self, function, args, kwargs)
        with self.measured("checkpoint-forward"), saved_tensors_hooks(call.replace, call.restore):
            result = function(*args, **kwargs)
        call.end_forward()
        return result

    @contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """One run of a function."""
        self._synchronize()
        with nullcontext() if self.stopwatch is None else self.stopwatch.measure(name):
            yield
            self._synchronize()

    def _synchronize(self) -> None:
        if self.synchronizes is not None:
            torch.cuda.current_stream(self.synchronizes).synchronize()  # not of receives that are posted ahead


class _Placeholder:
    """Stands in the graph for the tensor that was saved at `place`; dies with the node that has saved it."""

    __slots__ = ("__weakref__", "_version", "place", "shape", "value")

    def __init__(self, place: int, tensor: Tensor) -> None:
        self.place = place
        self.shape = (tensor.shape, tensor.dtype)
        self.value: Tensor | None = None
        self._version = 0

    def fill(self, value: Tensor) -> None:
        self.value, self._version = value, value._version

    def read(self) -> Tensor:
        """The value, as it was when it was saved."""
        assert self.value is not None, "a run fills every placeholder, or raises"
        if self.value._version != self._version:
            given = f"recomputation: a tensor of {list(self.value.shape)} that backward needs has been written to"
            rule = "what autograd has saved stays as it is until backward"
            raise UsageError(Problem(given, rule, "clone it, or write elsewhere"))
        return self.value


class _Enough(Exception):
    """Every placeholder that is still there is filled."""


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
        self._arguments.checkpoint.leave()

    def replace(self, tensor: Tensor) -> _Placeholder:
        """Autograd saves a tensor in the first run."""
        placeholder = _Placeholder(len(self._placeholders), tensor)
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def restore(self, placeholder: _Placeholder) -> Tensor:
        """Backward asks for it."""
        if placeholder.value is None:
            self._run_again()
        value = placeholder.read()
        if _keeps_graph():
            placeholder.value = None  # whoever walks the graph once more has it computed once more
        if torch.is_grad_enabled():
            return value.clone()  # this backward makes a graph itself, which may outlive the place of our inputs
        return value

    def _run_again(self) -> None:
        needed = {place: found for place, ref in enumerate(self._placeholders) if (found := ref()) is not None}
        refill = _Refill(needed, len(self._placeholders))
        args, kwargs = self._arguments.bring()
        ledger, random = self._settings.ledger, self._settings.random
        present = random.get_state()
        random.set_state(self._random_state)
        ledger.phase("forward")
        try:
            with self._settings.measured("checkpoint-recompute"), self._autocast.again(), refill.catch():
                self._context.copy().run(self._function, *args, **kwargs)
        finally:
            random.set_state(present)
            ledger.phase("backward")
        refill.check()


class _Arguments:
    """The arguments of a call: tensors in a checkpoint, everything else as it is.

    A tensor that is given several times is kept once and stays one tensor: code may ask whether two are the same.
    """

    def __init__(self, checkpoints: Checkpoints, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self._structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        first: dict[int, int] = {}
        for index, tensor in enumerate(tensors):
            first.setdefault(id(tensor), index)
        self._tensor_at = {place: first[id(leaf)] for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._others = [None if place in self._tensor_at else leaf for place, leaf in enumerate(leaves)]
        self._needs_gradient = [tensor.requires_grad for tensor in tensors]
        # Every occurrence: a recomputation around us may see one tensor in its first run and two in its second.
        self.checkpoint = checkpoints.keep(tensors)

    def bring(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the second run; the gradients of its tensors go nowhere."""
        brought = zip(self.checkpoint.bring(), self._needs_gradient, strict=True)
        tensors = [_attached(tensor) if needs_gradient else tensor for tensor, needs_gradient in brought]
        leaves = list(self._others)
        for place, index in self._tensor_at.items():
            leaves[place] = tensors[index]
        args, kwargs = tree_unflatten(leaves, self._structure)
        return args, kwargs


def _attached(tensor: Tensor) -> Tensor:
    """The tensor as a part of a graph, which one that is detached was; so nested calls keep it as in the first run."""
    if tensor.requires_grad:
        return tensor
    with torch.enable_grad():
        return tensor.requires_grad_().view_as(tensor)


class _Refill:
    """The second run: fills placeholders in the order in which tensors are saved."""

    def __init__(self, needed: dict[int, _Placeholder], total: int) -> None:
        self._needed = needed
        self._total = total  # not the last that is needed: when a graph goes differs from rank to rank
        self._place = 0

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Catch what is saved inside; what runs there ends with the last tensor that is needed."""
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._fill, lambda tensor: tensor):
                yield
        except _Enough:
            pass

    def check(self) -> None:
        """Raise UsageError if the second run has saved less than the first."""
        if self._place <= max(self._needed):
            self._complain(f"{self._place} tensors saved where there had been {self._total}")

    def _fill(self, tensor: Tensor) -> Tensor:
        value = tensor.detach()
        placeholder = self._needed.get(self._place)
        if placeholder is not None:
            found = (value.shape, value.dtype)
            if found != placeholder.shape:
                self._complain(f"{_describe(found)} saved where there had been {_describe(placeholder.shape)}")
            placeholder.fill(value)
        self._place += 1
        if self._place >= self._total:
            raise _Enough
        return value

    def _complain(self, given: str) -> None:
        rule = "a recomputed function does the same in both of its runs"
        legal = "keep what differs from run to run out of it"
        raise UsageError(Problem(f"recomputation: {given}", rule, legal))


def _describe(shape: tuple[torch.Size, torch.dtype]) -> str:
    return f"{list(shape[0])} of {str(shape[1]).removeprefix('torch.')}"


class _Autocast:
    """Autocast as it is now."""

    def __init__(self) -> None:
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._was = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._caches = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Make it so inside."""
        with ExitStack() as stack:
            for kind, enabled, dtype in self._was:
                if enabled or torch.is_autocast_enabled(kind):
                    cast = torch.amp.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._caches)
                    stack.enter_context(cast)
            yield


def _keeps_graph() -> bool:
    """Whether the backward under way leaves its graph for another; outside of one everything is kept."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
