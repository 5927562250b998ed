"""A small model with every inconvenience for ZeRO's partitioning, and its training with and without the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from support.late_communicator import late_mesh
from support.processes import mesh_in_worker
from support.training import Saved, assemble, boxes
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.library.module.units import choose_units
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import AdamWSettings, FusedAdamW, StepInputs
from megazero.parallel.param_spec import Unit
from megazero.parallel.topology import Topology
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.plan import resolve

SETTINGS = AdamWSettings(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
LR = 1e-2
SAMPLES = 12  # samples of a global batch; 1, 2, 3, 4 and 6 divide it


class Awkward(nn.Module):
    """A model of odd sizes, with a parameter of one element that is used twice, and frozen, unused and tied ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(13, 11)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.middle = nn.Linear(11, 11)
        self.tied = self.middle.weight
        self.last = nn.Linear(11, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(torch.tanh(self.first(x)) * self.scale)
        x = torch.tanh(self.middle(x)) @ self.tied.t()
        return self.last(x) * self.scale


def make_model(dtype: torch.dtype = torch.float64) -> Awkward:
    torch.manual_seed(7)
    return Awkward().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(SAMPLES, 7, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.sin(x.sum(1, keepdim=True)).to(dtype)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Return what these samples add to the mean loss of the global batch."""
    return (model(x) - y).square().sum() / SAMPLES


class Options(NamedTuple):
    """The settings of a training run on the engine."""

    stage: int = 0
    dp: int = 1
    accumulation: int = 1
    steps: int = 5
    precision: str = "fp64"
    bucket: int = 100
    overlap: bool = True
    units: bool = True
    zero: tuple[tuple[str, Any], ...] = ()  # further settings of the ZeRO section
    seed: int | None = None  # draws the order in which communication finishes


class EngineRun(NamedTuple):
    """The outcome of a run on one rank.

    norms: the gradient norm of each step; saved: the state this rank owns; calls: the last step's collective calls over
    dp; num_buffers: buffers of the pool; working: full parameters by name.
    """

    norms: list[float]
    saved: list[Saved]
    calls: dict[str, int]
    num_buffers: int
    working: dict[str, Tensor]


def make_engine(rank: int, options: Options) -> tuple[Awkward, Engine, FusedBuffers]:
    mesh = mesh_in_worker(rank, dp=options.dp, seed=options.seed)
    zero = ZeroConfig(
        zero_stage=options.stage, reduce_bucket_size=options.bucket, overlap_comm=options.overlap, **dict(options.zero)
    )
    plan = resolve(zero, PrecisionConfig(precision=options.precision))
    model = make_model(plan.parameter.dtype)
    buffers = FusedBuffers(0, mesh.device)
    engine = Engine(
        model,
        units_of(model, split=options.units),
        plan,
        mesh=mesh,
        buffers=buffers,
        settings=EngineSettings(zero, FusedAdamW(SETTINGS)),
    )
    buffers.resize(engine.largest_buffer_bytes)
    return model, engine, buffers


def units_of(model: nn.Module, *, split: bool) -> list[Unit]:
    """Return one unit for each module that has parameters, or a single unit with all if not `split`."""
    names = [name for name, _ in model.named_parameters()]
    if not split:
        return [Unit("all", tuple(names), (model,))]
    heads = dict.fromkeys(name.rpartition(".")[0] for name in names)
    return [
        Unit(head or "root", tuple(name for name in names if name.rpartition(".")[0] == head), (_module(model, head),))
        for head in heads
    ]


def _module(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name) if name else model


def train_engine(rank: int, options: Options) -> EngineRun:
    """Train with the engine on this rank's share of the batches."""
    model, engine, buffers = make_engine(rank, options)
    mesh = mesh_in_worker(rank, dp=options.dp, seed=options.seed)
    norms, dtype = [], next(model.parameters()).dtype
    for step in range(options.steps):
        mesh.meter.reset()
        engine.begin_step()
        x, y = batch(step, dtype)
        shares = x.chunk(options.dp * options.accumulation), y.chunk(options.dp * options.accumulation)
        for micro in range(options.accumulation):
            part = micro * options.dp + rank
            engine.backward(loss_of(model, shares[0][part], shares[1][part]), is_last=micro == options.accumulation - 1)
        engine.finish_reductions()
        square = engine.local_norms().square.clone()
        mesh.world.all_reduce_scalars(square).wait()
        norms.append(float(square.sqrt()))
        engine.update(StepInputs(LR, torch.ones((), dtype=torch.float64), None))
    calls = {c: mesh.meter.count("dp", c).calls for c in ("all_gather", "reduce_scatter", "all_reduce")}
    with GatheredParameters(model):
        working = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    saved = [box for fragment in engine.owned_state() for box in boxes(fragment)]
    return EngineRun(norms, saved, calls, buffers.num_buffers, working)


def full_state(runs: list[EngineRun], kind: str = "weight") -> dict[str, Tensor]:
    return assemble(piece for run in runs for piece in run.saved if piece.kind == kind)


def train_plain(steps: int = 5) -> tuple[list[float], dict[str, Any]]:
    """Train the same in plain PyTorch; return the gradient norms of the steps and the final parameters."""
    model = make_model()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": SETTINGS.weight_decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False)
    norms = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        for p in trained.values():
            p.grad = torch.zeros_like(p)  # an unused parameter still decays
        loss_of(model, *batch(step)).backward()
        norms.append(float(torch.stack([p.grad.norm() for p in trained.values() if p.grad is not None]).norm()))
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def alone() -> Mesh:
    """Return a late mesh of a single rank, in the calling process."""
    device = torch.device("cpu")
    return late_mesh(make_mesh(Topology(), 0, device, FusedBuffers(0, device)))


def engine_around(
    model: nn.Module, mesh: Mesh, *, precision: str = "fp64", serves_user_code: bool = False, **zero: Any
) -> Engine:
    """Return an engine around any module, with units chosen as for a user's; ZeRO stage 3 by default."""
    config = ZeroConfig(**{"zero_stage": 3, "reduce_bucket_size": 100, **zero})
    plan = resolve(config, PrecisionConfig(precision=precision))
    buffers = FusedBuffers(0, mesh.device)
    settings = EngineSettings(config, FusedAdamW(SETTINGS), serves_user_code=serves_user_code)
    engine = Engine(model, choose_units(model), plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    return engine


def owned_gradient(engine: Engine, name: str, numel: int) -> Tensor:
    """Return the reduced gradient of a parameter [numel], with zeros for the elements that another rank owns."""
    whole = torch.zeros(numel, dtype=torch.float64)
    for piece in engine.pieces(name, "gradient"):
        whole[piece.start : piece.stop] = piece.tensor
    return whole


def take_step(engine: Engine, lr: float = LR) -> None:
    """Reduce the gradients of a step whose backwards are done and update the parameters, without clipping."""
    engine.finish_reductions()
    engine.update(StepInputs(lr, torch.ones((), dtype=torch.float64), None))


@contextmanager
def released_memory_is_nan() -> Iterator[None]:
    """Fill memory with nan instead of freeing it, inside the block, so that a read after release shows in results."""
    resize = torch.UntypedStorage.resize_

    def fill_or_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if nbytes or not storage.nbytes():
            return resize(storage, nbytes)
        torch.empty(0, dtype=torch.float64).set_(storage).fill_(torch.nan)
        return storage

    with patch.object(torch.UntypedStorage, "resize_", fill_or_resize):
        yield
