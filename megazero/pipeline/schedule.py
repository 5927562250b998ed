"""Schedules as data: what a rank does in one step, as a list of actions.  Pure.

one stage, 3 micro-batches:   F0 B0 F1 B1 F2 B2
"""

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What an action does; the letter is how schedules are drawn."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One thing to do with one micro-batch."""

    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}"


def one_stage(num_micro_batches: int) -> tuple[Action, ...]:
    """Gradient accumulation on a model that is not cut: each backward follows its forward."""
    return tuple(
        Action(kind, micro_batch) for micro_batch in range(num_micro_batches) for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
