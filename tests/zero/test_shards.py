"""Tests of the flat tensors of a rank: views, bytes, master and working values."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.each import each
from support.flat_layout import padded_numel
from support.irregular_model import Options, make_engine, make_model
from support.processes import run_ranks
from torch import nn

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.memory.ledger import Ledger
from megazero.parallel.param_spec import Unit, spec_of
from megazero.zero.layout import Bucket, LayoutRules, Range, Slot, build_layout
from megazero.zero.plan import Placement, resolve
from megazero.zero.shards import Shards


def make_shards(
    stage: int, precision: str, *, rank: int = 0, ranks: int = 2, arena: bool = True
) -> tuple[nn.Module, Shards]:
    plan = resolve(
        ZeroConfig(zero_stage=stage),
        PrecisionConfig(precision=precision),
    )
    model = make_model(plan.parameter.dtype)
    parameters = dict(model.named_parameters())
    partitioned = plan.parameter.placement is Placement.PARTITIONED
    placed = [
        Slot(spec, parameter.dtype, partitioned, int(spec.decay))
        for spec, parameter in ((spec_of(name, parameter), parameter) for name, parameter in parameters.items())
    ]
    layout = build_layout([Unit("all", tuple(parameters))], placed, LayoutRules(ranks, 64, 2))
    return model, Shards(plan, layout, rank, parameters, gradients_in_arena=arena)


@each("precision", ["fp64", "fp32", "bf16"])
@each("stage", [0, 1, 2])
def test_parameters_keep_their_values_and_become_views(stage: int, precision: str) -> None:
    model, shards = make_shards(stage, precision)
    fresh = make_model(next(model.parameters()).dtype)
    for (name, parameter), before in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter, before), name
    for bucket in shards.layout.trainable_buckets:
        shards.working(bucket, bucket.range).fill_(3.0)
    for name, parameter in model.named_parameters():
        expected = parameter.requires_grad
        assert bool((parameter == 3.0).all()) == expected, name
    assert model.get_parameter("middle.weight") is model.tied, "a tied parameter stays one tensor"


def test_master_is_the_owned_range_of_working() -> None:
    for rank in (0, 1):
        _, shards = make_shards(1, "bf16", rank=rank)
        for bucket in shards.layout.trainable_buckets:
            owned = bucket.partition(rank)
            assert shards.master(bucket, owned).dtype == torch.float32
            assert torch.equal(shards.master(bucket, owned), shards.working(bucket, owned).float())
    _, shards = make_shards(1, "fp32")
    bucket = shards.layout.trainable_buckets[0]
    owned = shards.owned(bucket)
    assert shards.master(bucket, owned).data_ptr() == shards.working(bucket, owned).data_ptr()


def views_of(shards: Shards) -> list[Callable[[Bucket, Range], torch.Tensor]]:
    moments = [partial(shards.moment, kind) for kind in shards.moment_kinds]
    return [shards.master, shards.reduced_gradient, *moments]


def test_owned_ranges_do_not_overlap_in_the_flat_tensors() -> None:
    _, shards = make_shards(2, "bf16", rank=1)
    for number, bucket in enumerate(shards.layout.trainable_buckets):
        owned = shards.owned(bucket)
        for view in views_of(shards):
            view(bucket, owned).fill_(number + 1)
    for number, bucket in enumerate(shards.layout.trainable_buckets):
        owned = shards.owned(bucket)
        for view in views_of(shards):
            assert bool((view(bucket, owned) == number + 1).all())


def test_resident_gradients_are_where_autograd_adds() -> None:
    model, shards = make_shards(0, "bf16")
    shards.reset_resident_gradients()
    for _ in range(2):
        model.first.weight.sum().backward()
    found = torch.cat(
        [shards.resident_gradient(bucket, bucket.range).flatten() for bucket in shards.layout.trainable_buckets]
    )
    assert float(found.sum()) == 2 * model.get_parameter("first.weight").numel()
    model.zero_grad()  # drops the views, as users' code does
    shards.reset_resident_gradients()
    model.first.weight.sum().backward()
    assert float(found.sum()) == 2 * model.get_parameter("first.weight").numel(), "a copy of what was there"
    again = torch.cat([shards.resident_gradient(bucket, bucket.range) for bucket in shards.layout.trainable_buckets])
    assert float(again.sum()) == model.get_parameter("first.weight").numel()


@each("precision", ["fp64", "bf16"])
@each("stage", [0, 1, 2, 3])
def test_kept_gradients_fill_one_arena(stage: int, precision: str) -> None:
    model, shards = make_shards(stage, precision, rank=1)
    _, plain = make_shards(stage, precision, rank=1, arena=False)
    arena = shards.gradient_arena
    assert arena is not None and plain.gradient_arena is None
    assert shards.model_state_bytes() == plain.model_state_bytes()
    held = shards.model_state_bytes().gradients
    assert (arena.statistics.capacity_bytes, arena.statistics.live_bytes) == (held, held)
    views = [shards.reduced_gradient(bucket, shards.owned(bucket)) for bucket in shards.layout.trainable_buckets]
    views += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(views) > len(shards.layout.trainable_buckets) if stage < 2 else views
    assert all(arena.contains(view) and not view.any() for view in views)


@pytest.mark.parametrize("stage", [0, 2])
def test_the_ledger_counts_kept_gradients_once(stage: int) -> None:
    with Ledger(torch.device("cpu")) as ledger:
        model = make_model(torch.float32)
        parameters = dict(model.named_parameters())
        placed = [Slot(spec_of(name, p), p.dtype, False, 0) for name, p in parameters.items()]
        layout = build_layout([Unit(name, (name,)) for name in parameters], placed, LayoutRules(2, 64))
        plan = resolve(ZeroConfig(zero_stage=stage), PrecisionConfig())
        shards = Shards(plan, layout, 0, parameters, ledger=ledger)
        assert ledger.live_bytes()["gradients"] == shards.model_state_bytes().gradients > 0


def test_gradients_accumulate_in_fp32_where_asked() -> None:
    plan = resolve(ZeroConfig(zero_stage=0), PrecisionConfig(precision="bf16", accumulate_allreduce_grads_in_fp32=True))
    parameter = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    placed = [Slot(spec_of("p", parameter), parameter.dtype, False, 0)]
    layout = build_layout([Unit("u", ("p",))], placed, LayoutRules(1, 64, 1))
    shards = Shards(plan, layout, 0, {"p": parameter})
    for _ in range(1000):
        (parameter * 0.001).sum().backward()
    bucket = layout.trainable_buckets[0]
    gradient = shards.resident_gradient(bucket, bucket.range)
    assert gradient.dtype == torch.float32
    # 0.001 in bf16 is 0.00100; in a bf16 sum the last hundreds of additions would vanish.
    torch.testing.assert_close(gradient, torch.full((4,), 1.0), rtol=5e-3, atol=0)


def bytes_on_rank(rank: int, stage: int) -> tuple[dict[str, int], int, int]:
    _, engine, _ = make_engine(rank, Options(stage=stage, dp=4, precision="bf16"))
    engine.close()
    states = engine.model_state_bytes()
    frozen = padded_numel(engine.layout, trainable=False)
    return vars(states), padded_numel(engine.layout, trainable=True), frozen


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_cost_their_value_only(stage: int) -> None:
    for states, trained, frozen in run_ranks(4, bytes_on_rank, stage):
        owned = trained if stage == 0 else trained // 4
        assert states == {
            "parameters": 2 * (trained + frozen) // (4 if stage == 3 else 1),
            "gradients": 2 * (trained // 4 if stage >= 2 else trained),
            "master": 4 * owned,
            "moments": 8 * owned,
        }
