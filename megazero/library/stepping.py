"""Performs an optimizer step: norm over all ranks, clipping, overflow check, update, loss scale, learning rates.

Gradients arrive as sums over micro-batches and data-parallel ranks, of losses that were multiplied by the loss scale.
One factor turns the sums into averages, `gradient_scale`:

    average = sum x predivisor / (data-parallel ranks x micro-batches x loss scale)

The learning rate advances after each update that was not skipped.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config.choices import SchedulerChoice
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.optim.inner import Elementwise
from megazero.optim.loss_scaler import LossScaler
from megazero.optim.schedules import rate_of
from megazero.timers import Timers
from megazero.zero.engine import Engine
from megazero.zero.step import first_overflow, reduce_gradients, update_parameters


class StepOutcome(NamedTuple):
    """The outcome of a step.

    grad_norm: the gradients' norm before clipping, unscaled; a float64 scalar.  applied: False after an overflow.
    stop: the number of ranks that request the end of the training; a float64 scalar.
    """

    grad_norm: Tensor
    applied: bool
    stop: Tensor


class LearningRates:
    """The learning rates of an optimizer's groups: a schedule's, or those that the user sets in the groups."""

    def __init__(self, groups: Sequence[dict[str, Any]], schedule: SchedulerChoice | None) -> None:
        """groups: param groups with an "lr" each, which a schedule takes as its base and writes to.

        Raises ConfigError if one is below the rate at which the schedule starts or ends.
        """
        self._groups = groups
        self._schedule = schedule
        self._bases = [float(group["lr"]) for group in groups]
        self._num_updates = 0
        raise_problems(ConfigError, self._problems())
        self._write()

    def current(self) -> list[float]:
        """Return the rates of the next update, one for each group."""
        return [float(group["lr"]) for group in self._groups]

    def advance(self) -> None:
        """Count an update, and write the next rates to the groups."""
        self._num_updates += 1
        self._write()

    def _problems(self) -> Iterator[Problem]:
        params = {} if self._schedule is None else self._schedule.params
        for name in ("lr_warmup_init", "min_lr"):
            if params.get(name, 0.0) > min(self._bases):
                given = f"scheduler.params.{name}: {params[name]:g} with a learning rate of {min(self._bases):g}"
                yield Problem(given, "the optimizer's learning rate is the schedule's peak", f"{name}: 0")

    def _write(self) -> None:
        if self._schedule is not None:
            for group, base in zip(self._groups, self._bases, strict=True):
                group["lr"] = rate_of(self._schedule, self._num_updates, base)


class Stepper:
    """The optimizer steps of one engine."""

    def __init__(
        self,
        engine: Engine,
        timers: Timers,
        *,
        device: torch.device,
        rates: LearningRates,
        scaler: LossScaler,
        clip_grad: float,
        accumulation: int,
    ) -> None:
        """clip_grad: largest gradient norm, 0 for no limit.  accumulation: micro-batches per step."""
        self._engine = engine
        self._accumulation = accumulation
        self._timers = timers
        self._device = device
        self._clip_grad = clip_grad
        self._scaler = scaler
        self._state = scaler.start()
        self.rates = rates

    @property
    def loss_scale(self) -> float:
        """The factor by which the next backward's loss is multiplied."""
        return self._state.scale

    def gradient_scale(self) -> float:
        """Return the factor that turns summed gradients into averages."""
        return self._engine.predivisor / (self._engine.data_parallel.size * self._accumulation * self.loss_scale)

    def step(self, *, stop: bool) -> StepOutcome:
        """Update the parameters; they are up to date on every rank when this returns.

        stop: True if this rank requests the end of the training, which travels with the step's figures.

        Where gradients pass through fp16, one that is not finite skips the update and lowers the loss scale.  Raises
        TrainingError after too many such steps at the lowest scale.
        """
        engine = self._engine
        flag = torch.full((), float(stop), dtype=torch.float64, device=self._device)
        reduced = reduce_gradients(engine, self._timers, flag)
        update = update_parameters(
            engine,
            self._timers,
            reduced,
            scale=engine.gradient_scale,
            clip_grad=self._clip_grad,
            lr=None if isinstance(engine.settings.optimizer, Elementwise) else self.rates.current()[0],
        )
        # Parameters may be read anywhere between two steps, not only where a forward waits for them.
        engine.ensure_parameters()
        skipped = update.skipped is not None and bool(update.skipped.item())
        self._state = self._scaler.after_step(self._state, overflow=skipped)
        if not skipped:
            self.rates.advance()
        elif self._scaler.exhausted(self._state):
            first = int(first_overflow(engine, reduced).item())
            self._scaler.check_not_exhausted(self._state, parameter=engine.parameter_name(first))
        return StepOutcome(update.grad_norm, not skipped, reduced.figures[0])
