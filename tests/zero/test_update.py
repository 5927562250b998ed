"""The norm counts each logical element once, and an overflow is attributed to the right parameter."""

import math

import pytest
import torch
from support.irregular_model import Options, batch, loss_of, make_engine, make_model
from support.models import build_gpt, context, small_config
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor

from megazero.config.choices import defaults_of
from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.config.optimizers import OPTIMIZERS
from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.lease import Scratch
from megazero.model.initial_values import initialize_
from megazero.optim.inner import AdamWSettings, ElementRun, FusedAdamW, StepInputs
from megazero.optim.lamb import Lamb
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import resolve


def poisoned(rank: int, name: str, value: float, stage: int) -> tuple[float, str]:
    """Return the squared norm over ranks and the parameter named when rank 1 has a bad gradient of one parameter."""
    model, engine, _ = make_engine(rank, Options(stage=stage, dp=2, precision="fp32"))
    mesh = mesh_in_worker(rank, dp=2)
    engine.begin_step()
    if rank == 1:
        model.get_parameter(name).register_hook(lambda grad: torch.full_like(grad, value))
    engine.backward(loss_of(model, *batch(0, torch.float32)), is_last=True)
    engine.finish_reductions()
    square, first = engine.local_norms()
    mesh.world.all_reduce_scalars(square).wait()
    mesh.world.all_reduce_scalars(first, "min").wait()
    engine.close()
    finite = math.isfinite(float(square))
    return float(square), "" if finite else engine.parameter_name(int(first))


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_overflow_names_its_parameter_on_every_rank(stage: int, value: float) -> None:
    for square, blamed in run_ranks(2, poisoned, "middle.bias", value, stage):
        assert not math.isfinite(square)
        assert blamed == "middle.bias"


@pytest.mark.gloo
def test_no_overflow_no_blame() -> None:
    results = run_ranks(2, poisoned, "middle.bias", 0.0, 2)
    assert all(blamed == "" for _, blamed in results)


def ones_norm(rank: int, tp: int, dp: int) -> tuple[float, int]:
    """Return the squared norm when every gradient element is 1: the number of elements without padding and replicas."""
    mesh = mesh_in_worker(rank, tp=tp, dp=dp)
    model = build_gpt(small_config(), context(mesh.axis("tp")), vocab_size=101, divisible_by=8)
    initialize_(model, 1)
    zero = ZeroConfig(zero_stage=1, reduce_bucket_size=5000)
    plan = resolve(zero, PrecisionConfig(precision="fp64"))
    buffers = FusedBuffers(1 << 20, mesh.device)
    settings = EngineSettings(zero, FusedAdamW(AdamWSettings(0.9, 0.95, 1e-8, 0.0)))
    engine = Engine(model, model.units(), plan, mesh=mesh, buffers=buffers, settings=settings)
    engine.begin_step()
    valid = {"embedding.word.weight": max(0, min(101 - mesh.coordinate("tp") * -(-101 // (8 * tp)) * 8, 10**9))}
    sums = [
        parameter.sum() if name not in valid else parameter[: valid[name]].sum()
        for name, parameter in model.named_parameters()
    ]
    engine.backward(torch.stack(sums).sum() / dp, is_last=True)
    engine.finish_reductions()
    square = engine.local_norms().square
    mesh.world.all_reduce_scalars(square).wait()
    engine.close()
    return float(square), 0


@pytest.mark.gloo
@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_every_logical_element_is_counted_once(tp: int, dp: int) -> None:
    full = build_gpt(small_config(), context(), vocab_size=101)
    expected = sum(parameter.numel() for parameter in full.parameters())
    for square, _ in run_ranks(tp * dp, ones_norm, tp, dp):
        assert square == pytest.approx(expected, rel=1e-12)


class RecordingLamb(Lamb):
    """LAMB, which keeps the squared norm of the weights of all of the parameters that it updates a part of."""

    def __init__(self) -> None:
        super().__init__(defaults_of(OPTIMIZERS["Lamb"].params))
        self.squares: list[float] = []

    def update(self, index: int, run: ElementRun, step: Tensor, inputs: StepInputs, *, buffers: Scratch) -> None:
        self.squares.append(round(float(inputs.figures[0][0]), 9))
        super().update(index, run, step, inputs, buffers=buffers)


def measured(rank: int, tp: int, dp: int, stage: int) -> set[float]:
    """Return the squared norms of parameters that are 1 everywhere, also in the padding, as the update gets them."""
    mesh = mesh_in_worker(rank, tp=tp, dp=dp)
    model = build_gpt(small_config(), context(mesh.axis("tp")), vocab_size=101, divisible_by=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    zero, optimizer = ZeroConfig(zero_stage=stage, reduce_bucket_size=5000), RecordingLamb()
    plan = resolve(zero, PrecisionConfig(precision="fp64"))
    buffers = FusedBuffers(1 << 20, mesh.device)
    engine = Engine(model, model.units(), plan, mesh=mesh, buffers=buffers, settings=EngineSettings(zero, optimizer))
    engine.begin_step()
    engine.backward(torch.stack([parameter.sum() for parameter in model.parameters()]).sum(), is_last=True)
    engine.finish_reductions()
    engine.update(StepInputs(0.1, torch.ones((), dtype=torch.float64), None))
    engine.close()
    return set(optimizer.squares)


@pytest.mark.gloo
@pytest.mark.parametrize(("tp", "dp", "stage"), [(1, 1, 0), (1, 3, 0), (2, 2, 0), (2, 2, 2), (4, 1, 1)])
def test_norms_of_whole_parameters_count_every_element_once(tp: int, dp: int, stage: int) -> None:
    full = build_gpt(small_config(), context(), vocab_size=101)
    expected = {float(parameter.numel()) for parameter in full.parameters()}
    assert set[float]().union(*run_ranks(tp * dp, measured, tp, dp, stage)) == expected


@pytest.mark.gloo
def test_frozen_parameters_have_no_name_in_the_update() -> None:
    names = {name for name, parameter in make_model().named_parameters() if parameter.requires_grad}
    assert set(run_ranks(1, trained_names)[0]) == names


def trained_names(rank: int) -> list[str]:
    _, engine, _ = make_engine(rank, Options())
    engine.close()
    count = sum(len(section.slots) for section in engine.layout.sections if section.trainable)
    return [engine.parameter_name(index) for index in range(count)]
