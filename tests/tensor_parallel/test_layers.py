"""Column- and row-parallel layers, apart and as a pair, equal nn.functional on whole matrices in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import Piece, assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.parallel.param_spec import InitialValue, spec_of
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedKeyValueLinear,
    RowParallelLinear,
    TensorParallel,
    column_linears,
)

pytestmark = pytest.mark.gloo
HIDDEN, HEADS, HEAD_DIM = 6, 4, 3
SHAPES = {
    "column.weight": (3, HEADS, HEAD_DIM, HIDDEN),
    "column.bias": (3, HEADS, HEAD_DIM),
    "row.weight": (5, HEADS * HEAD_DIM),
    "row.bias": (5,),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def x_and_target() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    return (
        torch.randn(2, 7, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(2, 7, 5, generator=generator, dtype=torch.float64),
    )


class Pair(nn.Module):
    """A fused query, key and value projection followed by a row-parallel layer; each head must stay on one rank."""

    def __init__(self, tp) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(
            tp, logical_shape=(3, HEADS, HEAD_DIM, HIDDEN), split_dim=1, init=InitialValue("normal", 1.0)
        )
        self.row = RowParallelLinear(tp, logical_shape=(5, HEADS * HEAD_DIM), init=InitialValue("normal", 1.0))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.column(x).unflatten(-1, (3, -1)).unbind(-2)
        return self.row(query * torch.tanh(key) + value)


def parallel_pair(rank: int, size: int) -> tuple[Tensor, Tensor, list[Piece]]:
    model = Pair(context(mesh_in_worker(rank, tp=size).axis("tp")))
    put_logical(model, weights())
    x, target = x_and_target()
    x.requires_grad_(True)
    y = model(x)
    (y * target).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad, pieces(model, gradients=True)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_pair_equals_whole_matrices(size: int) -> None:
    full = {name: value.requires_grad_(True) for name, value in weights().items()}
    x, target = x_and_target()
    x.requires_grad_(True)
    fused = F.linear(x, full["column.weight"].reshape(-1, HIDDEN), full["column.bias"].reshape(-1))
    query, key, value = fused.chunk(3, dim=-1)
    y = F.linear(query * torch.tanh(key) + value, full["row.weight"], full["row.bias"])
    (y * target).sum().backward()
    results = run_ranks(size, parallel_pair, size)
    for parallel_y, grad_x, _ in results:
        torch.testing.assert_close(parallel_y, y.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad_x, x.grad, rtol=1e-13, atol=1e-13)
    gradients = assemble(result[2] for result in results)
    for name, value in full.items():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-13, atol=1e-12)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    model = Pair(context())
    put_logical(model, weights())
    model.column.weight.requires_grad_(False)
    model(x_and_target()[0]).sum().backward()
    assert model.column.weight.grad is None and model.column.bias.grad is not None


def test_specs_tell_slice_decay_and_sharding() -> None:
    pair = Pair(context())
    weight, bias = spec_of("w", pair.column.weight), spec_of("b", pair.column.bias)
    assert weight.full_shape == (3, HEADS, HEAD_DIM, HIDDEN) and weight.decay and weight.sharded_axes == ("tp",)
    assert bias.full_shape == (3, HEADS, HEAD_DIM) and not bias.decay and bias.sharded_axes == ("tp",)
    assert spec_of("w", pair.row.weight).sharded_axes == ("tp",)
    row_bias = spec_of("b", pair.row.bias)
    assert row_bias.sharded_axes == () and not row_bias.decay


def test_layers_that_do_not_divide_are_our_own_bug() -> None:
    class Three:
        size, rank = 3, 0

    with pytest.raises(AssertionError, match="4 elements over 3 ranks"):
        ColumnParallelLinear(context(Three()), logical_shape=(4, 2), split_dim=0, init=InitialValue())


class Grouped(nn.Module):
    """Queries of four heads, and keys and values of fewer, of which each rank uses those of its queries."""

    def __init__(self, tp: TensorParallel, groups: int) -> None:
        super().__init__()
        init = InitialValue("normal", 1.0)
        self.query = ColumnParallelLinear(tp, logical_shape=(HEADS, HEAD_DIM, HIDDEN), split_dim=0, init=init)
        shape = (2, groups, HEAD_DIM, HIDDEN)
        self.key_value = (
            ReplicatedKeyValueLinear(
                tp, logical_shape=shape, used=[tp.communicator.rank * groups // tp.communicator.size], init=init
            )
            if groups % tp.communicator.size
            else ColumnParallelLinear(tp, logical_shape=shape, split_dim=1, init=init)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return column_linears(x, (self.query.operands(), self.key_value.operands()))


def grouped_weights(groups: int) -> dict[str, Tensor]:
    shapes = {"query.weight": (HEADS, HEAD_DIM, HIDDEN), "key_value.weight": (2, groups, HEAD_DIM, HIDDEN)}
    shapes |= {"query.bias": (HEADS, HEAD_DIM), "key_value.bias": (2, groups, HEAD_DIM)}
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def grouped_outputs(rank: int, size: int, groups: int, splits: bool) -> tuple[Tensor, Tensor, Tensor, list[Piece]]:
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    tp = replace(context(axis), splits_sequence=splits)
    model = Grouped(tp, groups)
    put_logical(model, grouped_weights(groups))
    whole = x_and_target()[0].flatten(0, 1)[:12]
    x = whole[tp.local_rows(12)].clone().requires_grad_(True)
    query, pairs = model(x)
    (query.square().sum() + pairs.pow(3).sum() * (size // groups if size > groups else 1) ** -1).backward()
    for name, parameter in model.named_parameters():
        if "tp" in spec_of(name, parameter).summed_over:
            assert parameter.grad is not None
            axis.all_reduce(parameter.grad).wait()
    assert x.grad is not None
    return query.detach(), pairs.detach(), x.grad, pieces(model, gradients=True)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_share_keys_and_values_use_those_of_their_queries(size: int, groups: int, splits: bool) -> None:
    full = {name: value.requires_grad_(True) for name, value in grouped_weights(groups).items()}
    x = x_and_target()[0].flatten(0, 1)[:12].requires_grad_(True)
    query = torch.einsum("nh,adh->nad", x, full["query.weight"]) + full["query.bias"]
    pairs = torch.einsum("nh,kgdh->nkgd", x, full["key_value.weight"]) + full["key_value.bias"]
    (query.square().sum() + pairs.pow(3).sum()).backward()
    results = run_ranks(size, grouped_outputs, size, groups, splits)
    for rank, (found, shared, grad_x, _) in enumerate(results):
        held = slice(rank * HEADS // size, (rank + 1) * HEADS // size)
        torch.testing.assert_close(found, query[:, held].flatten(1).detach(), rtol=1e-12, atol=1e-12)
        first, length = rank * groups // size, max(1, groups // size)
        expected = pairs[:, :, first : first + length].flatten(1).detach()
        torch.testing.assert_close(shared, expected, rtol=1e-12, atol=1e-12)
        assert x.grad is not None
        rows = slice(rank * 12 // size, (rank + 1) * 12 // size) if splits else slice(None)
        torch.testing.assert_close(grad_x, x.grad[rows], rtol=1e-11, atol=1e-11)
    gradients = assemble(result[3] for result in results)
    for name, value in full.items():
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-11, atol=1e-11)
