"""Whether a layout computes what one process computes: both train side by side in float64, and are compared.

    every rank    build ---- step 1 ---- compare ---- step 2 ---- compare ---- ... ---- weights, copies
    rank 0 too    build ---- step 1 ----/        ---- step 2 ----/                     /
    (one process: no partition, no recomputation, communicators of one rank)

Compared are the loss and the gradient norm of every step; every gradient, by the parameter's name, after reduction;
in the end every weight; and what several ranks hold the same of, to the bit.  Weights are only looked at in the end,
since reading them waits for what hands them to other ranks, and a step that forgets to wait would go unnoticed.
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
from megazero.train.build import batch_layout, build_core, padded_vocab_size, step_parts
from megazero.train.inputs import RunInputs
from megazero.train.resolve_activations import settle_activations
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

Tell = Callable[[str], None]

_SILENCE_SECONDS = 5.0
# A tensor is another one times a factor if nothing is left of it beyond this share of its largest element.
_FACTOR_BOUND = 1e-6
# With this epsilon and below it, Adam makes more of rounding errors in gradients than the bound of weights allows.
_USUAL_EPSILON = 1e-8


def verify(
    config: RunConfig,
    mesh: Mesh,
    buffers: FusedBuffers,
    inputs: RunInputs,
    *,
    steps: int = DEFAULT_STEPS,
    tell: Tell = lambda line: None,
) -> Report:
    """Compare the layout of `mesh` with one process; a collective call with the same report on every rank.

    config: the user's, checked; what it says of precision and dropout doesn't count.  buffers: those that the mesh's
    communicators borrow from.  tell: is given a line when one is due.
    """
    comparison = _Comparison(config, mesh, buffers, inputs, tell)
    try:
        return comparison.run(steps)
    finally:
        comparison.close()


class _Side:
    """One of the two runs on this rank."""

    def __init__(self, config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs) -> None:
        core = build_core(config, mesh, buffers, vocab_size=inputs.vocab_size)
        self._parts = step_parts(config, core)
        self._loader = BatchLoader(inputs.train, batch_layout(config, mesh, inputs.eod), prefetch=0)
        self.engine = core.engine
        self.tensors = OwnedTensors(core)

    def step(self, lr: float) -> tuple[float, float]:
        """Loss and gradient norm of the next step."""
        report = training_step(self._parts, next(self._loader), StepControls(lr, 1.0))
        return report.loss.item(), report.grad_norm.item()

    def close(self) -> None:
        self._loader.close()
        self.engine.close()


class _Comparison:
    """The two runs, and what is known of the whole model."""

    def __init__(self, config: RunConfig, mesh: Mesh, buffers: FusedBuffers, inputs: RunInputs, tell: Tell) -> None:
        self._pace = _Pace(tell)
        self._mesh = mesh
        config = in_float64(config)
        config = replace(config, model=replace(config.model, vocab_size=inputs.vocab_size))
        padded = padded_vocab_size(config, inputs.vocab_size)
        settled, reasons = settle_activations(config, mesh, vocab_size=inputs.vocab_size, padded_vocab_size=padded)
        for reason in reasons:
            tell(reason)
        self._config = replace(config, activations=settled)
        self._rate = LearningRate.from_config(
            config.optimizer, train_iters=derived.train_iters(config, mesh.topology.world_size)
        )
        self._here = _Side(self._config, mesh, buffers, inputs)
        self._one = self._one_process(inputs) if mesh.rank == 0 else None
        self._parameters = self._agree_on_parameters()
        self._num_copies = 0

    def run(self, steps: int) -> Report:
        """Train, and compare."""
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
        """The plain run, on this rank alone."""
        config, device = on_one_process(self._config, self._mesh.topology.world_size), self._mesh.device
        buffers = FusedBuffers(0, device)
        return _Side(config, make_mesh(Topology(), 0, device, buffers), buffers, inputs)

    def _agree_on_parameters(self) -> tuple[Parameter, ...]:
        """All of the model, in its order, as rank 0 knows it; where they lie, every rank tells of its own."""
        mine: dict[str, Any] = {"stage": self._mesh.coordinate("pp"), "held": list(self._here.tensors.specs)}
        if self._one is not None:
            mine["model"] = [(s.name, s.full_shape, "tp" in s.sharded_axes) for s in self._one.tensors.specs.values()]
        told = gather_json(self._mesh.world, mine, self._mesh.device)
        stages: dict[str, set[int]] = {}
        for rank in told:
            for name in rank["held"]:
                stages.setdefault(name, set()).add(rank["stage"])
        return tuple(
            Parameter(name, tuple(shape), tuple(sorted(stages[name])), cut) for name, shape, cut in told[0]["model"]
        )

    def _step(self, number: int, steps: int) -> StepComparison:
        """Train a step on both sides and compare it."""
        lr = self._rate.at(number - 1)
        self._pace.tell(f"step {number} of {steps}: training on one process")
        loss, norm = self._one.step(lr) if self._one is not None else (0.0, 0.0)
        self._pace.tell(f"step {number} of {steps}: training in the layout")
        loss_here, norm_here = self._here.step(lr)
        figures = torch.tensor([loss, norm], dtype=torch.float64, device=self._mesh.device)
        self._mesh.world.broadcast(figures, 0).wait()
        loss, norm = figures.tolist()
        doing = f"step {number} of {steps}: comparing gradients"
        gradients = tuple(self._differences("gradient", NORM_SHARE * norm, doing))
        copies = self._copies("gradient")
        return StepComparison(number, Figure(loss_here, loss), Figure(norm_here, norm), gradients, copies)

    def _differences(self, kind: str, least: float, doing: str) -> Iterator[TensorDifference]:
        """How every parameter's `kind` differs, measured by its largest element and `least` at least; a collective."""
        for index, parameter in enumerate(self._parameters):
            self._pace.tell(f"{doing}, {index} of {len(self._parameters)}")
            found = self._here.tensors.full(parameter.name, kind, parameter.shape)
            self._mesh.world.all_reduce(found).wait()
            if self._one is not None:
                expected = self._one.tensors.full(parameter.name, kind, parameter.shape)
            else:
                expected = torch.empty_like(found)
            self._mesh.world.broadcast(expected, 0).wait()
            yield difference(parameter.name, found, expected, least=least)

    def _copies(self, kind: str) -> tuple[CopyDifference, ...]:
        """Copies that are not the same; a collective."""
        told = gather_json(self._mesh.world, self._here.tensors.copies(kind), self._mesh.device)
        self._num_copies += _num_copies(self._mesh.topology, told[0])
        return copy_differences(self._mesh.topology, told)


