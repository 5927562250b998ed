"""Full gradients and weights of parameters, put together from the elements that ranks own.

Every rank owns some elements of some parameters; the full tensor is the sum over the world of the owned elements with
zeros elsewhere, one parameter at a time.  Where several ranks hold the same element, one of them contributes it, and
digests of these *copies* are compared to the bit.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from megazero.checkpoint.slices import fragment_pieces, index_within, piece_view
from megazero.comm.mesh import Mesh
from megazero.parallel.param_spec import Box, ParamSpec, named_specs
from megazero.parallel.topology import ENDS, REPLICAS
from megazero.zero.engine import Engine
from megazero.zero.plan import Placement

# The digests of a rank's copies: axis -> kind -> parameter's name -> digest.
Copies = dict[str, dict[str, dict[str, str]]]

# The compared kinds of state, and the engine's names for them.
KINDS = MappingProxyType({"gradient": "gradient", "weight": "master"})


class Core(Protocol):
    """A model on this rank, the engine that trains it, and the mesh of the ranks that do so."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def mesh(self) -> Mesh: ...


class FullTensors(Protocol):
    """The tensors of one side, put together by name; kind: "gradient" or "weight"."""

    def full(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return this rank's share of a tensor in its full shape, 0 elsewhere, in float64."""

    def copies(self, kind: str) -> Copies:
        """Return digests of what this rank shares with others along an axis."""


class OwnedTensors:
    """The elements of its model's gradients and weights that one rank owns."""

    def __init__(self, core: Core, *, gradient_factor: Callable[[], float] | None = None) -> None:
        """gradient_factor: returns what gradients, as they are stored, must be multiplied by; None: the predivisor."""
        self._core = core
        self._factor = gradient_factor or (lambda: core.engine.predivisor)
        self.specs = {spec.name: spec for spec, _ in named_specs(core.model)}
        self._place = {axis: core.mesh.coordinate(axis) for axis in ("tp", ENDS, REPLICAS)}
        plan, sections = core.engine.plan, core.engine.layout.sections
        self._whole = {slot.spec.name for section in sections if not section.partitioned for slot in section.slots}
        self._is_first_copy = plan.optimizer.placement is Placement.PARTITIONED or core.mesh.coordinate("dp") == 0

    def full(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of a parameter's full shape with the elements this rank owns, 0 elsewhere, in float64."""
        whole = torch.zeros(shape, dtype=torch.float64, device=self._core.mesh.device)
        spec = self.specs.get(name)
        if spec is None or not self._is_first_copy or not spec.is_counted_on(self._place):
            return whole
        everything = Box((0,) * len(shape), shape)
        for owned in self._core.engine.pieces(name, KINDS[kind]):
            for piece in fragment_pieces(spec, owned.start, owned.stop):
                whole[index_within(everything, piece.box)] = piece_view(owned.tensor, piece).double()
        if kind == "gradient":
            whole *= self._factor()
        return whole

    def copies(self, kind: str) -> Copies:
        """Return digests of what this rank shares with others along an axis; kind: "gradient" or "weight"."""
        found: Copies = {axis: {kind: {}} for axis in ("tp", ENDS, REPLICAS, "dp")}
        for name, spec in self.specs.items():
            owned = digest(piece.tensor for piece in self._core.engine.pieces(name, KINDS[kind]))
            for axis in _replicated_along(spec):
                found[axis][kind][name] = owned
            if kind == "gradient" and self._core.engine.plan.gradient.placement is Placement.REPLICATED:
                found["dp"][kind][name] = owned
            elif kind == "weight" and name in self._whole:
                found["dp"][kind][name] = digest([self._core.model.get_parameter(name).detach()])
        return found


def _replicated_along(spec: ParamSpec) -> Iterator[str]:
    return (axis for axis in ("tp", ENDS, REPLICAS) if spec.is_replicated_along(axis))


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash that is the same for tensors of the same bits."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        state.update(tensor.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
