"""Tests AdamW on flat runs against torch.optim.AdamW, and that a skipped step changes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support.each import each
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megazero.memory.fused_buffers import FusedBuffers
from megazero.model.compiled import lacking
from megazero.optim import inner
from megazero.optim.inner import AdamWSettings, ElementRun, FusedAdamW, StepInputs, advance
from megazero.parallel.param_spec import ParamSpec
from megazero.tensor_parallel.compiler import compiled

LACKING = lacking(torch.device("cpu"))
SETTINGS = AdamWSettings(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
NUMEL = {True: 11, False: 5}  # elements of the decayed run and of the other one
RATES = (3e-2, 1e-2, 0.0, 5e-3, 2e-2)


def spec(decay: bool) -> ParamSpec:
    return ParamSpec("p", (1,), (1,), (0,), decay=decay)


@dataclass
class Flat:
    """The master weights and moments of both runs, each in one flat tensor, as the engine keeps them."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    pool: FusedBuffers

    @classmethod
    def start(cls, dtype: torch.dtype) -> "Flat":
        numel = sum(NUMEL.values())
        values = torch.randn(numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
        pool = FusedBuffers(max(NUMEL.values()) * dtype.itemsize, torch.device("cpu"))
        return cls(values, torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype), torch.zeros(()), pool)

    def update(self, gradient: Tensor, inputs: StepInputs, by: Callable[..., None] | None = None) -> None:
        """Take one optimizer step over both runs; by: a function in place of torch's fused kernel."""
        advance(self.step, inputs)
        inputs = inputs.for_masters(self.master.dtype)
        optimizer = FusedAdamW(SETTINGS)
        for decay, part in self.parts().items():
            moments = {"exp_avg": self.exp_avg[part], "exp_avg_sq": self.exp_avg_sq[part]}
            run = ElementRun(
                self.master[part], gradient[part], moments, optimizer.group_of(spec(decay), nn.Parameter())
            )
            if by is None:
                optimizer.update(0, run, self.step, inputs, buffers=self.pool)
            else:
                inner.in_one_pass(by, run, self.step, inputs, optimizer.groups[run.group], inputs.lr or 0.0)

    @staticmethod
    def parts() -> dict[bool, slice]:
        return {True: slice(0, NUMEL[True]), False: slice(NUMEL[True], sum(NUMEL.values()))}

    def copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in (self.master, self.exp_avg, self.exp_avg_sq, self.step)]


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    numel = sum(NUMEL.values())
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in RATES]


def inputs(lr: float, factor: float = 1.0, found_inf: float | None = None) -> StepInputs:
    flag = None if found_inf is None else torch.tensor(found_inf)
    return StepInputs(lr, torch.tensor(factor, dtype=torch.float64), flag)


