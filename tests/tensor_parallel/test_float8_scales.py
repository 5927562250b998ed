"""Delayed scaling is compared with its rule, written in plain PyTorch, and training by it in every layout."""

import base64
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.each import each
from support.float8_runs import LAYERS, SIZES, Layout, Ran, check_bitwise, ran_all
from support.processes import run_ranks
from support.small_runs import train_run
from support.thread_world import run_threads
from torch import Tensor

from megazero.checkpoint.reader import open_checkpoint
from megazero.comm.local import LocalCommunicator
from megazero.errors import DamageError
from megazero.tensor_parallel.float8 import E4M3, E5M2, GRADIENT, INPUT, WEIGHT, Float8Products, quantise_weight
from megazero.tensor_parallel.float8_scales import PROGRESS_KEY, DelayedRecipe, DelayedScales

CPU = torch.device("cpu")
DELAYED: dict[str, Any] = {"fp8_recipe": "delayed"}
IN_FP32: dict[str, Any] = {"accumulate_allreduce_grads_in_fp32": True}
BF16: dict[str, Any] = {"fp8_format": None}
FORMATS = {INPUT: E4M3, WEIGHT: E4M3, GRADIENT: E5M2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def drawn(*shape: int, seed: int, magnitude: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude).bfloat16()


def one_layer(recipe: DelayedRecipe, world: Any = None) -> tuple[DelayedScales, Float8Products]:
    products = Float8Products(E5M2)
    world = LocalCommunicator() if world is None else world
    return DelayedScales({0: products}, recipe, num_layers=1, world=world, device=CPU), products


class PlainScaling:
    """TransformerEngine's delayed scaling of one tensor, with one maximum a step."""

    def __init__(self, dtype: torch.dtype, recipe: DelayedRecipe, scale: float = 1.0) -> None:
        self.dtype, self.recipe = dtype, recipe
        self.history: list[float] = []
        self.scale = torch.tensor(scale)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        limit = LARGEST[self.dtype]
        return (x.float() * self.scale).clamp(-limit, limit).to(self.dtype), 1 / self.scale

    def end_step(self, maximum: float) -> None:
        self.history = [maximum, *self.history][: self.recipe.history_len]
        amax = self.history[0] if self.recipe.algorithm == "most_recent" else max(self.history)
        if amax > 0:
            found = (torch.tensor(LARGEST[self.dtype]) / torch.tensor(amax)) / 2**self.recipe.margin
            self.scale = found.clamp(max=torch.finfo(torch.float32).max)


RECIPES = [
    DelayedRecipe(0, 1, "most_recent"),
    DelayedRecipe(2, 1, "most_recent"),
    DelayedRecipe(1, 3, "max", 512.0),
    DelayedRecipe(0, 16, "max"),
]


@each("recipe", RECIPES, ids=str)
def test_the_rule_in_plain_pytorch(recipe: DelayedRecipe) -> None:
    """Values and scales are bitwise those of the rule, in steps of several micro-batches, of zeros and of extremes."""
    scales, products = one_layer(recipe)
    plain = {which: PlainScaling(FORMATS[which], recipe) for which in FORMATS}
    plain[GRADIENT].scale = torch.tensor(recipe.first_gradient_scale)
    held = products.scales
    assert held is not None
    for step, magnitude in enumerate((1.0, 4.0, 1e-3, 0.0, 1e30, 2.0**-133, 1.0, 1.0, 1.0)):
        scales.begin_step()
        for which, dtype in FORMATS.items():
            maximum = 0.0
            for micro_batch in range(3):
                x = drawn(16, 32, seed=9 * step + micro_batch, magnitude=magnitude)
                maximum = max(maximum, float(x.abs().max()))
                found, expected = held.quantise(which, x, dtype), plain[which].quantise(x)
                assert torch.equal(found.rows.float(), expected[0].float())
                assert torch.equal(found.scale, expected[1])
                assert torch.equal(found.columns.float().t(), expected[0].float())
            plain[which].end_step(maximum)
        scales.end_step(None)
        assert torch.equal(scales.scales, torch.stack([plain[which].scale for which in FORMATS])), step


def test_an_overflow_is_limited_and_infinities_are_seen() -> None:
    scales, products = one_layer(DelayedRecipe(0, 4, "max"))
    x, weight, grad = drawn(32, 48, seed=1), drawn(16, 48, seed=2), drawn(32, 16, seed=3)
    for _ in range(2):
        products.weight = quantise_weight(weight, products.scales)
        products.output(x, weight, None)
        products.weight_gradient(grad, x)
        scales.end_step(None)
    before = scales.scales.clone()
    products.weight = quantise_weight(weight, products.scales)
    far = products.output(x * 1e4, weight, None)
    assert torch.isfinite(far).all() and torch.isfinite(products.weight_gradient(grad * 1e4, x)).all()
    limited = (x * 1e4).clamp(-x.abs().max(), x.abs().max())
    assert torch.allclose(far, products.output(limited, weight, None), rtol=0.02, atol=1e-2)
    for value in (math.inf, -math.inf, math.nan):
        spoilt = [one.clone() for one in (x, weight, grad)]
        for one in spoilt:
            one[3, 5] = value
        assert not torch.isfinite(products.output(spoilt[0], weight, None)[3]).any()
        assert not torch.isfinite(products.weight_gradient(spoilt[2], x)[5]).any()
        products.weight = quantise_weight(spoilt[1], products.scales)
        assert not torch.isfinite(products.output(x, weight, None)[:, 3]).any()
        assert not torch.isfinite(products.input_gradient(grad, weight)[:, 5]).any()
    scales.end_step(None)
    assert torch.equal(scales.scales, before) and torch.isfinite(scales.history).all()


def test_single_numbers_are_aligned() -> None:
    """A GPU's library takes the address of a scale, and compiled code that of a maximum, as a tensor's own."""
    layers = {row: Float8Products(E5M2) for row in range(5)}
    DelayedScales(layers, DelayedRecipe(0, 1, "max"), num_layers=5, world=LocalCommunicator(), device=CPU)
    numbers = [number for each in layers.values() for triple in each.scales._each for number in triple]
    first = min(number.data_ptr() for number in numbers)
    assert len({number.data_ptr() for number in numbers}) == 5 * 9
    assert all((number.data_ptr() - first) % 512 == 0 and number.ndim == 0 for number in numbers)


def test_ranks_share_maxima() -> None:
    """Ranks have the scales of the largest maximum among them, of layers that only one has too; a skip changes none."""

    def train(world: Any) -> Tensor:
        layers = {row: Float8Products(E5M2) for row in (0, 1 + world.rank)}
        scales = DelayedScales(layers, DelayedRecipe(0, 2, "max"), num_layers=3, world=world, device=CPU)
        for step in range(3):
            for row, products in layers.items():
                assert products.scales is not None
                for which in FORMATS:
                    x = drawn(16, 16, seed=row) * (1 + which) * (2 if world.rank == row == 0 else 1)
                    products.scales.quantise(which, x * (100 if step == 2 else 1), FORMATS[which])
            scales.end_step(torch.tensor(float(step == 2), dtype=torch.float64))
        assert all(
            torch.equal(products.scales.scales, scales.scales.view(3, 3)[row])
            for row, products in layers.items()
            if products.scales is not None
        )
        return scales.scales.view(3, 3)

    first, second = run_threads(2, train)
    assert torch.equal(first, second)
    for row, factor in enumerate((2, 1, 1)):
        amax = torch.stack([(drawn(16, 16, seed=row) * (1 + which) * factor).abs().max() for which in FORMATS])
        assert torch.equal(first[row], torch.tensor([448.0, 448.0, 57344.0]) / amax.float())


def test_what_a_checkpoint_stores() -> None:
    scales, products = one_layer(DelayedRecipe(0, 3, "max"))
    assert products.scales is not None
    for step in range(5):
        products.scales.quantise(INPUT, drawn(16, 16, seed=step), E4M3)
        scales.end_step(None)
    saved = scales.to_json()
    for history_len in (2, 3, 9):
        other, own = one_layer(DelayedRecipe(0, history_len, "max"))
        other.restore(saved)
        assert torch.equal(other.scales, scales.scales)
        same = min(3, history_len)
        assert torch.equal(other.history[:same], scales.history[:same]) and not other.history[same:].any()
        assert own.scales is not None and torch.equal(own.scales.scales, scales.scales)
    bomb = base64.b64encode(zlib.compress(bytes(1 << 26))).decode()
    wrong = ({"fp32": "?"}, {"tensors": 2}, {"fp32": saved["fp32"][:20]}, {"fp32": bomb}, {"history_len": "many"})
    for broken in (None, {}, *({**saved, **one} for one in wrong)):
        with pytest.raises(DamageError, match=PROGRESS_KEY):
            scales.restore(broken)


PLAIN = Layout({**DELAYED, **IN_FP32, "fp8_amax_history_len": 2, "fp8_amax_compute_algo": "max"})
FULL = {"recompute_granularity": "full"}
NEAR = 6e-3  # between layouts, which sum in another order; measured are 4e-3 with tensor parallelism, else 4e-4


@pytest.fixture(scope="module")
def alone() -> list[Ran]:
    """Return runs on one process: as it is, with weights cached, recomputed, twice in stage 3, and others."""
    stage_3 = PLAIN.having(zero_stage=3)
    layouts = [PLAIN, PLAIN.having(fp8_cache_weights=True), PLAIN.having(**FULL), stage_3, stage_3.having(**FULL)]
    others = [PLAIN.having(fp8_recipe="tensorwise"), PLAIN.having(**BF16), PLAIN._replace(evaluates=False)]
    found: list[Ran] = run_ranks(1, ran_all, [*layouts, *others])[0]
    return found


@pytest.mark.gloo
def test_on_one_process(alone: list[Ran]) -> None:
    """Neither kept values nor recomputation changes a bit; losses are near those of the other recipe, and of bf16."""
    plain, cached, recomputed, stage_3, recomputed_in_stage_3, tensorwise, bf16, unevaluated = alone
    check_bitwise(replace(plain, evaluations=[]), unevaluated)  # whose maxima count for no later step
    for one, other in ((plain, cached), (plain, recomputed), (stage_3, recomputed_in_stage_3)):
        check_bitwise(one, other)
    for other in (stage_3, tensorwise, bf16):
        assert [loss for loss, _ in other.figures] == pytest.approx([loss for loss, _ in plain.figures], rel=0.02)
        assert other.figures != plain.figures
    assert len(plain.history) == 2 and bool((plain.history > 0).all())
    assert len(set(plain.scales.tolist())) > 12


@pytest.mark.gloo
def test_layouts_have_the_same_scales(alone: list[Ran]) -> None:
    """Ranks reduce their maxima, so a layout's scales are those of one process up to the order of sums."""
    plain = alone[0]
    tensorwise, *layouts = [
        PLAIN._replace(dp=2).having(fp8_recipe="tensorwise"),
        *(PLAIN._replace(dp=2).having(zero_stage=stage, fp8_cache_weights=stage < 3) for stage in range(4)),
        PLAIN._replace(tp=2).having(fp8_cache_weights=True),
        PLAIN._replace(tp=2).having(sequence_parallel=True, **FULL),
        PLAIN._replace(pp=2).having(pipeline_schedule="zero-bubble"),
    ]
    (tensorwise, *first), (_, *second) = run_ranks(2, ran_all, [tensorwise, *layouts])
    for layout, mine, others in zip(layouts, first, second, strict=True):
        assert torch.equal(mine.scales, others.scales) and torch.equal(mine.history, others.history), layout
        assert mine.figures == others.figures
        losses, of_one = ([loss for loss, _ in each.figures] for each in (mine, plain))
        assert losses == pytest.approx(of_one, rel=NEAR), layout
        assert mine.figures[0][1] == pytest.approx(plain.figures[0][1], rel=NEAR), layout
        assert mine.evaluations == pytest.approx(plain.evaluations[: len(mine.evaluations)], rel=5 * NEAR)
        assert torch.allclose(mine.history, plain.history, rtol=0.3), "of gradients that have gone another way"
        assert torch.allclose(mine.history[:, WEIGHT::3], plain.history[:, WEIGHT::3], rtol=0.01), layout
        if layout.tp == 1:
            assert losses[0] == pytest.approx(of_one[0], rel=1e-6), "of the same weights and scales"
        figures = mine.figures_sent - tensorwise.figures_sent
        assert figures == 2 * (2 - 1) / 2 * LAYERS * 12 * 4, "one all-reduce of 12 fp32 figures a layer"


@pytest.mark.gloo
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    """Scales and history come from the checkpoint, so that a run in two parts ends in the same bits as one in one."""
    settings = {**SIZES, **PLAIN.settings, "fp8_amax_history_len": 3, "save_interval": 2, "lr": 1e-2}

    def to(step: int, name: str, **more: Any) -> str:
        folder = str(tmp_path / name)
        own = {**settings, "save": folder, "load": folder, "train_iters": step, **more}
        text: str = run_ranks(1, train_run, 1, own)[0].text
        return text

    to(4, "whole")
    to(2, "parts")
    assert "no scales" not in to(4, "parts")
    whole, parts = (open_checkpoint(tmp_path / name, step=4) for name in ("whole", "parts"))
    assert whole.progress[PROGRESS_KEY] == parts.progress[PROGRESS_KEY]
    assert list(whole.boxes()) == list(parts.boxes())  # with the digests of all tensors
    to(2, "other", fp8_recipe="tensorwise", fp8_amax_compute_algo="most_recent", fp8_amax_history_len=1)
    assert "has no scales of 8-bit numbers: delayed scaling begins without a history" in to(4, "other")
