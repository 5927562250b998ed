"""Tests which backward passes are a step's: explicit, plain and recomputing ones, uncounted ones, and refused ones."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megazero
from megazero.errors import UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.zero.parameters.gathered import GatheredParameters

STAGES = range(4)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def make_engine(
    stage: int = 0, *, accumulation: int = 1, mesh: Any = None, precision: str = "fp64"
) -> DataParallelEngine:
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 50},
        "precision": {"precision": precision},
        "optimizer": {"type": "SGD", "lr": 0.1},
        "gradient_accumulation_steps": accumulation,
    }
    return megazero.initialize(make_model(), config, mesh=mesh)


@pytest.fixture
def engine() -> Iterator[DataParallelEngine]:
    engine = make_engine()
    yield engine
    engine.close()


def batch(seed: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model: Callable[[Tensor], Tensor], seed: int = 0) -> Tensor:
    return model(batch(seed)).square().mean()


def weights(engine: DataParallelEngine) -> list[Tensor]:
    with GatheredParameters(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


def after_sgd(*losses: tuple[int, float]) -> list[Tensor]:
    """Return the parameters after one step of plain SGD on a weighted sum of losses, given as (seed, weight)."""
    model = make_model()
    sum(loss_of(model, seed) * weight for seed, weight in losses).backward()
    return [(p - 0.1 * p.grad).detach() for p in model.parameters() if p.grad is not None]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


# --- passes that count -----------------------------------------------------------------------------------------------


def test_a_boundary_is_known_before_and_after_each_pass() -> None:
    engine = make_engine(accumulation=2)
    told = []
    for _ in range(4):
        told.append(engine.is_gradient_accumulation_boundary())
        loss = loss_of(engine)
        told.append(engine.is_gradient_accumulation_boundary())
        engine.backward(loss)
        told.append(engine.is_gradient_accumulation_boundary())
        with torch.no_grad():
            engine(batch())
        told.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    # Before the forward of the second micro-batch the first one is still the current one.
    assert told == [False, False, False, False, False, True, True, True] * 2
    assert engine.global_steps == 2


@pytest.mark.skipif(not hasattr(sys, "getrefcount"), reason="this Python counts no references")
def test_a_pass_leaves_as_many_references_as_there_were() -> None:
    """torch 2.11 releases one that it has not taken from what is kept with autograd's threads."""
    engine = make_engine()
    counts = []
    for _ in range(4):
        engine.backward(loss_of(engine))
        engine.step()
        counts.append(sys.getrefcount(engine._passes))
    assert len(set(counts)) == 1


def in_one_step(rank: int, stage: int) -> list[list[Tensor]]:
    """Take the same step in three ways, with uncounted or uneven passes, and return the weights after each."""
    mesh = mesh_in_worker(rank, dp=2)
    found = []
    for way in (uncounted_passes, accumulated_at_the_end, dropped_gradients):
        engine = way(stage, mesh, rank)
        found.append(weights(engine))
        engine.close()
    return found


def uncounted_passes(stage: int, mesh: Any, rank: int) -> DataParallelEngine:
    engine = make_engine(stage, mesh=mesh)
    with engine.no_sync():
        engine.backward(loss_of(engine, rank) * 0.5)
        assert not engine.is_gradient_accumulation_boundary()
        (loss_of(engine, 2 + rank) * 0.25).backward()
    engine.backward(loss_of(engine, 4 + rank) * 0.25)
    engine.step()
    return engine


def accumulated_at_the_end(stage: int, mesh: Any, rank: int) -> DataParallelEngine:
    """Run all passes before the call of step."""
    engine = make_engine(stage, accumulation=2, mesh=mesh)
    engine.backward(loss_of(engine, rank))
    loss = (loss_of(engine, 2 + rank) + loss_of(engine, 4 + rank)) * 0.5
    loss.backward()
    engine.step()
    return engine


def dropped_gradients(stage: int, mesh: Any, rank: int) -> DataParallelEngine:
    """Take a step in a loop that calls the module's zero_grad between passes."""
    engine = make_engine(stage, accumulation=3, mesh=mesh)
    engine.module.zero_grad()
    for seed, weight in ((0, 0.5), (2, 0.25), (4, 0.25)):
        (loss_of(engine, seed + rank) * (3 * weight)).backward()
        engine.step()
        if stage == 1:
            engine.module[0].zero_grad()  # a part of the gradients
        elif stage != 3:
            engine.module.zero_grad(set_to_none=stage == 0)
    assert engine.was_step_applied()
    return engine


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_ways_to_one_step(stage: int) -> None:
    expected = after_sgd(*((seed + rank, w / 2) for rank in (0, 1) for seed, w in ((0, 0.5), (2, 0.25), (4, 0.25))))
    for found in run_ranks(2, in_one_step, stage):
        for way in found:
            close(way, expected)


