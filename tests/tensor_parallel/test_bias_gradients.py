"""Passes that make a gradient and add it up over rows equal torch's own gradients, as do the GPU's kernels for them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from support.models import context, small_config
from torch import Tensor, nn

from megazero.model.attention import SelfAttention
from megazero.model.block import FeedForward
from megazero.model.positions import rotation_table
from megazero.model.sequences import Sequences
from megazero.parallel.param_spec import InitialValue
from megazero.tensor_parallel.bias_gradients import (
    biased_gelu,
    biased_heads,
    gelu_gradient_by_torch,
    packed_gradient_by_torch,
)
from megazero.tensor_parallel.deferred import DeferredGradients
from megazero.tensor_parallel.layers import ColumnParallelLinear

ROWS = [(1, 1), (7, 5), (70, 130)]
HEADS = [(1, 1, 1, 1), (2, 35, 3, 16), (1, 3, 5, 7)]
# Rows of several runs, and columns of several blocks, both with a rest.
MORE_ROWS = [*ROWS, (33, 128), (2100, 5), (4100, 257)]
MORE_HEADS = [*HEADS, (1, 2100, 1, 7), (3, 1400, 3, 64)]


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differentiated(function: Any, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the inputs, from those of the function's outputs."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return list(torch.autograd.grad(outputs, leaves, grads))


@each("shape", ROWS)
def test_gelu_behind_a_bias(shape: tuple[int, int]) -> None:
    x, bias, grad = draw(*shape), draw(shape[1], seed=2), draw(*shape, seed=3)
    expected = differentiated(lambda x, bias: F.gelu(x + bias, approximate="tanh"), (x, bias), (grad,))
    found = differentiated(lambda x, bias: biased_gelu(x + bias.detach(), bias), (x, bias), (grad,))
    torch.testing.assert_close(biased_gelu(x, bias), F.gelu(x, approximate="tanh"), rtol=0, atol=0)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@each("shape", HEADS)
def test_heads_behind_a_bias(shape: tuple[int, int, int, int]) -> None:
    batch, length, heads, width = shape
    x, bias = draw(batch, length, 3, heads, width), draw(3 * heads * width, seed=2)
    grads = [draw(*shape, seed=seed) for seed in (3, 4, 5)]
    expected = differentiated(lambda x, bias: (x + bias.view(3, heads, width)).unbind(2), (x, bias), grads)
    found = differentiated(
        lambda x, bias: biased_heads(x + bias.detach().view(3, heads, width), bias), (x, bias), grads
    )
    for mine, view in zip(biased_heads(x, bias), x.unbind(2), strict=True):
        assert torch.equal(mine, view)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@each("wants_output", [False, True])
def test_the_operators_are_what_their_schemas_and_fakes_say(wants_output: bool) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.megazero.gelu_gradient.default, (draw(7, 5), draw(7, 5), wants_output), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.megazero.packed_gradient.default,
        tuple(draw(2, 3, 4, 5, seed=seed) for seed in (1, 2, 3)),
        test_utils=checks,
    )


def make_layer(*, frozen: bool) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(context(), logical_shape=(5, 3), split_dim=0, init=InitialValue("zeros"))
    with torch.no_grad():
        layer.weight.copy_(draw(5, 3))
        assert layer.bias is not None
        layer.bias.copy_(draw(5, seed=2))
    layer.bias.requires_grad_(not frozen)
    return layer


def test_a_layer_leaves_its_biass_gradient_and_no_other() -> None:
    layer, x = make_layer(frozen=False), draw(4, 3, seed=3)
    whole, left = layer(x), layer(x, leaves_bias_gradient=True)
    assert torch.equal(whole, left)
    left.sum().backward()
    assert layer.bias is not None and layer.bias.grad is None and layer.weight.grad is not None


def operations(loss: Tensor) -> set[str]:
    """Return the names of the operations that backward goes through."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return {node.name() for node in seen}


def drawn(module: nn.Module) -> nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return module


@each("case", [("trained", {}, True), ("frozen", {}, False), ("another activation", {"squared_relu": True}, False)])
def test_feed_forward_layers_add_up_where_the_bias_is_trained(case: tuple[str, dict[str, bool], bool]) -> None:
    name, options, adds_up = case
    layers = drawn(FeedForward(small_config(**options), context()))
    bias = layers.get_parameter("up.bias").requires_grad_(name != "frozen")
    loss = layers(draw(4, 60, seed=9)).square().sum()
    assert ("_GeluBackward" in operations(loss)) is adds_up
    loss.backward()
    assert (bias.grad is None) is (name == "frozen")


