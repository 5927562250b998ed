"""The inner optimizers, which update flat pieces of master weights after their gradients are reduced.

`FusedAdamW` is torch's fused kernel on flat tensors, with its moments in the engine's shards; `found_inf` is an
argument of the kernel: on overflow weights, moments and step count stay untouched, without a branch on the host.  In a
run that compiles, a GPU updates by a kernel that reads gradients as they are: 26 bytes an element of a bf16 gradient in
place of 34.
`Elementwise` runs any torch optimizer that works element by element, which owns its state.
`lamb.py` and `adafactor.py` have those whose step of a parameter needs figures of all of it, which ranks add up before;
`eight_bit.py` those with moments in 8 bits.

All others take gradients in the master weights' dtype, so each run of gradients is scaled into a leased constant-size
buffer before its update; unscaling and clipping are one factor there, and on a GPU the cast is a part of the
multiplication.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megazero.errors import Problem, UsageError
from megazero.memory.lease import Scratch
from megazero.optim.block_moments import BlockMoment
from megazero.optim.factors import Factors
from megazero.optim.grouping import Grouping
from megazero.optim.torch_optimizer import FlatRun, TorchOptimizer
from megazero.parallel.param_spec import ParamSpec

# On a CPU a run is updated in pieces whose gradients stay in the cache between being scaled and being used: 2 MiB.
# Smaller ones would stay in a nearer cache, which saves less than their calls cost.
_CACHED_NUMEL = 1 << 19
NOT_UPDATED = -1


class ElementRun(NamedTuple):
    """A contiguous run of elements treated alike: one-dimensional views of the same length, and its optimizer group.

    parameter, start: of what a measuring optimizer gets, the only parameter in it, and its first element there.
    blocks: the moments that are stored in 8 bits.
    """

    master: Tensor
    gradient: Tensor
    moments: Mapping[str, Tensor]
    group: int
    parameter: str = ""
    start: int = 0
    blocks: Mapping[str, BlockMoment] = MappingProxyType({})

    def part(self, start: int, stop: int) -> "ElementRun":
        """Return the elements [start, stop) of the run."""
        within = slice(start, stop)
        moments = {name: moment[within] for name, moment in self.moments.items()}
        blocks = {name: moment[within] for name, moment in self.blocks.items()}
        first = self.start + start
        return ElementRun(
            self.master[within], self.gradient[within], moments, self.group, self.parameter, first, blocks
        )


class StepInputs(NamedTuple):
    """The inputs of one optimizer step beside the state; the tensors are scalars.

    lr: learning rate; None: param groups have their own.  factor: the factor of gradients (unscaling and clipping).
    found_inf: float32, 1 if the step is to be skipped; None where no step is ever skipped.
    options: those of all groups at this step; None: those that the groups have when their runs are updated.
    figures: for elements of one parameter, what an optimizer that measures has found in each of its passes so far, over
    all of the parameter; on the device that updates.
    """

    lr: float | None
    factor: Tensor
    found_inf: Tensor | None
    options: Sequence[Mapping[str, Any]] | None = None
    figures: tuple[Tensor, ...] = ()

    def for_masters(self, dtype: torch.dtype) -> "StepInputs":
        """Return the inputs with the factor as products with master weights of `dtype` take it: of this dtype, [1].

        In two dtypes a GPU multiplies more slowly; and without a dim the factor would first be rounded to a lower
        precision of the gradient's.
        """
        return self._replace(factor=self.factor.to(dtype).view(1))

    def to(self, device: torch.device) -> "StepInputs":
        """Return the inputs on a device; the host waits for them where they come from another one."""
        found_inf = None if self.found_inf is None else self.found_inf.to(device)
        return self._replace(factor=self.factor.to(device), found_inf=found_inf)


class InnerOptimizer(Protocol):
    """An optimizer of runs; `index` is a run's position in the argument of `bind`."""

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the flat tensors that the engine's shards have for it, each of the master weights' shape."""

    @property
    def code_values(self) -> Mapping[str, Tensor]:
        """The 256 values of each of these that is stored as `BlockMoment`; the others are numbers."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of all state with one value per element that some parameter has from its first step on."""

    @property
    def keeps_state(self) -> bool:
        """True if the optimizer allocates the state of runs itself, and counts their steps; else the engine does."""

    @property
    def skips_on_host(self) -> bool:
        """True if the caller must not call `update` for a skipped step; else `found_inf` skips it on the device."""

    @property
    def options(self) -> Sequence[dict[str, Any]]:
        """The options of all groups, which every update reads."""

    def group_of(self, spec: ParamSpec, parameter: nn.Parameter) -> int:
        """Return the group of a parameter; parameters of one group have the same options and are contiguous."""

    def bind(self, runs: Sequence[ElementRun]) -> None:
        """Set the runs that `update` takes; called once, for an optimizer that keeps its state itself."""

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        """Update one run in place; step: the number of this step, from 1, a float32 scalar.

        A run that was bound without elements has them here, and the state that the optimizer would keep itself in the
        memory of the moments.
        inputs: those `for_masters`.
        """

    def divide(self, index: int, parts: Sequence[ElementRun]) -> None:
        """Put adjacent parts of a run, which are updated one by one from here on, in the run's place.

        Called for an optimizer that keeps its state itself.
        """

    def state(self, index: int, run: ElementRun) -> Mapping[str, Tensor]:
        """Return the state of a run with one value per element, by name; empty before the first step.

        The tensors of state in the memory of moments have no elements.
        """

    def numbers(self, index: int) -> Mapping[str, float] | None:
        """Return the numbers of a run's state; None if it has no state (yet)."""

    def start(self, index: int, numbers: Mapping[str, float] | None) -> None:
        """Make the state of a run, whose elements the caller fills; None empties it, as before the first step.

        Raises CheckpointError if these are another optimizer's numbers.
        """


