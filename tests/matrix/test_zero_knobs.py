"""Tests that every setting of the ZeRO section changes counted messages, bytes or values, and never the training.

This module covers the reduction and publication of parameters; `test_zero_knobs_memory.py` covers gathering and
keeping. Expected figures come from the shapes of the awkward model, whose units are its own two parameters and each of
its layers.
"""

import math
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.irregular_model import (
    LR,
    Options,
    batch,
    engine_around,
    full_state,
    loss_of,
    make_engine,
    make_model,
    owned_gradient,
    train_plain,
)
from support.processes import mesh_in_worker, run_ranks
from support.training import Saved, boxes
from torch import Tensor, nn

from megazero.comm.interface import Collective
from megazero.comm.metered import Count
from megazero.config.engine_sections import ZeroConfig
from megazero.errors import UsageError
from megazero.optim.inner import StepInputs
from megazero.zero.parameters.gathered import GatheredParameters
from megazero.zero.plan import ModelStateBytes

RANKS = 2
ACCUMULATION = 2
QUANTUM = 16 * RANKS
ITEMSIZE = 8  # bytes of a float64 element
HUGE = 10**9
COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce", "broadcast")
STAGES = (0, 1, 2, 3)


def section_numels(*, trainable: bool = True) -> list[int]:
    """Return the elements of each unit of the awkward model, with padding."""
    parameters = [(n.rpartition(".")[0], p) for n, p in make_model().named_parameters() if p.requires_grad == trainable]
    sums = (sum(p.numel() for _, p in unit) for _, unit in groupby(parameters, lambda named: named[0]))
    return [math.ceil(numel / QUANTUM) * QUANTUM for numel in sums]


