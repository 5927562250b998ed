"""The backward passes of a step: how many there are, and where each begins and ends.

`engine.backward(loss)` says so itself.  A plain `loss.backward()` is noticed:

    a gradient comes back to the model's output    *armed*: autograd is asked to call at the end of this pass
    a parameter has got its first gradient         *begun*: the core hears of the pass, before it hears of the gradient
    autograd calls                                 the pass has ended

Arming comes first because a checkpoint that recomputes with `use_reentrant=True` runs passes inside the pass, which end
early.  `torch.autograd.grad` gives parameters nothing, so it is no pass.

A step has `accumulation` passes; those in `no_sync` are not counted and never end it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megazero.errors import Problem, UsageError
from megazero.zero.engine import Engine
from megazero.zero.frames import on_gradient, tensors_in
from megazero.zero.gather import in_backward

_STEP = "a step is gradient_accumulation_steps backward passes, then engine.step()"


class BackwardPasses:
    """Counts passes and tells the core about them; `watch` before the core is made, `start` after."""

    def __init__(self, accumulation: int, *, needs_scale: bool) -> None:
        """needs_scale: whether a plain backward must start from a loss that `expect_scaled` has seen (fp16)."""
        self.accumulation = accumulation
        self.count = 0
        self._needs_scale = needs_scale
        self._synchronises = True
        self._holds_gradients = False
        self._at_next = True  # whether the step's next pass is still to come, or the last one is the current one
        self._is_explicit = self._is_armed = self._is_begun = self._is_scaled = False
        self._kept: dict[str, Tensor] = {}  # gradients that autograd is to add to in place
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Put hooks on the model; its parameters' come before the core's, which must know of a pass by then."""
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self._handles = [
            *on_gradient(self._parameters, self._gradient_came),
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]

    def start(self, core: Engine, gradient_scale: Callable[[], float]) -> None:
        """From here on `core` is told.  gradient_scale: what a step's summed gradients must be multiplied with."""
        self._core = core
        self._gradient_scale = gradient_scale
        self.start_over()

    def start_over(self) -> None:
        """The next pass is the first of a step."""
        self._core.begin_step()
        self._core.gradient_scale = self._gradient_scale()
        self.count, self._holds_gradients, self._at_next = 0, False, True
        self._kept = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    @property
    def is_boundary(self) -> bool:
        """Whether the current pass ends the step: the one that has run, or, once a forward has begun, the next one."""
        next_ends = self._at_next and self._synchronises and self.count + 1 == self.accumulation
        return next_ends or self.count >= self.accumulation

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Passes within the block don't count."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def run(self, loss: Tensor, *, retain_graph: bool) -> None:
        """One pass from `loss`; raises UsageError when the step is complete."""
        self._check_room()
        self._is_explicit = True
        try:
            self._begin()
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        except BaseException:
            self.discard()
            raise
        finally:
            self._is_explicit = False
        self._end()

    def expect_scaled(self, loss: Tensor) -> None:
        """A pass that starts from `loss` has the loss scale."""
        loss.register_hook(self._scaled_pass_begins)  # type: ignore[no-untyped-call]

    def check_complete(self) -> bool:
        """Whether `step` is to act; raises UsageError when there is nothing that it could be about."""
        if not self._synchronises:
            raise UsageError(Problem("engine.step() within engine.no_sync()", _STEP, "engine.step() after the block"))
        if self.count == 0:
            given = "engine.step() after backward passes in no_sync only" if self._holds_gradients else "engine.step()"
            raise UsageError(Problem(f"{given} without a backward pass", _STEP, "engine.backward(loss) before it"))
        return self.count >= self.accumulation

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _forward_begins(self, _model: nn.Module, _inputs: Any) -> None:
        if not in_backward():
            begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
            if begun:  # an error has ended the pass before
                self.discard()
            self._at_next = self._at_next or torch.is_grad_enabled()

    def _forward_ends(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        if in_backward():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._gradient_came_back)  # type: ignore[no-untyped-call]

    def _gradient_came_back(self, _gradient: Tensor) -> None:
        if not self._is_explicit:
            self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            Variable._execution_engine.queue_callback(self._pass_ends)

    def _scaled_pass_begins(self, _gradient: Tensor) -> None:
        self._is_scaled = True

    def _gradient_came(self, name: str, _parameter: Tensor) -> None:
        if not (self._is_explicit or self._is_begun):
            self._arm()
            self._begin_plain()
            self._is_begun = True
        kept, parameter = self._kept.get(name), self._parameters[name]
        if kept is not None and parameter.grad is not kept:
            _put_back(parameter, kept)

    def _begin_plain(self) -> None:
        """The first gradient is there already; if the pass is not to be, all that came is thrown away."""
        try:
            self._check_room()
            if self._needs_scale and not self._is_scaled:
                rule = "fp16 gradients below 6e-8 vanish, so the loss is scaled before its backward"
                legal = "engine.backward(loss), or engine.scale(loss).backward()"
                raise UsageError(Problem("loss.backward() of a loss without the loss scale", rule, legal))
        except UsageError:
            self._is_armed = False
            self.discard()
            raise
        self._begin()

    def discard(self) -> None:
        """Throw away what the step has so far; its first pass comes next."""
        self._core.reset_step()
        for name, parameter in self._parameters.items():
            if name not in self._kept:
                parameter.grad = None
        self.start_over()

    def _check_room(self) -> None:
        if self.count >= self.accumulation:
            given = f"backward pass {self.count + 1} of a step of {self.accumulation}"
            legal = "engine.step() first; passes that don't count: with engine.no_sync()"
            raise UsageError(Problem(given, _STEP, legal))

    def _begin(self) -> None:
        self._core.begin_backward(is_last=self._synchronises and self.count + 1 == self.accumulation)

    def _end(self) -> None:
        self._core.end_backward()
        self._holds_gradients = True
        self._at_next = False
        self.count += self._synchronises

    def _pass_ends(self) -> None:
        begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
        if begun:
            self._end()


def _put_back(parameter: nn.Parameter, kept: Tensor) -> None:
    """Autograd has made a new tensor instead of adding to `kept`: the user's zero_grad() had dropped it, or the pass
    has a graph of its own (create_graph), in which nothing is changed in place."""
    assert parameter.grad is not None, "autograd has just made it"
    gradient = parameter.grad.detach()
    if torch.is_grad_enabled():
        kept.copy_(gradient)
    else:
        kept.add_(gradient)
    parameter.grad = kept
