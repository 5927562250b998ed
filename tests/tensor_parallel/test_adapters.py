"""Adapters beside column- and row-parallel layers equal one matrix, W + scale B A, in float64, and so do gradients."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.models import Piece, assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

from megazero.parallel.param_spec import InitialValue, named_specs
from megazero.tensor_parallel.adapters import (
    LowRank,
    adapt_column,
    adapt_row,
    is_adapters,
    merged,
    train_adapters_alone,
)
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedKeyValueLinear,
    RowParallelLinear,
    TensorParallel,
)

HIDDEN, INNER, ROWS, RANK, SCALE = 6, 8, 12, 3, 0.7
SHAPES = {
    "column": (2, INNER, HIDDEN),
    "pairs": (2, 1, INNER, HIDDEN),
    "row": (HIDDEN, INNER),
}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, (*outputs, inputs) in SHAPES.items():
        shapes = {"weight": (*outputs, inputs), "adapter.lora_A.weight": (RANK, inputs)}
        shapes |= {"adapter.lora_B.weight": (*outputs, RANK)}
        for end, shape in shapes.items():
            found[f"{name}.{end}"] = torch.randn(shape, generator=generator, dtype=torch.float64)
    return found


def rows(width: int, seed: int) -> Tensor:
    return torch.randn(ROWS, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Layers(nn.Module):
    """A layer with two outputs an element, one of keys and values of a single head, and a row-parallel one."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        plain = {"init": InitialValue("normal", 1.0), "has_bias": False}
        self.column = ColumnParallelLinear(tp, logical_shape=SHAPES["column"], split_dim=1, **plain)
        self.pairs = ReplicatedKeyValueLinear(tp, logical_shape=SHAPES["pairs"], used=[0], **plain)
        self.row = RowParallelLinear(tp, logical_shape=SHAPES["row"], **plain)
        form = LowRank(RANK, SCALE)
        adapt_column(tp, self.column, form)
        adapt_column(tp, self.pairs, form)
        adapt_row(tp, self.row, form)
        train_adapters_alone(self)

    def forward(self, x: Tensor, part: slice) -> Tensor:
        first, second = self.column(x).unflatten(-1, (2, -1)).unbind(-2)
        key, value = self.pairs(x).unflatten(-1, (2, -1)).unbind(-2)
        y: Tensor = self.row(torch.tanh(first + key[:, part]) * (second + value[:, part]))
        return y


def compute(rank: int, size: int, splits: bool) -> tuple[Tensor, list[Piece], list[str]]:
    """Return the outputs of this rank's rows, the gradients of its parts, and what has gradients."""
    axis = mesh_in_worker(rank, tp=size).axis("tp")
    tp = replace(context(axis), splits_sequence=splits)
    model = Layers(tp)
    put_logical(model, weights())
    held = tp.local_rows(ROWS)
    y = model(rows(HIDDEN, 6)[held], slice(rank * INNER // size, (rank + 1) * INNER // size))
    (y * rows(HIDDEN, 7)[held]).sum().backward()
    for spec, parameter in named_specs(model):
        if parameter.grad is not None and "tp" in spec.summed_over:
            axis.all_reduce(parameter.grad).wait()
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    trained = [spec.name for spec, parameter in named_specs(model) if parameter.requires_grad]
    return y.detach(), pieces(model, gradients=True), trained


@pytest.mark.gloo
@pytest.mark.parametrize(("size", "splits"), [(1, False), (2, False), (2, True)])
def test_an_adapted_layer_equals_one_matrix(size: int, splits: bool) -> None:
    full = {name: value.requires_grad_(is_adapters(name)) for name, value in weights().items()}
    whole = {
        name: (
            full[f"{name}.weight"]
            + SCALE
            * torch.tensordot(full[f"{name}.adapter.lora_B.weight"], full[f"{name}.adapter.lora_A.weight"], dims=1)
        ).flatten(0, -2)
        for name in SHAPES
    }
    x = rows(HIDDEN, 6)
    first, second = F.linear(x, whole["column"]).chunk(2, dim=-1)
    key, value = F.linear(x, whole["pairs"]).chunk(2, dim=-1)
    y = F.linear(torch.tanh(first + key) * (second + value), whole["row"])
    (y * rows(HIDDEN, 7)).sum().backward()
    found = run_ranks(size, compute, size, splits)
    outputs = torch.cat([each[0] for each in found]) if splits else found[-1][0]
    torch.testing.assert_close(outputs, y.detach(), rtol=1e-12, atol=1e-12)
    gradients = assemble([each[1] for each in found])
    assert {name for each in found for name in each[2]} == {name for name in full if is_adapters(name)}
    for name, tensor in full.items():
        expected = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-11, atol=1e-11)


@pytest.mark.pure
def test_merging_sums_in_float32() -> None:
    weight, thin, other = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((2, 3, 5), (4, 5), (2, 3, 4)))
    found = merged(weight, thin, other, 0.5)
    assert found.dtype == torch.float32 and merged(weight.double(), thin, other, 0.5).dtype == torch.float64
    expected = weight.float() + 0.5 * torch.einsum("...r,ri->...i", other.float(), thin.float())
    torch.testing.assert_close(found, expected)
