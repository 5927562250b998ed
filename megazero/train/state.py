"""What a run has come to: exactly this and the engine's shards are what a checkpoint keeps.

Random states are not among it: initial values, sample order and dropout are functions of the seed and of counters that
stand here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megazero.errors import CheckpointError, Problem
from megazero.optim.loss_scaler import LossScale


@dataclass
class TrainState:
    """Counters of a run.

    iteration: steps done, skipped ones included.  consumed_samples: position in the data, the whole of it.
    optimizer_steps: steps that were not skipped; the learning rate goes by these.
    """

    loss_scale: LossScale
    iteration: int = 0
    consumed_samples: int = 0
    optimizer_steps: int = 0

    def advance(self, *, num_samples: int, skipped: bool) -> None:
        """Count one step."""
        self.iteration += 1
        self.consumed_samples += num_samples
        self.optimizer_steps += not skipped

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "optimizer_steps": self.optimizer_steps,
            "loss_scale": self.loss_scale.to_json(),
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "TrainState":
        """Back from a checkpoint; raises `CheckpointError` when a counter is missing or not a count."""
        names = ("iteration", "consumed_samples", "optimizer_steps")
        bad = [name for name in names if type(saved.get(name)) is not int or saved[name] < 0]
        if bad or not isinstance(saved.get("loss_scale"), Mapping):
            given = f"the checkpoint's progress {dict(saved)}"
            raise CheckpointError(Problem(given, f"progress has loss_scale and the counts {', '.join(names)}"))
        return cls(LossScale.from_json(saved["loss_scale"]), *(saved[name] for name in names))
