"""Counts the backward passes of a step, and finds where each begins and ends.

`engine.backward(loss)` marks its begin and end itself.  A plain `loss.backward()` is detected by hooks:

    the model's output gets a gradient      *armed*: a callback is queued at the end of this pass
    a parameter gets its first gradient     *begun*: the ZeRO engine begins a pass, before it gets the gradient
    autograd runs the callback              the pass has ended

Arming comes first because a checkpoint that recomputes with `use_reentrant=True` runs passes inside the pass, which end
early.  `torch.autograd.grad` writes no gradients to parameters, so it is not a pass.

A step has `accumulation` passes; those in `no_sync` are not counted and never end it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from megazero.errors import Problem, UsageError
from megazero.zero.engine import Engine
from megazero.zero.frames import on_gradient, tensors_in
from megazero.zero.gather import in_backward

_STEP = "a step is gradient_accumulation_steps backward passes, then engine.step()"


class BackwardPasses:
    """A counter of backward passes, which begins and ends them in the ZeRO engine.

    Call `watch` before the ZeRO engine is made, and `start` after.
    """

    def __init__(self, accumulation: int, *, needs_scale: bool) -> None:
        """needs_scale: True if a plain backward must start from a loss given to `expect_scaled` (fp16)."""
        self.accumulation = accumulation
        self.count = 0
        self._needs_scale = needs_scale
        self._synchronises = True
        self._holds_gradients = False
        self._awaits_pass = True  # False from the end of a pass to the next forward
        self._is_explicit = self._is_armed = self._is_begun = self._is_scaled = False
        self._accumulated: dict[str, Tensor] = {}  # gradients of earlier passes, to which autograd adds in place
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Register hooks on the model, before the ZeRO engine's: a pass must have begun when its hooks run."""
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self._handles = [
            *on_gradient(self._parameters, self._on_gradient),
            model.register_forward_pre_hook(self._forward_begins),
            model.register_forward_hook(self._forward_ends),
        ]

    def start(self, engine: Engine, gradient_scale: Callable[[], float]) -> None:
        """Begin and end passes in `engine` from here on.

        gradient_scale: returns the factor that turns a step's summed gradients into averages.
        """
        self._engine = engine
        self._gradient_scale = gradient_scale
        self.reset()

    def reset(self) -> None:
        """Begin a step: the next pass is its first."""
        self._engine.begin_step()
        self._engine.gradient_scale = self._gradient_scale()
        self.count, self._holds_gradients, self._awaits_pass = 0, False, True
        self._accumulated = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}

    @property
    def is_boundary(self) -> bool:
        """True if the current pass ends the step: the last one, or the next one once a forward has begun."""
        next_ends = self._awaits_pass and self._synchronises and self.count + 1 == self.accumulation
        return next_ends or self.count >= self.accumulation

    @property
    def is_between_steps(self) -> bool:
        """True if no gradients of a step in progress exist."""
        return not (self.count or self._holds_gradients)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which passes are not counted."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def run(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Run one pass from `loss`; raises UsageError when the step is complete."""
        self._check_room()
        self._is_explicit = True
        try:
            self._begin()
            torch.autograd.backward(loss, retain_graph=retain_graph)
        except BaseException:
            self.discard()
            raise
        finally:
            self._is_explicit = False
        self._end()

    def expect_scaled(self, loss: Tensor) -> None:
        """Mark `loss` as multiplied by the loss scale; a plain backward may start from it."""
        _call_on_gradient(loss, self._on_scaled_loss)

    def check_complete(self) -> bool:
        """Return True if the step is complete; raise UsageError without a counted pass, and within `no_sync`."""
        if not self._synchronises:
            raise UsageError(Problem("engine.step() within engine.no_sync()", _STEP, "engine.step() after the block"))
        if self.count == 0:
            given = "engine.step() after backward passes in no_sync only" if self._holds_gradients else "engine.step()"
            raise UsageError(Problem(f"{given} without a backward pass", _STEP, "engine.backward(loss) before it"))
        return self.count >= self.accumulation

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _forward_begins(self, _model: nn.Module, _inputs: Any) -> None:
        if not in_backward():
            begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
            if begun:  # an error interrupted the previous pass
                self.discard()
            self._awaits_pass = self._awaits_pass or torch.is_grad_enabled()

    def _forward_ends(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        if in_backward():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                _call_on_gradient(tensor, self._on_output_gradient)

    def _on_output_gradient(self, _gradient: Tensor) -> None:
        if not self._is_explicit:
            self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_scaled_loss(self, _gradient: Tensor) -> None:
        self._is_scaled = True

    def _on_gradient(self, name: str, _parameter: Tensor) -> None:
        if not (self._is_explicit or self._is_begun):
            self._arm()
            self._begin_plain()
            self._is_begun = True
        accumulated, parameter = self._accumulated.get(name), self._parameters[name]
        if accumulated is not None and parameter.grad is not accumulated:
            _restore_accumulated(parameter, accumulated)

    def _begin_plain(self) -> None:
        """Begin a pass that `loss.backward()` has started.

        Its first gradient has been computed already, so a pass that is refused is discarded.
        """
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
        """Discard the gradients of the step; the next pass is its first."""
        self._engine.reset_step()
        for name, parameter in self._parameters.items():
            if name not in self._accumulated:
                parameter.grad = None
        self.reset()

    def _check_room(self) -> None:
        if self.count >= self.accumulation:
            given = f"backward pass {self.count + 1} of a step of {self.accumulation}"
            legal = "engine.step() first; passes that don't count: with engine.no_sync()"
            raise UsageError(Problem(given, _STEP, legal))

    def _begin(self) -> None:
        self._engine.begin_backward(is_last=self._synchronises and self.count + 1 == self.accumulation)

    def _end(self) -> None:
        self._engine.end_backward()
        self._holds_gradients = True
        self._awaits_pass = False
        self.count += self._synchronises

    def _on_backward_end(self) -> None:
        begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
        if begun:
            self._end()


def _call_on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Call the hook with every gradient of `tensor` (torch's method has no annotations)."""
    register: Callable[..., RemovableHandle] = tensor.register_hook
    register(hook)


def _restore_accumulated(parameter: nn.Parameter, accumulated: Tensor) -> None:
    """Add a new gradient to the accumulated one, and make that the parameter's gradient again.

    Autograd makes a new tensor if the user's zero_grad() has set the gradient to None.  With create_graph it changes
    nothing in place, and the new tensor is the sum already.
    """
    assert parameter.grad is not None, "autograd has just made it"
    gradient = parameter.grad.detach()
    if torch.is_grad_enabled():
        accumulated.copy_(gradient)
    else:
        accumulated.add_(gradient)
    parameter.grad = accumulated
