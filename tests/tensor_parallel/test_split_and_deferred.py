"""Layers with a split sequence, deferred gradients, recomputation and all of that together, in float64.

They are compared with nn.functional on whole matrices; bytes sent, elements kept and random numbers are counted too.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.models import Piece, assemble, context, pieces, put_logical
from support.processes import mesh_in_worker, run_ranks
from support.recomputed_programs import recomputation
from torch import Tensor, nn

from megazero.comm.mesh import Mesh
from megazero.parallel.param_spec import InitialValue, named_specs
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_linear,
    replicated_parameter,
)

pytestmark = pytest.mark.gloo

WIDTH, INNER = 6, 12
BLOCK = {
    "scale": (WIDTH,),
    "column.weight": (3, INNER, WIDTH),
    "column.bias": (3, INNER),
    "row.weight": (WIDTH, INNER),
    "row.bias": (WIDTH,),
}


class Way(NamedTuple):
    """A way to compute a block: the sequence is split, gradients are deferred, the forward is recomputed, or not."""

    splits: bool
    deferred: bool
    recomputed: bool


class Found(NamedTuple):
    """Results of a rank: outputs and gradients of x of its tokens, by micro-batch; hooks: calls by parameter."""

    outputs: list[Tensor]
    grad_x: list[Tensor]
    gradients: list[Piece]
    hooks: dict[str, int]


class Block(nn.Module):
    """A residual block with a replicated parameter, whose layers may not write to the block's output gradient."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self._tp = tp
        self.scale = replicated_parameter(tp, (WIDTH,), init=InitialValue("ones"), decay=False)
        self.column = ColumnParallelLinear(tp, logical_shape=(3, INNER, WIDTH), split_dim=1, init=InitialValue())
        self.row = RowParallelLinear(tp, logical_shape=(WIDTH, INNER), init=InitialValue())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.column(torch.tanh(x * self._tp.use(self.scale))).chunk(3, dim=-1)
        return x + self.row(query * torch.tanh(key) + value)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def block_weights() -> dict[str, Tensor]:
    return {name: draw(seed, *shape) for seed, (name, shape) in enumerate(BLOCK.items())}


