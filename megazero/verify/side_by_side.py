"""Verification of a layout: it and one process train side by side in float64, and are compared.

    every rank    build ---- step 1 ---- compare ---- step 2 ---- compare ---- ... ---- weights, copies
    rank 0 too    build ---- step 1 ----/        ---- step 2 ----/                     /
    (one process: no partition, no recomputation, communicators of one rank)

Compared are the loss and the gradient norm of every step; every gradient, by the parameter's name, after reduction;
at the end every weight; and the copies that several ranks hold, to the bit.  Weights are only read at the end, since
reading them waits for their all-gather, and a step without that wait would go unnoticed.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megazero.comm.mesh import Mesh, gather_json
from megazero.comm.startup import make_mesh
from megazero.config import derived
from megazero.config.engine_sections import OptimizerConfig
from megazero.config.run import RunConfig
from megazero.data.loader import BatchLoader
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.grad_norm import clip_coefficient
from megazero.optim.schedules import LearningRate
from megazero.parallel.param_spec import named_specs
from megazero.parallel.topology import ENDS, REPLICAS, Topology
from megazero.train.build import batch_layout, build_components, step_context
from megazero.train.pipeline_stages import activation_config
from megazero.train.start.inputs import RunInputs
from megazero.train.step import StepControls, training_step
from megazero.verify.configuration import DEFAULT_STEPS, describe_layout, in_float64, on_one_process
from megazero.verify.full_tensors import FullTensors, OwnedTensors
from megazero.verify.verdict import (
    BOUND,
    NORM_SHARE,
    CopyDifference,
    Figure,
    Parameter,
    Report,
    StepComparison,
    TensorDifference,
    copy_differences,
)

PrintLine = Callable[[str], None]

_SILENCE_SECONDS = 5.0
# A tensor is another one times a factor if the rest is below this share of its largest element.
_FACTOR_BOUND = 1e-6
# With this epsilon and below it, Adam amplifies rounding errors of gradients beyond the bound of weights.
_USUAL_EPSILON = 1e-8


def verify(
    config: RunConfig,
    mesh: Mesh,
    buffers: FusedBuffers,
    inputs: RunInputs,
    *,
    steps: int = DEFAULT_STEPS,
    print_line: PrintLine = lambda line: None,
) -> Report:
    """Compare the layout of `mesh` with one process; a collective call with the same report on every rank.

    config: the user's, checked; its precision and dropout are overridden.  buffers: those that the mesh's communicators
    borrow from.  print_line: prints a line about progress.
    """
    config = in_float64(config)
    config = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
    config = replace(config, activations=activation_config(config))
    sides = _run_sides(config, mesh, buffers, inputs, print_line)
    try:
        return Comparison(mesh, *sides, print_line).run(
            steps, layout=describe_layout(config), least_weight=lambda norms: _least_weight(config.optimizer, norms)
        )
    finally:
        for side in filter(None, sides):
            side.close()


class Side(Protocol):
    """One of the two trainings on this rank: the layout's, or that of one process."""

    tensors: FullTensors

    def parameters(self) -> list[tuple[str, tuple[int, ...], bool]]:
        """Return the name and full shape of each parameter here, and if tensor-parallel ranks hold slices of it."""

    def train(self, number: int) -> float:
        """Train step `number`, counted from 1, as far as its gradients; return the loss."""

    def finish(self) -> float:
        """Finish the step; return its gradient norm before clipping.  One process still has the step's gradients."""

    def ensure_parameters(self) -> None:
        """Wait until the weights of the last step are in place."""


