"""Tests one step: number formats, loss scale, norm over tensor-parallel ranks, learning rates."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.each import each
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.config.choices import SchedulerChoice
from megazero.errors import ConfigError, TrainingError, UsageError
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.library.step.stepping import LearningRates
from megazero.zero.parameters.gathered import GatheredParameters

LR = 0.1
CLIP = 0.3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).to(dtype)


def batch(step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def make_engine(stage: int, mesh: Any = None, clip: float = 0.0, **precision: Any) -> DataParallelEngine:
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64},
        "precision": precision,
        "optimizer": {"type": "SGD", "lr": LR},
        "gradient_clipping": clip,
    }
    return megazero.initialize(make_model(), config, mesh=mesh)


def working(engine: DataParallelEngine) -> list[Tensor]:
    with GatheredParameters(engine.module):
        return [p.detach().clone() for p in engine.module.parameters()]


def by_hand(precision: str, steps: int, scale: float) -> tuple[list[Tensor], list[float]]:
    """Take steps in plain torch, with working parameters, fp32 master weights, unscaling, clipping and SGD; return the
    working parameters and the norms.
    """
    model = make_model(DTYPES[precision])
    master = [p.detach().float() for p in model.parameters()]
    norms = []
    for step in range(steps):
        model.zero_grad()
        loss = model(batch(step).to(DTYPES[precision])).square().mean()
        (loss.float() * scale).backward()
        gradients = [p.grad.float() / scale for p in model.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.double().norm() for g in gradients]).norm()))
        for p, kept, g in zip(model.parameters(), master, gradients, strict=True):
            kept -= LR * g * min(1.0, CLIP / (norms[-1] + 1e-6))
            p.data.copy_(kept)
    return [p.detach() for p in model.parameters()], norms


@each("stage", range(4))
@each(
    ("precision", "options"),
    [("fp32", {}), ("bf16", {}), ("fp16", {"loss_scale": 1024.0}), ("fp16", {"initial_loss_scale": 512.0})],
    ids=str,
)
def test_number_formats(precision: str, options: dict[str, float], stage: int) -> None:
    engine = make_engine(stage, clip=CLIP, precision=precision, **options)
    expected, norms = by_hand(precision, 4, next(iter(options.values()), 1.0))
    for step in range(4):
        loss = engine(batch(step).to(DTYPES[precision])).square().mean()
        if step % 2:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norms[step], rel=1e-6)
    assert max(norms) > CLIP > min(norms), "clipping bites in some steps"
    for found, value in zip(working(engine), expected, strict=True):
        assert found.dtype == DTYPES[precision]
        torch.testing.assert_close(found, value, rtol=1e-6 if precision == "fp32" else 1e-2, atol=1e-6)


def test_gradient_scale_is_told() -> None:
    engine = make_engine(0, precision="fp16", loss_scale=64.0)
    assert engine.zero_engine.gradient_scale == 1 / 64


def seen_gradients(rank: int, stage: int, zero: dict[str, Any]) -> list[Tensor | None]:
    """Return each gradient as a user reads it between a step's last backward and its update."""
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 64, **zero},
        "precision": {"precision": "fp16", "loss_scale": 128.0},
        "optimizer": {"type": "SGD", "lr": LR},
        "gradient_accumulation_steps": 2,
    }
    engine = megazero.initialize(make_model(), config, mesh=mesh_in_worker(rank, dp=2))
    found: list[Tensor | None] = []
    for _ in range(2):
        for micro in range(2):
            engine.backward(engine(batch(0).chunk(4)[2 * micro + rank].half()).square().mean())
            engine.step() if micro == 0 else None
        found = [megazero.zero.safe_get_full_grad(p) for p in engine.module.parameters()]
        engine.step()
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
def test_gradients_are_shown_as_averages(stage: int) -> None:
    """Gradients of the second step, whose parameters the first one has changed, are averages over ranks."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(0)).square().mean().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    for zero in ({}, {"gradient_predivide_factor": 4.0}):
        for found in run_ranks(2, seen_gradients, stage, zero):
            torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-4)


def summed_steps(rank: int, stage: int, zero: dict[str, Any]) -> list[Tensor]:
    """Take three steps of two micro-batches with sums over the ranks; return the parameters."""
    config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "gradient_accumulation_steps": 2,
        "gradient_allreduce_op": "sum",
    }
    engine = megazero.initialize(make_model(), config, mesh=mesh_in_worker(rank, dp=2))
    for step in range(3):
        for micro in range(2):
            engine.backward(3 * engine(batch(step).chunk(4)[2 * micro + rank]).square().mean())
            engine.step()
    return working(engine)


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "zero"), [(0, {}), (1, {"reduce_scatter": False}), (3, {})], ids=str)
def test_gradients_may_be_sums_over_ranks(stage: int, zero: dict[str, Any]) -> None:
    """Two ranks' sums are twice the mean; clipped, as a DeepSpeed file without gradient_clipping wants it, to 1."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        (2 * 3 * model(batch(step)).square().mean()).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    assert max(norms) > 1, "the norm of 1 makes a difference"
    for found in run_ranks(2, summed_steps, stage, zero):
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stage"), [("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp16", 1), ("fp16", 3)]
)
def test_autocast_computes_as_torchs(name: str, stage: int) -> None:
    """A model in fp32 computes its products in 16 bits, in training, recomputation and evaluation, to the bit.

    In fp16 the loss is scaled as by torch's GradScaler, which skips the first steps until the scale has fallen.
    """
    dtype, first = DTYPES[name], 2.0**24
    config = {
        "zero": {"zero_stage": stage, "param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "lr": LR},
        "autocast": name,
        **({"precision": {"initial_loss_scale": first, "hysteresis": 1}} if name == "fp16" else {}),
    }
    engine, model = megazero.initialize(Recomputed(make_model()), config), make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=first, enabled=name == "fp16")
    for step in range(12):
        assert engine.loss_scale == scaler.get_scale()
        output = engine(batch(step))
        assert output.dtype == dtype
        engine.backward(output.float().square().mean())
        engine.step()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = model(batch(step)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (0 < engine.skipped_steps < 12) == (name == "fp16")
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        assert torch.equal(engine(batch(20)), model(batch(20)))
    torch.testing.assert_close(working(engine), [p.detach() for p in model.parameters()], rtol=0, atol=1e-7)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_autocast_beside_parameters_in_bf16_computes_some_operations_in_fp32(stage: int) -> None:
    """The model's loss is in fp32, as in plain torch with weights in bf16, rounded from fp32 ones after each step."""
    config = {
        "zero": {"zero_stage": stage, "param_persistence_threshold": 0},
        "precision": {"precision": "bf16"},
        "optimizer": {"type": "SGD", "lr": LR},
        "autocast": "bf16",
    }
    engine = megazero.initialize(SquareError(make_model()), config)
    model = SquareError(make_model()).bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    for step in range(4):
        loss = engine(batch(step).bfloat16())
        assert loss.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(batch(step).bfloat16())
        assert torch.equal(loss, expected)
        engine.backward(loss)
        engine.step()
        for master, parameter, gradient in zip(
            masters, model.parameters(), torch.autograd.grad(expected, tuple(model.parameters())), strict=True
        ):
            parameter.data.copy_(master.sub_(LR * gradient.float()))


class SquareError(nn.Module):
    """A model whose forward returns a loss that torch's autocast computes in fp32."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, values: Tensor) -> Tensor:
        output = self.layers(values)
        return nn.functional.mse_loss(output, torch.ones_like(output))


def test_autocast_in_fp16_starts_from_a_scaled_loss() -> None:
    engine = megazero.initialize(make_model(), {"optimizer": {"type": "SGD", "lr": LR}, "autocast": "fp16"})
    with pytest.raises(UsageError, match=r"engine\.scale\(loss\)"):
        engine(batch(0)).float().square().mean().backward()


class Recomputed(nn.Module):
    """A model whose last layer's input is computed again in backward."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, values: Tensor) -> Any:
        first, activation, last = self.layers.children()
        return last(megazero.recompute(lambda x: activation(first(x)), values))


def overflowing(rank: int, stage: int) -> list[Any]:
    """Take steps with a loss that is too large on rank 1 only; return what each rank reports of them."""
    engine = make_engine(stage, mesh_in_worker(rank, dp=2), precision="fp16", initial_loss_scale=256.0, hysteresis=2)
    before, told = working(engine), []
    for step, factor in enumerate((1e6, 1e6, 1.0)):
        engine.backward(engine(batch(step).half()).square().mean() * (factor if rank == 1 else 1.0))
        engine.step()
        norm = engine.get_global_grad_norm()
        assert norm is not None and (norm < 10) == engine.was_step_applied()
        unchanged = all(torch.equal(*pair) for pair in zip(before, working(engine), strict=True))
        told.append((engine.was_step_applied(), unchanged, engine.loss_scale))
    return [told, engine.global_steps, engine.skipped_steps]


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_anywhere_skips_the_step_everywhere(stage: int) -> None:
    expected = [(False, True, 256.0), (False, True, 128.0), (True, False, 128.0)]
    assert run_ranks(2, overflowing, stage) == [[expected, 3, 2]] * 2


def infinite(rank: int, stage: int, kind: str) -> list[Any]:
    """Take steps in bf16, two of them with an infinite loss on rank 1 only; return what each rank reports of them."""
    config = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 64},
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "optimizer": {"type": kind, "params": {"lr": LR}},
        "gradient_clipping": 0,
    }
    engine = megazero.initialize(make_model(), config, mesh=mesh_in_worker(rank, dp=2))
    before, told = working(engine), []
    for step, factor in enumerate((float("inf"), float("inf"), 1.0)):
        engine.backward(engine(batch(step).bfloat16()).square().mean() * (factor if rank == 1 else 1.0))
        engine.step()
        unchanged = all(torch.equal(*pair) for pair in zip(before, working(engine), strict=True))
        told.append((engine.was_step_applied(), unchanged))
    return [told, engine.global_steps, engine.skipped_steps]


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "kind"), [(0, "AdamW"), (2, "SGD"), (3, "AdamW")])
def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(stage: int, kind: str) -> None:
    expected = [(False, True), (False, True), (True, False)]
    assert run_ranks(2, infinite, stage, kind) == [[expected, 3, 2]] * 2


