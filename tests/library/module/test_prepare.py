"""Tests the preparation of a module for its engine: refusals, number formats, equal values, descriptions."""

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.errors import UsageError
from megazero.library.module.prepare import describe, prepare
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.param_spec import ParamSpec, attach_spec, spec_of
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")


def alone() -> Mesh:
    return make_mesh(Topology(), 0, CPU, FusedBuffers(0, CPU))


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 4, bias=False))
    model[2].weight = nn.Parameter(torch.randn(4, 4).t())  # not contiguous
    model[0].weight.data = model[0].weight.data.to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.tensor([True, False]))
    model.count = nn.Parameter(torch.arange(2), requires_grad=False)
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_everything_floating_gets_the_precision(dtype: torch.dtype) -> None:
    model = make_model()
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    parameters, statistics = list(model.parameters()), model[1].running_mean
    model[0].weight.grad = torch.ones_like(model[0].weight)
    prepare(model, alone(), dtype)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model[1].running_mean is statistics and model[0].weight.grad is None
    for name, value in model.state_dict().items():
        keeps = dtype == torch.bfloat16 and name.startswith("1.")  # batch normalisation and its running statistics
        changes = values[name].is_floating_point() and not keeps
        assert value.dtype == (dtype if changes else values[name].dtype), name
        assert torch.equal(value, values[name].to(value.dtype)), name


def start(rank: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(rank)
    model = make_model()
    model[1].running_var.fill_(rank + 1)
    model.mask.fill_(rank == 0)
    prepare(model, mesh_in_worker(rank, dp=2), torch.float32)
    return {name: value.detach().contiguous() for name, value in model.state_dict().items()}


@pytest.mark.gloo
def test_every_rank_starts_from_the_first_one() -> None:
    torch.manual_seed(0)
    expected = make_model().state_dict() | {"mask": torch.tensor([True, True])}
    for found in run_ranks(2, start):
        for name, value in found.items():
            assert torch.equal(value, expected[name]), name


def test_specs_decay_everything_and_respect_what_is_there() -> None:
    model = nn.Linear(3, 2)
    own = ParamSpec("", (4,), (2,), (2,), sharded_axes=("tp",), decay=False)
    attach_spec(model.bias, own)
    prepare(model, alone(), torch.float32)
    assert spec_of("w", model.weight) == ParamSpec("w", (2, 3), (2, 3), (0, 0))
    assert spec_of("b", model.bias).decay is False and spec_of("b", model.bias).full_shape == (4,)
    norm = nn.LayerNorm(3)
    describe(norm.weight, alone())
    assert spec_of("n", norm.weight).decay, "an optimizer of a configuration decays all parameters, as torch's do"


def sliced(rank: int) -> tuple[ParamSpec, ParamSpec, ParamSpec]:
    mesh = mesh_in_worker(rank, tp=2)
    by_rows, by_columns, whole = (nn.Parameter(torch.zeros(3, 4)) for _ in range(3))
    by_rows.model_parallel = True
    by_columns.tensor_model_parallel, by_columns.partition_dim = True, 1
    whole.tensor_model_parallel, whole.partition_dim = False, -1
    for parameter in (by_rows, by_columns, whole):
        describe(parameter, mesh)
    return spec_of("r", by_rows), spec_of("c", by_columns), spec_of("w", whole)


@pytest.mark.gloo
def test_slices_of_tensor_parallel_parameters() -> None:
    for rank, (rows, columns, whole) in enumerate(run_ranks(2, sliced)):
        assert (rows.full_shape, rows.offset, rows.sharded_axes) == ((6, 4), (3 * rank, 0), ("tp",))
        assert (columns.full_shape, columns.offset, columns.sharded_axes) == ((3, 8), (0, 4 * rank), ("tp",))
        assert (whole.full_shape, whole.offset, whole.sharded_axes) == ((3, 4), (0, 0), ())


def test_all_problems_at_once() -> None:
    model = nn.ModuleList(
        [nn.LazyLinear(3), nn.Linear(2, 2, device="meta"), nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2)]
    )
    model.register_parameter("other", nn.Parameter(TwoTensor(torch.zeros(2), torch.zeros(2))))
    model.register_parameter("wave", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    with pytest.raises(UsageError) as caught:
        prepare(model, alone(), torch.float32)
    assert [problem.given for problem in caught.value.problems] == [
        "parameter other of type TwoTensor",
        "parameter wave of torch.complex64",
        "parameter 0.weight without a shape",
        "parameter 0.bias without a shape",
        "parameter 1.weight on the meta device",
        "parameter 1.bias on the meta device",
        "embedding 2 with sparse=True",
    ]
