"""Tests of what crosses between nodes with each wire, byte for byte, and of training with those that round."""

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import Tensor, nn

import megazero
from megazero.comm.wires.codec import BlockCodec
from megazero.library.data_parallel_engine import DataParallelEngine
from megazero.parallel.nodes import Nodes

WIDTH, SAMPLES, NODES, INSIDE = 24, 8, 2, 2
RANKS = NODES * INSIDE


def make_model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH), nn.Linear(WIDTH, 3))


LARGE = ("all_gather", "reduce_scatter", "all_to_all")
ADAMW = {"type": "AdamW", "lr": 0.01, "params": {"weight_decay": 0.1}}


def make_engine(rank: int, stage: int = 3, precision: str = "fp32", **zero: Any) -> DataParallelEngine:
    """Make an engine on two nodes of two ranks, as the launcher's variables say."""
    zero = {"zero_stage": stage, "reduce_bucket_size": 1000, **zero}
    return start(rank, make_model(), {"zero": zero, "precision": {"precision": precision}, "optimizer": ADAMW})


def start(rank: int, model: nn.Module, config: dict[str, Any]) -> DataParallelEngine:
    job = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank % INSIDE, "LOCAL_WORLD_SIZE": INSIDE}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}
    with patch.dict(os.environ, {name: str(value) for name, value in job.items()}):
        nodes = Nodes((INSIDE,) * NODES)
        return megazero.initialize(model, config, mesh=mesh_in_worker(rank, dp=RANKS, nodes=nodes))


def take_step(engine: DataParallelEngine, step: int) -> float:
    rank = engine.mesh.axis("dp").rank
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (engine(batch.to(next(engine.module.parameters()).dtype)).float() - 0.5).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    engine.mesh.axis("dp").all_reduce(total).wait()
    return total.item() / RANKS


Traffic = dict[str, dict[str, int]]  # {axis: {collective: bytes}}


def sent(rank: int, zero: dict[str, Any]) -> tuple[Traffic, list[int], int]:
    """Return the bytes that a rank sends in a step, the elements of the buckets, and the bytes that cross nodes.

    Those that cross are without scalars.  Nothing is gathered ahead, so that little stays from forward to backward.
    """
    engine = make_engine(rank, prefetch_bucket_size=0, **zero)
    for step in range(2):
        take_step(engine, step)
    engine.mesh.meter.reset()
    take_step(engine, 2)
    buckets = [bucket.numel for section in engine.zero_engine.layout.sections for bucket in section.buckets]
    meter = engine.mesh.meter
    found, across = meter.bytes_by_axis(), meter.bytes_across_nodes()
    engine.close()
    return found, buckets, sum(nbytes for row in across.values() for name, nbytes in row.items() if name in LARGE)


def on_each_rank(**zero: Any) -> tuple[Traffic, list[int], int]:
    """Return what every rank sends alike."""
    results = run_ranks(RANKS, sent, zero)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.gloo