def num_buckets(size: int = Options().bucket) -> int:
    """Return the number of messages of at most `size` elements that move every trainable element once."""
    legal = max(size // QUANTUM, 1) * QUANTUM
    return sum(math.ceil(numel / legal) for numel in section_numels())


PSI = sum(section_numels())
FROZEN = sum(section_numels(trainable=False))


class Seen(NamedTuple):
    """Norms of all steps, weights as saved and as working copies, traffic of the last step, and state bytes."""

    norms: list[float]
    saved: list[Saved]
    working: dict[str, Tensor]
    sent: dict[Collective, Count]
    states: ModelStateBytes

    @property
    def calls(self) -> dict[Collective, int]:
        return {name: count.calls for name, count in self.sent.items() if count.calls}


def train(rank: int, options: Options) -> Seen:
    """Take steps on this rank's share of the batches, scaled to undo what gradients have been divided by."""
    model, engine, _ = make_engine(rank, options)
    mesh = mesh_in_worker(rank, dp=RANKS)
    norms, dtype = [], next(model.parameters()).dtype
    for step in range(options.steps):
        mesh.meter.reset()
        engine.begin_step()
        x, y = (whole.chunk(RANKS * ACCUMULATION) for whole in batch(step, dtype))
        for micro in range(ACCUMULATION):
            part = micro * RANKS + rank
            engine.backward(loss_of(model, x[part], y[part]), is_last=micro == ACCUMULATION - 1)
        engine.finish_reductions()
        square = engine.local_norms().square.clone()
        mesh.world.all_reduce_scalars(square).wait()
        norms.append(float(square.sqrt()) * engine.predivisor)
        engine.update(StepInputs(LR, torch.tensor(engine.predivisor, dtype=torch.float64), None))
    sent = {name: replace(mesh.meter.count("dp", name)) for name in COLLECTIVES}  # copied, as gathers below count too
    with GatheredParameters(model):
        working = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    saved = [box for fragment in engine.owned_state() for box in boxes(fragment)]
    states = engine.model_state_bytes()
    engine.close()
    return Seen(norms, saved, working, sent, states)


def seen(stage: int, *, precision: str = "fp64", bucket: int = Options().bucket, **zero: Any) -> Seen:
    """Return rank 0's figures of two steps."""
    options = Options(stage, RANKS, steps=2, precision=precision, bucket=bucket, zero=tuple(zero.items()))
    return run_ranks(RANKS, train, options)[0]


def reductions(stage: int) -> int:
    """Return the number of times that every gradient is reduced in a step."""
    return ACCUMULATION if stage >= 2 else 1


# zero_stage


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_the_stage_decides_what_is_kept_and_how_often_it_is_reduced(stage: int) -> None:
    run = seen(stage)
    assert run.states == ModelStateBytes(
        parameters=ITEMSIZE * (PSI + FROZEN) // (RANKS if stage == 3 else 1),
        gradients=ITEMSIZE * PSI // (RANKS if stage >= 2 else 1),
        master=0,
        moments=2 * ITEMSIZE * PSI // (RANKS if stage >= 1 else 1),
    )
    assert run.calls["reduce_scatter"] == reductions(stage) * num_buckets()


# reduce_scatter


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_without_reduce_scatter_gradients_are_all_reduced(stage: int) -> None:
    run = seen(stage, reduce_scatter=False)
    assert "reduce_scatter" not in run.calls
    assert run.calls["all_reduce"] == reductions(stage) * num_buckets()
    assert run.sent["all_reduce"].nbytes == reductions(stage) * 2 * ITEMSIZE * PSI * (RANKS - 1) // RANKS
    if stage == 0:
        assert "all_gather" not in run.calls, "an all-reduce leaves nothing to gather"


# reduce_bucket_size, allgather_bucket_size


@pytest.mark.gloo
@pytest.mark.parametrize("reduced", [1, QUANTUM, 3 * QUANTUM + 1, HUGE])
@pytest.mark.parametrize("gathered", [QUANTUM, HUGE])
def test_messages_respect_their_bucket_sizes(reduced: int, gathered: int) -> None:
    """Gathers and reductions move as much of a unit as each may, whichever may move more."""
    run, bound = (seen(1, bucket=reduced, allgather_bucket_size=most) for most in (gathered, None))
    assert run.calls == {
        "reduce_scatter": num_buckets(reduced),
        "all_gather": num_buckets(gathered),
    }
    assert bound.calls == {"reduce_scatter": num_buckets(reduced), "all_gather": num_buckets(reduced)}
    assert all(run.sent[name].nbytes == bound.sent[name].nbytes for name in run.calls), "the bytes are the same"


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [{}, {"prefetch_bucket_size": HUGE}, {"offload_param": "cpu"}])
def test_in_stage_3_a_unit_is_gathered_by_one_message(zero: dict[str, Any]) -> None:
    zero = {"offload_optimizer": "cpu", **zero} if "offload_param" in zero else zero
    together, each = (seen(3, bucket=QUANTUM, allgather_bucket_size=most, **zero) for most in (HUGE, None))
    whole = seen(3, bucket=HUGE, **zero)
    assert together.calls == {**whole.calls, "reduce_scatter": each.calls["reduce_scatter"]}
    assert each.calls["all_gather"] > whole.calls["all_gather"]
    assert together.sent["all_gather"].nbytes == each.sent["all_gather"].nbytes


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("zero", [{}, {"reduce_scatter": False}, {"allgather_partitions": False}])
def test_small_gathers_leave_reductions_large(stage: int, zero: dict[str, Any]) -> None:
    """Where nothing is gathered, a size of gathers changes nothing."""
    small, plain = (seen(stage, bucket=3 * QUANTUM, allgather_bucket_size=most, **zero) for most in (QUANTUM, None))
    assert {**small.calls, "all_gather": 0} == {**plain.calls, "all_gather": 0}
    assert {name: count.nbytes for name, count in small.sent.items()} == {
        name: count.nbytes for name, count in plain.sent.items()
    }
    publishes = stage == 3 or (stage > 0 and zero.get("allgather_partitions", True))
    gathers = [run.calls.get("all_gather", 0) for run in (small, plain)]
    assert gathers[0] > gathers[1] > 0 if publishes else gathers[0] == gathers[1]


# allgather_partitions


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_all_gather_every_owner_broadcasts(stage: int) -> None:
    """Every owner broadcasts its part; in stage 3 all trainable parameters are kept whole, so that there is one."""
    run, plain = (seen(stage, allgather_partitions=value, param_persistence_threshold=HUGE) for value in (False, True))
    assert plain.calls["all_gather"] == num_buckets()
    assert run.calls.get("all_gather", 0) == 0
    assert run.calls["broadcast"] == RANKS * num_buckets()
    assert run.sent["broadcast"].nbytes == ITEMSIZE * PSI


# overlap_comm: reductions


