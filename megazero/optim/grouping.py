"""The param group that a parameter belongs to, in optimizers that a configuration describes.

The first groups are those without and with weight decay, then those whose learning rate is decoupled, if there are
any; then each pattern has two, for what does not decay by itself and for what does.
"""

from dataclasses import dataclass

from megazero.config.param_groups import ParamGroup, place_of
from megazero.parallel.param_spec import ParamSpec

UNDECAYED, DECAYED, DECOUPLED = 0, 1, 2


@dataclass(frozen=True)
class Grouping:
    """The param groups of an optimizer.

    decoupled: names of parameters, with weight decay, that have a learning rate of their own.
    """

    decoupled: frozenset[str] = frozenset()
    patterns: tuple[ParamGroup, ...] = ()

    def group_of(self, spec: ParamSpec) -> int:
        """Return the number of a parameter's group."""
        place = place_of(self.patterns, spec.name)
        if place is not None:
            return self._num_others + 2 * place + spec.decay
        if spec.name in self.decoupled:
            return DECOUPLED
        return DECAYED if spec.decay else UNDECAYED

    def pattern_of(self, spec: ParamSpec) -> ParamGroup | None:
        """Return the pattern's group that a parameter belongs to; None if it belongs to none."""
        place = place_of(self.patterns, spec.name)
        return None if place is None else self.patterns[place]

    def weight_decays(self, weight_decay: float) -> list[float]:
        """Return the weight decay of every group; weight_decay: that of parameters which decay."""
        found = [0.0, weight_decay, weight_decay][: self._num_others]
        for group in self.patterns:
            own = group.weight_decay
            found += [0.0, weight_decay] if own is None else [own, own]
        return found

    @property
    def _num_others(self) -> int:
        return 3 if self.decoupled else 2
