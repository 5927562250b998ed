"""8-bit products are compared with float64 products of numbers that the tests quantise, and with unquantised ones."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from support.gpus import has_8bit_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megazero.errors import ConfigError
from megazero.tensor_parallel import float8
from megazero.tensor_parallel.float8 import E4M3, E5M2, check_device, float8_products, quantise
from megazero.tensor_parallel.products import TORCH, Products

HYBRID, ALL_E4M3 = float8_products("hybrid"), float8_products("e4m3")
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
# Bounds on the error relative to the sum of |a b|: two operands are rounded from bf16 to 8 bits, the result to bf16.
BOUND = {E4M3: 2 * 2**-4 + 0.01, E5M2: 2**-4 + 2**-3 + 0.02}


def drawn(*shape: int, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Draw normal numbers in bf16, a few of them far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x.view(-1)[:: max(1, x.numel() // 5)] *= 8
    return (x * magnitude).bfloat16()


def dequantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x quantised to 8 bits and scaled back, in float64."""
    factor = torch.tensor(LARGEST[dtype]) / x.float().abs().max()
    return (x.float() * factor).to(dtype).double() / factor.double()


def near_bf16(found: Tensor, exact: Tensor) -> bool:
    """Return True if `found` is `exact` rounded to bf16, or next to it: fp32 sums near a tie may round otherwise."""
    return torch.allclose(found.double(), exact.bfloat16().double(), rtol=2**-7, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize(("products", "of_gradients"), [(HYBRID, E5M2), (ALL_E4M3, E4M3)])
def test_products_are_those_of_quantised_numbers(products: Products, of_gradients: torch.dtype) -> None:
    x, weight, grad, bias = drawn(48, 80), drawn(112, 80, seed=1), drawn(48, 112, seed=2), drawn(112, seed=3)
    q_x, q_weight, q_grad = dequantised(x, E4M3), dequantised(weight, E4M3), dequantised(grad, of_gradients)
    pairs = {
        "output": (products.output(x, weight, None), q_x @ q_weight.t()),
        "with bias": (products.output(x, weight, bias), q_x @ q_weight.t() + bias.double()),
        "input": (products.input_gradient(grad, weight), q_grad @ q_weight),
        "weight": (products.weight_gradient(grad, x), q_grad.t() @ q_x),
    }
    for name, (found, exact) in pairs.items():
        assert found.dtype == torch.bfloat16 and found.is_contiguous(), name
        assert near_bf16(found, exact), name
        assert (found == exact.bfloat16()).double().mean() > 0.99, name


def within(found: Tensor, left: Tensor, right: Tensor, bound: float) -> bool:
    """Return True if each error of `found` as left @ right is at most `bound` times the element of |left| @ |right|."""
    error = (found.double() - left.double() @ right.double()).abs()
    return bool((error <= bound * (left.double().abs() @ right.double().abs())).all())


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 5).map(lambda n: 16 * n)] * 3),
    seed=st.integers(0, 1000),
    magnitudes=st.tuples(*[st.integers(-60, 60)] * 3),
    transposed=st.booleans(),
)
def test_error_is_bounded(
    sizes: tuple[int, int, int], seed: int, magnitudes: tuple[int, int, int], transposed: bool
) -> None:
    """The error stays within the bound for any memory layout, and any magnitude whose products bf16 can hold."""

    def tensor(rows: int, columns: int, which: int) -> Tensor:
        x = drawn(rows, columns, seed=3 * seed + which, magnitude=2.0 ** magnitudes[which])
        return x.t().contiguous().t() if transposed else x

    n, inputs, outputs = sizes
    x, weight, grad = tensor(n, inputs, 0), tensor(outputs, inputs, 1), tensor(n, outputs, 2)
    assert within(HYBRID.output(x, weight, None), x, weight.t(), BOUND[E4M3])
    assert within(HYBRID.input_gradient(grad, weight), grad, weight, BOUND[E5M2])
    assert within(HYBRID.weight_gradient(grad, x), grad.t(), x, BOUND[E5M2])


