"""The progress of a run.  A checkpoint consists of exactly this and the engine's shards.

Random states are not part of it: initial values, sample order and dropout are functions of the seed and of the counters
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.errors import DamageError, Problem
from megazero.optim.loss_scaler import LossScale

_MAX_COUNT = 2**48  # far more than any run reaches, and small enough for every product in 64 bits
_TOKENS = ("consumed_tokens", "update_tokens")


@dataclass
class TrainState:
    """The counters of a run.

    iteration: steps done, skipped ones included.  consumed_samples: the position in the data, over all ranks.
    optimizer_steps: steps that were not skipped, which determine the learning rate.
    update_samples: samples of these steps, which do so where the schedule's lengths are given in samples.
    consumed_tokens, update_tokens: the same in tokens, of rows that may have been cut; runs count them.
    """

    loss_scale: LossScale
    iteration: int = 0
    consumed_samples: int = 0
    optimizer_steps: int = 0
    update_samples: int = 0
    consumed_tokens: int = 0
    update_tokens: int = 0

    def advance(self, *, num_samples: int, skipped: bool, num_tokens: int = 0) -> None:
        """Count one step of `num_samples` samples with `num_tokens` tokens."""
        self.iteration += 1
        self.consumed_samples += num_samples
        self.optimizer_steps += not skipped
        self.update_samples += 0 if skipped else num_samples
        self.consumed_tokens += num_tokens
        self.update_tokens += 0 if skipped else num_tokens

    def to_json(self) -> dict[str, Any]:
        """Return the counters as a checkpoint stores them."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer_steps,
            "update_samples": self.update_samples,
            "consumed_tokens": self.consumed_tokens,
            "update_tokens": self.update_tokens,
            "loss_scale": self.loss_scale.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], *, step: int) -> "TrainState":
        """Restore the counters from the checkpoint of `step`; raise `DamageError` if they are not those of a run."""
        names = ("iteration", "consumed_samples", "optimizer_steps", "update_samples", *_TOKENS)
        if "update_samples" not in saved:  # an earlier version's, where all steps have the same number of samples
            counts = [saved.get(name) for name in names[:3]]
            iteration, samples, updates = (count if type(count) is int else 0 for count in counts)
            saved = {**saved, "update_samples": samples * updates // max(iteration, 1)}
        if not saved.keys() & _TOKENS:  # an earlier version's, whose rows are whole
            counts = [saved.get(name) for name in ("consumed_samples", "update_samples", "seq_length")]
            consumed, updates, length = (count if type(count) is int else 0 for count in counts)
            saved = {**saved, "consumed_tokens": consumed * length, "update_tokens": updates * length}
        given = f"the checkpoint's progress {str(dict(saved))[:1000]}"
        bad = [name for name in names if type(saved.get(name)) is not int or not 0 <= saved[name] <= _MAX_COUNT]
        is_dynamic = saved.get("loss_scale_is_dynamic", False)
        if bad or not isinstance(saved.get("loss_scale"), Mapping) or type(is_dynamic) is not bool:
            rule = f"progress has loss_scale, loss_scale_is_dynamic and the counts {', '.join(names)}"
            raise DamageError(Problem(given, rule, f"counts from 0 to {_MAX_COUNT}"))
        state = cls(LossScale.from_json(saved["loss_scale"]), *(saved[name] for name in names))
        if state.iteration != step:
            raise DamageError(Problem(given, f"the iteration is the step of the checkpoint, {step}"))
        too_many = state.optimizer_steps > step or state.update_samples > state.consumed_samples
        too_many = too_many or state.update_tokens > state.consumed_tokens
        if too_many or state.consumed_samples < step or state.loss_scale.good_steps > step:
            raise DamageError(Problem(given, "a step takes at least one sample, and the optimizer at most one step"))
        return state
