"""Tests models cut by torch's own tensor parallelism, under the engine, against the uncut model on one process."""

from typing import Any

import pytest
import torch
from support.processes import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import megazero
from megazero.errors import ConfigError
from megazero.parallel.param_spec import spec_of

STEPS, SAMPLES, WIDTH, INNER = 4, 8, 6, 10
CUT = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    """A norm, a layer up and one down: replicated parameters, sliced ones, and a replicated one among the sliced."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Layer() for _ in range(3))).double()


def samples(step: int) -> Tensor:
    return torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def plain() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(samples(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def device_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def cut_model(mesh: DeviceMesh) -> nn.Sequential:
    model = make_model()
    for layer in model:
        parallelize_module(layer, mesh["tp"], CUT)
    return model


def train_cut(rank: int, zero_stage: int) -> tuple[list[float], list[float], dict[str, tuple[Any, Tensor]]]:
    mesh = device_mesh()
    model = cut_model(mesh)
    config = {
        "zero": {"zero_stage": zero_stage, **({"prefetch_bucket_size": 200} if zero_stage == 3 else {})},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "AdamW", "lr": 1e-2, "params": {"weight_decay": 0.01}},
        "gradient_clipping": 0.1,
    }
    engine = megazero.initialize(model, config, mesh=mesh)
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        share = samples(step).chunk(2)[engine.mesh.coordinate("dp")]
        loss = engine(share).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    with megazero.zero.GatheredParameters(model):
        local = {name: (spec_of(name, p).box.offset, p.detach().clone()) for name, p in model.named_parameters()}
    engine.close()
    return losses, norms, local


@pytest.mark.gloo
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_model_of_dtensors_trains_like_the_uncut_one(zero_stage: int) -> None:
    losses, norms, weights = plain()
    outcomes = run_ranks(4, train_cut, zero_stage)
    for step in range(STEPS):
        mean = sum(outcomes[rank][0][step] for rank in (0, 2)) / 2
        assert mean == pytest.approx(losses[step], rel=1e-9)
    for _, seen, local in outcomes:
        assert seen == pytest.approx(norms, rel=1e-9), "sliced elements count once, replicated ones too"
        for name, (offset, value) in local.items():
            place = tuple(slice(start, start + size) for start, size in zip(offset, value.shape, strict=True))
            torch.testing.assert_close(value, weights[name][place], rtol=1e-9, atol=1e-12, msg=name)
    cut = outcomes[1][2]["0.up.weight"]
    assert (cut[0], tuple(cut[1].shape)) == ((INNER // 2, 0), (INNER // 2, WIDTH))


def refused(rank: int) -> str:
    """Return the message for a model that is distributed over the data-parallel axis, which belongs to the engine."""
    mesh = device_mesh()
    model = make_model()
    for layer in model:
        parallelize_module(layer, init_device_mesh("cpu", (4,)), {"down": RowwiseParallel()})
    try:
        megazero.initialize(model, {"zero": {"zero_stage": 1}, "optimizer": {"type": "AdamW", "lr": 1e-2}}, mesh=mesh)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.gloo
def test_other_axes_are_refused() -> None:
    for told in run_ranks(4, refused):
        assert "0.down.weight" in told and "over ranks [0, 1, 2, 3]" in told and "here" in told
