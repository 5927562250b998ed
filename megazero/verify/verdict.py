"""The result of a comparison: figures, the first difference, and the axis that it points to.

Pure: parameters are given by name, shape and stages, no tensor is read.  *Here* is the layout, *one* the same run on
one process; *copies* are tensors that several ranks hold alike.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from megazero.parallel.topology import ENDS, REPLICAS, Topology

BOUND = 1e-9
# A gradient that is zero in truth holds rounding errors only; it is measured by this share of the whole norm.
NORM_SHARE = 1e-3
BOUNDS = (
    f"bounds: losses and norms {BOUND:g} relative; gradients {BOUND:g} of the parameter's largest (or of {NORM_SHARE:g}"
    f" of the norm, if that is more); weights {BOUND:g} of the parameter's largest (or of the learning rate); copies"
    " equal to the bit"
)
_AXIS_NAMES = MappingProxyType(
    {
        "tp": "tensor-parallel",
        "dp": "data-parallel",
        ENDS: "first and last pipeline stage's",
        REPLICAS: "replicated shard group's",
    }
)
# Two factors are the same if they agree as far as this; the bound allows more noise in small gradients.
_SAME_FACTOR = 1e-6


@dataclass(frozen=True)
class Parameter:
    """A parameter of the whole model.

    stages: the pipeline stages that hold it, two if it is tied between the ends.  cut: whether tensor-parallel ranks
    hold slices of it, or each all of it.
    """

    name: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    cut: bool


@dataclass(frozen=True)
class Figure:
    """A figure of the layout, and that of one process."""

    here: float
    one: float

    @property
    def difference(self) -> float:
        """The relative difference; inf where it is no number."""
        if self.here == self.one:
            return 0.0
        difference = abs(self.here - self.one) / abs(self.one) if self.one else math.inf
        return difference if math.isfinite(difference) else math.inf

    @property
    def agrees(self) -> bool:
        return self.difference <= BOUND


@dataclass(frozen=True)
class TensorDifference:
    """The difference of a parameter's tensor: at most `largest`, measured by `scale`; inf where one is no number.

    beyond: elements whose difference is above the bound, of numel.  factor: the tensor here divided by the one
    process's (1 where they agree); None if they are not proportional, as between rounding errors.
    """

    name: str
    largest: float
    scale: float
    beyond: int
    numel: int
    factor: float | None = None

    @property
    def relative(self) -> float:
        if self.largest == 0.0:
            return 0.0
        return self.largest / self.scale if self.scale and math.isfinite(self.largest) else math.inf

    @property
    def agrees(self) -> bool:
        return self.relative <= BOUND

    def __str__(self) -> str:
        return (
            f"differs by {self.largest:.3g} at most, {self.relative:.1e} of {self.scale:.3g},"
            f" in {self.beyond} of {self.numel} elements"
        )


@dataclass(frozen=True)
class CopyDifference:
    """The ranks along an axis whose copies of one parameter's `kind` are not the same to the bit."""

    axis: str
    kind: str
    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        ranks = " and ".join(str(rank) for rank in self.ranks)
        return f"the {_AXIS_NAMES[self.axis]} copies on ranks {ranks} are not the same"


@dataclass(frozen=True)
class StepComparison:
    """The comparison of one step, counted from 1; gradients are those of all parameters, in order, after reduction."""

    step: int
    loss: Figure
    norm: Figure
    gradients: tuple[TensorDifference, ...]
    copies: tuple[CopyDifference, ...]

    @property
    def differing(self) -> tuple[TensorDifference, ...]:
        return tuple(found for found in self.gradients if not found.agrees)

    @property
    def agrees(self) -> bool:
        return self.loss.agrees and self.norm.agrees and not self.differing and not self.copies


