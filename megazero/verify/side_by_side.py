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
from typing import Any

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
from megazero.parallel.topology import ENDS, Topology
from megazero.train.build import batch_layout, build_components, padded_vocab_size, step_context
from megazero.train.inputs import RunInputs
from megazero.train.resolve_activations import resolve_activations
from megazero.train.step import StepControls, training_step
from megazero.verify.configuration import DEFAULT_STEPS, describe_layout, in_float64, on_one_process
from megazero.verify.full_tensors import OwnedTensors
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
    comparison = _Comparison(config, mesh, buffers, inputs, print_line)
    try:
        return comparison.run(steps)
    finally:
        comparison.close()


class _Side:
    """One of the two runs on this rank."""

    def __init__(self, config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs) -> None:
        core = build_components(config, mesh, buffers, vocab_size=inputs.vocab_size)
        self._parts = step_context(config, core)
        self._loader = BatchLoader(inputs.train, batch_layout(config, mesh, inputs.eod), prefetch=0)
        self.engine = core.engine
        self.attention = core.attention.line
        self.tensors = OwnedTensors(core)

    def step(self, lr: float, momentum: float | None) -> tuple[float, float]:
        """Train the next step; return its loss and gradient norm."""
        report = training_step(self._parts, next(self._loader), StepControls(lr, 1.0, momentum=momentum))
        return report.loss.item(), report.grad_norm.item()

    def close(self) -> None:
        self._loader.close()
        self.engine.close()


class _Comparison:
    """The comparison of the two runs, parameter by parameter."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs, print_line: PrintLine
    ) -> None:
        self._progress = _Progress(print_line)
        self._mesh = mesh
        config = in_float64(config)
        config = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
        padded = padded_vocab_size(config, inputs.vocab_size)
        resolved, reasons = resolve_activations(config, mesh, vocab_size=inputs.vocab_size, padded_vocab_size=padded)
        self._config = replace(config, activations=resolved)
        self._rate = LearningRate.from_config(
            config.optimizer, train_iters=derived.train_iters(config, mesh.topology.world_size)
        )
        self._here = _Side(self._config, mesh, buffers, inputs)
        for line in filter(None, (*reasons, self._here.attention)):
            print_line(line)
        self._one = self._one_process(inputs) if mesh.rank == 0 else None
        self._parameters = self._gather_parameters()
        self._num_copies = 0

    def run(self, steps: int) -> Report:
        """Train all steps on both sides, and compare them."""
        compared = [self._step(number, steps) for number in range(1, steps + 1)]
        self._here.engine.ensure_parameters()
        least = _least_weight(self._config.optimizer, [step.norm.one for step in compared])
        weights = tuple(self._differences("weight", least, f"comparing weights after step {steps}"))
        copies = self._copies("weight")
        return Report(
            topology=self._mesh.topology,
            layout=describe_layout(self._config),
            parameters=self._parameters,
            steps=tuple(compared),
            weights=weights,
            copies=copies,
            num_copies=self._num_copies,
        )

    def close(self) -> None:
        for side in filter(None, (self._here, self._one)):
            side.close()

    def _one_process(self, inputs: RunInputs) -> _Side:
        """Build the plain run, on this rank alone."""
        config, device = on_one_process(self._config, self._mesh.topology.world_size), self._mesh.device
        buffers = FusedBuffers(0, device)
        return _Side(config, make_mesh(Topology(), 0, device, buffers), buffers, inputs)

    def _gather_parameters(self) -> tuple[Parameter, ...]:
        """Return all parameters of the model, in rank 0's order, with the pipeline stages that hold each."""
        mine: dict[str, Any] = {"stage": self._mesh.coordinate("pp"), "held": list(self._here.tensors.specs)}
        if self._one is not None:
            mine["model"] = [(s.name, s.full_shape, "tp" in s.sharded_axes) for s in self._one.tensors.specs.values()]
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
        lr, momentum = self._rate.at(number - 1), self._rate.momentum(number - 1)
        self._progress.show(f"step {number} of {steps}: training on one process")
        loss, norm = self._one.step(lr, momentum) if self._one is not None else (0.0, 0.0)
        self._progress.show(f"step {number} of {steps}: training in the layout")
        loss_here, norm_here = self._here.step(lr, momentum)
        figures = torch.tensor([loss, norm], dtype=torch.float64)
        self._mesh.control.broadcast(figures, 0).wait()
        loss, norm = figures.tolist()
        doing = f"step {number} of {steps}: comparing gradients"
        gradients = tuple(self._differences("gradient", NORM_SHARE * norm, doing))
        copies = self._copies("gradient")
        return StepComparison(number, Figure(loss_here, loss), Figure(norm_here, norm), gradients, copies)

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
    """Return the scale of small weights: the learning rate, or Adam's update from gradients' rounding errors."""
    clipped = [norm * float(clip_coefficient(torch.tensor(norm), config.clip_grad)) for norm in norms]
    return config.lr * max(1.0, max(clipped) * _USUAL_EPSILON / config.adam_eps)


def _num_copies(topology: Topology, copies: Mapping[str, Mapping[str, Mapping[str, str]]]) -> int:
    """Return how many parameters of a rank have copies elsewhere, counted along every axis that has several ranks."""
    return sum(
        len(digests) for axis in ("tp", ENDS, "dp") if topology.size(axis) > 1 for digests in copies[axis].values()
    )
