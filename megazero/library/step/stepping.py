"""Performs an optimizer step: norm over all ranks, clipping, overflow check, update, loss scale, learning rates.

Gradients arrive as sums over micro-batches and data-parallel ranks, of losses that were multiplied by the loss scale.
One factor turns the sums into averages, `gradient_scale`:

    average = sum x predivisor / (data-parallel ranks x micro-batches x loss scale)

With `gradient_allreduce_op: sum` the data-parallel ranks are left out of it.

The learning rate advances after each update that was not skipped.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megazero.config.choices import SchedulerChoice
from megazero.errors import ConfigError, Problem, TrainingError, UsageError, raise_problems
from megazero.library.step.records import StepRecords
from megazero.memory.host_copy import HostCopy
from megazero.optim.loss_scaler import LossScale, LossScaler
from megazero.optim.schedules import (
    increased_weight_decay,
    momentum_of,
    progress_of,
    rate_of,
    unmoved_momentum,
    write_momentum,
    write_weight_decay,
)
from megazero.timers import Timers
from megazero.zero.engine import Engine
from megazero.zero.step import Update, reduce_gradients, update_parameters


class StepOutcome(NamedTuple):
    """The outcome of a step.

    grad_norm: the gradients' norm before clipping, unscaled; a float64 scalar.
    flags: float64 scalars: the number of ranks that request the end of the training, and where there is a save beside
    training, that of ranks on which it has failed.
    applied: False after a gradient that was not finite.  fault: the reason why training cannot go on as it is.
    """

    grad_norm: Tensor
    flags: Sequence[Tensor]
    applied: bool
    fault: Problem | None = None


class LearningRates:
    """The learning rates of an optimizer's groups: a schedule's, or those that the user sets in the groups.

    A schedule may count samples or tokens in place of updates, and increase weight decay meanwhile.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        schedule: SchedulerChoice | None,
        *,
        samples_per_step: int | None = None,
        decoupled: Collection[int] = (),
        factors: Mapping[int, float] = MappingProxyType({}),
        decays_itself: Collection[int] = (),
    ) -> None:
        """groups: param groups with an "lr" each, which a schedule takes as its base and writes to.

        samples_per_step: those of every update from now on, over all ranks.  decoupled: the positions of groups whose
        least rate is the schedule's `decoupled_min_lr`.  factors: by position, what a group's rate is a multiple of the
        schedule's by.  decays_itself: the positions of groups whose weight decay stays.
        Raises ConfigError if a rate is below the one at which the schedule starts or ends; if the schedule counts
        samples and their number is not known; or if it increases a weight decay that the groups have not got.
        """
        self._groups = groups
        self._schedule = schedule
        self._decoupled = decoupled
        self._bases = [float(group["lr"]) for group in groups]
        self._factors = factors
        self._decayed = [
            group for place, group in enumerate(groups) if group.get("weight_decay") and place not in decays_itself
        ]
        self._num_updates = self._num_samples = 0
        self.samples_per_step = samples_per_step
        raise_problems(ConfigError, self._problems())
        if schedule is not None:
            for group, base in zip(groups, self._bases, strict=True):
                group["initial_lr"] = base  # as torch's schedules have it
        self._write()

    def current(self) -> list[float]:
        """Return the rates of the next update, one for each group."""
        return [float(group["lr"]) for group in self._groups]

    def get_last_lr(self) -> list[float]:
        """Return the rates of the next update, as torch's schedules do after a step."""
        return self.current()

    def advance(self, by: int = 1) -> None:
        """Count an update (-1: one that turns out not to have been made), and write the next rates to the groups."""
        self._num_updates += by
        self._num_samples += by * (self.samples_per_step or 0)
        self._write()

    @property
    def moved(self) -> tuple[str, ...]:
        """The options of param groups that the schedule writes at every step."""
        if self._schedule is None:
            return ()
        betas = () if momentum_of(self._schedule, 0) is None else ("betas",)
        return ("lr", *betas, *(("weight_decay",) if self._schedule.weight_decay else ()))

    def notices(self) -> list[str]:
        """Return one line if the schedule cycles a momentum that the optimizer does not have."""
        return [] if self._schedule is None else unmoved_momentum(self._schedule, self._groups)

    def step(self) -> None:
        """Raise UsageError: the configuration's schedule advances in engine.step()."""
        rule = "engine.step() advances the configuration's schedule, by one for each update that it makes"
        raise UsageError(Problem("step() of the engine's lr_scheduler", rule, "engine.step() alone"))

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule, and the number of updates so far and of the samples in them."""
        return {**self._description(), "num_updates": self._num_updates, "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` has returned; raise UsageError if it is another schedule's."""
        raise_problems(UsageError, self.differences(state))
        self._num_updates, self._num_samples = int(state["num_updates"]), int(state.get("num_samples", 0))
        self._write()

    def differences(self, state: Mapping[str, Any] | None) -> list[Problem]:
        """Return a problem for each part in which the schedule of a saved state, None for none, is another one."""
        # The parts that a schedule of an earlier version does not have.
        later = {"unit": "iters", "tokens_per_sample": 1, "weight_decay": {}, "decoupled_min_lr": None}
        own, saved = self._description(), {**later, **(state or {})}
        rule = "a resumed training keeps its learning-rate schedule"
        return [
            Problem(f"scheduler: {name} {own[name]}; saved with {saved.get(name)}", rule, f"{name} {saved.get(name)}")
            for name in own
            if own[name] != saved.get(name)
        ]

    @property
    def _counts_samples(self) -> bool:
        return self._schedule is not None and self._schedule.unit != "iters"

    def _description(self) -> dict[str, Any]:
        schedule = self._schedule
        if schedule is None:
            return {"type": None}
        return {
            "type": schedule.type,
            "params": dict(schedule.params),
            "base_lrs": self._bases,
            "unit": schedule.unit,
            "tokens_per_sample": schedule.tokens_per_sample,
            "weight_decay": dict(schedule.weight_decay),
            "decoupled_min_lr": schedule.decoupled_min_lr,
        }

    def _problems(self) -> Iterator[Problem]:
        schedule = self._schedule
        if schedule is None:
            return
        for name in ("lr_warmup_init", "min_lr"):
            rates = [self._peak(place) for place in range(len(self._bases)) if not self._is_aside(place, name)]
            lowest = min(rates, default=math.inf)
            if schedule.params.get(name, 0.0) > lowest:
                given = f"scheduler.params.{name}: {schedule.params[name]:g} with a learning rate of {lowest:g}"
                yield Problem(given, "the optimizer's learning rate is the schedule's peak", f"{name}: 0")
        if self._counts_samples and self.samples_per_step is None:
            given = f"a schedule whose lengths are {schedule.unit}"
            rule = "the samples of a step are known"
            yield Problem(given, rule, "train_batch_size, or train_micro_batch_size_per_gpu")
        if schedule.weight_decay and not self._decayed:
            given = f"scheduler.params.weight_decay_incr_style: {schedule.weight_decay['style']}"
            rule = "an optimizer whose weight decay increases has one"
            yield Problem(given, rule, f"optimizer.params.weight_decay: {schedule.weight_decay['end']:g}")

    def _peak(self, place: int) -> float:
        """Return the peak of the schedule that a group's rate is a multiple of."""
        return self._bases[place] / self._factors.get(place, 1.0)

    def _is_aside(self, place: int, name: str) -> bool:
        """Return True if a group has a least rate of its own."""
        has_own = self._schedule is not None and self._schedule.decoupled_min_lr is not None
        return has_own and name == "min_lr" and place in self._decoupled

    def _write(self) -> None:
        schedule = self._schedule
        if schedule is None:
            return
        progress = progress_of(schedule, self._num_updates, self._num_samples)
        for place, group in enumerate(self._groups):
            least = schedule.decoupled_min_lr if place in self._decoupled else None
            factor = self._factors.get(place, 1.0)
            group["lr"] = factor * rate_of(schedule, progress, self._peak(place), min_lr=least)
        write_momentum(self._groups, momentum_of(schedule, progress))
        write_weight_decay(self._decayed, increased_weight_decay(schedule.weight_decay, progress))


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
        averages: bool,
        accumulation: int,
        records: StepRecords,
    ) -> None:
        """clip_grad: largest gradient norm, 0 for no limit.  accumulation: micro-batches per step.

        averages: True if gradients are means over the data-parallel processes, False if they are sums.
        """
        self._engine = engine
        self._num_summed = engine.data_parallel.size if averages else 1
        self.accumulation = accumulation
        self._timers = timers
        self._device = device
        self._clip_grad = clip_grad
        self._scaler = scaler
        self._state = scaler.start()
        self._records = records
        self._figures: HostCopy | None = None  # of the last step, not read yet
        self._num_steps = 0
        self.rates = rates

    @property
    def loss_scale(self) -> float:
        """The factor by which the next backward's loss is multiplied."""
        return self._state.scale

    @property
    def scale_state(self) -> LossScale:
        """The state of the loss scale, which a checkpoint stores."""
        return self._state

    @property
    def scale_is_dynamic(self) -> bool:
        """True if the loss scale moves."""
        return self._scaler.dynamic

    def finish(self) -> None:
        """Read the last step's figures; raise TrainingError if its gradients were not finite and no report came.

        On a GPU the host waits for the step.
        """
        outcome = self._read_fault([torch.zeros((), dtype=torch.float64, device=self._device)])
        if outcome is not None and outcome.fault is not None:
            raise TrainingError(outcome.fault)

    def resume(self, state: LossScale, *, num_steps: int) -> None:
        """Go on after `num_steps` steps from a loss scale that has been saved; a constant one stays as it is.

        state: of a dynamic loss scale, or the present one.
        """
        self._state, self._num_steps = state, num_steps

    def gradient_scale(self) -> float:
        """Return the factor that turns summed gradients into averages."""
        return self._engine.predivisor / (self.accumulation * self._num_summed * self.loss_scale)

    def step(self, *, stop: bool, save_failed: bool | None = None) -> StepOutcome:
        """Update the parameters; they are up to date on every rank when this returns.

        stop: True if this rank requests the end of the training, which travels with the step's figures.
        save_failed: True if a save beside training has failed on this rank; None if there is none.

        Where gradients pass through fp16, one that is not finite skips the update and lowers the loss scale; too many
        such steps at the lowest scale are a fault.  So it is in other formats with `check_grad_overflow`; without it
        such a gradient is a fault itself, if the engine checks.  The figures are read at once on a CPU; on a GPU before
        the next update, which changes nothing either.
        """
        engine = self._engine
        given = [stop] if save_failed is None else [stop, save_failed]
        flags = [torch.full((), float(flag), dtype=torch.float64, device=self._device) for flag in given]
        if fault := self._read_fault(flags):
            return fault
        reduced = reduce_gradients(engine, self._timers, *flags, *engine.written.figures(self._device))
        flags = list(reduced.figures[: len(flags)])
        engine.written.agree(reduced.figures[len(flags) :])
        update = update_parameters(
            engine,
            self._timers,
            reduced,
            scale=engine.gradient_scale,
            clip_grad=self._clip_grad,
            lr=None,
        )
        # Parameters may be read anywhere between two steps, not only where a forward waits for them.
        engine.ensure_parameters()
        if engine.plan.may_overflow:
            return self._after_fp16(update, reduced.first_overflow, flags)
        if update.skipped is not None:
            self._num_steps += 1
            index = reduced.first_overflow.to(update.skipped.dtype)
            self._figures = HostCopy([update.skipped, index, update.grad_norm])
        self._records.end_step()
        self.rates.advance()
        fault = self._read_fault(flags) if self._device.type == "cpu" else None
        return fault or StepOutcome(update.grad_norm, flags, applied=True)

    def _after_fp16(self, update: Update, first_overflow: Tensor, flags: Sequence[Tensor]) -> StepOutcome:
        """Move the loss scale on; count the update unless it was skipped."""
        skipped = update.skipped is not None and bool(update.skipped.item())
        self._state = self._scaler.after_step(self._state, overflow=skipped)
        self._records.end_step()
        fault = None
        if not skipped:
            self.rates.advance()
            self._records.unwatch()
        elif self._scaler.exhausted(self._state):
            cause = self._records.cause(int(first_overflow.item()))
            fault = self._scaler.exhaustion(self._state, cause=cause)
        elif self._state.skips_at_minimum:
            self._records.watch()
        return StepOutcome(update.grad_norm, flags, not skipped, fault)

    def _read_fault(self, flags: Sequence[Tensor]) -> StepOutcome | None:
        """Return the outcome of the last step if its gradients were not finite and nothing has read that yet.

        flags: those of the outcome, as far as this rank has them.
        """
        figures, self._figures = self._figures, None
        if figures is None:
            return None
        skipped, index, norm = figures.read()
        if not skipped:
            self._records.unwatch()
            return None
        cause = self._records.cause(int(index))
        self._records.watch()
        self._engine.stopped.zero_()
        self.rates.advance(-1)
        kept = "the update was not made" if self._engine.refuses_updates else "the update has been made"
        rule = "gradients are finite (precision.check_for_nan_in_loss_and_grad)"
        legal = f"a lower learning rate or other samples; {kept}, and a further step may follow"
        fault = Problem(f"step {self._num_steps}: gradient norm {norm}; {cause}", rule, legal)
        return StepOutcome(torch.tensor(norm), flags, applied=False, fault=fault)
