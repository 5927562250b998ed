"""DeepSpeed's `deepspeed.runtime.lr_schedules`: its five schedules, for programs that make one around an optimizer.

A configuration's "scheduler" has the same rates (`megazero/optim/schedules.py`), and needs no object.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from megazero.config.choices import SchedulerChoice, choose_scheduler
from megazero.config.schedules import SCHEDULES
from megazero.config.values import Diagnostics, Location
from megazero.errors import ConfigError, raise_problems
from megazero.optim.schedules import momentum_of, rate_of, write_momentum

VALID_LR_SCHEDULES = [name for name in SCHEDULES if name[0].isupper()]


class _Schedule:
    """A schedule that writes the rates of an optimizer's param groups: at once, and at every step.

    Its arguments are those of the class of DeepSpeed's with the same name, in the same order.
    """

    def __init__(self, optimizer: Optimizer, *values: Any, **params: Any) -> None:
        """Raise ConfigError for parameters that are missing or illegal, and TypeError for too many."""
        self.optimizer = optimizer
        self._choice = self._choose(values, params)
        self._bases = [group.setdefault("initial_lr", group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = -1
        """The number of the last step, counted from 0; -1 before the first."""
        self._write()

    def _choose(self, values: tuple[Any, ...], params: Mapping[str, Any]) -> SchedulerChoice:
        name = type(self).__name__
        positions = [*SCHEDULES[name], "last_batch_iteration"]
        named = dict(zip(positions, values, strict=False))
        if len(values) > len(positions) or named.keys() & params.keys():
            raise TypeError(f"{name} takes an optimizer and then {', '.join(positions)}, each once")
        diagnostics = Diagnostics()
        choice = choose_scheduler(Location(name), name, {**named, **params}, diagnostics, lr=None)
        raise_problems(ConfigError, diagnostics.problems)
        assert choice is not None, "a choice without problems is one"
        return choice

    def get_lr(self) -> list[float]:
        """Return the rates of the next update, one for each param group."""
        return [rate_of(self._choice, self.last_batch_iteration + 1, base) for base in self._bases]

    def get_last_lr(self) -> list[float]:
        """Return the rates of the next update, as torch's schedules do after a step."""
        return self.get_lr()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one update, or to that which follows a stated step, and write the rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` has returned, and write the rates."""
        self.step(int(state["last_batch_iteration"]))

    def _write(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate
        write_momentum(self.optimizer.param_groups, momentum_of(self._choice, self.last_batch_iteration + 1))


class WarmupLR(_Schedule):
    """A rate that rises, and stays."""


class WarmupDecayLR(_Schedule):
    """A rate that rises, then falls straight."""


class WarmupCosineLR(_Schedule):
    """A rate that rises to the optimizer's, then falls along half a cosine."""


class LRRangeTest(_Schedule):
    """A rate that rises without an end."""


class OneCycle(_Schedule):
    """A rate that rises and falls once, then decays; the first beta moves against it."""