@runtime_checkable
class MeasuringOptimizer(InnerOptimizer, Protocol):
    """An optimizer whose update of a parameter needs figures of all of it, which other ranks may have parts of.

    Before the updates of a step every rank measures what it updates, in one or more passes over parts of one parameter
    each.  A pass's figures are summed over the ranks, each element counted once, and later passes have those sums, as
    the update has.
    """

    @property
    def num_passes(self) -> int:
        """The number of passes before the update."""

    def begin(self, parameters: Sequence[Factors], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate the state of whole parameters, those that this rank updates elements of; called once."""

    @property
    def own_memory(self) -> Sequence[Tensor]:
        """The tensors on the engine's device in which state of whole parameters lies."""

    def state_of(self, name: str) -> Mapping[str, tuple[ParamSpec, Tensor]]:
        """Return a parameter's state that is not of elements, by kind: of what it is, and itself, equal on all ranks.

        Writing to the tensor writes the state.
        """

    def num_figures(self, number: int, name: str) -> int:
        """Return the number of a parameter's figures in a pass on one rank."""

    def measure(
        self, number: int, part: ElementRun, step: Tensor, inputs: StepInputs, into: Tensor | None, *, buffers: Scratch
    ) -> None:
        """Add a part's figures in pass `number` to those of its parameter on this rank, float64.

        into: None where another rank, or another part, counts these elements.  `update` takes the same elements later
        in the step, perhaps in other parts.
        """

    def whole_figures(self, number: int, name: str, local: Tensor) -> Tensor:
        """Return a rank's figures of a parameter in the form in which they are summed over the ranks."""

    def finish_pass(self, number: int, figures: Mapping[str, Tensor], steps: Mapping[str, Tensor]) -> None:
        """Use the sums of a pass, by parameter; steps: the number of this step, of those that take one."""


@dataclass(frozen=True)
class AdamWSettings:
    """The constants of AdamW (Loshchilov and Hutter, arXiv 1711.05101); weight decay is decoupled."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class OfEngine:
    """The common base of optimizers whose state the engine keeps: most have the two moments of Adam in its shards.

    groups: the options of the groups, which every update reads; "lr" is read where the update is given no rate.
    Weight decay applies to parameters whose spec has `decay`, and to those of a pattern with `weight_decay`.
    """

    moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    kinds: tuple[str, ...] = moments
    code_values: Mapping[str, Tensor] = MappingProxyType({})
    keeps_state = False

    def __init__(self, common: Mapping[str, Any], weight_decay: float, grouping: Grouping) -> None:
        """common: options of all groups."""
        self._grouping = grouping
        decays = grouping.weight_decays(weight_decay)
        self.groups: Sequence[dict[str, Any]] = [{**common, "weight_decay": decay} for decay in decays]

    @property
    def options(self) -> list[dict[str, Any]]:
        return [*self.groups]

    def group_of(self, spec: ParamSpec, parameter: nn.Parameter) -> int:
        return self._grouping.group_of(spec)

    def bind(self, runs: Sequence[ElementRun]) -> None:
        """Do nothing: a run holds its moments, and the engine has the rest."""

    def divide(self, index: int, parts: Sequence[ElementRun]) -> None:
        """Do nothing: a run holds its moments."""

    def state(self, index: int, run: ElementRun) -> Mapping[str, Tensor]:
        return run.moments

    def numbers(self, index: int) -> Mapping[str, float]:
        return {}

    def start(self, index: int, numbers: Mapping[str, float] | None) -> None:
        """Do nothing: the engine has made the moments, and counts steps itself."""


class FusedAdamW(OfEngine):
    """AdamW by torch's fused kernel, or on a GPU by `adamw` compiled."""

    skips_on_host = False

    def __init__(
        self,
        settings: AdamWSettings,
        grouping: Grouping | None = None,
        *,
        compile: Callable[[Callable[..., None]], Callable[..., None]] | None = None,
    ) -> None:
        """compile: makes of `adamw` one kernel for every length of a run; without it, a GPU has torch's fused one."""
        common = {"betas": (settings.beta1, settings.beta2), "eps": settings.eps}
        super().__init__(common, settings.weight_decay, grouping or Grouping())
        self._compiled = compile and compile(adamw)

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        numel = run.master.numel()
        piece = piece_numel(run)
        lease = buffers.lease(piece, run.master.dtype)
        for start in range(0, numel, piece):
            self._update_piece(run.part(start, start + piece), step, inputs, lease.tensor)
        lease.release()

    def _update_piece(self, run: ElementRun, step: Tensor, inputs: StepInputs, memory: Tensor) -> None:
        options = self.groups[run.group] if inputs.options is None else inputs.options[run.group]
        if options.get("amsgrad"):
            rule = "this AdamW was made without the third moment that amsgrad needs"
            raise UsageError(Problem("amsgrad=True in a param group", rule, "amsgrad in the optimizer's configuration"))
        beta1, beta2 = options["betas"]
        lr = float(options["lr"] if inputs.lr is None else inputs.lr)
        if self._compiled and run.master.is_cuda and run.master.dtype == torch.float32 and not options.get("maximize"):
            in_one_pass(self._compiled, run, step, inputs, options, lr)
            return
        torch._fused_adamw_(
            [run.master],
            [scaled(run.gradient, inputs.factor, memory)],
            [run.moments["exp_avg"]],
            [run.moments["exp_avg_sq"]],
            [],
            [step],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=bool(options.get("maximize")),
            grad_scale=None,
            found_inf=inputs.found_inf,
        )


def in_one_pass(
    function: Callable[..., None],
    run: ElementRun,
    step: Tensor,
    inputs: StepInputs,
    options: Mapping[str, Any],
    lr: float,
) -> None:
    """Update a run by `adamw`, or what a compiler has made of it."""
    beta1, beta2 = options["betas"]
    # As tensors on the host these are arguments of the kernel; as numbers each new rate would be compiled anew.
    logarithms = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
    numbers = (lr, options["weight_decay"], 1 - beta1, 1 - beta2, *logarithms, options["eps"])
    scalars = [torch.tensor(number, dtype=torch.float64) for number in numbers]
    moments = (run.moments["exp_avg"], run.moments["exp_avg_sq"])
    function(run.master, run.gradient.detach(), *moments, step, inputs.factor, inputs.found_inf, *scalars)


def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    factor: Tensor,
    found_inf: Tensor | None,
    lr: Tensor,
    weight_decay: Tensor,
    share: Tensor,
    share_sq: Tensor,
    log_beta1: Tensor,
    log_beta2: Tensor,
    eps: Tensor,
) -> None:
    """Update weights and moments in place by the formulas of torch's fused kernel, in the master weights' dtype.

    share, share_sq: 1 - beta1 and 1 - beta2.  Scalars have no dimensions, and the factor has one element.
    """
    dtype = master.dtype
    lr, eps, steps = lr.to(dtype), eps.to(dtype), step.to(dtype)
    values = gradient.to(dtype) * factor
    first = exp_avg + (values - exp_avg) * share.to(dtype)
    second = exp_avg_sq + (values * values - exp_avg_sq) * share_sq.to(dtype)
    # 1 - beta ** steps, which would lose most digits of its first steps in float32.
    correction, correction_sq = -torch.expm1(steps * log_beta1.to(dtype)), -torch.expm1(steps * log_beta2.to(dtype))
    decayed = master - lr * weight_decay.to(dtype) * master
    updated = decayed - lr / correction * first / (second.sqrt() / correction_sq.sqrt() + eps)
    for target, value in ((master, updated), (exp_avg, first), (exp_avg_sq, second)):
        target.copy_(value if found_inf is None else torch.where(found_inf > 0, target, value))