def most_reductions_in_flight(rank: int, stage: int, overlap: bool) -> int:
    """Return the most reductions in flight, counted whenever a gradient has come and at the end of backward."""
    model, engine, _ = make_engine(rank, Options(stage, RANKS, bucket=QUANTUM, overlap=overlap))
    looks: list[int] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: looks.append(len(engine._reducer._in_flight)))
    engine.begin_step()
    engine.begin_backward(is_last=True)
    loss_of(model, *batch(0)).backward()
    engine.end_backward()
    looks.append(len(engine._reducer._in_flight))
    engine.finish_reductions()
    engine.close()
    return max(looks)


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_overlap_leaves_reductions_in_flight(stage: int) -> None:
    assert run_ranks(RANKS, most_reductions_in_flight, stage, True) == [2] * RANKS
    assert run_ranks(RANKS, most_reductions_in_flight, stage, False) == [0] * RANKS


# communication_data_type


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("precision", "wire", "itemsize"), [("fp64", "fp32", 4), ("fp32", "bf16", 2), ("bf16", "fp32", 4)]
)
def test_gradients_travel_in_the_format_of_the_wire(stage: int, precision: str, wire: str, itemsize: int) -> None:
    run, plain = (seen(stage, precision=precision, communication_data_type=name) for name in (wire, "auto"))
    share = reductions(stage) * PSI * (RANKS - 1) // RANKS
    assert run.sent["reduce_scatter"].nbytes == share * itemsize
    assert plain.sent["reduce_scatter"].nbytes == share * {"fp64": 8, "fp32": 4, "bf16": 2}[precision]


# prescale_gradients, gradient_predivide_factor


class Slope(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def sum_of_large_gradients(rank: int, stage: int, zero: Mapping[str, Any]) -> tuple[float, float]:
    """Return (gradient that rank 0 keeps, divisor that it includes) when every rank's gradient is 40000 in fp16."""
    model = Slope().half()
    engine = engine_around(model, mesh_in_worker(rank, dp=RANKS), precision="fp16", zero_stage=stage, **zero)
    engine.begin_step()
    engine.backward(model(torch.full((1,), 40_000.0, dtype=torch.float16)).sum(), is_last=True)
    engine.finish_reductions()
    gradient = float(owned_gradient(engine, "weight", 1))
    engine.close()
    return gradient, engine.predivisor


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_dividing_first_keeps_sums_below_the_largest_number(stage: int, reduce_scatter: bool) -> None:
    rows: list[tuple[dict[str, Any], tuple[float, float]]] = [
        ({}, (math.inf, 1.0)),  # fp16's largest number is 65504
        ({"prescale_gradients": True}, (40_000.0, 2.0)),
        ({"gradient_predivide_factor": 4.0}, (20_000.0, 4.0)),
    ]
    for zero, expected in rows:
        outcome = run_ranks(RANKS, sum_of_large_gradients, stage, {"reduce_scatter": reduce_scatter, **zero})[0]
        assert outcome == expected


# load_from_fp32_weights


def loaded_values(name: str, numel: int) -> Tensor:
    """Return float32 values that bfloat16 cannot represent."""
    return torch.linspace(1.0, 2.0, numel) / 3 + len(name) / 7


def load_weights(rank: int, stage: int, from_fp32: bool, weights_only: bool) -> Seen:
    options = Options(stage, RANKS, precision="bf16", zero=(("load_from_fp32_weights", from_fp32),))
    model, engine, _ = make_engine(rank, options)
    for fragment in engine.wanted_state():
        if fragment.kind == "weight":
            fragment.tensor.copy_(
                loaded_values(fragment.spec.name, fragment.spec.numel)[fragment.start : fragment.stop]
            )
    engine.state_loaded(weights_only=weights_only)
    with GatheredParameters(model):
        working = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.close()
    saved = [box for fragment in engine.owned_state() for box in boxes(fragment)]
    return Seen([], saved, working, {}, engine.model_state_bytes())


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("from_fp32", "weights_only"), [(True, True), (False, True), (False, False)])
def test_master_weights_come_from_rounded_weights_if_so_wanted(stage: int, from_fp32: bool, weights_only: bool) -> None:
    runs = run_ranks(RANKS, load_weights, stage, from_fp32, weights_only)
    masters = full_state(runs)
    rounded = weights_only and not from_fp32
    for name, parameter in make_model().named_parameters():
        exact = loaded_values(name, parameter.numel()).view(parameter.shape)
        assert not torch.equal(exact, exact.bfloat16().float()) or parameter.numel() == 1
        assert all(torch.equal(run.working[name], exact.bfloat16()) for run in runs)
        if parameter.requires_grad:
            assert torch.equal(masters[name], exact.bfloat16().float() if rounded else exact), name