@each("stage", STAGES)
def test_no_pass_of_autograd_grad(stage: int) -> None:
    """A gradient penalty is trained: derivatives by the input, then a pass through them that alone counts."""
    engine = make_engine(stage)
    x = batch().requires_grad_()
    (slope,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    assert engine._passes.count == 0
    engine.backward(slope.square().mean())
    engine.step()

    model = make_model()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    expected = torch.autograd.grad(slope.square().mean(), list(model.parameters()), allow_unused=True)
    values = zip(model.parameters(), expected, strict=True)
    close(weights(engine), [p.detach() - (0 if g is None else 0.1 * g) for p, g in values])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients(stage: int) -> None:
    """Gradients accumulate also with create_graph=True, where autograd adds nothing in place."""
    engine = make_engine(stage, accumulation=2)
    for seed in (0, 1):
        loss_of(engine, seed).backward(create_graph=True)
        engine.step()
    close(weights(engine), after_sgd((0, 0.5), (1, 0.5)))


@each("stage", STAGES)
def test_parts_of_the_model_called_by_themselves(stage: int) -> None:
    engine = make_engine(stage)
    hidden = engine.module[1](engine.module[0](batch()))
    hidden = engine.module[3](engine.module[2](hidden))
    engine.module[4](hidden).square().mean().backward()
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


@each("stage", STAGES)
def test_a_graph_used_twice_is_two_passes(stage: int) -> None:
    engine = make_engine(stage, accumulation=2)
    loss = loss_of(engine)
    engine.backward(loss, retain_graph=True)
    engine.backward(loss, scale_wrt_gas=False)
    engine.step()
    close(weights(engine), after_sgd((0, 1.5)))


@each("reentrant", [True, False])
@each("stage", STAGES)
def test_recomputation_around_the_engine(stage: int, reentrant: bool) -> None:
    engine = make_engine(stage)
    x = batch().requires_grad_()
    checkpoint(engine, x, use_reentrant=reentrant).square().mean().backward()
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


class RecomputedEnd(nn.Module):
    """A model whose first gradients come in a backward pass inside the pass, and the next ones in another."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(make_model()[index : index + 2] for index in (0, 2))
        self.last = make_model()[4]

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.parts, self.last):
            x = checkpoint(part, x, use_reentrant=True)
        return x


@each("stage", STAGES)
def test_passes_inside_a_plain_pass(stage: int) -> None:
    config = {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
    }
    engine = megazero.initialize(RecomputedEnd(), config)
    engine(batch().requires_grad_()).square().mean().backward()
    assert engine._passes.count == 1
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


def adversaries(stage: int | None) -> list[Tensor]:
    """Train two models, one through the other, which is frozen meanwhile; stage None: in plain PyTorch."""
    makers = make_model(), nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    torch.manual_seed(9)
    for p in makers[1].parameters():
        nn.init.normal_(p)
    config = {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
    }
    models: Any = makers if stage is None else [megazero.initialize(model, config) for model in makers]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in makers] if stage is None else models
    for seed in range(2):
        made = models[0](batch(seed))
        verdicts = models[1](made.detach()).square().mean(), models[1](made.detach() + 1)
        for index, loss in ((1, verdicts[0] + verdicts[1].mean()), (0, None)):
            makers[1].requires_grad_(index == 1)
            loss = models[1](made).mean() if loss is None else loss
            loss.backward() if stage is None else models[index].backward(loss)
            optimizers[index].step()
            optimizers[index].zero_grad()
        makers[1].requires_grad_(True)
    with GatheredParameters([p for model in makers for p in model.parameters()]):
        return [p.detach().clone() for model in makers for p in model.parameters()]


@pytest.mark.parametrize("stage", STAGES)
def test_two_engines_in_one_graph(stage: int) -> None:
    close(adversaries(stage), adversaries(None))


GAN_STEPS = 3


def gan(rank: int, stage: int | None, way: str, accumulation: int = 2) -> list[Tensor]:
    """Train as torch's DCGAN tutorial does: the generator's loss goes through the discriminator, which is not frozen.

    way: "explicit" for engine.backward(loss), "plain" for loss.backward() with zero_grad before every pass that counts.
    stage None: in plain PyTorch.
    """
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    models: Any = generator, judge
    optimizers: Any = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    if stage is not None:
        config = {
            "zero": {"zero_stage": stage, "reduce_bucket_size": 40},
            "precision": {"precision": "fp64"},
            "optimizer": {"type": "AdamW", "lr": 0.1, "params": {"weight_decay": 0.01}},
        }
        mesh = mesh_in_worker(rank, dp=2)
        passes = (1, accumulation)
        models = optimizers = [
            megazero.initialize(model, {**config, "gradient_accumulation_steps": number}, mesh=mesh)
            for model, number in zip(models, passes, strict=True)
        ]

    def backward(index: int, loss: Tensor) -> None:
        if stage is None:
            loss.backward()
        elif way == "plain":
            (loss * models[index].gradient_accumulation_steps()).backward()
        else:
            models[index].backward(loss, scale_wrt_gas=False)

    def part(x: Tensor) -> Tensor:
        return x if stage is None else x.chunk(2)[rank]

    def zero_grad(index: int) -> None:
        if stage is None or way == "plain":
            optimizers[index].zero_grad()

    for step in range(GAN_STEPS):
        noise = torch.randn(4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        zero_grad(1)
        for half in batch(step)[:4].chunk(accumulation - 1):
            backward(1, models[1](part(half)).square().mean())
        fake = models[0](part(noise))
        if way == "explicit" and stage is not None and step:
            # Another engine's pass in the middle of this one's step.
            models[0].backward(models[1](fake).sum() * 1e6, retain_graph=True)
            models[0].zero_grad()
        backward(1, (models[1](fake.detach()) - 1).square().mean())
        optimizers[1].step()
        zero_grad(0)
        backward(0, models[1](fake).mean())
        optimizers[0].step()
    zero_grad(1)
    if stage is None:
        return [p.detach() for model in models for p in model.parameters()]
    return [value for model in models for value in weights(model)]


def gans(rank: int, stage: int) -> list[list[Tensor]]:
    return [gan(rank, stage, way, accumulation) for accumulation in (2, 3) for way in ("explicit", "plain")]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_through_another_engine(stage: int) -> None:
    for found in run_ranks(2, gans, stage):
        for index, values in enumerate(found):
            close(values, gan(0, None, "plain", 2 + index // 2))


@pytest.mark.parametrize("stage", STAGES)
def test_a_loss_through_a_part_of_another_engine(stage: int) -> None:
    """A pass that does not come through the other model's output is told apart too, or refused in a step's middle."""
    generator, judge = make_engine(stage, accumulation=2), make_engine(stage)
    generator.backward(judge.module[0](batch(1)[:, :4] * generator(batch(1))).sum())
    assert judge.zero_engine.gathered_numel[0] == 0
    judge.backward(loss_of(judge))
    judge.step()
    close(weights(judge), after_sgd((0, 1.0)))
    judge.backward(loss_of(judge, 1))
    loss = judge.module[0](batch(1)[:, :4] * generator(batch(1))).sum()
    if stage == 0:
        with pytest.raises(UsageError, match="in the middle of a step"):
            generator.backward(loss)
        return
    generator.backward(loss)
    judge.step()
    other = make_engine(stage)
    for seed in range(2):
        other.backward(loss_of(other, seed))
        other.step()
    close(weights(judge), weights(other))


def test_a_step_after_other_engines_passes_only() -> None:
    generator, judge = make_engine(), make_engine()
    generator.backward(judge(batch() * generator(batch())).sum())
    with pytest.raises(UsageError, match=r"after other engines' backward\(loss\) only .*"):
        judge.step()
    assert judge._passes.count == 0
    generator.step()


@each("stage", STAGES)
def test_zero_grad_throws_away_the_step_so_far(stage: int) -> None:
    engine = make_engine(stage, accumulation=2)
    engine.zero_grad()
    engine.backward(loss_of(engine, 3) * 1e6)
    engine.zero_grad()
    with engine.no_sync():
        engine.backward(loss_of(engine, 4) * 1e6)
    loss = loss_of(engine, 0)
    engine.zero_grad()  # between a forward and its backward
    loss.backward()
    engine.step()
    loss_of(engine, 1).backward()
    engine.step()
    close(weights(engine), after_sgd((0, 0.5), (1, 0.5)))


def test_zero_grad_after_every_early_step_is_refused(engine: DataParallelEngine) -> None:
    """A loop written for plain PyTorch would discard every micro-batch and never take a step."""
    engine = make_engine(accumulation=2)
    with pytest.raises(UsageError, match=r"engine.zero_grad\(\) after an engine.step\(\) that awaits more passes"):
        for _ in range(2):
            engine.backward(loss_of(engine))
            engine.step()
            engine.zero_grad()


@each("stage", STAGES)
def test_inference_between_steps(stage: int) -> None:
    engine, plain = make_engine(stage, accumulation=2), make_model()
    for seed in (0, 1):
        with torch.inference_mode():
            torch.testing.assert_close(engine(batch(3)), plain(batch(3)))
        engine.backward(loss_of(engine, seed))
        engine.step()
    close(weights(engine), after_sgd((0, 0.5), (1, 0.5)))


@each("stage", STAGES)
def test_a_backward_that_fails_is_forgotten(stage: int) -> None:
    engine = make_engine(stage)

    def fail(gradient: Tensor) -> None:
        raise ValueError("not today")

    loss = loss_of(engine)
    loss.register_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        loss.backward()
    loss_of(engine).backward()
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


@each("stage", STAGES)
def test_a_backward_that_fails_half_way_is_forgotten(stage: int) -> None:
    """A pass that fails after some gradients have come leaves no trace."""
    engine = make_engine(stage)

    def fail(gradient: Tensor) -> None:
        raise ValueError("not today")

    first = next(engine.module.parameters())  # its gradient comes last
    handle = first.register_hook(fail)
    with pytest.raises(ValueError, match="not today"):
        loss_of(engine, 1).backward()
    handle.remove()
    loss_of(engine).backward()
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_a_step_needs_a_backward(engine: DataParallelEngine) -> None:
    with pytest.raises(UsageError, match=r"engine.step\(\) without a backward pass"):
        engine.step()
    engine.backward(loss_of(engine))
    engine.step()
    with pytest.raises(UsageError, match="without a backward"):
        engine.step()


def test_a_step_needs_a_pass_that_counts(engine: DataParallelEngine) -> None:
    with engine.no_sync():
        engine.backward(loss_of(engine))
        with pytest.raises(UsageError, match=r"within engine.no_sync\(\)"):
            engine.step()
    with pytest.raises(UsageError, match="in no_sync only"):
        engine.step()


@each("stage", STAGES)
def test_a_complete_step_takes_no_further_pass(stage: int) -> None:
    engine = make_engine(stage)
    engine.backward(loss_of(engine))
    with pytest.raises(UsageError, match="backward pass 2 of a step of 1"):
        engine.backward(loss_of(engine, 1))
    with engine.no_sync(), pytest.raises(UsageError, match="backward pass 2"):
        engine.backward(loss_of(engine, 1))
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))


@each("stage", STAGES)
def test_a_plain_pass_too_many_starts_the_step_over(stage: int) -> None:
    """The pass is refused when its first gradients have been added already, so the step starts over."""
    engine = make_engine(stage)
    loss_of(engine).backward()
    with pytest.raises(UsageError, match="backward pass 2 of a step of 1"):
        loss_of(engine, 1).backward()
    loss_of(engine, 2).backward()
    engine.step()
    close(weights(engine), after_sgd((2, 1.0)))


@each("stage", STAGES)
def test_fp16_wants_the_scale(stage: int) -> None:
    engine = make_engine(stage, precision="fp16")
    x = batch().half()
    with pytest.raises(UsageError, match=r"engine.scale\(loss\).backward\(\)"):
        engine(x).square().mean().backward()
    scaled = engine.scale(engine(x).square().mean())
    assert scaled.dtype == torch.float32 and engine.loss_scale == 2.0**32
    scaled.backward()
    with pytest.raises(UsageError, match="backward pass 2"):
        engine.backward(engine(x).square().mean())


def test_shared_parameters_in_reentrant_checkpoints(engine: DataParallelEngine) -> None:
    """Each checkpoint completes the gradient, so the first one would be reduced without the second."""
    layer = engine.module[2]
    x = torch.ones(2, 6, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(UsageError, match="a second gradient of 2") as caught:
        engine.backward(x.sum())
    assert "use_reentrant=False" in str(caught.value)


def test_close_takes_the_hooks_off() -> None:
    engine = make_engine()
    engine.close()
    loss_of(engine.module).backward()
    loss_of(engine.module).backward()
    assert not (engine.module._forward_hooks or engine.module._forward_pre_hooks)


@each("stage", STAGES)
@each("where", ["forward", "backward"])
def test_an_interrupted_pass_is_forgotten(stage: int, where: str) -> None:
    """A pass that Ctrl-C interrupts leaves no trace, although torch calls no hooks then."""
    engine = make_engine(stage)
    interrupts = True

    def interrupt(*_: object) -> None:
        if interrupts:
            raise KeyboardInterrupt

    last = [module for module in engine.module.modules() if not list(module.children())][-1]
    if where == "forward":
        last.register_forward_pre_hook(interrupt)
    else:
        next(engine.module.parameters()).register_hook(interrupt)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.backward(loss_of(engine, 1))
    interrupts = False
    engine.backward(loss_of(engine))
    engine.step()
    close(weights(engine), after_sgd((0, 1.0)))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert engine.zero_engine.gathered_numel[0] == 0


# --- parameters without a gradient -----------------------------------------------------------------------------------


class WithHead(nn.Module):
    """A model of blocks of 56 elements with two more that may be used: a stem, last in backward, and a head, first.

    on_middle: called when backward has left two of the four blocks behind.
    """

    def __init__(self, on_middle: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.head = nn.Linear(7, 7)
        self.double()
        self.on_middle = on_middle

    def forward(self, x: Tensor, uses_head: bool = False, recomputed: str = "") -> Tensor:
        if recomputed == "stem":
            x = checkpoint(self.stem, x.requires_grad_(), use_reentrant=True)
        for index, block in enumerate(self.blocks):
            x = block(x).tanh()
            if index == 1:
                x.register_hook(lambda _gradient: self.on_middle())
        if recomputed == "head":
            return checkpoint(self.head, x, use_reentrant=True)
        return self.head(x) if uses_head else x


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def reduced_by_the_middle(rank: int, stage: int, plain: bool, uses: list[list[bool]]) -> tuple[list[int], list[Tensor]]:
    """Train a step for each of `uses`, by rank; return the reductions begun by a backward's middle, and the weights."""
    mesh, counts = mesh_in_worker(rank, dp=2), list[int]()
    model = WithHead(lambda: counts.append(mesh.meter.count("dp", "reduce_scatter").calls))
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 56},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
    }
    engine = megazero.initialize(model, config, mesh=mesh)
    for step, used in enumerate(uses):
        mesh.meter.reset()
        loss = engine(rows(step, rank), used[rank]).square().mean()
        loss.backward() if plain else engine.backward(loss)
        engine.step()
    found = weights(engine)
    engine.close()
    return counts, found


