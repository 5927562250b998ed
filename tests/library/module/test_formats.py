"""Tests that buffers, and what is kept in fp32 on purpose, keep their number format in mixed precision."""

from typing import Any, ClassVar

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.errors import UsageError
from megazero.library.module.formats import choose_formats
from megazero.library.state.access import safe_get_full_fp32_param
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology
from megazero.zero.parameters.gathered import GatheredParameters

DP, STEPS, LR = 2, 3, 0.125
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
NARROW, WIDE = ("first.weight", "first.bias", "last.weight"), ("norm.weight", "norm.bias", "router.weight")


class Net(nn.Module):
    """A model with running statistics, a buffer of fp32, and a router that computes in its own weight's format."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6, momentum=0.01)
        self.router = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 1, bias=False)
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, 6) / 6)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        share = self.router(x.to(self.router.weight.dtype) * self.inv_freq).softmax(-1)
        return self.last(x * share.to(x.dtype))


def make() -> Net:
    torch.manual_seed(0)
    return Net()


def initialize(mesh: Mesh, stage: int, precision: str, **more: Any) -> Any:
    scale = {"loss_scale": 1.0} if precision == "fp16" else {}
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64},
        "precision": {"precision": precision, **scale},
        "optimizer": {"type": "SGD", "lr": LR},
        "keep_in_fp32": ["router"],
        **more,
    }
    return megazero.initialize(make(), config, mesh=mesh)


def batch(number: int, rank: int, precision: str) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank)).to(DTYPES[precision])


def train(mesh: Mesh, stage: int, precision: str) -> dict[str, Tensor]:
    """Return master weights and buffers after some steps."""
    engine = initialize(mesh, stage, precision)
    for number in range(STEPS):
        engine.backward(engine(batch(number, mesh.world.rank, precision)).square().mean())
        engine.step()
    found = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    with GatheredParameters(engine.module):
        for name, parameter in engine.module.named_parameters():
            assert parameter.dtype == (torch.float32 if name in WIDE else DTYPES[precision])
            assert torch.equal(parameter, found[name].to(parameter.dtype)), "masters and working values agree"
    found |= {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    engine.close()
    return found


def train_plain(precision: str) -> dict[str, Tensor]:
    """Train one process in the same formats, with fp32 master weights and gradients in the precision's format."""
    model = make()
    for name in NARROW:
        model.get_parameter(name).data = model.get_parameter(name).data.to(DTYPES[precision])
    masters = {name: parameter.detach().float().clone() for name, parameter in model.named_parameters()}
    for number in range(STEPS):
        model.zero_grad()
        model(batch(number, 0, precision)).square().mean().float().backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                masters[name] -= LR * parameter.grad.to(DTYPES[precision]).float()
                parameter.copy_(masters[name])
    return masters | dict(model.named_buffers())


@each("precision", ["bf16", "fp16"])
@each("stage", range(4))
def test_kept_formats_train_as_in_plain_torch(stage: int, precision: str) -> None:
    found = train(make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU)), stage, precision)
    torch.testing.assert_close(found, train_plain(precision), rtol=1e-6, atol=1e-7)
    assert found["norm.running_var"].dtype == found["inv_freq"].dtype == torch.float32
    assert torch.equal(found["inv_freq"], make().inv_freq)


def train_in_stages(rank: int) -> list[dict[str, Tensor]]:
    return [train(mesh_in_worker(rank, dp=DP), stage, "bf16") for stage in range(4)]


@pytest.mark.gloo
def test_every_stage_trains_kept_formats_alike() -> None:
    for runs in run_ranks(DP, train_in_stages):
        for found in runs[1:]:
            for name, value in runs[0].items():
                assert "running" in name or torch.equal(found[name], value), name


@pytest.mark.parametrize("form", ["deepspeed", "own"])
def test_a_configuration_may_cast_buffers(form: str) -> None:
    mesh = make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))
    own = {"precision": {"precision": "bf16"}, "buffer_dtype": "bf16", "keep_in_fp32": ["inv_freq"]}
    foreign = {
        "bf16": {"enabled": True},
        "data_types": {"buffer_dtype": "bfloat16"},
        "keep_in_fp32": ["inv_freq"],
        "train_micro_batch_size_per_gpu": 4,
    }
    engine = megazero.initialize(make(), own if form == "own" else foreign, mesh=mesh)
    assert engine.module.norm.running_mean.dtype == engine.module.norm.weight.dtype == torch.bfloat16
    assert engine.module.inv_freq.dtype == torch.float32
    engine.close()


class Named(Net):
    """A model that names its wide tensors as transformers' models do."""

    _keep_in_fp32_modules: ClassVar = ["router"]
    _keep_in_fp32_modules_strict: ClassVar = {"last.weight"}


@each(
    ("dtype", "wide"),
    [
        (torch.bfloat16, {"last.weight"}),
        (torch.float16, {"last.weight", "router.weight"}),
        (torch.float32, None),
        (torch.float64, set()),
    ],
)
def test_what_models_name_themselves_stays_wide(dtype: torch.dtype, wide: set[str] | None) -> None:
    model = nn.ModuleDict({"inner": Named()})
    formats = choose_formats(model, dtype, buffer_dtype=None, keep_in_fp32=())
    found = {n.removeprefix("inner.") for n, p in model.named_parameters() if formats[id(p)] == torch.float32}
    every = {n for n, _ in Named().named_parameters()}
    assert found == (every if wide is None else wide | ({"norm.weight", "norm.bias"} if dtype.itemsize == 2 else set()))
    assert {formats[id(buffer)] for _, buffer in model.named_buffers() if buffer.is_floating_point()} == {
        torch.float64 if dtype == torch.float64 else torch.float32
    }


def test_names_without_a_tensor_are_refused() -> None:
    for names, dtype in ((["routers", "first.weigh"], torch.bfloat16), (["router", "last"], torch.float64)):
        with pytest.raises(UsageError) as caught:
            choose_formats(make(), dtype, buffer_dtype=None, keep_in_fp32=names)
        assert [problem.given.split('"')[1] for problem in caught.value.problems] == names
    assert choose_formats(make(), torch.float32, buffer_dtype=None, keep_in_fp32=["router"])
