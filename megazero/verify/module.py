"""Verification of a user's own module: its training by the library's engine beside plain PyTorch on one process.

Both train in float64 from data-parallel rank 0's first values, on the same micro-batches: in step s, micro-batch m of
rank r of n, of a micro-batches a step, is batch (s * a + m) * n + r.  On one process, rank 0 goes through all of them,
without megazero: the module, `loss.backward()`, a torch optimizer of the same class and options.  torch's random state
is set for each batch, so that both drop out the same.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from megazero.comm.mesh import Mesh
from megazero.config.engine_sections import PrecisionConfig
from megazero.config.optimizers import in_numbers
from megazero.errors import Problem, TrainingError, UsageError
from megazero.library.config import EngineConfig, load_engine_config
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.initialize import initialize
from megazero.library.optimizers import MakeOptimizer
from megazero.parallel.param_spec import named_specs
from megazero.verify.configuration import describe_stage, exact
from megazero.verify.full_tensors import Copies, FullTensors, OwnedTensors
from megazero.verify.side_by_side import Comparison, PrintLine, least_weight
from megazero.verify.verdict import Report
from megazero.zero.engine import Engine
from megazero.zero.parameters.guard import handle_of

MakeModel = Callable[[], nn.Module]
LossOf = Callable[[Any, Any], Tensor]


def verify_module(
    model_fn: MakeModel,
    loss_fn: LossOf,
    batches: Iterable[Any],
    config: EngineConfig | Mapping[str, Any] | str | Path,
    *,
    mesh: Any = None,
    optimizer: MakeOptimizer | None = None,
    steps: int | None = None,
    raises: bool = False,
    print_line: PrintLine = lambda line: None,
) -> Report:
    """Train a module in a layout and on one process, in float64, and return how every parameter compares.

    A collective call of all processes of torch's default group, or else of the launcher's job (one, without either),
    with the same report on every rank: `agrees`, and `lines()` for a user to read.
    model_fn: makes the module; called twice.  loss_fn(model, batch): returns a batch's mean loss, of the engine or of
    the module.  batches: the same on every rank, one for each micro-batch of each rank and step; those beyond the last
    whole step are not used.  Floating-point tensors in them become float64.
    config, mesh: those of `megazero.initialize`, without tensor parallelism; precision, autocast, formats of buffers,
    quantized wires and late updates are overridden.  optimizer: a function that makes one of the parameters; None: the
    configuration's.
    steps: at most so many; None: all batches'.  raises: raise TrainingError with the report if it does not agree.
    print_line: prints a line about progress.
    """
    settings = _in_float64(load_engine_config(config))
    model, plain = _make(model_fn), _make(model_fn)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if (names := {name: value.shape for name, value in values.items()}) != _shapes(plain):
        rule = "the function that makes the module makes the same parameters whenever it is called"
        raise UsageError(Problem(f"{len(names)} parameters, and {len(_shapes(plain))} at the second call", rule))
    if not isinstance(batches, Iterable):
        raise UsageError(Problem(f"batches of type {type(batches).__name__}", "batches are a list or another iterable"))
    engine = initialize(model, settings, mesh, optimizer)
    try:
        own = engine.optimizer
        if own is None:
            rule = "steps are compared, and an optimizer makes them"
            given = "a configuration without an optimizer, or a module without parameters that are trained"
            raise UsageError(Problem(given, rule, '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}'))
        sides = _sides(engine, plain, values, loss_fn, list(batches), settings, optimizer)
        accumulation = engine.gradient_accumulation_steps()
        report = Comparison(engine.mesh, *sides, print_line).run(
            sides[0].num_steps if steps is None else min(steps, sides[0].num_steps),
            layout=f"{describe_stage(settings.zero)}, micro-batches a step: {accumulation}",
            least_weight=lambda norms: _least_weight(own, norms, settings),
        )
    finally:
        engine.close()
    if raises and not report.agrees:
        raise TrainingError("\n".join(report.lines()))
    return report


class _Core(NamedTuple):
    """A user's module and the parts of its engine."""

    model: nn.Module
    engine: Engine
    mesh: Mesh