class Elementwise:
    """A torch optimizer with its own groups and learning rates; parameters it was not given stay as they are.

    The host skips a step on overflow, so each step of an fp16 run waits for the device once.
    """

    moments: tuple[str, ...] = ()
    code_values: Mapping[str, Tensor] = MappingProxyType({})
    keeps_state = True
    skips_on_host = True

    def __init__(self, optimizer: TorchOptimizer) -> None:
        self.optimizer = optimizer
        self._runs: list[ElementRun] = []
        self._positions: dict[int, int] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        groups = range(len(self.optimizer.template.param_groups))
        return tuple(dict.fromkeys(name for group in groups for name in self.optimizer.state_names(group)))

    @property
    def options(self) -> list[dict[str, Any]]:
        return self.optimizer.template.param_groups

    def group_of(self, spec: ParamSpec, parameter: nn.Parameter) -> int:
        group = self.optimizer.group_of(parameter)
        return NOT_UPDATED if group is None else group

    def bind(self, runs: Sequence[ElementRun]) -> None:
        self._place(runs)
        self.optimizer.bind([FlatRun(run.master, run.group) for run in runs if run.group != NOT_UPDATED])

    def divide(self, index: int, parts: Sequence[ElementRun]) -> None:
        if index in self._positions:
            self.optimizer.divide(self._positions[index], [part.master for part in parts])
        self._place([*self._runs[:index], *parts, *self._runs[index + 1 :]])

    def _place(self, runs: Sequence[ElementRun]) -> None:
        """Number the runs that the optimizer updates."""
        self._runs = list(runs)
        updated = [index for index, run in enumerate(runs) if run.group != NOT_UPDATED]
        self._positions = {index: place for place, index in enumerate(updated)}

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        if index not in self._positions:
            return
        position = self._positions[index]
        lease = buffers.lease(run.master.numel(), run.master.dtype)
        gradient = scaled(run.gradient, inputs.factor, lease.tensor)
        is_away = not self._runs[index].master.numel()  # between two updates, with its state, if it has any
        if is_away:
            self.optimizer.attach(position, run.master, run.moments)
        options = None if inputs.options is None else inputs.options[run.group]
        self.optimizer.step_run(position, gradient, lr=inputs.lr, options=options)
        if is_away:
            self.optimizer.detach(position, run.moments)
        lease.release()

    def state(self, index: int, run: ElementRun) -> Mapping[str, Tensor]:
        return self.optimizer.state_of(self._positions[index]).tensors if index in self._positions else {}

    def numbers(self, index: int) -> Mapping[str, float] | None:
        return self.optimizer.numbers(self._positions[index]) if index in self._positions else None

    def start(self, index: int, numbers: Mapping[str, float] | None) -> None:
        if index in self._positions:
            self.optimizer.start(self._positions[index], numbers)


def piece_numel(run: ElementRun) -> int:
    """Return the elements of a run that are updated at once: on a CPU what stays in its cache, else all."""
    numel = run.master.numel()
    return min(numel, _CACHED_NUMEL) if run.master.device.type == "cpu" else numel


def scaled(gradient: Tensor, factor: Tensor, memory: Tensor) -> Tensor:
    """Return gradient * factor, written to `memory` in its dtype; detached, in case the pass had create_graph."""
    gradient, target = gradient.detach(), memory[: gradient.numel()]
    if gradient.dtype != target.dtype and gradient.device.type == "cpu":
        # A CPU would widen the gradient into memory of its own first, which takes longer than two passes in the cache.
        return target.copy_(gradient).mul_(factor)
    return torch.mul(gradient, factor, out=target)


def advance(step: Tensor, inputs: StepInputs) -> None:
    """Count one optimizer step in `step`, a float32 scalar, unless it is skipped."""
    step.add_(1.0 if inputs.found_inf is None else 1.0 - inputs.found_inf)