def micro_batches(num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each of two micro-batches x and the factors of its outputs in the loss, both [tokens, WIDTH]."""
    return [(draw(20 + index, num_tokens, WIDTH), draw(30 + index, num_tokens, WIDTH)) for index in range(2)]


def context_for(mesh: Mesh, way: Way) -> TensorParallel:
    deferred = DeferredGradients() if way.deferred else None
    return replace(context(mesh.axis("tp")), splits_sequence=way.splits, deferred=deferred)


def count_hooks(model: nn.Module) -> dict[str, int]:
    fired = {name: 0 for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.update({name: fired[name] + 1}))
    return fired


def sum_partial_gradients(model: nn.Module, tp: TensorParallel) -> None:
    for spec, parameter in named_specs(model):
        if spec.summed_over:
            assert spec.summed_over == ("tp",) and parameter.grad is not None
            tp.communicator.all_reduce(parameter.grad).wait()


def through_two_blocks(rank: int, size: int, num_tokens: int, way: Way) -> Found:
    """Run two micro-batches forward and backward through one block twice; then accumulate the deferred gradients."""
    mesh = mesh_in_worker(rank, tp=size)
    tp = context_for(mesh, way)
    model = Block(tp)
    put_logical(model, block_weights())
    hooks = count_hooks(model)
    call: Callable[..., Tensor] = recomputation().run if way.recomputed else lambda block, x: block(x)
    outputs, grad_x, held = [], [], []
    for x, factors in micro_batches(num_tokens):
        rows = tp.local_rows(num_tokens)
        x = x[rows].clone().requires_grad_(True)
        y = call(model, call(model, x))
        (y * factors[rows]).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach())
        grad_x.append(x.grad)
        if tp.deferred is not None:
            assert model.column.weight.grad is None
            held.append(tp.deferred.collect())
    for one in held:
        one.accumulate()
    sum_partial_gradients(model, tp)
    return Found(outputs, grad_x, pieces(model, gradients=True), hooks)


def plain_blocks(num_tokens: int) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor | None]]:
    full = {name: value.requires_grad_(True) for name, value in block_weights().items()}
    outputs, grad_x = [], []
    for x, factors in micro_batches(num_tokens):
        x.requires_grad_(True)
        y = x
        for _ in range(2):
            z = torch.tanh(y * full["scale"])
            fused = F.linear(z, full["column.weight"].reshape(-1, WIDTH), full["column.bias"].reshape(-1))
            query, key, value = fused.chunk(3, dim=-1)
            y = y + F.linear(query * torch.tanh(key) + value, full["row.weight"], full["row.bias"])
        (y * factors).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach())
        grad_x.append(x.grad)
    return outputs, grad_x, {name: value.grad for name, value in full.items()}


WAYS = [Way(splits, deferred, recomputed) for splits in (0, 1) for deferred in (0, 1) for recomputed in (0, 1)][1:]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(n for n, on in way._asdict().items() if on))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_blocks_equal_whole_matrices_in_every_way(size: int, way: Way) -> None:
    num_tokens = 7 * size
    outputs, grad_x, gradients = plain_blocks(num_tokens)
    results = run_ranks(size, through_two_blocks, size, num_tokens, way)
    for index in range(2):
        for rank, found in enumerate(results):
            rows = slice(7 * rank, 7 * (rank + 1)) if way.splits else slice(None)
            torch.testing.assert_close(found.outputs[index], outputs[index][rows], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found.grad_x[index], grad_x[index][rows], rtol=1e-12, atol=1e-12)
    found_gradients = assemble(found.gradients for found in results)
    for name, expected in gradients.items():
        torch.testing.assert_close(found_gradients[name], expected, rtol=1e-12, atol=1e-12)
    assert all(count == 2 for found in results for count in found.hooks.values()), "once in each micro-batch"


def test_one_rank_splits_nothing() -> None:
    way = Way(splits=True, deferred=False, recomputed=False)
    tp = replace(context(), splits_sequence=True)
    assert tp.local_rows(7) == slice(0, 7) and not tp.border.splits_sequence
    model = Block(tp)
    assert all(not spec.summed_over for spec, _ in named_specs(model)), way
    put_logical(model, block_weights())
    (x, _), *_ = micro_batches(5)
    torch.testing.assert_close(model(x.view(1, 5, WIDTH)), model(x).view(1, 5, WIDTH))


class Traffic(NamedTuple):
    """Bytes sent by each collective, in forward, in backward, and while deferred gradients are computed."""

    forward: dict[str, int]
    backward: dict[str, int]
    defer: dict[str, int]


def count_traffic(rank: int, size: int, num_tokens: int, way: Way) -> Traffic:
    mesh = mesh_in_worker(rank, tp=size)
    tp = context_for(mesh, way)
    model = Block(tp)
    put_logical(model, block_weights())
    x = micro_batches(num_tokens)[0][0][tp.local_rows(num_tokens)].requires_grad_(True)
    counts = []

    def count() -> None:
        counts.append(mesh.meter.bytes_by_axis().get("tp", {}))
        mesh.meter.reset()

    loss = model(x).square().sum()
    count()
    loss.backward()
    count()
    if tp.deferred is not None:
        tp.deferred.collect().accumulate()
    count()
    return Traffic(*counts)


@pytest.mark.parametrize("size", [2, 3])
def test_a_split_sequence_sends_what_all_reduces_do_and_one_more_gather(size: int) -> None:
    num_tokens = 5 * size
    part = num_tokens * WIDTH * 8 * (size - 1) // size
    for deferred in (False, True):
        whole, *_ = run_ranks(size, count_traffic, size, num_tokens, Way(False, deferred, False))
        split, *_ = run_ranks(size, count_traffic, size, num_tokens, Way(True, deferred, False))
        assert whole == Traffic({"all_reduce": 2 * part}, {"all_reduce": 2 * part}, {})
        assert split.forward == {"all_gather": part, "reduce_scatter": part}
        if deferred:  # the row layer's output gradient is gathered again as well
            assert split.backward == {"all_gather": part, "reduce_scatter": part}
            assert split.defer == {"all_gather": 2 * part}
        else:
            assert split.backward == {"all_gather": 2 * part, "reduce_scatter": part}
            assert split.defer == {}


def traffic_of_wants(rank: int, size: int, x_wants: bool, weight_wants: bool, bias_wants: bool) -> dict[str, int]:
    """Return the bytes that a column layer's backward sends, by collective, for some set of needed gradients."""
    mesh = mesh_in_worker(rank, tp=size)
    tp = context_for(mesh, Way(splits=True, deferred=False, recomputed=False))
    model = Block(tp)
    put_logical(model, block_weights())
    model.column.weight.requires_grad_(weight_wants)
    model.column.bias.requires_grad_(bias_wants)
    x = draw(1, 3, WIDTH).requires_grad_(x_wants)
    y = column_linear(tp, x, model.column.weight, model.column.bias, products=tp.products)
    mesh.meter.reset()
    y.sum().backward()
    wants = {"x": x_wants, "weight": weight_wants, "bias": bias_wants}
    got = {"x": x.grad, "weight": model.column.weight.grad, "bias": model.column.bias.grad}
    assert {name: gradient is not None for name, gradient in got.items()} == wants
    return mesh.meter.bytes_by_axis().get("tp", {})


@pytest.mark.parametrize(
    ("wants", "collectives"),
    [
        ((True, True, False), {"all_gather", "reduce_scatter"}),
        ((True, False, False), {"reduce_scatter"}),
        ((False, True, True), {"all_gather"}),
        ((False, False, True), set()),
    ],
)
def test_only_what_is_wanted_is_sent(wants: tuple[bool, bool, bool], collectives: set[str]) -> None:
    for sent in run_ranks(2, traffic_of_wants, 2, *wants):
        assert set(sent) == collectives


def saved_elements(rank: int, size: int, way: Way) -> int:
    """Return the number of elements that autograd saves for a column layer, without its weight."""
    tp = context_for(mesh_in_worker(rank, tp=size), way)
    model = Block(tp)
    put_logical(model, block_weights())
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.column(draw(1, 12, WIDTH)[tp.local_rows(12)])
    return sum(tensor.numel() for tensor in saved) - model.column.weight.numel()


def test_a_column_layer_keeps_this_ranks_tokens_only() -> None:
    whole, _, _ = run_ranks(3, saved_elements, 3, Way(False, False, False))
    split, _, _ = run_ranks(3, saved_elements, 3, Way(True, False, False))
    assert (whole, split) == (12 * WIDTH, 4 * WIDTH)


def bfloat16_block(rank: int, size: int, deferred: bool) -> list[tuple[str, Tensor]]:
    """Return the gradients of a bf16 block, kept in given fp32 memory; those of parts of the tokens are added up."""
    tp = context_for(mesh_in_worker(rank, tp=size), Way(True, deferred, False))
    tp = replace(tp, dtype=torch.bfloat16)
    model = Block(tp)
    put_logical(model, block_weights())
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    y = model(micro_batches(7 * size)[0][0][tp.local_rows(7 * size)].bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    if tp.deferred is not None:
        tp.deferred.collect().accumulate()
    sum_partial_gradients(model, tp)
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]


def test_bfloat16_with_gradients_of_their_own_precision() -> None:
    immediate, deferred = (run_ranks(2, bfloat16_block, 2, defer) for defer in (False, True))
    for ours, theirs in zip(immediate, deferred, strict=True):
        for (name, first), (_, second) in zip(ours, theirs, strict=True):
            assert first.dtype == second.dtype == torch.float32 and first.any(), name
            torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_use_without_gradients_is_the_parameter() -> None:
    deferred = DeferredGradients()
    tp = replace(context(), deferred=deferred)
    parameter = nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert tp.use(parameter) is parameter
    assert tp.use(parameter) is not parameter
    assert context().use(parameter) is parameter
    parameter.requires_grad_(False)
    assert tp.use(parameter) is parameter and tp.linear(parameter, tp.products).defer is None


def test_frozen_weights_defer_nothing() -> None:
    deferred = DeferredGradients()
    model = Block(replace(context(), deferred=deferred))
    put_logical(model, block_weights())
    for parameter in (model.column.weight, model.row.weight):
        parameter.requires_grad_(False)
    model(draw(1, 4, WIDTH)).sum().backward()
    deferred.collect().accumulate()
    got = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert got == {"scale", "column.bias", "row.bias"}


# --- dropout outside of regions --------------------------------------------------------------------------------------


def dropped(rank: int, size: int, splits: bool) -> tuple[Tensor, Tensor]:
    """Return a tensor of ones after dropout, and numbers drawn from the replicated state after it."""
    tp = context_for(mesh_in_worker(rank, tp=size), Way(splits, False, False))
    tp.random.begin_micro_batch(3)
    return tp.residual_dropout(torch.ones(200), 0.5, True), torch.rand(3)


def test_residual_dropout_draws_what_its_tokens_need() -> None:
    (first, after), (second, also_after) = run_ranks(2, dropped, 2, False)
    assert torch.equal(first, second) and torch.equal(after, also_after)
    (first, after_split), (second, also_after_split) = run_ranks(2, dropped, 2, True)
    assert not torch.equal(first, second), "other tokens, other masks"
    assert torch.equal(after_split, also_after_split) and not torch.equal(after_split, after)
    assert set(first.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_where_nothing_is_dropped(p: float, training: bool) -> None:
    tp = context()  # without begin_micro_batch
    before, x = torch.get_rng_state(), torch.ones(4)
    assert tp.residual_dropout(x, p, training) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_local_rows_are_contiguous_parts_in_rank_order() -> None:
    class Three:
        size, rank = 3, 1

    tp = replace(context(), communicator=Three(), splits_sequence=True)
    assert tp.local_rows(15) == slice(5, 10)
    with pytest.raises(AssertionError, match="16 tokens over 3 ranks"):
        tp.local_rows(16)