@each("exponent", [-126, -60, 0, 60, 120])
def test_scale_follows_the_magnitude(exponent: int) -> None:
    """Multiplying by a power of two multiplies the scale and leaves the 8-bit numbers unchanged."""
    one, other = quantise(drawn(16, 16), E4M3), quantise(drawn(16, 16) * 2.0**exponent, E4M3)
    if exponent > -126:
        assert torch.equal(one.rows.float(), other.rows.float())
        assert other.scale == one.scale * 2.0**exponent
    assert other.scale.shape == () and other.scale.dtype == torch.float32 and other.scale >= 2.0**-126


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_largest_becomes_the_formats_largest(dtype: torch.dtype) -> None:
    for seed in range(200):
        values, columns, scale = quantise(drawn(16, 32, seed=seed), dtype)
        assert torch.equal(columns.float(), values.float().t())
        assert values.float().abs().max() == LARGEST[dtype] and torch.isfinite(scale)


def test_views_with_gaps_between_rows() -> None:
    wide = drawn(48, 96)
    x, weight, grad = wide[:32, :64], drawn(80, 128, seed=1)[:, ::2], drawn(64, 80, seed=2)[::2]
    for product, left, right in (
        (HYBRID.output(x, weight, None), x, weight.t()),
        (HYBRID.input_gradient(grad, weight), grad, weight),
        (HYBRID.weight_gradient(grad, x), grad.t(), x),
    ):
        assert within(product, left, right, BOUND[E5M2])
    assert torch.equal(HYBRID.output(x, weight, None), HYBRID.output(x.contiguous(), weight.contiguous(), None))


def test_zeros_make_zeros() -> None:
    zeros, x = torch.zeros(16, 32, dtype=torch.bfloat16), drawn(48, 32)
    assert torch.equal(HYBRID.output(zeros, x, None), torch.zeros(16, 48, dtype=torch.bfloat16))
    assert torch.equal(HYBRID.input_gradient(torch.zeros_like(x), zeros.t()), torch.zeros(48, 16, dtype=x.dtype))
    least = torch.full_like(zeros, 2.0**-133)  # subnormal in bf16
    assert torch.isfinite(HYBRID.output(least, x, None)).all()


@each("value", [math.inf, -math.inf, math.nan])
@each("products", [HYBRID, ALL_E4M3])
def test_what_is_not_finite_stays_so(products: Products, value: float) -> None:
    """Wherever an unquantised product is not finite, the 8-bit one is not either, so that overflows are detected."""
    x, weight, grad = drawn(32, 48), drawn(16, 48, seed=1), drawn(32, 16, seed=2)
    calls: list[Callable[[], Tensor]] = [
        lambda: products.output(x, weight, None),
        lambda: products.input_gradient(grad, weight),
        lambda: products.weight_gradient(grad, x),
    ]
    plain = [lambda: x @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ x]
    for spoilt in (x, weight, grad):
        before = spoilt[3, 5].clone()
        spoilt[3, 5] = value
        for call, exact in zip(calls, plain, strict=True):
            assert not torch.isfinite(call()[~torch.isfinite(exact())]).any()
        spoilt[3, 5] = before
    assert all(torch.isfinite(call()).all() for call in calls)


@each("dtype", [torch.bfloat16, torch.float32])
@each("inputs", [32, 33])
def test_weight_gradients_add_up(dtype: torch.dtype, inputs: int) -> None:
    """Weight gradients are added in the number format of the total; the first one overwrites what is there."""
    x, grad = drawn(48, inputs), drawn(48, 16, seed=1)
    total = torch.full((16, inputs), math.nan, dtype=dtype)
    once = HYBRID.weight_gradient(grad, x)
    HYBRID.add_weight_gradient(total, grad, x, is_first=True)
    assert torch.equal(total, once.to(dtype))
    HYBRID.add_weight_gradient(total, grad, x, is_first=False)
    assert torch.allclose(total, 2 * once.to(dtype), rtol=2**-7)
    if inputs == 32:
        assert torch.equal(total, once.to(dtype) + once)


