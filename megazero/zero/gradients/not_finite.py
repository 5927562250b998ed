"""Finds the first value of a step that is not finite: its parameter or module, its layer, rank and micro-batch.

Good steps only take the gradient norm, which shows that something is wrong, and not where.  A *watch* checks every
value on its way: parameters when a module reads them, the outputs of modules, and gradients before they are added up.
It makes the host wait for each of them, so it is attached for the one step that is computed again after a bad one.
Every rank finds its own first value; `first_of_all` compares them.

    forward    the first module in the order of use counts, by its place in the model and the order on its rank
    backward   comes after its micro-batch's forward, and goes through the model in the other direction
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megazero.comm.mesh import Mesh, gather_json
from megazero.parallel.param_spec import Unit
from megazero.zero.parameters.frames import tensors_in
from megazero.zero.parameters.gather import in_backward


@dataclass(frozen=True)
class Finding:
    """A value that is not finite.

    micro_batch: counted from 0 in the step.  place: the position of the part of the model (a pipeline's chunk),
    negative in backward, which ends with the first part.  order: the number of the check on its rank.
    value: in words.  is_weight: True if a weight itself is not finite.  note: the micro-batch's samples, in words.
    """

    micro_batch: int
    in_backward: bool
    place: int
    order: int
    value: str
    unit: str
    is_weight: bool = False
    note: str = ""

    @property
    def key(self) -> tuple[int, bool, int, int]:
        """The key by which findings are sorted; the least is the cause of the others."""
        return self.micro_batch, self.in_backward, self.place, self.order


@dataclass(frozen=True)
class Verdict:
    """The first finding of all ranks, and the ranks that have it, in words."""

    finding: Finding
    ranks: str

    def __str__(self) -> str:
        layer = f", in {self.finding.unit}" if self.finding.unit else ""
        place = f"{self.ranks}, micro-batch {self.finding.micro_batch}"
        return f"{self.finding.value}{layer}, on {place}{self.finding.note and f' ({self.finding.note})'}"


def cause_in_words(verdict: Verdict | None, parameter: str, *, otherwise: str) -> str:
    """Return the cause of a bad step.

    parameter: the first one, in the order of the model, whose summed gradient was not finite; "" if all were.
    otherwise: the text where there is no verdict.
    """
    first = otherwise if verdict is None else f"the first value that is not finite is {verdict}"
    return first + (parameter and f"; in the order of the model, the first such gradient is {parameter}'s")


class Watch:
    """Hooks that check the values of one model's forwards and backwards.

    The caller sets `micro_batch` and `place` as the step goes on, and `is_on` False where forwards are not the step's.
    Layers that write gradients into slots return them to autograd meanwhile.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.micro_batch, self.place, self.is_on = 0, 0, True
        self.found: Finding | None = None
        self._checks = 0
        self._units = {name: unit.name for unit in units for name in unit.parameters}
        self._unit_names = sorted((unit.name for unit in units), key=len, reverse=True)
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(partial(self._check_weights, name)))
            self._handles.append(module.register_forward_hook(partial(self._check_output, name)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                register: Callable[..., Any] = parameter.register_hook
                self._handles.append(register(partial(self._check_gradient, name)))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _check_weights(self, name: str, module: nn.Module, _inputs: Any) -> None:
        if self._in_forward():
            for own, parameter in module.named_parameters(recurse=False):
                path = f"{name}.{own}" if name else own
                self._check(parameter, f"the parameter {path} itself", self._units.get(path, ""), is_weight=True)

    def _check_output(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._in_forward():
            unit = next((u for u in self._unit_names if name == u or name.startswith(f"{u}.")), "")
            for tensor in tensors_in(output):
                self._check(tensor, f"the output of {name or 'the model'}", unit)

    def _in_forward(self) -> bool:
        """Return True in a forward of the step; backward recomputes forwards, whose values have been checked."""
        return self.is_on and not in_backward()

    def _check_gradient(self, name: str, gradient: Tensor) -> None:
        self._check(gradient, f"the gradient of {name}", self._units.get(name, ""), in_backward=True)

    def _check(
        self, tensor: Tensor, value: str, unit: str, *, is_weight: bool = False, in_backward: bool = False
    ) -> None:
        self._checks += 1
        if _is_finite(tensor.detach()):
            return
        place = -self.place if in_backward else self.place
        finding = Finding(self.micro_batch, in_backward, place, self._checks, value, unit, is_weight)
        if self.found is None or finding.key < self.found.key:
            self.found = finding


def _is_finite(tensor: Tensor) -> bool:
    """Return True if all values are finite, as those of a format without infinity and NaN are."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.dtype is torch.float4_e2m1fn_x2:
        return True
    values = tensor.float() if tensor.element_size() == 1 else tensor  # torch looks for no NaN in some 8-bit formats
    return bool(torch.isfinite(values).all())


def first_of_all(found: Finding | None, mesh: Mesh) -> Verdict | None:
    """Return the first of all ranks' findings, None if no rank has any; a collective call."""
    rows: list[Mapping[str, Any] | None] = gather_json(mesh.control, None if found is None else asdict(found))
    findings = {rank: Finding(**row) for rank, row in enumerate(rows) if row is not None}
    if not findings:
        return None
    first = min(findings.values(), key=lambda finding: finding.key)
    same = [rank for rank, other in findings.items() if other.key[:3] == first.key[:3] and other.value == first.value]
    topology = mesh.topology
    axes = [axis for axis in ("pp", "dp", "tp") if topology.size(axis) > 1]
    places = [", ".join(f"{axis} {topology.coordinate(rank, axis)}" for axis in axes) for rank in same]
    words = [f"{rank}{place and f' ({place})'}" for rank, place in zip(same, places, strict=True)]
    return Verdict(first, f"rank{'s' if len(words) > 1 else ''} {_listed(words)}")


def _listed(words: Sequence[str]) -> str:
    """Return at most four words as a list."""
    more = f" and {len(words) - 4} more" if len(words) > 4 else ""
    return ", ".join(words[:4]) + more
