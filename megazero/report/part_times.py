"""Defines the seconds that parts of a step take on all ranks of a job, and how they are shown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Option = Literal["max", "minmax", "all"]


@dataclass(frozen=True)
class PartTimes:
    """The seconds of parts, each a mean over the steps of an interval, as one of the three options shows them.

    by_part: every rank's seconds, in rank order; 0 on a rank that has no such part.
    """

    option: Option
    num_steps: int
    by_part: Mapping[str, Sequence[float]]

    def largest(self) -> dict[str, float]:
        """Return the seconds of the slowest rank, by part."""
        return {name: max(ranks) for name, ranks in self.by_part.items()}

    def smallest(self) -> dict[str, float]:
        """Return the seconds of the fastest rank that has the part, by part; none with the option max."""
        if self.option == "max":
            return {}
        return {name: min(seconds for seconds in ranks if seconds > 0) for name, ranks in self.by_part.items()}

    def to_json(self) -> dict[str, dict[str, float] | list[float]]:
        """Return {part: {"max": seconds}}, with "min" too, or every rank's seconds in a list."""
        if self.option == "all":
            return {name: list(ranks) for name, ranks in self.by_part.items()}
        smallest = self.smallest()
        return {
            name: ({"min": smallest[name]} if name in smallest else {}) | {"max": seconds}
            for name, seconds in self.largest().items()
        }

    def lines(self) -> list[str]:
        """Return a heading, and a line of milliseconds for each part."""
        steps = f"{self.num_steps} step{'s' if self.num_steps > 1 else ''}"
        of = {"max": "maximum of all ranks", "minmax": "minimum and maximum of all ranks", "all": "every rank"}
        width = max(map(len, self.by_part), default=0)
        return [
            f"milliseconds a step, over {steps}, {of[self.option]}:",
            *(self._row(name, width) for name in self.by_part),
        ]

    def _row(self, name: str, width: int) -> str:
        shown = {
            "max": [max(self.by_part[name])],
            "minmax": [self.smallest().get(name, 0.0), max(self.by_part[name])],
            "all": self.by_part[name],
        }
        return f"    {name:<{width}} " + " ".join(f"{1000 * seconds:10.2f}" for seconds in shown[self.option])