def torch_adamw(start: Tensor, grads: list[Tensor], factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, first moments and second moments after all steps of a plain loop in torch."""
    parts = {decay: start[part].clone().requires_grad_(True) for decay, part in Flat.parts().items()}
    groups = [
        {"params": [weight], "weight_decay": SETTINGS.weight_decay if decay else 0.0} for decay, weight in parts.items()
    ]
    betas = (SETTINGS.beta1, SETTINGS.beta2)
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=SETTINGS.eps, foreach=False, fused=False)
    for rate, gradient in zip(RATES, grads, strict=True):
        for decay, weight in parts.items():
            weight.grad = (gradient[Flat.parts()[decay]] * factor).to(start.dtype)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    states = [optimizer.state[weight] for weight in parts.values()]
    return (
        torch.cat([weight.detach() for weight in parts.values()]),
        torch.cat([state["exp_avg"] for state in states]),
        torch.cat([state["exp_avg_sq"] for state in states]),
    )


@each(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=str)
@each("factor", [1.0, 0.125])
@each("found_inf", [None, 0.0])
@each("by", [None, inner.adamw], ids=["the kernel", "in one pass"])
def test_steps_equal_torchs(
    dtype: torch.dtype, rtol: float, factor: float, found_inf: float | None, by: Callable[..., None] | None
) -> None:
    flat, grads = Flat.start(dtype), gradients(dtype)
    expected = torch_adamw(flat.master.clone(), grads, factor)
    for rate, gradient in zip(RATES, grads, strict=True):
        flat.update(gradient, inputs(rate, factor, found_inf), by)
    for ours, theirs in zip((flat.master, flat.exp_avg, flat.exp_avg_sq), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)
    assert flat.step.item() == len(RATES)


def test_one_pass_skips_a_step_and_takes_narrow_gradients() -> None:
    flat, narrow = Flat.start(torch.float32), gradients(torch.bfloat16)
    expected, _, _ = torch_adamw(flat.master.clone(), [gradient.float() for gradient in narrow], 2.0**-16)
    for rate, gradient in zip(RATES, narrow, strict=True):
        flat.update(gradient, inputs(rate, 2.0**-16, 0.0), inner.adamw)
        before = flat.copies()
        flat.update(torch.full_like(gradient, torch.inf), inputs(rate, 1.0, 1.0), inner.adamw)
        assert all(torch.equal(a, b) for a, b in zip(flat.copies(), before, strict=True))
    torch.testing.assert_close(flat.master, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("betas", [(0.0, 0.95), (0.8, 0.0), (0.0, 0.0)])
def test_one_pass_without_an_average(betas: tuple[float, float]) -> None:
    weight = nn.Parameter(torch.linspace(-2, 3, 7, dtype=torch.float64))
    plain = torch.optim.AdamW([weight], lr=1e-2, betas=betas, eps=1e-6, weight_decay=0.3)
    master, step = weight.detach().clone(), torch.zeros(())
    moments = {name: torch.zeros(7, dtype=torch.float64) for name in FusedAdamW.moments}
    options = {"betas": betas, "eps": 1e-6, "weight_decay": 0.3}
    for gradient in (torch.linspace(-1, 2, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)):
        weight.grad = gradient.clone()
        plain.step()
        given = inputs(1e-2)
        advance(step, given)
        given = given.for_masters(torch.float64)
        inner.in_one_pass(inner.adamw, ElementRun(master, gradient, moments, 0), step, given, options, 1e-2)
    torch.testing.assert_close(master, weight.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.skipif(bool(LACKING), reason=f"this machine lacks {LACKING}")
def test_runs_of_all_lengths_and_rates_are_one_graph() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    function, flat = compiled(inner.adamw, has_one_shape=False), Flat.start(torch.float32)
    grads = gradients(torch.bfloat16)
    expected, _, _ = torch_adamw(flat.master.clone(), [gradient.float() for gradient in grads], 0.5)
    for rate, gradient in zip(RATES, grads, strict=True):
        flat.update(gradient, inputs(rate, 0.5), function)
    torch.testing.assert_close(flat.master, expected, rtol=2e-6, atol=2e-6)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.cuda
def test_a_gpu_updates_by_either_kernel() -> None:
    device = torch.device("cuda")
    found = []
    for compile in (None, partial(compiled, has_one_shape=False)):
        optimizer = FusedAdamW(SETTINGS, compile=compile)
        flat, step = Flat.start(torch.float32), torch.zeros((), device=device)
        master, first, second = (tensor.to(device) for tensor in (flat.master, flat.exp_avg, flat.exp_avg_sq))
        pool = FusedBuffers(master.nbytes, device)
        for rate, gradient in zip(RATES, gradients(torch.bfloat16), strict=True):
            given = inputs(rate, 0.5).to(device)
            advance(step, given)
            run = ElementRun(master, gradient.to(device), {"exp_avg": first, "exp_avg_sq": second}, 0)
            optimizer.update(0, run, step, given.for_masters(torch.float32), buffers=pool)
        found.append((master, first, second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_gradients_are_widened_before_they_are_scaled(narrow: torch.dtype) -> None:
    """A factor of 1 / 2^16 would otherwise push fp16 gradients below the smallest fp16 number."""
    flat, grads = Flat.start(torch.float32), gradients(narrow)
    expected, _, _ = torch_adamw(flat.master.clone(), [gradient.float() for gradient in grads], 2.0**-16)
    for rate, gradient in zip(RATES, grads, strict=True):
        before = gradient.clone()
        flat.update(gradient, inputs(rate, 2.0**-16))
        assert torch.equal(gradient, before), "gradients are read only"
    torch.testing.assert_close(flat.master, expected, rtol=2e-6, atol=2e-6)


class Operations(TorchDispatchMode):
    """A dispatch mode that records the operations that read or write elements; views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


@each(
    ("device", "master", "gradient", "expected"),
    [
        ("meta", torch.float32, torch.bfloat16, ["mul", "_fused_adamw_"]),
        ("meta", torch.float32, torch.float16, ["mul", "_fused_adamw_"]),
        ("meta", torch.float32, torch.float32, ["mul", "_fused_adamw_"]),
        ("meta", torch.float64, torch.float64, ["mul", "_fused_adamw_"]),
        ("cpu", torch.float32, torch.bfloat16, ["copy_", "mul_", "_fused_adamw_"]),
        ("cpu", torch.float32, torch.float32, ["mul", "_fused_adamw_"]),
        ("cpu", torch.float64, torch.float64, ["mul", "_fused_adamw_"]),
    ],
    ids=str,
)
def test_a_run_is_updated_in_two_operations(
    device: str, master: torch.dtype, gradient: torch.dtype, expected: list[str]
) -> None:
    """A gradient is read once, and scaled in the precision of the master weights (meta tensors stand for a GPU's)."""
    place = torch.device(device)
    weights, *moments = (torch.zeros(NUMEL[True], dtype=master, device=place) for _ in range(3))
    run = ElementRun(
        weights,
        torch.zeros(NUMEL[True], dtype=gradient, device=place),
        dict(zip(FusedAdamW.moments, moments, strict=True)),
        0,
    )
    given = StepInputs(1e-2, torch.ones((), dtype=torch.float64, device=place), None).for_masters(master)
    assert given.factor.dtype == master
    step, pool = torch.ones((), device=place), FusedBuffers(NUMEL[True] * master.itemsize, place)
    with Operations() as seen:
        FusedAdamW(SETTINGS).update(0, run, step, given, buffers=pool)
    assert [name for name in seen.names if name not in ("empty", "detach")] == expected


@each("gradient", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_factor_is_not_rounded_to_the_gradients_precision(gradient: torch.dtype) -> None:
    """One multiplication with a cast in it, as on a GPU, gives the bits of a cast followed by a multiplication."""
    master = torch.promote_types(gradient, torch.float32)
    given, values = inputs(1e-2, 1 / 3).for_masters(master), gradients(gradient)[0]
    scaled = torch.mul(values, given.factor, out=torch.empty(len(values), dtype=master))
    expected = (values.double() / 3).to(master)
    torch.testing.assert_close(scaled, expected, rtol=1e-15 if master == torch.float64 else 2e-7, atol=0)
    assert torch.equal(scaled, inner.scaled(values, given.factor, torch.empty_like(scaled)))


def test_decay_without_gradient() -> None:
    """A zero gradient leaves nothing but the decay: weight (1 - lr decay), and only in the run that decays."""
    flat = Flat.start(torch.float64)
    before = flat.master.clone()
    flat.update(torch.zeros_like(before), inputs(0.5))
    parts = flat.parts()
    torch.testing.assert_close(flat.master[parts[True]], before[parts[True]] * (1 - 0.5 * 0.3), rtol=1e-15, atol=0)
    assert torch.equal(flat.master[parts[False]], before[parts[False]])


@each("dtype", [torch.float64, torch.float32], ids=str)
@each("value", [torch.inf, torch.nan, 1.0])
def test_a_skipped_step_leaves_everything_as_it_was(dtype: torch.dtype, value: float) -> None:
    flat, grads = Flat.start(dtype), gradients(dtype)
    flat.update(grads[0], inputs(1e-2, found_inf=0.0))
    before = flat.copies()
    overflowed = grads[1].clone()
    overflowed[3] = value
    flat.update(overflowed, inputs(1e-2, factor=torch.nan, found_inf=1.0))
    for ours, expected in zip(flat.copies(), before, strict=True):
        assert torch.equal(ours, expected)


def test_the_step_after_a_skipped_one_is_the_one_that_would_have_been() -> None:
    skipping, straight = Flat.start(torch.float32), Flat.start(torch.float32)
    first, second = gradients(torch.float32)[:2]
    for flat in (skipping, straight):
        flat.update(first, inputs(1e-2, found_inf=0.0))
    skipping.update(second * torch.inf, inputs(1e-2, found_inf=1.0))
    for flat in (skipping, straight):
        flat.update(second, inputs(1e-2, found_inf=0.0))
    for ours, expected in zip(skipping.copies(), straight.copies(), strict=True):
        assert torch.equal(ours, expected)


def test_scratch_memory_is_one_buffer_and_given_back() -> None:
    flat = Flat.start(torch.float64)
    flat.update(gradients(torch.float64)[0], inputs(1e-2))
    assert flat.pool.num_buffers == 1
    flat.pool.resize(8)  # refused while a buffer is leased


def one_call(flat: Flat, gradient: Tensor, given: StepInputs) -> None:
    """Apply torch's own kernel to both runs whole."""
    advance(flat.step, given)
    for decay, part in Flat.parts().items():
        torch._fused_adamw_(
            [flat.master[part]],
            [gradient[part].to(flat.master.dtype) * given.factor.to(flat.master.dtype)],
            [flat.exp_avg[part]],
            [flat.exp_avg_sq[part]],
            [],
            [flat.step],
            lr=given.lr,
            beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2,
            weight_decay=SETTINGS.weight_decay if decay else 0.0,
            eps=SETTINGS.eps,
            amsgrad=False,
            maximize=False,
        )


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=str)
@pytest.mark.parametrize("piece", [1, 4, 5, 6, 10, 11, 12])
def test_pieces_are_updated_as_one_run_is(
    monkeypatch: pytest.MonkeyPatch, piece: int, dtype: torch.dtype, rtol: float
) -> None:
    """Runs of 11 and 5 elements are cut into pieces that divide them or not, that are as long, or that are longer."""
    monkeypatch.setattr(inner, "_CACHED_NUMEL", piece)
    ours, whole = Flat.start(dtype), Flat.start(dtype)
    for count, (rate, gradient) in enumerate(zip(RATES, gradients(dtype), strict=True), 1):
        ours.update(gradient, inputs(rate, 0.125))
        one_call(whole, gradient, inputs(rate, 0.125))
        assert ours.step.item() == count, "each step is counted once, whatever the number of pieces"
    for found, expected in zip(ours.copies(), whole.copies(), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("piece", [1, 4, 11])
def test_an_overflow_skips_every_piece(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(inner, "_CACHED_NUMEL", piece)
    flat, grads = Flat.start(torch.float32), gradients(torch.float32)
    flat.update(grads[0], inputs(1e-2, found_inf=0.0))
    before = flat.copies()
    flat.update(grads[1].index_fill(0, torch.tensor([10]), torch.inf), inputs(1e-2, found_inf=1.0))
    assert all(torch.equal(ours, expected) for ours, expected in zip(flat.copies(), before, strict=True))


def test_a_piece_is_all_the_memory_that_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "_CACHED_NUMEL", 4)
    flat = Flat.start(torch.float64)
    flat.pool.resize(4 * 8)
    flat.update(gradients(torch.float64)[0], inputs(1e-2))
    assert flat.pool.num_buffers == 1
    flat.pool.resize(8)  # refused while a buffer is leased


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_run_about_as_long_as_a_piece_really_is(extra: int) -> None:
    """Every element is updated once: after one step from zero, each has moved by the rate against its gradient."""
    numel = inner._CACHED_NUMEL + extra
    master, moments = torch.zeros(numel), {name: torch.zeros(numel) for name in FusedAdamW.moments}
    gradient = torch.where(torch.arange(numel) % 3 == 0, -1.0, 2.0)
    pool, step = FusedBuffers(numel * 4, torch.device("cpu")), torch.ones(())
    given = inputs(0.5).for_masters(torch.float32)
    FusedAdamW(SETTINGS).update(0, ElementRun(master, gradient, moments, 0), step, given, buffers=pool)
    torch.testing.assert_close(master, -0.5 * gradient.sign(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("narrow", [torch.float64, torch.bfloat16], ids=str)
def test_a_gradient_with_a_graph_is_used_for_its_values(narrow: torch.dtype) -> None:
    """A backward with create_graph=True leaves a gradient with a graph, of which only the values are used."""
    ours, plain = Flat.start(torch.float64), Flat.start(torch.float64)
    gradient = gradients(narrow)[0]
    plain.update(gradient, inputs(1e-2, 0.5))
    ours.update(gradient.clone().requires_grad_() * 1, inputs(1e-2, 0.5))
    assert not ours.master.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(ours.copies(), plain.copies(), strict=True))