class _Pace:
    """Tells what is being done when nothing has been told for a while."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._last = time.monotonic()

    def tell(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= _SILENCE_SECONDS:
            self._last = now
            self._tell(text)


def difference(name: str, found: Tensor, expected: Tensor, *, least: float) -> TensorDifference:
    """How a tensor differs from the expected one, of the same shape, measured by its largest element or by `least`."""
    apart = (found - expected).abs()
    highest = float(expected.abs().max())
    scale = max(highest, least)
    largest = float(apart.max())
    beyond = int((~(apart <= BOUND * scale)).sum())
    if not largest < float("inf"):
        return TensorDifference(name, float("inf"), scale, beyond, found.numel())
    return TensorDifference(name, largest, scale, beyond, found.numel(), _factor(found, expected, highest))


def _factor(found: Tensor, expected: Tensor, highest: float) -> float | None:
    """What `expected` has to be multiplied with to become `found`, if anything does that."""
    if not highest > 0.0:
        return None
    scaled = expected / highest  # squares of small gradients would be lost
    factor = float((found / highest * scaled).sum() / scaled.square().sum())
    rest = float((found / highest - factor * scaled).abs().max())
    return factor if rest <= _FACTOR_BOUND * abs(factor) else None


def _least_weight(config: OptimizerConfig, norms: list[float]) -> float:
    """What weights are measured by at least: the learning rate, or what Adam makes of gradients' rounding errors."""
    clipped = [norm * float(clip_coefficient(torch.tensor(norm), config.clip_grad)) for norm in norms]
    return config.lr * max(1.0, max(clipped) * _USUAL_EPSILON / config.adam_eps)


def _num_copies(topology: Topology, copies: Mapping[str, Mapping[str, Mapping[str, str]]]) -> int:
    """How many parameters of a rank have copies elsewhere, counted along every axis that has several ranks."""
    return sum(
        len(digests) for axis in ("tp", ENDS, "dp") if topology.size(axis) > 1 for digests in copies[axis].values()
    )