def _sides(
    engine: DataParallelEngine,
    plain: nn.Module,
    values: Mapping[str, Tensor],
    loss_fn: LossOf,
    batches: list[Any],
    settings: EngineConfig,
    optimizer: MakeOptimizer | None,
) -> tuple["_EngineSide", "_PlainSide | None"]:
    """Return the training by the engine, and on rank 0 that of `plain` from these first values.

    Raises UsageError if the mesh is tensor parallel, or if there are too few batches.
    """
    mesh = engine.mesh
    if mesh.axis("tp").size > 1:
        given = f"a mesh of {mesh.axis('tp').size} tensor-parallel ranks"
        raise UsageError(Problem(given, "one process trains the module too, so every rank has all of it", "dp alone"))
    every = [tree_map(lambda leaf: _wide(leaf, mesh.device), batch) for batch in batches]
    here = _EngineSide(engine, loss_fn, every)
    if here.num_steps < 1:
        rule = "each rank has a batch for each micro-batch of a step"
        needed = f"{engine.gradient_accumulation_steps() * mesh.axis('dp').size} batches for each step"
        raise UsageError(Problem(f"{len(every)} batches for 0 steps", rule, needed))
    if mesh.rank:
        return here, None
    with torch.no_grad():
        for name, parameter in plain.to(mesh.device).named_parameters():
            parameter.copy_(values[name])
    return here, _PlainSide(plain, engine, optimizer, loss_fn, every, settings)


class _EngineSide:
    """The training by the library's engine.  num_steps: the steps for which there are batches."""

    def __init__(self, engine: DataParallelEngine, loss_fn: LossOf, batches: list[Any]) -> None:
        self._engine, self._loss_fn, self._batches = engine, loss_fn, batches
        self.num_steps = len(batches) // (engine.gradient_accumulation_steps() * engine.mesh.axis("dp").size)
        core = _Core(engine.module, engine.zero_engine, engine.mesh)
        self._specs = {spec.name: spec for spec, parameter in named_specs(engine.module) if parameter.requires_grad}
        self.tensors: FullTensors = OwnedTensors(core, gradient_factor=lambda: engine.zero_engine.gradient_scale)

    def parameters(self) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(spec.name, spec.full_shape, False) for spec in self._specs.values()]

    def train(self, number: int) -> float:
        engine, ranks = self._engine, self._engine.mesh.axis("dp")
        accumulation = engine.gradient_accumulation_steps()
        total = torch.zeros((), dtype=torch.float64, device=engine.mesh.device)
        for micro in range((number - 1) * accumulation, number * accumulation):
            index = micro * ranks.size + ranks.rank
            with _seeded(index, engine.mesh.device):
                loss = checked_loss(self._loss_fn(engine, self._batches[index]))
                engine.backward(loss)
            total += loss.detach() / (accumulation * ranks.size)
        engine.mesh.world.all_reduce_scalars(total).wait()
        engine.zero_engine.finish_reductions()
        return total.item()

    def finish(self) -> float:
        self._engine.step()
        return self._engine.get_global_grad_norm() or 0.0

    def ensure_parameters(self) -> None:
        self._engine.zero_engine.ensure_parameters()