class _RunSide:
    """A run of pretrain_gpt.py, whose step leaves its gradients where they are."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs, rate: LearningRate
    ) -> None:
        core = build_components(config, mesh, buffers, vocab_size=inputs.vocab_size)
        self._parts = step_context(config, core)
        sizes = derived.step_sizes(config, mesh.topology.world_size)
        layout, self._rows = batch_layout(config, mesh, inputs.eod), derived.row_lengths(config)
        self._loader = BatchLoader(inputs.train, layout, prefetch=0, sizes=sizes, lengths=self._rows)
        self._sizes, self._rate, self._norm = sizes, rate, 0.0
        self._engine = core.engine
        self._specs = {spec.name: spec for spec, _ in named_specs(core.model)}
        self.attention = core.attention.line
        self.tensors: FullTensors = OwnedTensors(core)

    def parameters(self) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(spec.name, spec.full_shape, "tp" in spec.sharded_axes) for spec in self._specs.values()]

    def train(self, number: int) -> float:
        tokens = self._rows.tokens_after(number - 1, self._sizes)
        progress = self._rate.progress(number - 1, self._loader.consumed_samples, tokens)
        momentum, weight_decay = self._rate.momentum(progress), self._rate.weight_decay_at(progress)
        decoupled_lr = self._rate.decoupled_at(progress)
        controls = StepControls(self._rate.at(progress), 1.0, False, momentum, weight_decay, decoupled_lr)
        report = training_step(self._parts, next(self._loader), controls)
        self._norm = report.grad_norm.item()
        return report.loss.item()

    def finish(self) -> float:
        return self._norm

    def ensure_parameters(self) -> None:
        self._engine.ensure_parameters()

    def close(self) -> None:
        self._loader.close()
        self._engine.close()


def _run_sides(
    config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs, print_line: PrintLine
) -> tuple[_RunSide, _RunSide | None]:
    """Build the layout, and on rank 0 the plain run too; config: the layout's in float64."""
    rate = LearningRate.from_config(config.optimizer, derived.run_length(config, mesh.topology.world_size))
    here = _RunSide(config, mesh, buffers, inputs, rate)
    if here.attention:
        print_line(here.attention)
    if mesh.rank:
        return here, None
    alone = FusedBuffers(0, mesh.device)
    one = on_one_process(config, mesh.topology.world_size)
    return here, _RunSide(one, make_mesh(Topology(), 0, mesh.device, alone), alone, inputs, rate)


class Comparison:
    """The comparison of the two sides, parameter by parameter; every rank calls the same methods."""

    def __init__(self, mesh: Mesh, here: Side, one: Side | None, print_line: PrintLine) -> None:
        """one: the training of one process, on rank 0 alone."""
        self._progress = _Progress(print_line)
        self._mesh, self._here, self._one = mesh, here, one
        self._parameters = self._gather_parameters()
        self._num_copies = 0

    def run(self, steps: int, *, layout: str, least_weight: Callable[[list[float]], float]) -> Report:
        """Train all steps on both sides, and compare them.

        layout: describes the layout beyond its degrees.  least_weight: returns the scale of small weights for the
        gradient norms of all steps.
        """
        compared = [self._step(number, steps) for number in range(1, steps + 1)]
        self._here.ensure_parameters()
        least = least_weight([step.norm.one for step in compared])
        weights = tuple(self._differences("weight", least, f"comparing weights after step {steps}"))
        copies = self._copies("weight")
        return Report(
            topology=self._mesh.topology,
            layout=layout,
            parameters=self._parameters,
            steps=tuple(compared),
            weights=weights,
            copies=copies,
            num_copies=self._num_copies,
        )

    def _gather_parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters of the model, in rank 0's order, with the pipeline stages that hold each."""
        held = [name for name, _, _ in self._here.parameters()]
        mine: dict[str, Any] = {"stage": self._mesh.coordinate("pp"), "held": held}
        if self._one is not None:
            mine["model"] = self._one.parameters()
        ranks = gather_json(self._mesh.control, mine)
        stages: dict[str, set[int]] = {}
        for rank in ranks:
            for name in rank["held"]:
                stages.setdefault(name, set()).add(rank["stage"])
        return tuple(
            Parameter(name, tuple(shape), tuple(sorted(stages[name])), cut) for name, shape, cut in ranks[0]["model"]
        )

    def _step(self, number: int, steps: int) -> StepComparison:
        """Train a step on both sides and compare it."""
        self._progress.show(f"step {number} of {steps}: training on one process")
        loss, norm = (self._one.train(number), self._one.finish()) if self._one is not None else (0.0, 0.0)
        self._progress.show(f"step {number} of {steps}: training in the layout")
        loss_here = self._here.train(number)
        figures = torch.tensor([loss, norm], dtype=torch.float64)
        self._mesh.control.broadcast(figures, 0).wait()
        loss, norm = figures.tolist()
        doing = f"step {number} of {steps}: comparing gradients"
        gradients = tuple(self._differences("gradient", NORM_SHARE * norm, doing))
        copies = self._copies("gradient")
        return StepComparison(number, Figure(loss_here, loss), Figure(self._here.finish(), norm), gradients, copies)

    def _differences(self, kind: str, least: float, doing: str) -> Iterator[TensorDifference]:
        """Yield how every parameter's `kind` differs, relative to its largest element or to `least`; a collective."""
        for index, parameter in enumerate(self._parameters):
            self._progress.show(f"{doing}, {index} of {len(self._parameters)}")
            found = self._here.tensors.full(parameter.name, kind, parameter.shape)
            self._mesh.world.all_reduce(found).wait()
            if self._one is not None:
                expected = self._one.tensors.full(parameter.name, kind, parameter.shape)
            else:
                expected = torch.empty_like(found)
            self._mesh.world.broadcast(expected, 0).wait()
            yield difference(parameter.name, found, expected, least=least)

    def _copies(self, kind: str) -> tuple[CopyDifference, ...]:
        """Return the copies that are not the same; a collective."""
        digests = gather_json(self._mesh.control, self._here.tensors.copies(kind))
        self._num_copies += _num_copies(self._mesh.topology, digests[0])
        return copy_differences(self._mesh.topology, digests)