def test_training_stops_when_the_scale_can_fall_no_further() -> None:
    engine = make_engine(0, precision="fp16", loss_scale=1.0, max_skipped_steps_at_min_loss_scale=2)
    engine.backward(engine(batch(0).half()).square().mean() * 1e6)
    engine.step()
    engine.backward(engine(batch(0).half()).square().mean() * 1e6)
    # The step after the first one at the lowest scale is watched value by value.
    named = "at loss scale 1; in the last, .* is the gradient of 2.bias, in 2, on rank 0, micro-batch 0;"
    with pytest.raises(TrainingError, match=f"2 steps in a row overflowed {named}"):
        engine.step()


# --- tensor parallelism that the user brings -------------------------------------------------------------------------


def norms_with_mpu(rank: int, stage: int, mark: str) -> list[float | None]:
    """Return the norms of two steps in which ranks 0 and 2 (and 1 and 3) share a model: its parameter "cut" is a slice
    on each, and "whole" is the same on both.
    """
    pairs = [(0, 1), (2, 3)], [(0, 2), (1, 3)]
    groups = [next(g for g in [(r, dist.new_group(r)) for r in pair] if rank in g[0])[1] for pair in pairs]
    mpu = SimpleNamespace(get_data_parallel_group=lambda: groups[0], get_model_parallel_group=lambda: groups[1])
    model = nn.ParameterDict({"cut": torch.zeros(3, 5), "whole": torch.zeros(7)}).double()
    setattr(model["cut"], mark, True)
    config = {
        "zero": {"zero_stage": stage, "reduce_bucket_size": 40},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": "SGD", "lr": LR},
    }
    engine = megazero.initialize(model, config, mesh=mpu)
    tensor_rank, data_rank = rank // 2, rank % 2
    norms = []
    for _ in range(2):
        loss = (2.0 + tensor_rank + 4 * data_rank) * model["cut"].sum() + (1.0 + data_rank) * model["whole"].sum()
        engine.backward(loss)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