@each("sizes", [(15, 32, 48), (16, 33, 48), (16, 32, 40), (1, 16, 16), (0, 16, 16)])
def test_other_sizes_are_left_to_the_others(sizes: tuple[int, int, int]) -> None:
    """Sizes that 8-bit products do not support are computed by torch, in all three products alike."""
    n, inputs, outputs = sizes
    x, weight, grad, bias = drawn(n, inputs), drawn(outputs, inputs), drawn(n, outputs), drawn(outputs)
    assert torch.equal(HYBRID.output(x, weight, bias), F.linear(x, weight, bias))
    assert torch.equal(HYBRID.input_gradient(grad, weight), grad @ weight)
    assert torch.equal(HYBRID.weight_gradient(grad, x), grad.t() @ x)
    found, plain = drawn(outputs, inputs), drawn(outputs, inputs)
    HYBRID.add_weight_gradient(found, grad, x, is_first=False)
    TORCH.add_weight_gradient(plain, grad, x, is_first=False)
    assert torch.equal(found, plain)


def test_operands_keep_their_values() -> None:
    x, weight, grad = drawn(32, 48), drawn(16, 48), drawn(32, 16)
    copies = x.clone(), weight.clone(), grad.clone()
    HYBRID.output(x, weight, None)
    HYBRID.input_gradient(grad, weight)
    HYBRID.weight_gradient(grad, x)
    assert all(torch.equal(now, before) for now, before in zip((x, weight, grad), copies, strict=True))