def trained_with_head(uses: list[list[bool]]) -> list[Tensor]:
    """Return the weights after the same steps on all ranks' rows, in plain PyTorch."""
    model = WithHead()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, used in enumerate(uses):
        optimizer.zero_grad()
        sum(model(rows(step, rank), used[rank]).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.gloo
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_unused_head_holds_back_no_reduction_behind_the_first_pass(stage: int, plain: bool) -> None:
    """The head is used in some steps, and where partitioned parameters allow it by one rank alone."""
    uses = [[False, False]] * 3 + [[stage == 3, True], [True, True], [False, False], [False, False]]
    for rank, (counts, found) in enumerate(run_ranks(2, reduced_by_the_middle, stage, plain, uses)):
        close(found, trained_with_head(uses))
        # Of two blocks and the head all but one have begun, unless the head was used by this rank in the pass before.
        assert counts[0] == counts[5] == 0 and min(*counts[1:4], counts[6]) >= 4, (rank, counts)


@pytest.mark.parametrize("stage", STAGES)
def test_a_first_gradient_of_a_graph_within_the_graph(stage: int) -> None:
    """It is awaited where it comes before its reduction, and refused behind it."""
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 56},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": 0.1},
    }
    engine, plain = megazero.initialize(WithHead(), config), WithHead()
    for step, recomputed in enumerate(["", "", "head", "", "stem"]):
        engine.backward(engine(rows(step, 0), recomputed=recomputed).square().mean())
        engine.step()
        plain.zero_grad()
        plain(rows(step, 0), recomputed=recomputed).square().mean().backward()
        with torch.no_grad():
            for p in plain.parameters():
                p.sub_(0 if p.grad is None else 0.1 * p.grad)
    before = weights(engine)
    close(before, list(plain.parameters()))
    engine.close()
    engine = megazero.initialize(WithHead(), config)
    for step in range(2):
        engine.backward(engine(rows(step, 0)).square().mean())
        engine.step()
    before = weights(engine)
    with pytest.raises(UsageError, match=r"a gradient of stem.* by a backward within backward"):
        engine.backward(engine(rows(3, 0), recomputed="stem").square().mean())
    close(weights(engine), before)
    engine.backward(engine(rows(3, 0), recomputed="stem").square().mean())  # awaited from then on
    engine.step()
    engine.close()