@dataclass(frozen=True)
class Report:
    """The whole comparison; the same on every rank.

    weights and copies are those after the last step; num_copies counts the copies that were compared, over all axes.
    """

    topology: Topology
    layout: str
    parameters: tuple[Parameter, ...]
    steps: tuple[StepComparison, ...]
    weights: tuple[TensorDifference, ...]
    copies: tuple[CopyDifference, ...]
    num_copies: int

    @property
    def agrees(self) -> bool:
        return all(step.agrees for step in self.steps) and not self.copies and all(w.agrees for w in self.weights)

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report for the user."""
        yield f"layout: {self.topology.describe()}, {self.layout}"
        yield from _table(self.steps)
        gradients = [(found, f", step {step.step}") for step in self.steps for found in step.gradients]
        yield f"gradients: {len(self.parameters)} parameters in {len(self.steps)} steps, {_largest(gradients)}"
        weights = _largest([(found, "") for found in self.weights])
        yield f"weights: {len(self.weights)} parameters after the last step, {weights}"
        unequal = len(self.copies) + sum(len(step.copies) for step in self.steps)
        yield f"copies on several ranks: {self.num_copies} compared, {unequal or 'none'} not the same"
        yield BOUNDS
        if self.agrees:
            yield "the layout computes what one process computes"
            return
        yield f"FIRST DIFFERENCE: {self.first_difference()}"
        yield from (f"    {hint}" for hint in self.hints())

    def first_difference(self) -> str:
        """Describe the first difference: the first step that differs, the first parameter in the model's order."""
        step = self._first_step()
        if step is None:
            return f"after step {len(self.steps)}, {_first_of('weight', self.weights, self.copies)}"
        if step.differing or step.copies:
            return f"step {step.step}, {_first_of('gradient', step.differing, step.copies)}"
        name, figure = ("gradient norm", step.norm) if step.loss.agrees else ("loss", step.loss)
        return f"step {step.step}, {name}: {figure.here!r}, {figure.one!r} on one process"

    def hints(self) -> Iterator[str]:
        """Yield what the pattern of the first difference indicates about its cause."""
        step = self._first_step()
        if step is None:
            yield "all gradients agree: the update of weights, or the exchange of updated weights between ranks"
        elif step.step > 1:
            yield f"step {step.step - 1} agrees: the update of weights at its end, or their exchange between ranks"
        elif not step.loss.agrees:
            yield f"the loss differs too, so it is the forward pass: {self._forward_suspects()}"
        elif step.differing:
            yield self._gradient_suspect(step)
        elif step.copies:
            yield "the copy that is compared agrees with one process: the sum or the update of the other copies"
        else:
            yield "all gradients agree: the sum of their squares over ranks"

    def _first_step(self) -> StepComparison | None:
        return next((step for step in self.steps if not step.agrees), None)

    def _forward_suspects(self) -> str:
        suspects = {
            "the sums over the tensor axis": self.topology.tp,
            "the activations that one pipeline stage sends to the next": self.topology.pp,
            "the samples of the data-parallel ranks": self.topology.dp,
        }
        return ", ".join(name for name, size in suspects.items() if size > 1) or "recomputation"

    def _gradient_suspect(self, step: StepComparison) -> str:
        """Name the reduction or exchange that gradients pass wrongly when the loss is right."""
        names = {found.name for found in step.differing}
        chosen = [parameter for parameter in self.parameters if parameter.name in names]
        factor = _common_factor(step)
        if factor is not None:
            return f"all gradients are {factor:.6g} times as large: the data-parallel reduction, or its divisor"
        if all(len(parameter.stages) > 1 for parameter in chosen):
            return "only parameters shared by the first and the last pipeline stage differ: their sum over the two"
        if self.topology.tp > 1 and not any(parameter.cut for parameter in chosen):
            return "only parameters that every tensor-parallel rank holds whole differ: their sum over the tensor axis"
        if len(chosen) < len(self.parameters) and chosen == list(self.parameters[: len(chosen)]):
            return self._backward_suspect(chosen[-1], self.parameters[len(chosen)])
        return "the reduction of the buckets that hold them, over the data-parallel axis"

    def _backward_suspect(self, last: Parameter, behind: Parameter) -> str:
        """Name the exchange in backward if everything up to `last` differs and nothing from `behind` on."""
        found = f"everything up to {last.name} differs and nothing behind it:"
        if last.stages[0] != behind.stages[0]:
            return f"{found} the gradients that pipeline stage {behind.stages[0]} sends to {last.stages[0]}"
        return f"{found} the gradients that backward passes on from there, over the tensor axis if it has several ranks"


def copy_differences(
    topology: Topology, digests: Sequence[dict[str, dict[str, dict[str, str]]]]
) -> tuple[CopyDifference, ...]:
    """Return the copies that are not the same; digests: for each rank, those by axis, kind and parameter's name."""
    found = []
    for axis in ("tp", ENDS, REPLICAS, "dp"):
        for group in topology.groups(axis):
            first = digests[group[0]].get(axis, {})
            for kind, name in ((kind, name) for kind, names in first.items() for name in names):
                others = [
                    rank for rank in group if digests[rank].get(axis, {}).get(kind, {}).get(name) != first[kind][name]
                ]
                if others:
                    found.append(CopyDifference(axis, kind, name, (group[0], *others)))
    return tuple(found)


def _table(steps: Sequence[StepComparison]) -> Iterator[str]:
    titles = ("step", *(f"{name}, {where}" for name in ("loss", "norm") for where in ("one process", "here", "rel.")))
    widths = (4, 20, 20, 10, 20, 20, 10)
    yield " ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True))
    for step in steps:
        cells = [str(step.step)]
        for figure in (step.loss, step.norm):
            cells += [f"{figure.one:.15g}", f"{figure.here:.15g}", f"{figure.difference:.1e}"]
        yield " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _largest(found: Sequence[tuple[TensorDifference, str]]) -> str:
    """Describe the largest difference and where it is."""
    worst, where = max(found, key=lambda pair: pair[0].relative)
    return f"largest difference {worst.relative:.1e} ({worst.name}{where})" if worst.relative else "no difference"


def _first_of(kind: str, tensors: Sequence[TensorDifference], copies: Sequence[CopyDifference]) -> str:
    """Describe the first difference of a kind: `gradient of NAME: how it differs; 3 more parameters differ`."""
    differing: list[TensorDifference | CopyDifference] = [found for found in tensors if not found.agrees]
    differing += copies
    found = differing[0]
    num_others = len({each.name for each in differing} - {found.name})
    more = f"; {num_others} more parameter{'s differ' if num_others > 1 else ' differs'}" if num_others else ""
    return f"{kind} of {found.name}: {found}{more}"


def _common_factor(step: StepComparison) -> float | None:
    """Return the factor by which all gradients are wrong alike, if there is one."""
    factors = [found.factor for found in step.differing]
    first = factors[0]
    if first is None or any(found.agrees and found.factor is not None for found in step.gradients):
        return None
    alike = all(factor is not None and math.isclose(factor, first, rel_tol=_SAME_FACTOR) for factor in factors)
    return first if alike else None
