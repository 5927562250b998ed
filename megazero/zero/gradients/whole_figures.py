"""Figures of whole parameters, of which ranks have parts: norms, or sums by row and column.

A rank adds up what it counts of the parameters that it has, and so has the sums over all ranks; pipeline stages
have other parameters, but for what the first and the last one share.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh
from megazero.parallel.param_spec import ParamSpec
from megazero.parallel.topology import ENDS


class Figures:
    """Some numbers of each parameter, float64, one behind the other in `flat`."""

    def __init__(self, numels: Mapping[str, int], flat: Tensor) -> None:
        self.flat = flat
        self._numels = numels
        places = pairwise(accumulate(numels.values(), initial=0))
        self._places = {name: slice(*place) for name, place in zip(numels, places, strict=True)}

    def of(self, name: str) -> Tensor:
        """Return a parameter's, a view."""
        return self.flat[self._places[name]]

    def to(self, device: torch.device) -> "Figures":
        return self if self.flat.device == device else Figures(self._numels, self.flat.to(device))


class WholeFigures:
    """The sums of figures of whole parameters over all ranks that have parts of them."""

    def __init__(self, specs: Sequence[ParamSpec], mesh: Mesh) -> None:
        """specs: of this rank's parameters, in an order that is that of all ranks of its pipeline stage."""
        self._ends = mesh.axis(ENDS)
        shared = [spec.name for spec in specs if ENDS in spec.summed_over] if self._ends.size > 1 else []
        self.names = (*sorted(shared), *(spec.name for spec in specs if spec.name not in shared))
        self._num_shared = len(shared)
        is_alone = mesh.topology.pp == 1
        self._axes = (mesh.world,) if is_alone else (mesh.partition, mesh.replicas, mesh.axis("tp"))

    def zeros(self, num_figures: Callable[[str], int], device: torch.device) -> Figures:
        """Return zeros for a rank's figures of every parameter."""
        numels = {name: num_figures(name) for name in self.names}
        return Figures(numels, torch.zeros(sum(numels.values()), dtype=torch.float64, device=device))

    def add_up(self, local: Figures, whole: Callable[[str, Tensor], Tensor]) -> Figures:
        """Sum figures over the ranks, in the form in which `whole` returns a parameter's; a collective call."""
        parts = {name: whole(name, local.of(name)) for name in self.names}
        numels = {name: part.numel() for name, part in parts.items()}
        flat = torch.cat([*parts.values(), local.flat.new_zeros(0)])
        for axis in self._axes:
            if axis.size > 1:
                axis.all_reduce_scalars(flat).wait()
        if self._num_shared:
            self._ends.all_reduce_scalars(flat[: sum([*numels.values()][: self._num_shared])]).wait()
        return Figures(numels, flat)