@each(
    "case",
    [
        ("trained", {}, True),
        ("frozen", {}, False),
        ("normalised", {"qk_layernorm": True}, False),
        ("rotated", {"position_embedding_type": "rope", "num_attention_heads": 6}, False),
    ],
)
def test_attention_adds_up_where_the_bias_is_trained(case: tuple[str, dict[str, object], bool]) -> None:
    name, options, adds_up = case
    config = small_config(**options)
    attention = drawn(SelfAttention(config, context(), None))
    bias = attention.get_parameter("qkv.bias").requires_grad_(name != "frozen")
    table = rotation_table(config, torch.float64, torch.device("cpu")) if name == "rotated" else None
    loss = attention(draw(24, 60, seed=9), Sequences(12, rotation=table)).square().sum()
    assert ("_HeadsBackward" in operations(loss)) is adds_up
    loss.backward()
    assert (bias.grad is None) is (name == "frozen")


def test_attention_adds_up_where_gradients_are_deferred() -> None:
    deferred, x = DeferredGradients(), draw(24, 60, seed=9)
    late, plain = (
        drawn(SelfAttention(small_config(), tp, None)) for tp in (replace(context(), deferred=deferred), context())
    )
    losses = [attention(x, Sequences(12)).square().sum() for attention in (late, plain)]
    assert all("_HeadsBackward" in operations(loss) for loss in losses)
    for loss in losses:
        loss.backward()
    assert all(parameter.grad is None for parameter in late.parameters())
    deferred.collect().accumulate()
    for mine, other in zip(late.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, other.grad)


@each(
    "case",
    [
        ({}, False, True),
        ({}, True, True),
        ({"qk_layernorm": True}, False, True),
        ({"qk_layernorm": True}, True, False),
        ({"attention_dropout": 0.1}, False, False),
    ],
)
def test_code_that_defers_gradients_is_not_compiled(case: tuple[dict[str, object], bool, bool]) -> None:
    options, defers, is_compilable = case
    tp = replace(context(), deferred=DeferredGradients() if defers else None)
    assert SelfAttention(small_config(**options), tp, None).is_compilable is is_compilable


def check_kernels(device: str, dtype: torch.dtype, rows: Sequence[Any], heads: Sequence[Any]) -> None:
    """Compare the kernels on a device with torch in float64 on a CPU."""
    from megazero.tensor_parallel import bias_gradient_kernels as kernels

    # Sums are rounded once, and a rounding of the elements added up counts by the square root of their number.
    bounds = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
    for shape in rows:
        grad, x = draw(*shape).to(dtype), (draw(*shape, seed=2) * 3).to(dtype)
        expected = gelu_gradient_by_torch(grad.double(), x.double(), True)
        for wants_output in (True, False):
            found = kernels.gelu_gradient(grad.to(device), x.to(device), wants_output)
            assert found[1].shape == (x.shape if wants_output else (0,))
            for mine, other in zip(found, expected, strict=True):
                if mine.numel():
                    torch.testing.assert_close(mine.cpu().double(), other, **bounds)
    for shape in heads:
        grads = [draw(*shape, seed=seed).to(dtype) for seed in (1, 2, 3)]
        expected_packed, expected_sums = packed_gradient_by_torch(*(grad.double() for grad in grads))
        packed, sums = kernels.packed_gradient(*(grad.to(device) for grad in grads))
        assert torch.equal(packed.cpu().double(), expected_packed)
        torch.testing.assert_close(sums.cpu().double(), expected_sums, **bounds)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpus_kernels_have_the_gradients_of_torch(dtype: torch.dtype) -> None:
    check_kernels("cuda", dtype, MORE_ROWS, MORE_HEADS)


@pytest.mark.cuda
def test_on_a_gpu_in_float64_and_of_no_rows() -> None:
    grad, x = draw(7, 5), draw(7, 5, seed=2)
    for rows in (7, 0):
        found = torch.ops.megazero.gelu_gradient(grad[:rows].cuda(), x[:rows].cuda(), True)
        for mine, other in zip(found, gelu_gradient_by_torch(grad[:rows], x[:rows], True), strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-12, atol=1e-12)
    grads = [draw(2, 3, 4, 5, seed=seed) for seed in (1, 2, 3)]
    found = torch.ops.megazero.packed_gradient(*(grad.cuda() for grad in grads))
    for mine, other in zip(found, packed_gradient_by_torch(*grads), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: it comes with torch for GPUs")
def test_the_kernels_as_triton_interprets_them_on_a_cpu() -> None:
    words = f"import test_bias_gradients as t, torch; t.check_kernels('cpu', torch.float32, {MORE_ROWS}, {MORE_HEADS})"
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", words], env=environment, check=True)
