"""Counts the backward passes of a step, and finds where each begins and ends.

`engine.backward(loss)` marks its begin and end itself.  A plain `loss.backward()` is detected by hooks:

    the model's output gets a gradient      *armed*: a callback is queued at the end of this pass
    a parameter gets its first gradient     *begun*: the ZeRO engine begins a pass, before it gets the gradient (or,
                                            before that, where backward enters a leaf module)
    autograd runs the callback              the pass has ended

Arming comes first because a checkpoint that recomputes with `use_reentrant=True` runs passes inside the pass, which end
early.  `torch.autograd.grad` writes no gradients to parameters, so it is not a pass.

A step has `accumulation` passes, unless the user sets for every pass whether it is the last one; those in `no_sync`
are not counted and never end it.

`engine.backward(loss)` is a pass of this engine only: of other engines that it walks through (a generator's loss goes
through the discriminator) it leaves the gradients as they were.  A plain `loss.backward()` is a pass of all of them.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from megazero.errors import Problem, UsageError
from megazero.zero.engine import Engine
from megazero.zero.parameters.eagerly import eagerly
from megazero.zero.parameters.frames import ModuleHook, call_on_gradient, tensors_in
from megazero.zero.parameters.gather import in_backward

_STEP = "a step is gradient_accumulation_steps backward passes, then engine.step()"
_OWNER = "megazero_backward_owner"  # key of the running pass's owner in what autograd's threads take over


class BackwardPasses:
    """A counter of backward passes, which begins and ends them in the ZeRO engine.

    Call `watch` before the ZeRO engine is made, and `start` after.
    """

    def __init__(
        self, accumulation: int, *, needs_scale: bool, has_optimizer: bool = True, frozen: Sequence[nn.Parameter] = ()
    ) -> None:
        """needs_scale: True if a plain backward must start from a loss given to `expect_scaled` (fp16).

        has_optimizer: False for an engine that computes only.  frozen: the parameters that are frozen for that, until
        `close`.
        """
        self._has_optimizer, self._frozen = has_optimizer, frozen
        self.accumulation = accumulation
        self.count = 0
        self.boundary: bool | None = None
        """True if the next pass is the step's last, as the user has set it; None: `accumulation` decides."""
        self.num_since_step = 0
        """The counted passes since `step` was last called, whether or not it updated the parameters."""
        self._is_complete = self._is_last = False  # the step's last pass has ended; the running pass is the last one
        self._needs_scale = needs_scale
        self._synchronises = True
        self._holds_gradients = False
        self._awaits_pass = True  # False from the end of a pass to the next forward
        self._is_explicit = self._is_armed = self._is_begun = self._is_scaled = False
        self._aside: dict[str, Tensor | None] | None = None  # `.grad`s while another engine's pass walks through
        self._was_walked_through = False  # by another engine's pass, since the last step
        self._step_was_early = False  # since the last pass, a step was called that awaits more of them
        self._num_futile = 0  # discarded steps in a row of which each had been asked to be taken
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Register hooks on the model, before the ZeRO engine's: a pass must have begun when its hooks run."""
        self._parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        self._trains = any(parameter.requires_grad for parameter in self._parameters.values())
        self._handles = [
            model.register_forward_pre_hook(ModuleHook(self._forward_begins)),
            model.register_forward_hook(ModuleHook(self._forward_ends)),
        ]

    def start(self, engine: Engine, gradient_scale: Callable[[], float]) -> None:
        """Begin and end passes in `engine` from here on.

        gradient_scale: returns the factor that turns a step's summed gradients into averages.
        """
        self._engine = engine
        engine.before_stray_gradient = self._before_stray_gradient
        engine.before_leaf = self._before_leaf
        self._gradient_scale = gradient_scale
        self.reset()

    def reset(self) -> None:
        """Begin a step: the next pass is its first."""
        self._engine.begin_step()
        self._engine.gradient_scale = self._gradient_scale()
        self.count, self._holds_gradients, self._awaits_pass = 0, False, True
        self.num_since_step, self._is_complete = 0, False
        self._was_walked_through = self._step_was_early = False

    @property
    def is_boundary(self) -> bool:
        """True if the current pass ends the step: the last one, or the next one once a forward has begun."""
        if self.boundary is not None:
            return self.boundary and self._synchronises
        return self._is_complete or (self._awaits_pass and self._next_ends)

    @property
    def _next_ends(self) -> bool:
        reaches_end = self.count + 1 >= self.accumulation if self.boundary is None else self.boundary
        return self._synchronises and reaches_end

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
        """Run one pass from `loss`; raises UsageError when the step is complete, and for a frozen model."""
        self._check_trains("engine.backward(loss)")
        self._check_room()
        around, self._is_explicit = _running_owner(), True
        _set_running_owner(self)
        try:
            self._begin()
            if self._engine.may_find_unused and loss.requires_grad:
                call_on_gradient(loss, self._on_loss_gradient)
            torch.autograd.backward(loss, retain_graph=retain_graph)
        except BaseException:
            self.discard()
            raise
        finally:
            self._is_explicit = False
            _set_running_owner(around)
        self._end()

    def complete(self) -> None:
        """End the step with the passes that it has had, by reducing what they have accumulated; a collective call.

        Does nothing where no gradients are, or they are reduced already.
        """
        if self._holds_gradients and not self._is_complete:
            self._engine.begin_backward(is_last=True)
            self._engine.end_backward()
            self.count, self.num_since_step = max(self.count, 1), max(self.num_since_step, 1)
            self._is_complete = True

    def expect_scaled(self, loss: Tensor) -> None:
        """Mark `loss` as multiplied by the loss scale; a plain backward may start from it."""
        call_on_gradient(loss, self._on_scaled_loss)

    def check_complete(self) -> bool:
        """Return True if the step is complete; raise UsageError without a counted pass, within `no_sync`, and for a
        frozen model.
        """
        self._check_trains("engine.step()")
        if not self._synchronises:
            raise UsageError(Problem("engine.step() within engine.no_sync()", _STEP, "engine.step() after the block"))
        if self.count == 0:
            given, legal = "engine.step()", "engine.backward(loss) before it"
            if self._holds_gradients:
                given = "engine.step() after backward passes in no_sync only"
            elif self._was_walked_through:
                given = "engine.step() after other engines' backward(loss) only"
                legal += "; for a loss that trains several engines loss.backward(), a pass of each of them"
            raise UsageError(Problem(f"{given} without a backward pass", _STEP, legal))
        if self.boundary and not self._is_complete:
            given = "engine.step() at a boundary that was set after the last backward pass"
            legal = "set_gradient_accumulation_boundary(True) before that pass, or allreduce_gradients() after it"
            raise UsageError(Problem(given, _STEP, legal))
        self.num_since_step = 0
        self._step_was_early = not self._is_complete
        if self._is_complete:
            self._num_futile = 0
        return self._is_complete

    def zero_grad(self) -> bool:
        """Discard what has been accumulated since the last step, and return True if there was anything.

        Raises UsageError in a loop that discards every micro-batch whose `engine.step()` awaits another one.
        """
        if not self._holds_gradients:
            return False
        self._num_futile = self._num_futile + 1 if self._step_was_early else 0
        if self._num_futile > 1:
            given = f"engine.zero_grad() after an engine.step() that awaits more passes, {self._num_futile} times"
            rule = "engine.zero_grad() throws away what has been accumulated, so that no step is ever complete"
            raise UsageError(Problem(given, rule, "no zero_grad between micro-batches: a step clears its gradients"))
        self._engine.forget_gradients()
        self._clear_gradients()
        self.reset()
        return True

    def close(self) -> None:
        """Remove the hooks, and thaw what was frozen because the engine has no optimizer."""
        for handle in self._handles:
            handle.remove()
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    @eagerly
    def _forward_begins(self, _model: nn.Module, _inputs: Any) -> None:
        if not in_backward():
            begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
            self._end_walk_through()  # in case an error interrupted it
            if begun:  # an error interrupted the previous pass
                self.discard()
            if torch.is_grad_enabled():
                self._awaits_pass = True
                self._engine.written.before_forward()

    @eagerly
    def _forward_ends(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        if in_backward():
            return
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                call_on_gradient(tensor, self._on_output_gradient)

    def _on_loss_gradient(self, _gradient: Tensor) -> None:
        if self._is_explicit:
            self._engine.find_unused()

    def _on_output_gradient(self, _gradient: Tensor) -> None:
        if self._is_explicit:
            return
        if self._is_walked_through():
            self._set_aside()
            return
        if not (self._is_armed or self._is_begun):
            self._engine.find_unused()
        self._arm()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            Variable._execution_engine.queue_callback(self._on_backward_end)

    def _on_scaled_loss(self, _gradient: Tensor) -> None:
        self._is_scaled = True

    def _before_stray_gradient(self, name: str) -> None:
        if self._is_walked_through():
            self._drop(name)
        else:
            self._before_leaf()

    def _before_leaf(self) -> None:
        if not self._is_walked_through():
            self._arm()
            self._begin_plain()
            self._is_begun = True

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
        self._clear_gradients()
        self.reset()

    def _clear_gradients(self) -> None:
        self._end_walk_through()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _is_walked_through(self) -> bool:
        """Return True if another engine's `backward(loss)` is running."""
        return _running_owner() not in (None, self)

    def _set_aside(self) -> None:
        """Take every `.grad` away, until the pass of another engine ends, so that its gradients are not added."""
        if self._aside is None:
            Variable._execution_engine.queue_callback(self._end_walk_through)
            self._aside = {name: p.grad for name, p in self._parameters.items() if p.requires_grad}
            for name in self._aside:
                self._parameters[name].grad = None

    def _drop(self, name: str) -> None:
        """Drop the gradient that a pass of another engine has just computed.

        The first one of a pass that has not come through this model's output may have been added to earlier ones.
        """
        if self._aside is None:
            if self._engine.accumulates_in_grad:
                self._undo(name)
            self._parameters[name].grad = None
            self._set_aside()
        self._parameters[name].grad = None

    def _undo(self, name: str) -> None:
        """Remove from a parameter's gradient what was just added to it; raise UsageError if that is not possible."""
        if self._holds_gradients:
            given = f"another engine's backward(loss) that gives parameter {name} a gradient in the middle of a step"
            rule = "the first gradient has been added already to those of this engine's passes, unless it comes through"
            rule += " the output of this engine's model"
            legal = "engine.zero_grad() or engine.step() before it, or a call of the whole model"
            self.discard()
            raise UsageError(Problem(given, rule, legal))

    def _end_walk_through(self) -> None:
        """Put back what was set aside when a pass of another engine began to walk through this model."""
        aside, self._aside = self._aside, None
        if aside is None:
            return
        for name, gradient in aside.items():
            self._parameters[name].grad = gradient
        self._was_walked_through = True
        self._engine.end_walk(ends_pass=True)
        self._engine.guard_gradients()

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Return a context in which a UsageError discards the step, and so does what ends an update on its way."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, UsageError) or self._engine.is_partly_updated:
                self.discard()
            raise

    def _check_trains(self, call: str) -> None:
        if not self._has_optimizer:
            rule = "the engine has no optimizer, so that it trains nothing and its parameters are frozen"
            legal = 'optimizer: {"type": "AdamW"} in the configuration, or initialize(model, config, optimizer=...)'
            raise UsageError(Problem(f"{call} without an optimizer", rule, legal))
        if not self._trains:
            rule = "no parameter of it required a gradient when it was initialized, so that there is nothing to update"
            legal = "requires_grad_(True) before megazero.initialize; loss.backward() for gradients of its inputs"
            raise UsageError(Problem(f"{call} of a frozen model", rule, legal))

    def _check_room(self) -> None:
        if self._is_complete:
            given = f"backward pass {self.count + 1} of a step of {self.count}"
            legal = "engine.step() or engine.zero_grad() first; passes that don't count: with engine.no_sync()"
            raise UsageError(Problem(given, _STEP, legal))

    def _begin(self) -> None:
        self._step_was_early = False
        self._is_last = self._next_ends
        self._engine.settings.ledger.phase("backward")
        self._engine.begin_backward(is_last=self._is_last)

    def _end(self) -> None:
        self._engine.end_backward()
        self._holds_gradients, self._is_complete = True, self._is_last
        self._awaits_pass = False
        self.count += self._synchronises
        self.num_since_step += self._synchronises

    def _on_backward_end(self) -> None:
        begun, self._is_armed, self._is_begun, self._is_scaled = self._is_begun, False, False, False
        if begun:
            self._end()
        else:  # it made gradients of other tensors only
            self._engine.end_walk(ends_pass=False)


def _running_owner() -> object:
    """Return the passes of the engine whose `backward(loss)` is running, also in threads of autograd; else None."""
    return torch._C._get_obj_in_tls(_OWNER)[0] if torch._C._is_key_in_tls(_OWNER) else None


def _set_running_owner(owner: object) -> None:
    """Set what `_running_owner` returns, until the next call."""
    held = (owner,)
    before = sys.getrefcount(held)
    torch._C._stash_obj_in_tls(_OWNER, held)
    if sys.getrefcount(held) == before:
        # torch 2.11 releases a reference there that it has never taken, which would free an object in use.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
