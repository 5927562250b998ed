"""The progress of a run.  A checkpoint consists of exactly this and the engine's shards.

Random states are not part of it: initial values, sample order and dropout are functions of the seed and of the counters
here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.errors import CheckpointError, Problem
from megazero.optim.loss_scaler import LossScale


@dataclass
class TrainState:
    """The counters of a run.

    iteration: steps done, skipped ones included.  consumed_samples: the position in the data, over all ranks.
    optimizer_steps: steps that were not skipped, which determine the learning rate.
    """

    loss_scale: LossScale
    iteration: int = 0
    consumed_samples: int = 0
    optimizer_steps: int = 0

    def advance(self, *, num_samples: int, skipped: bool) -> None:
        """Count one step of `num_samples` samples."""
        self.iteration += 1
        self.consumed_samples += num_samples
        self.optimizer_steps += not skipped

    def to_json(self) -> dict[str, Any]:
        """Return the counters as a checkpoint stores them."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer_steps,
            "loss_scale": self.loss_scale.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        """Restore the counters from a checkpoint; raise `CheckpointError` if one is missing or not a count."""
        names = ("iteration", "consumed_samples", "optimizer_steps")
        bad = [name for name in names if type(saved.get(name)) is not int or saved[name] < 0]
        if bad or not isinstance(saved.get("loss_scale"), Mapping):
            given = f"the checkpoint's progress {dict(saved)}"
            raise CheckpointError(Problem(given, f"progress has loss_scale and the counts {', '.join(names)}"))
        return cls(LossScale.from_json(saved["loss_scale"]), *(saved[name] for name in names))