class _Progress:
    """Progress messages, printed when nothing has been printed for a while."""

    def __init__(self, print_line: PrintLine) -> None:
        self._print_line = print_line
        self._last = time.monotonic()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= _SILENCE_SECONDS:
            self._last = now
            self._print_line(text)


def difference(name: str, found: Tensor, expected: Tensor, *, least: float) -> TensorDifference:
    """Return how a tensor differs from the expected one, relative to its largest element or to `least`."""
    apart = (found - expected).abs()
    highest = float(expected.abs().max())
    scale = max(highest, least)
    largest = float(apart.max())
    beyond = int((~(apart <= BOUND * scale)).sum())
    if not largest < float("inf"):
        return TensorDifference(name, float("inf"), scale, beyond, found.numel())
    return TensorDifference(name, largest, scale, beyond, found.numel(), _factor(found, expected, highest))


def _factor(found: Tensor, expected: Tensor, highest: float) -> float | None:
    """Return the factor by which `found` is `expected`, if there is one."""
    if not highest > 0.0:
        return None
    scaled = expected / highest  # otherwise squares of small gradients would underflow
    factor = float((found / highest * scaled).sum() / scaled.square().sum())
    rest = float((found / highest - factor * scaled).abs().max())
    return factor if rest <= _FACTOR_BOUND * abs(factor) else None


def _least_weight(config: OptimizerConfig, norms: list[float]) -> float:
    return least_weight(norms, lr=config.lr, clip_grad=config.clip_grad, epsilon=config.adam_eps)


def least_weight(norms: list[float], *, lr: float, clip_grad: float, epsilon: float) -> float:
    """Return the scale of small weights: the learning rate, or Adam's update from gradients' rounding errors.

    norms: the gradient norms of all steps before clipping.
    """
    clipped = [norm * float(clip_coefficient(torch.tensor(norm), clip_grad)) for norm in norms]
    return lr * max(1.0, max(clipped) * _USUAL_EPSILON / epsilon)


def _num_copies(topology: Topology, copies: Mapping[str, Mapping[str, Mapping[str, str]]]) -> int:
    """Return how many parameters of a rank have copies elsewhere, counted along every axis that has several ranks."""
    return sum(
        len(digests)
        for axis in ("tp", ENDS, REPLICAS, "dp")
        if topology.size(axis) > 1
        for digests in copies[axis].values()
    )
