"""What a DeepSpeed configuration contributes to the settings of a run, while it is gathered."""

from dataclasses import dataclass, field
from typing import Any

from megazero.config.origin import Origin
from megazero.config.validate import Said
from megazero.config.values import Place
from megazero.dialects.deepspeed.reading import Reading
from megazero.errors import Problem


@dataclass(frozen=True)
class Floor:
    """The end of a cosine as a part of the learning rate, which may be said elsewhere; written: not a default."""

    ratio: float
    place: Place
    written: bool


@dataclass
class Adopted:
    """What a file contributes.

    said: settings that count as flags.  defaults: settings that give way to everything that was said anywhere.
    """

    reading: Reading
    said: list[Said] = field(default_factory=list)
    defaults: list[Said] = field(default_factory=list)
    floor: Floor | None = None

    def place(self, path: str) -> Place:
        """Where a key stands, by its canonical path."""
        return self.reading.place.key(path)

    def say(self, setting: str, value: Any, source: str) -> None:
        self.said.append(Said(setting.replace("_", "-"), value, source, Origin.FOREIGN))

    def default(self, setting: str, value: Any, path: str) -> None:
        source = f"{self.place(path).said(value)} (DeepSpeed's default)"
        self.defaults.append(Said(setting, value, source, Origin.DEFAULT))

    def refuse(self, given: str, rule: str, legal: str) -> None:
        self.reading.findings.problems.append(Problem(given, f"refused: {rule}", legal))