def test_what_crosses_between_nodes() -> None:
    plain, buckets, crossed = on_each_rank()
    psi, gathered, reduced = sum(buckets), plain["dp"]["all_gather"], plain["dp"]["reduce_scatter"]
    assert reduced == 4 * psi * (RANKS - 1) // RANKS
    in_backward = gathered - reduced  # parameters are as many bytes as gradients, and a forward gathers all
    assert 0 < in_backward <= reduced
    to_others = RANKS - INSIDE  # of the RANKS - 1 messages of an exchange
    assert crossed == (gathered + reduced) * to_others // (RANKS - 1)

    hops, _, in_hops = on_each_rank(hierarchical_collectives=True)
    share = {"dp_across": NODES - 1, "dp_inside": NODES * (INSIDE - 1)}  # of the slices of a rank
    for axis, slices in share.items():
        assert hops[axis] == {
            "all_gather": gathered * slices // (RANKS - 1),
            "reduce_scatter": reduced * slices // (RANKS - 1),
        }
    assert not hops.get("dp", {}).keys() & {"all_gather", "reduce_scatter"}
    assert in_hops == sum(hops["dp_across"].values()) == crossed // INSIDE

    gathers, _, in_gathers = on_each_rank(mics_hierarchical_params_gather=True)
    assert gathers["dp_across"] == {"all_gather": gathered // (RANKS - 1)}
    assert gathers["dp"]["reduce_scatter"] == reduced
    assert in_gathers == gathers["dp_across"]["all_gather"] + reduced * to_others // (RANKS - 1)

    secondary, _, in_secondary = on_each_rank(zero_hpz_partition_size=INSIDE)
    assert secondary["dp"]["all_gather"] == reduced  # a forward's only
    assert secondary["dp_secondary"] == {"all_gather": in_backward * RANKS // (RANKS - 1) * (INSIDE - 1) // INSIDE}
    assert in_secondary == 2 * reduced * to_others // (RANKS - 1)

    codec = BlockCodec(8, 256)
    weights, _, in_weights = on_each_rank(zero_quantized_weights=True, zero_hpz_partition_size=INSIDE)
    encoded = sum(codec.encoded_bytes(numel // RANKS) * (RANKS - 1) for numel in buckets)
    assert weights["dp"]["all_gather"] == encoded < reduced // 3
    assert weights["dp_secondary"] == secondary["dp_secondary"]
    assert in_weights == (encoded + reduced) * to_others // (RANKS - 1)

    codec = BlockCodec(4, 256)
    gradients, _, in_gradients = on_each_rank(zero_quantized_gradients=True)
    slices = sum(codec.encoded_bytes(numel // RANKS) for numel in buckets)
    assert gradients["dp_across"] == {"all_to_all": (NODES - 1) * slices}
    assert gradients["dp_inside"] == {"all_to_all": (INSIDE - 1) * NODES * slices}
    assert gradients["dp"]["all_gather"] == gathered
    assert in_gradients == gradients["dp_across"]["all_to_all"] + gathered * to_others // (RANKS - 1)


def memory(rank: int, size: int) -> tuple[int, int]:
    plain, with_secondary = make_engine(rank), make_engine(rank, zero_hpz_partition_size=size)
    numel = sum(section.numel for section in plain.zero_engine.layout.sections)
    found = [engine.zero_engine.model_state_bytes().parameters for engine in (plain, with_secondary)]
    for engine in (plain, with_secondary):
        engine.close()
    return found[1] - found[0], numel * 4 // size


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_secondary_partitions_are_counted(size: int) -> None:
    for more, expected in run_ranks(RANKS, memory, size):
        assert more == expected


def losses(rank: int, every: list[dict[str, Any]], steps: int) -> list[tuple[list[float], list[Tensor]]]:
    """Return losses and the weights of trainings, one after another, with the settings of each."""
    found = []
    for zero in every:
        engine = make_engine(rank, **zero)
        told = [take_step(engine, step) for step in range(steps)]
        found.append((told, [value.clone() for value in engine.state_dict().values()]))
        engine.close()
    return found


WEIGHTS = {"zero_quantized_weights": True}
GRADIENTS = {"zero_quantized_gradients": True}
# Each with how far its losses may be from exact ones.
ROUNDING: tuple[tuple[dict[str, Any], float], ...] = (
    (WEIGHTS, 0.02),
    ({**WEIGHTS, "zero_quantized_weights_bits": 4, "zero_quantized_block_size": 64}, 0.3),
    ({**GRADIENTS, "zero_quantized_gradients_bits": 8}, 0.02),
    (GRADIENTS, 0.2),
    ({**GRADIENTS, "zero_error_feedback": True, "zero_quantized_block_size": 128}, 0.2),
    ({**GRADIENTS, "stage": 2}, 0.2),
    ({**GRADIENTS, "stage": 1, "mics_shard_size": 2}, 0.2),
    ({**WEIGHTS, **GRADIENTS, "zero_hpz_partition_size": 2, "offload_param": "cpu"}, 0.2),
    ({**WEIGHTS, **GRADIENTS, "hierarchical_collectives": True, "offload_optimizer": "cpu"}, 0.2),
    ({**WEIGHTS, **GRADIENTS, "zero_quantized_stochastic": True, "zero_hpz_partition_size": 4}, 0.3),
)


@pytest.mark.gloo
def test_rounding_trains_nearly_alike() -> None:
    trained = run_ranks(RANKS, losses, [{}, *(zero for zero, _ in ROUNDING)], 12)
    (exact, _), *_ = trained[0]
    for number, (zero, bound) in enumerate(ROUNDING, 1):
        results = [of_rank[number] for of_rank in trained]
        assert all(result[0] == results[0][0] for result in results), zero
        assert results[0][0] == pytest.approx(exact, rel=bound) and results[0][0] != exact, zero
        assert results[0][0][-1] < 0.7 * exact[0], zero
        for result in results[1:]:  # every rank computes with the same values
            assert all(torch.equal(mine, first) for mine, first in zip(result[1], results[0][1], strict=True)), zero


@pytest.mark.gloo
def test_every_form_of_rounding_computes_other_numbers() -> None:
    """A setting without effect would train like the one without it; two runs of the same settings train alike.

    The last to show, what is fed back being forgotten after two steps, does so in the loss of the fourth.
    """
    fed = {**GRADIENTS, "zero_error_feedback": True}
    forms = [
        WEIGHTS,
        {**WEIGHTS, "zero_quantized_weights_bits": 4},
        {**WEIGHTS, "zero_quantized_block_size": 32},
        {**WEIGHTS, "zero_quantized_stochastic": True},
        GRADIENTS,
        {**GRADIENTS, "zero_quantized_gradients_bits": 8},
        {**GRADIENTS, "zero_quantized_block_size": 32},
        {**GRADIENTS, "zero_quantized_stochastic": True},
        fed,
        {**fed, "zero_error_feedback_beta": 0.3},
        {**fed, "zero_error_feedback_reset": 2},
    ]
    found = [tuple(told) for told, _ in run_ranks(RANKS, losses, [*forms, fed], 5)[0]]
    assert found[-1] == found[forms.index(fed)]
    assert len(set(found)) == len(forms)


def generators_after(rank: int, every: list[dict[str, Any]]) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the state of torch's default generator, and the weights, after two steps with the settings of each."""
    found = []
    for zero in every:
        engine = make_engine(rank, **zero)
        for step in range(2):
            take_step(engine, step)
        found.append((torch.get_rng_state(), [value.clone() for value in engine.state_dict().values()]))
        engine.close()
    return found


@pytest.mark.gloo
def test_stochastic_rounding_draws_from_generators_of_its_own() -> None:
    """The default one, from which a recomputed forward draws its dropout again, is left as it was."""
    every = [{**zero, "zero_quantized_stochastic": True} for zero in (WEIGHTS, GRADIENTS, {**WEIGHTS, **GRADIENTS})]
    for expected, *found in run_ranks(RANKS, generators_after, [{}, *every, *every]):
        for mine, repeated in zip(found[: len(every)], found[len(every) :], strict=True):
            assert torch.equal(mine[0], expected[0])
            assert all(torch.equal(one, other) for one, other in zip(mine[1], repeated[1], strict=True))


class Sloped(nn.Module):
    """A function whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(700), torch.zeros(13, 50), torch.zeros(1)])

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return torch.stack([(w * slope).sum() for w, slope in zip(self.weights, slopes, strict=True)]).sum()


STEPS = 20


def drift(rank: int, zero: dict[str, Any], num_steps: int) -> float:
    """Return how far equal steps along a slope have led from where exact ones lead, over one exact step."""
    config = {"zero": {"reduce_bucket_size": 1000, **zero}, "optimizer": {"type": "SGD", "lr": 1.0}}
    engine = start(rank, Sloped(), {**config, "gradient_accumulation_steps": 2})
    generator = torch.Generator().manual_seed(7)
    every = [[torch.randn(w.shape, generator=generator) for w in Sloped().weights] for _ in range(RANKS)]
    for _ in range(2 * num_steps):
        engine.backward(engine(every[rank]))
        engine.step()
    means = [torch.stack(slopes).mean(0) for slopes in zip(*every, strict=True)]
    pairs = zip(engine.state_dict().values(), means, strict=True)
    lost = torch.cat([(weight + num_steps * mean).flatten() for weight, mean in pairs])
    engine.close()
    return (lost.norm() / torch.cat([mean.flatten() for mean in means]).norm()).item()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "zero", [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3, "mics_shard_size": 2}], ids=str
)
def test_what_is_fed_back_does_not_add_up(zero: dict[str, Any]) -> None:
    """The same is rounded off in every step without feedback; with it, the sum of all errors stays bounded."""
    zero = {**zero, **GRADIENTS}
    (plain, *_), (fed, *_) = (
        run_ranks(RANKS, drift, {**zero, **feedback}, STEPS) for feedback in ({}, {"zero_error_feedback": True})
    )
    assert 1 < plain < STEPS and fed < 0.25 * plain


def as_a_user_sees_them(rank: int) -> list[tuple[int, int, bool]]:
    """Return each parameter's number of elements and of different values, and whether a pass computes with others."""
    engine = make_engine(rank, **WEIGHTS, reduce_bucket_size=100_000, max_reuse_distance=10**9)
    for step in range(3):
        take_step(engine, step)
    seen: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda module, args, output: seen.append(module.weight.detach().clone()))
        for module in engine.module
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        engine(torch.ones(1, WIDTH))
    for hook in hooks:
        hook.remove()
    found = []
    weights = [parameter for parameter in engine.module.parameters() if parameter.dim() > 1]
    with megazero.zero.GatheredParameters(weights, modifier_rank=0):
        for parameter, of_pass in zip(weights, seen, strict=True):
            different = not torch.equal(parameter.detach(), of_pass)
            found.append((parameter.numel(), len(parameter.detach().unique()), different))
    before = engine.state_dict()
    assert all(len(before[name].unique()) > 0.95 * before[name].numel() for name in ("0.weight", "2.weight"))
    engine.close()
    return found


@pytest.mark.gloo
def test_users_get_what_is_stored() -> None:
    """Blocks of rounded weights have 255 values at most, and what is stored has more."""
    for found in run_ranks(RANKS, as_a_user_sees_them):
        assert len(found) == 3
        for numel, values, different in found:
            assert values > 0.95 * numel and different
