"""LAMB (You et al., arXiv 1904.00962, algorithm 2): Adam's direction, in a step as long as the parameter is large.

The step of a parameter is its direction times a *trust ratio*, the norm of its weights over the norm of its direction,
each over all of the parameter.  ZeRO cuts a parameter over ranks, and tensor parallelism does; so a step has two
passes.  The first advances the moments and adds up the squares of both norms over the elements that are here; the
engine sums them over the ranks; the second makes the direction again, of moments and weights, and takes the step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megazero.memory.lease import Scratch
from megazero.optim.factors import Factors
from megazero.optim.grouping import Grouping
from megazero.optim.inner import ElementRun, OfEngine, StepInputs, piece_numel, scaled
from megazero.parallel.param_spec import ParamSpec


class Lamb(OfEngine):
    """LAMB, whose weight decay is part of the direction; the ratio of a parameter of zeros, or at rest, is 1."""

    skips_on_host = True
    num_passes = 1
    own_memory: Sequence[Tensor] = ()

    def __init__(self, params: Mapping[str, Any], grouping: Grouping | None = None) -> None:
        """params: by the names of the table of optimizers.

        bias_correction: whether moments are divided by what they lack in the first steps.  eps_inside_sqrt: whether eps
        is added to the second moment, not to its root.  min_coeff, max_coeff: the least and the largest trust ratio.
        """
        common = {name: value for name, value in params.items() if name != "weight_decay"}
        super().__init__(common, params["weight_decay"], grouping or Grouping())

    def begin(self, parameters: Sequence[Factors], dtype: torch.dtype, device: torch.device) -> None:
        """Do nothing: all state is of elements."""

    def state_of(self, name: str) -> Mapping[str, tuple[ParamSpec, Tensor]]:
        return {}

    def num_figures(self, number: int, name: str) -> int:
        return 2

    def measure(
        self, number: int, part: ElementRun, step: Tensor, inputs: StepInputs, into: Tensor | None, *, buffers: Scratch
    ) -> None:
        """Advance the moments, and add up the squares of the norms of weights and direction."""
        numel, piece = part.master.numel(), piece_numel(part)
        beta1, beta2 = self.groups[part.group]["betas"]
        lease = buffers.lease(piece, part.master.dtype)
        for start in range(0, numel, piece):
            run = part.part(start, min(start + piece, numel))
            gradient = scaled(run.gradient, inputs.factor, lease.tensor)
            run.moments["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
            run.moments["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            if into is not None:
                direction = self._direction(run, step, lease.tensor)
                into += torch.stack([torch.linalg.vector_norm(each).double() for each in (run.master, direction)]) ** 2
        lease.release()

    def whole_figures(self, number: int, name: str, local: Tensor) -> Tensor:
        return local

    def finish_pass(self, number: int, figures: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> None:
        """Do nothing: the update uses the sums."""

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        """Take the step of elements of one parameter, whose moments have advanced."""
        options = self.groups[run.group]
        weights, direction = inputs.figures[0].sqrt().unbind()
        ratio = (weights / direction).clamp(options["min_coeff"], options["max_coeff"])
        ratio = torch.where((weights > 0) & (direction > 0), ratio, torch.ones_like(ratio))
        length = (ratio * float(options["lr"] if inputs.lr is None else inputs.lr)).to(run.master.dtype)
        numel, piece = run.master.numel(), piece_numel(run)
        lease = buffers.lease(piece, run.master.dtype)
        for start in range(0, numel, piece):
            part = run.part(start, min(start + piece, numel))
            part.master.sub_(self._direction(part, step, lease.tensor).mul_(length))
        lease.release()

    def _direction(self, run: ElementRun, step: Tensor, memory: Tensor) -> Tensor:
        """Return the direction of elements whose moments have advanced, written to `memory`.

        step: its number, float32 without dimensions.
        """
        options, target = self.groups[run.group], memory[: run.master.numel()]
        lacking: tuple[Tensor | float, ...] = (1.0, 1.0)
        if options["bias_correction"]:
            count = step.double()
            lacking = tuple((1 - beta**count).to(run.master.dtype) for beta in options["betas"])
        torch.div(run.moments["exp_avg_sq"], lacking[1], out=target)
        if options["eps_inside_sqrt"]:
            target.add_(options["eps"]).sqrt_()
        else:
            target.sqrt_().add_(options["eps"])
        torch.div(run.moments["exp_avg"], target, out=target).div_(lacking[0])
        return target.add_(run.master, alpha=options["weight_decay"])