# ignore_unused_parameters


def backward_with_an_unused_layer(rank: int, stage: int, ignore: bool) -> str:
    """Return the message of the engine's error, or an empty string if there is none."""
    model, engine, _ = make_engine(rank, Options(stage, RANKS, zero=(("ignore_unused_parameters", ignore),)))
    engine.begin_step()
    try:
        engine.backward(loss_of(model, *batch(0)), is_last=True)
        message = ""
    except UsageError as error:
        message = str(error)
    engine.finish_reductions()
    return message


def backward_with_all_used(rank: int, stage: int) -> float:
    model = Slope().double()
    mesh = mesh_in_worker(rank, dp=RANKS)
    engine = engine_around(model, mesh, zero_stage=stage, ignore_unused_parameters=False)
    engine.begin_step()
    engine.backward(model(torch.full((1,), 3.0, dtype=torch.float64)).sum(), is_last=True)
    engine.finish_reductions()
    return float(owned_gradient(engine, "weight", 1))


@pytest.mark.gloo
@pytest.mark.parametrize("stage", STAGES)
def test_unused_parameters_stop_the_run_with_their_names(stage: int) -> None:
    assert run_ranks(RANKS, backward_with_an_unused_layer, stage, True) == [""] * RANKS
    for message in run_ranks(RANKS, backward_with_an_unused_layer, stage, False):
        assert "no gradient for unused.bias, unused.weight" in message
    assert run_ranks(RANKS, backward_with_all_used, stage)[0] == 3.0 * RANKS


# Every setting leaves the training as it is.