class _PlainSide:
    """The training of all ranks' batches by plain PyTorch."""

    def __init__(
        self,
        model: nn.Module,
        engine: DataParallelEngine,
        optimizer: MakeOptimizer | None,
        loss_fn: LossOf,
        batches: list[Any],
        settings: EngineConfig,
    ) -> None:
        self._model, self._engine, self._loss_fn = model, engine, loss_fn
        self._batches, self._settings = batches, settings
        self._trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._optimizer = (
            _of_the_same_kind(engine, self._trained) if optimizer is None else optimizer(list(self._trained.values()))
        )
        self._gradients: dict[str, Tensor] = {}
        self.tensors: FullTensors = self

    def parameters(self) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(name, tuple(parameter.shape), False) for name, parameter in self._trained.items()]

    def train(self, number: int) -> float:
        size, accumulation = self._engine.mesh.axis("dp").size, self._engine.gradient_accumulation_steps()
        share = accumulation * (1 if self._settings.gradient_allreduce_op == "sum" else size)
        self._optimizer.zero_grad()
        total, a_step = 0.0, accumulation * size
        for index in range((number - 1) * a_step, number * a_step):
            with _seeded(index, self._engine.mesh.device):
                loss = checked_loss(self._loss_fn(self._model, self._batches[index]))
                torch.autograd.backward(loss / share)
            total += loss.item() / a_step
        for parameter in self._trained.values() if self._settings.update_unused_parameters else ():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grads = {name: parameter.grad for name, parameter in self._trained.items()}
        self._gradients = {name: grad.clone() for name, grad in grads.items() if grad is not None}
        return total

    def finish(self) -> float:
        if self._settings.gradient_clipping:
            nn.utils.clip_grad_norm_(self._trained.values(), self._settings.gradient_clipping)
        for group, rate in zip(self._optimizer.param_groups, self._engine.get_lr(), strict=True):
            group["lr"] = rate
        self._optimizer.step()
        squares = [gradient.square().sum() for gradient in self._gradients.values()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def ensure_parameters(self) -> None:
        return None

    def full(self, name: str, kind: str, shape: tuple[int, ...]) -> Tensor:
        """Return a gradient, zeros where there is none, or a weight."""
        weight = self._trained[name].detach()
        return weight.clone() if kind == "weight" else self._gradients.get(name, torch.zeros_like(weight)).clone()

    def copies(self, kind: str) -> Copies:
        raise AssertionError("one process has no copies")


def _of_the_same_kind(engine: DataParallelEngine, trained: Mapping[str, nn.Parameter]) -> Optimizer:
    """Return a torch optimizer over these parameters of the class and options of the engine's own."""
    name_of = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    template = engine.optimizer
    assert template is not None, "which has been checked before"
    groups = [
        {**group, "params": [trained[name_of[id(parameter)]] for parameter in group["params"]]}
        for group in copy.copy(template.param_groups)
    ]
    kind: Callable[..., Optimizer] = type(template)
    return kind(groups)


def _least_weight(optimizer: Optimizer, norms: list[float], settings: EngineConfig) -> float:
    groups = optimizer.param_groups
    lr, epsilon = max(group["lr"] for group in groups), min(group.get("eps", 1.0) for group in groups)
    return least_weight(norms, lr=lr, clip_grad=settings.gradient_clipping, epsilon=epsilon or 1e-8)


def _in_float64(config: EngineConfig) -> EngineConfig:
    """Return the same layout, exact, with all numbers in float64, those of moments too."""
    return replace(
        config,
        precision=PrecisionConfig(precision="fp64"),
        zero=exact(config.zero),
        optimizer=config.optimizer and replace(config.optimizer, type=in_numbers(config.optimizer.type)),
        autocast=None,
        buffer_dtype=None,
        keep_in_fp32=(),
    )


def _make(model_fn: MakeModel) -> nn.Module:
    """Return a module in float64; raise UsageError if it is none, or is not whole."""
    model = model_fn()
    if not isinstance(model, nn.Module):
        given = f"{getattr(model_fn, '__name__', 'the function')}() that returns {type(model).__name__}"
        raise UsageError(Problem(given, "the function that makes the module returns a torch.nn.Module"))
    if any(handle_of(parameter) is not None for parameter in model.parameters()):
        rule = "one process trains the module too, so its parameters are whole when it is made"
        raise UsageError(Problem("a module made under megazero.zero.Init", rule, "a smaller module, without Init"))
    return model.double()


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _wide(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, torch.float64 if leaf.is_floating_point() else leaf.dtype)


def checked_loss(loss: Any) -> Tensor:
    """Return the loss; raise UsageError unless it is one number that a backward can begin with."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        shape = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        without = ", without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        rule = "the loss of a batch is a scalar tensor, computed from the module's parameters"
        raise UsageError(Problem(f"a loss function that returns {shape}{without}", rule, "loss.mean()"))
    return loss.reshape(())


@contextmanager
def _seeded(index: int, device: torch.device) -> Iterator[None]:
    """Return a context in which torch's random numbers are those of batch `index`; its end restores the state."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(index)
        yield
