"""Adafactor (Shazeer and Stern, arXiv 1804.04235) by torch's formulas, over any part of a matrix.

In place of a second moment for each element it has averages of squared gradients over every row and every column of a
matrix.  A step has three passes over what a rank updates.  The first adds up squares by row and by column, and those of
the weights; the second those of the direction, by which the third limits it.  The engine sums all of them over the
ranks, so that every rank has the averages of whole matrices, and the same.

    share = t^decay                      rows    += share * (mean of g^2 over each row    - rows)
                                         columns += share * (mean of g^2 over each column - columns)
    direction = g / sqrt(max(rows * columns / max(mean of rows, eps1), eps1^2))
    weights  -= lr * weight_decay * weights
    weights  -= max(eps2, RMS(weights)) * min(lr, t^-1/2) * direction / max(1, RMS(direction) / d)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megazero.errors import ConfigError, Problem
from megazero.memory.lease import Scratch
from megazero.optim.factors import Factors, put, take, whole_spec
from megazero.optim.grouping import Grouping
from megazero.optim.inner import NOT_UPDATED, ElementRun, OfEngine, StepInputs, piece_numel, scaled
from megazero.parallel.param_spec import ParamSpec

ROWS, COLUMNS, VECTOR = "row_var", "col_var", "variance"  # torch's names of them
_MOST_NUMEL = 1 << 22  # elements whose direction is computed at once


class Adafactor(OfEngine):
    """Adafactor; every rank has the averages of all rows and columns of the parameters that it has elements of."""

    moments = kinds = ()
    skips_on_host = True
    num_passes = 2

    def __init__(
        self, params: Mapping[str, Any], grouping: Grouping | None = None, *, template: Optimizer | None = None
    ) -> None:
        """params: by the names of the table of optimizers; "lr" is in the groups, or given to every update.

        template: a torch Adafactor that has not stepped, whose param groups are used in place of params and grouping;
        what is in none of them stays as it is.  Raises ConfigError if it has stepped.
        """
        common = {name: value for name, value in params.items() if name != "weight_decay"}
        super().__init__(common, params.get("weight_decay", 0.0), grouping or Grouping())
        self._given: dict[nn.Parameter, int] | None = None
        if template is not None:
            _check_is_new(template)
            self.groups = template.param_groups
            self._given = {p: index for index, group in enumerate(template.param_groups) for p in group["params"]}
        self._factors: dict[str, Factors] = {}
        self._averages: dict[str, list[Tensor]] = {}  # over rows, and over columns, in the shapes of their specs
        self._memory: list[Tensor] = []

    def group_of(self, spec: ParamSpec, parameter: nn.Parameter) -> int:
        return super().group_of(spec, parameter) if self._given is None else self._given.get(parameter, NOT_UPDATED)

    def begin(self, parameters: Sequence[Factors], dtype: torch.dtype, device: torch.device) -> None:
        self._factors = {factors.spec.name: factors for factors in parameters}
        shapes = [spec.full_shape for factors in parameters for spec in factors.averages]
        memory = torch.zeros(sum(map(math.prod, shapes)), dtype=dtype, device=device)
        parts = iter(zip(torch.split(memory, [math.prod(shape) for shape in shapes]), shapes, strict=True))
        self._averages = {
            factors.spec.name: [part.view(shape) for part, shape in islice(parts, len(factors.averages))]
            for factors in parameters
        }
        self._memory = [memory]

    @property
    def own_memory(self) -> Sequence[Tensor]:
        return self._memory

    def state_of(self, name: str) -> Mapping[str, tuple[ParamSpec, Tensor]]:
        factors = self._factors.get(name)
        if factors is None:
            return {}
        kinds = (ROWS, COLUMNS) if factors.has_columns else (VECTOR,)
        found = zip(kinds, factors.averages, self._averages[name], strict=True)
        return {kind: (whole_spec(spec), average) for kind, spec, average in found}

    def num_figures(self, number: int, name: str) -> int:
        return 1 + sum(spec.numel for spec in self._factors[name].averages if number == 0)

    def measure(
        self, number: int, part: ElementRun, step: Tensor, inputs: StepInputs, into: Tensor | None, *, buffers: Scratch
    ) -> None:
        """Add up squares: those of the weights, and of gradients by row and column; then those of the direction."""
        if into is None:
            return
        if number:
            for _, direction in self._directions(part, inputs, buffers):
                into += torch.linalg.vector_norm(direction).double() ** 2
            return
        factors = self._factors[part.parameter]
        (matrices, *lengths), sums = factors.local, torch.split(into, [1, *(spec.numel for spec in factors.averages)])
        sums[0].add_(torch.linalg.vector_norm(part.master).double() ** 2)
        by_row, *by_column = (each.view(matrices, length) for each, length in zip(sums[1:], lengths, strict=False))
        for run, gradient in self._gradients(part, inputs, buffers):
            for block in factors.blocks(run.start, run.start + run.master.numel()):
                squares = gradient[block.place].square_().view(block.shape)
                by_row[block.matrices, block.rows] += squares.sum(2, dtype=into.dtype)
                for columns in by_column:
                    columns[block.matrices, block.columns] += squares.sum(1, dtype=into.dtype)

    def whole_figures(self, number: int, name: str, local: Tensor) -> Tensor:
        specs = self._factors[name].averages if number == 0 else ()
        norm, *parts = torch.split(local, [1, *(spec.numel for spec in specs)])
        return torch.cat([norm, *(put(spec, part) for spec, part in zip(specs, parts, strict=True))])

    def finish_pass(self, number: int, figures: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> None:
        """Let averages have a share of the means that the first pass has found."""
        for name, step in steps.items() if number == 0 else ():
            factors, averages = self._factors[name], self._averages[name]
            share = (step.double() ** self.groups[factors.group]["beta2_decay"]).to(averages[0].dtype)
            sums = torch.split(figures[name][1:], [average.numel() for average in averages])
            for average, squares in zip(averages, sums, strict=True):
                mean = squares / (factors.whole_numel // average.numel())
                average.lerp_(mean.to(average.dtype).view(average.shape), share)

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        """Take the step of elements of one parameter."""
        options, count = self.groups[run.group], step.double()
        lr = float(options["lr"] if inputs.lr is None else inputs.lr)
        numel = self._factors[run.parameter].whole_numel
        weights, direction = ((figures[0] / numel).sqrt() for figures in inputs.figures)
        length = weights.clamp(min=options["eps"][1]) * count.rsqrt().clamp(max=lr)
        length = length / (direction / options["d"]).clamp(min=1.0)
        length = length if options.get("maximize") else -length
        length = length.to(torch.promote_types(run.master.dtype, torch.float32))
        if options["weight_decay"] != 0:
            run.master.mul_(1 - lr * options["weight_decay"])
        for part, each in self._directions(run, inputs, buffers):
            part.master.add_(each.mul_(length))

    def _gradients(self, part: ElementRun, inputs: StepInputs, buffers: Scratch) -> Iterator[tuple[ElementRun, Tensor]]:
        """Yield pieces of a run, each with its gradient in leased memory."""
        numel, piece = part.master.numel(), min(piece_numel(part), _MOST_NUMEL)
        lease = buffers.lease(piece, part.master.dtype)
        for start in range(0, numel, piece):
            run = part.part(start, min(start + piece, numel))
            yield run, scaled(run.gradient, inputs.factor, lease.tensor)
        lease.release()

    def _directions(
        self, part: ElementRun, inputs: StepInputs, buffers: Scratch
    ) -> Iterator[tuple[ElementRun, Tensor]]:
        """Yield pieces of a run, each with its direction before it is limited, in leased memory."""
        factors, eps = self._factors[part.parameter], self.groups[part.group]["eps"][0]
        eps = torch.finfo(part.master.dtype).eps if eps is None else eps
        rows, columns = self._local_averages(factors, eps, part.master.device)
        for run, gradient in self._gradients(part, inputs, buffers):
            lease = buffers.lease(gradient.numel(), gradient.dtype)
            for block in factors.blocks(run.start, run.start + run.master.numel()):
                variance = lease.tensor[block.place].view(block.shape)
                by_row, by_column = rows[block.matrices, block.rows], columns[block.matrices, block.columns]
                torch.mul(by_row.unsqueeze(2), by_column.unsqueeze(1), out=variance)
            gradient.mul_(lease.tensor.clamp_(min=eps * eps).rsqrt_())
            lease.release()
            yield run, gradient

    def _local_averages(self, factors: Factors, eps: float, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return this rank's averages over rows [matrices, rows], and over columns, over the former's mean.

        Those of a vector's one column are 1.
        """
        matrices, (rows, *others) = factors.local[0], self._averages[factors.spec.name]
        by_row = take(factors.rows, rows).to(device).view(matrices, -1)
        if not others:
            return by_row, by_row.new_ones(1, 1)
        mean = rows.mean(factors.row_dims, keepdim=True) if factors.row_dims else rows
        by_column = take(factors.columns, others[0] / mean.clamp(min=eps))
        return by_row, by_column.to(device).view(matrices, -1)


def _check_is_new(template: Optimizer) -> None:
    if template.state:
        given = "an optimizer Adafactor that has state already"
        legal = "an optimizer that has not stepped yet; its state is loaded later (engine.optimizer)"
        raise ConfigError(Problem(given, "the optimizer's state is the engine's from its first step on", legal))