# Rows of (setting with another value, ZeRO stages it applies to); settings without which it has no effect follow it.
# Sizes and factors of one kind share out the stages between them.
ALL, EVEN, ODD, PUBLISHING, GATHERING = STAGES, (0, 2), (1, 3), (1, 2, 3), (3,)
OTHERS: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"offload_optimizer": "cpu"}, (1, 2)),
    ({"offload_optimizer": "cpu", "offload_optimizer_ratio": 0.5, "offload_param": "cpu"}, (3,)),
    (
        {
            "offload_optimizer": "nvme",
            "nvme_path": Path(tempfile.gettempdir()),
            "offload_optimizer_nvme_ratio": 0.6,
            "offload_gradients_nvme": True,
            "offload_buffer_count": 4,
            "offload_pipeline_read": False,
            "aio_block_size": 8192,
        },
        (1, 2),
    ),
    (
        {
            "offload_optimizer": "nvme",
            "offload_param": "nvme",
            "nvme_path": Path(tempfile.gettempdir()),
            "offload_pipeline_write": False,
            "offload_param_buffer_count": 1,
            "offload_param_max_in_cpu": 100,
            "aio_queue_depth": 1,
        },
        (3,),
    ),
    ({"contiguous_gradients": False}, ALL),
    ({"reduce_scatter": False}, ALL),
    ({"reduce_scatter": False, "reduce_bucket_size": 3 * QUANTUM, "allgather_bucket_size": 1}, (1, 2, 3)),
    ({"reduce_bucket_size": 1}, EVEN),
    ({"reduce_bucket_size": HUGE}, ODD),
    ({"allgather_bucket_size": 1}, ODD),
    ({"reduce_bucket_size": 3 * QUANTUM + 1, "allgather_bucket_size": 1, "communication_data_type": "fp32"}, (1, 2)),
    (
        {
            "reduce_bucket_size": 3 * QUANTUM,
            "allgather_bucket_size": 1,
            "offload_optimizer": "cpu",
            "offload_optimizer_ratio": 0.5,
        },
        (1, 2, 3),
    ),
    (
        {
            "reduce_bucket_size": HUGE,
            "allgather_bucket_size": QUANTUM,
            "offload_optimizer": "nvme",
            "offload_gradients_nvme": True,
            "nvme_path": Path(tempfile.gettempdir()),
        },
        (2, 3),
    ),
    ({"reduce_bucket_size": 1, "allgather_bucket_size": 3 * QUANTUM}, ALL),
    (
        {
            "reduce_bucket_size": 1,
            "allgather_bucket_size": HUGE,
            "offload_optimizer": "cpu",
            "offload_optimizer_ratio": 0.5,
        },
        (1, 2, 3),
    ),
    ({"allgather_partitions": False}, PUBLISHING),
    ({"allgather_partitions": False, "param_persistence_threshold": 100}, GATHERING),
    ({"overlap_comm": False}, ALL),
    ({"sub_group_size": 0}, EVEN),
    ({"sub_group_size": 1}, ODD),
    ({"sub_group_size": 7}, EVEN),
    ({"prefetch_bucket_size": 0}, GATHERING),
    ({"prefetch_bucket_size": HUGE}, GATHERING),
    ({"param_persistence_threshold": 100}, GATHERING),
    ({"model_persistence_threshold": 20, "param_persistence_threshold": 100}, GATHERING),
    ({"max_live_parameters": 0}, GATHERING),
    ({"max_live_parameters": 300, "prefetch_bucket_size": HUGE}, GATHERING),
    ({"max_reuse_distance": 300}, GATHERING),
    ({"max_reuse_distance": HUGE}, GATHERING),
    ({"memory_efficient_linear": False}, GATHERING),
    ({"enable_sanity_checks": True}, GATHERING),
    ({"communication_data_type": "fp32"}, ODD),
    ({"prescale_gradients": True}, EVEN),
    ({"gradient_predivide_factor": 3.0}, ODD),
]
# Settings that other tests cover: the stage is in every row; two are about checkpoints, one about construction, one
# about parameters that this model leaves unused, three about units (library/module/test_leaf_modules.py); and windows
# belong to schedules (test_3d_layouts.py); late updates are another training (zero/test_late_update.py); and parts of
# the data-parallel axis, with their wires, need a mesh of their own (zero/test_data_axis.py, library/test_wires.py).
ELSEWHERE = {
    "zero_stage",
    "offload_pin_memory",  # a GPU's
    "load_from_fp32_weights",
    "override_module_apply",
    "ignore_unused_parameters",
    "zero3_reshard_after",
    "leaf_module_classes",
    "leaf_module_names",
    "leaf_module_name_suffixes",
    "delayed_parameter_update",
    "delayed_parameter_update_start",
    "mics_shard_size",
    "num_distributed_optimizer_instances",
    "hierarchical_collectives",
    "mics_hierarchical_params_gather",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "zero_quantized_weights_bits",
    "zero_quantized_gradients_bits",
    "zero_quantized_block_size",
    "zero_quantized_stochastic",
    "zero_error_feedback",
    "zero_error_feedback_beta",
    "zero_error_feedback_reset",
    "zero_error_feedback_saved",
}
STEPS = 3


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, Tensor]]:
    norms, weights = train_plain(STEPS)
    return norms, weights


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("zero", "stage"), [(zero, stage) for zero, stages in OTHERS for stage in stages], ids=lambda value: str(value)
)
def test_the_training_stays_the_same(
    zero: dict[str, Any], stage: int, plain: tuple[list[float], dict[str, Tensor]]
) -> None:
    rest = {"reduce_bucket_size": Options().bucket, "overlap_comm": True, **zero}
    options = Options(
        stage, RANKS, steps=STEPS, bucket=rest.pop("reduce_bucket_size"), overlap=rest.pop("overlap_comm")
    )
    runs = run_ranks(RANKS, train, options._replace(zero=tuple(rest.items())))
    norms, weights = plain
    # A gradient that is float32 for its reduction keeps only 24 bits.
    bound = 1e-5 if "communication_data_type" in zero else 1e-9
    saved = full_state(runs)
    assert saved.keys() == weights.keys()
    for run in runs:
        assert run.norms == pytest.approx(norms, rel=bound, abs=0)
        for name, expected in weights.items():
            torch.testing.assert_close(run.working[name], expected, rtol=0, atol=bound)
            torch.testing.assert_close(saved[name], expected, rtol=0, atol=bound)


def test_no_setting_is_forgotten() -> None:
    assert {name for zero, _ in OTHERS for name in zero} | ELSEWHERE == {field.name for field in fields(ZeroConfig)}