@pytest.mark.gloo
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("mark", ["tensor_model_parallel", "model_parallel"])
def test_the_norm_counts_every_slice_and_every_whole_parameter_once(stage: int, mark: str) -> None:
    # Averages over data-parallel ranks: 4 and 5 in the slices' 15 elements each, 1.5 in 7 elements.
    expected = (15 * 4.0**2 + 15 * 5.0**2 + 7 * 1.5**2) ** 0.5
    for norms in run_ranks(4, norms_with_mpu, stage, mark):
        assert norms == pytest.approx([expected] * 2, rel=1e-12)


# --- learning rates --------------------------------------------------------------------------------------------------


def test_a_schedule_is_one_call_behind() -> None:
    groups: list[dict[str, Any]] = [{"lr": 0.5}, {"lr": 0.25}]
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 4, "warmup_type": "linear"}
    schedule = SchedulerChoice(type="WarmupLR", params=params)
    rates = LearningRates(groups, schedule)
    seen = []
    for _ in range(6):
        seen.append(rates.current())
        rates.advance()
    assert [one for one, _ in seen] == [0.0, 0.0, 0.125, 0.25, 0.375, 0.5]
    assert [one / 2 for one, _ in seen] == [other for _, other in seen] and groups[0]["lr"] == 0.5


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_schedule_of_the_configuration(kind: str) -> None:
    """Parameters move by the schedule's rate, whatever the optimizer's is: two steps at 0, then rising."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_num_steps": 4, "warmup_type": "linear"}}
    config = {"optimizer": {"type": kind, "params": {"lr": 9.0}}, "scheduler": schedule}
    with pytest.warns(UserWarning, match="optimizer.params.lr: 9.0: moot here"):
        engine = megazero.initialize(make_model(), config)
    rates, moved = [], []
    for step in range(4):
        before = working(engine)
        rates.append(engine.get_lr())
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
        moved.append(any(not torch.equal(*pair) for pair in zip(before, working(engine), strict=True)))
    assert rates == [[0.0], [0.0], [pytest.approx(0.1)], [pytest.approx(0.2)]]
    assert moved == [False, False, True, True]


def test_a_runs_schedule_by_name() -> None:
    """The rate rises from 0.2 to 0.4 and falls on a line to 0.1; unlike DeepSpeed's, it is not one call behind."""
    params = {"lr_warmup_iters": 2, "lr_warmup_init": 0.2, "lr_decay_iters": 4, "min_lr": 0.1}
    schedule = {"type": "linear", "params": params}
    engine = megazero.initialize(make_model(), {"optimizer": {"type": "SGD", "lr": 0.4}, "scheduler": schedule})
    rates = []
    for step in range(6):
        rates += engine.get_lr()
        engine.backward(engine(batch(step)).square().mean())
        engine.step()
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.25, 0.1, 0.1], rel=1e-14)


CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 2}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["AdamW", "NAdam"])
def test_a_cycle_moves_the_rate_and_the_first_beta(kind: str, stage: int, tmp_path: Path) -> None:
    """Parameters take torch's steps with groups that are set by hand; a resumed training goes on in the cycle."""
    options: dict[str, Any] = {"betas": (0.8, 0.95), "weight_decay": 0.0}
    config = {
        "zero": {"zero_stage": stage},
        "precision": {"precision": "fp64"},
        "optimizer": {"type": kind, "params": options},
        "scheduler": {"type": "OneCycle", "params": CYCLE},
    }
    twin = make_model(torch.float64)
    plain = getattr(torch.optim, kind)(twin.parameters(), lr=1.0, **options)
    engine = megazero.initialize(make_model(), config)
    for step, (lr, momentum) in enumerate([(0.1, 0.8), (0.3, 0.85), (0.5, 0.8), (0.3, 0.85), (0.1, 0.9)]):
        if step == 2:
            engine.save_checkpoint(tmp_path)
            engine = megazero.initialize(make_model(), config)
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # no option has changed but those that the schedule moves
                engine.load_checkpoint(tmp_path)
        assert engine.get_lr() == pytest.approx([lr] * len(engine.get_lr()), rel=1e-14)
        engine.backward(engine(batch(step).double()).square().mean())
        engine.step()
        plain.param_groups[0].update(lr=lr, betas=(momentum, 0.95))
        plain.zero_grad()
        twin(batch(step).double()).square().mean().backward()
        plain.step()
    state = engine.state_dict()
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9)


def test_a_cycle_leaves_an_optimizer_without_betas_its_momentum() -> None:
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "scheduler": {"type": "OneCycle", "params": CYCLE}}
    with pytest.warns(UserWarning, match="the momentum is not cycled, because the optimizer has no betas"):
        engine = megazero.initialize(make_model(), config)
    assert engine.get_lr() == [0.1]


def test_a_peak_below_the_schedules_ends_is_refused() -> None:
    """The schedule is checked against the rates of a given optimizer, not against the configuration's."""
    schedule = {
        "type": "cosine",
        "params": {"lr_decay_iters": 4, "min_lr": 0.1, "lr_warmup_iters": 2, "lr_warmup_init": 0.2},
    }
    config = {"zero": {}, "scheduler": schedule}
    model = make_model()
    engine = megazero.initialize(model, config, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    assert engine.get_lr() == [0.2]
    with pytest.raises(ConfigError, match=r"lr_warmup_init: 0.2(?s:.*)min_lr: 0.1 with a learning rate of 0.01"):
        megazero.initialize(make_model(), {**config, "optimizer": {"type": "SGD", "lr": 0.01}})