@pytest.mark.parametrize("transposed", [False, True])
def test_operands_lie_as_a_gpu_wants_them(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    """Operands are always passed by rows on the left and by columns on the right: GPU libraries accept nothing else."""
    product, seen = torch._scaled_mm, []

    def scaled_mm(left: Tensor, right: Tensor, **options: object) -> Tensor:
        seen.append((left.is_contiguous(), right.t().is_contiguous(), options["use_fast_accum"]))
        assert {left.dtype, right.dtype} <= {E4M3, E5M2} and (left.dtype, right.dtype) != (E5M2, E5M2)
        return product(left, right, **options)

    monkeypatch.setattr(float8.torch, "_scaled_mm", scaled_mm)
    x, weight, grad = drawn(32, 48), drawn(64, 48), drawn(32, 64)
    if transposed:
        x, weight, grad = (tensor.t().contiguous().t() for tensor in (x, weight, grad))
    HYBRID.output(x, weight, None)
    HYBRID.input_gradient(grad, weight)
    HYBRID.weight_gradient(grad, x)
    assert seen == [(True, True, True), (True, True, False), (True, True, False)]


needs_cuda_build = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch was built without CUDA")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda_build)])
def test_without_memory(device: str) -> None:
    """The products work on fake tensors; torch refuses those of a GPU if their memory layout is not the library's."""
    with FakeTensorMode():
        x, weight, grad = (torch.empty(*n, dtype=torch.bfloat16, device=device) for n in ((32, 48), (64, 48), (32, 64)))
        bias, total = torch.empty(64, dtype=torch.bfloat16, device=device), torch.empty(64, 48, device=device)
        for products in (HYBRID, ALL_E4M3):
            assert products.output(x, weight, bias).shape == (32, 64)
            assert products.output(x.t().contiguous().t(), weight, None).shape == (32, 64)
            assert products.input_gradient(grad, weight).shape == (32, 48)
            assert products.weight_gradient(grad, x).shape == (64, 48)
            products.add_weight_gradient(total, grad, x, is_first=True)


class _Linear(torch.autograd.Function):
    """A linear layer that computes with the given products."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, products: Products) -> Tensor:
        ctx.products = products
        ctx.save_for_backward(x, weight)
        return products.output(x, weight, None)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return ctx.products.input_gradient(grad, weight), ctx.products.weight_gradient(grad, x), None


def train(products: Products, steps: int = 60) -> list[float]:
    """Train two layers on a random two-layer function; return the loss of each step."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(64, 32, generator=generator)
    target = torch.tanh(x @ torch.randn(32, 64, generator=generator) / 6) @ torch.randn(64, 16, generator=generator) / 8
    weights = [
        torch.nn.Parameter(torch.randn(*shape, generator=generator) / math.sqrt(shape[1]))
        for shape in ((64, 32), (16, 64))
    ]
    optimizer = torch.optim.Adam(weights, lr=1e-2)
    losses = []
    for _ in range(steps):
        hidden = torch.tanh(_Linear.apply(x.bfloat16(), weights[0].bfloat16(), products))
        loss = (_Linear.apply(hidden, weights[1].bfloat16(), products).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("products", [HYBRID, ALL_E4M3])
def test_a_network_learns_as_with_bf16(products: Products) -> None:
    plain, found = train(TORCH), train(products)
    assert plain[-1] < plain[0] / 20
    assert found[-1] < found[0] / 15
    assert all(abs(a - b) < 0.01 * plain[0] + 0.05 * b for a, b in zip(found, plain, strict=True))
    assert found != plain


def test_cpus_and_old_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert check_device(None, gpu) == ()
    (notice,) = check_device("hybrid", torch.device("cpu"))
    assert notice.startswith("--fp8-format hybrid: a CPU has no 8-bit products")
    monkeypatch.setattr(float8.torch.cuda, "get_device_name", lambda device: "some GPU")
    for capability, fits in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(
            float8.torch.cuda, "get_device_capability", lambda device, capability=capability: capability
        )
        if fits:
            assert check_device("e4m3", gpu) == ()
            continue
        with pytest.raises(ConfigError) as error:
            check_device("e4m3", gpu)
        (problem,) = error.value.problems
        has = ".".join(map(str, capability))
        assert problem.given == f"--fp8-format e4m3 on some GPU (compute capability {has})"
        assert "8.9" in problem.rule and problem.legal == "leave out --fp8-format"


def test_who_makes_the_rest_is_chosen() -> None:
    class Recorded:
        def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return torch.full((x.shape[0], weight.shape[0]), 3.0)

    products = float8_products("hybrid", Recorded())
    assert bool((products.output(drawn(3, 16), drawn(16, 16), None) == 3).all())
    assert dataclasses.is_dataclass(products)


@pytest.mark.cuda
@pytest.mark.skipif(not has_8bit_gpu(), reason="no GPU with 8-bit products")
@pytest.mark.parametrize("products", [HYBRID, ALL_E4M3])
def test_on_a_gpu(products: Products) -> None:
    """A GPU gives the products of the CPU up to the precision of its sums, which have fewer bits in forward."""
    x, weight, grad, bias = drawn(48, 80), drawn(112, 80, seed=1), drawn(48, 112, seed=2), drawn(112, seed=3)
    there = [tensor.cuda() for tensor in (x, weight, grad, bias)]
    for here, on_gpu, tolerance in (
        (products.output(x, weight, bias), products.output(there[0], there[1], there[3]), 2e-2),
        (products.input_gradient(grad, weight), products.input_gradient(there[2], there[1]), 2**-7),
        (products.weight_gradient(grad, x), products.weight_gradient(there[2], there[0]), 2**-7),
    ):
        assert torch.allclose(on_gpu.cpu(), here, rtol=tolerance, atol=tolerance * float(here.abs().max()) / 10)
    there[0][3, 5] = math.inf
    assert not torch.isfinite(products.output(there[0], there[1], None)[3]).any()
