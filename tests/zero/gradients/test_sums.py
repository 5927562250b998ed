"""Partial gradients along other axes are summed once a step, for the elements that a rank owns, and no others."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks
from torch import nn

from megazero.config.engine_sections import PrecisionConfig, ZeroConfig
from megazero.memory.fused_buffers import FusedBuffers
from megazero.optim.inner import AdamWSettings, FusedAdamW
from megazero.parallel.param_spec import ParamSpec, Unit, attach_spec
from megazero.zero.engine import Engine, EngineSettings
from megazero.zero.plan import resolve

SIZES = {"a": 7, "b": 1, "c": 40, "d": 3, "e": 48}
SUMMED = {"a": ("tp",), "b": ("tp",), "d": ("ends",), "e": ("tp", "ends")}


class Vectors(nn.Module):
    """A model of one vector for each name."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            parameter = nn.Parameter(torch.zeros(size, dtype=torch.float64))
            spec = ParamSpec("", (size,), (size,), (0,), summed_over=SUMMED.get(name, ()))
            self.register_parameter(name, attach_spec(parameter, spec))

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([getattr(self, name).sum() * factor for name in SIZES]).sum()


def engine_on(rank: int, stage: int, bucket: int, **degrees: int) -> tuple[Engine, Vectors]:
    mesh = mesh_in_worker(rank, **degrees)
    model = Vectors()
    units = [Unit("one", ("a", "b", "c", "d"), (model,)), Unit("two", ("e",), (model,))]
    zero = ZeroConfig(zero_stage=stage, reduce_bucket_size=bucket)
    buffers = FusedBuffers(0, mesh.device)
    settings = EngineSettings(zero, FusedAdamW(AdamWSettings(0.9, 0.999, 1e-8, 0.0)))
    plan = resolve(zero, PrecisionConfig(precision="fp64"))
    engine = Engine(model, units, plan, mesh=mesh, buffers=buffers, settings=settings)
    buffers.resize(engine.largest_buffer_bytes)
    mesh.meter.reset()
    return engine, model


def sums(rank: int, stage: int, bucket: int, degrees: dict[str, int]) -> dict[str, Any]:
    """Take a step in which rank r gives each element the gradient r + 1; finishing it twice must change nothing."""
    engine, model = engine_on(rank, stage, bucket, **degrees)
    engine.begin_step()
    engine.begin_backward(is_last=True)
    model(rank + 1.0).backward()
    engine.end_backward()
    engine.finish_reductions()
    engine.finish_reductions()
    found = {
        name: sorted({float(value) for piece in engine.pieces(name, "gradient") for value in piece.tensor})
        for name in SIZES
    }
    counted = {name: engine.mesh.meter.count(axis, "all_reduce") for name, axis in (("tp", "tp"), ("ends", "ends"))}
    engine.close()
    return {"gradients": found, "calls": {name: count.calls for name, count in counted.items()}}


def expected(rank: int, degrees: dict[str, int]) -> dict[str, list[float]]:
    """Return for each name the sum over the ranks of its axes; everything is summed over the data-parallel axis."""
    tp, dp, pp = (degrees.get(axis, 1) for axis in ("tp", "dp", "pp"))
    stage, rest = divmod(rank, dp * tp)
    column = rest % tp
    found = {}
    for name in SIZES:
        over = SUMMED.get(name, ())
        columns = range(tp) if "tp" in over else (column,)
        stages = (0, pp - 1) if "ends" in over and pp > 1 and stage in (0, pp - 1) else (stage,)
        ranks = [(s * dp + d) * tp + c for s in set(stages) for d in range(dp) for c in columns]
        found[name] = [float(sum(r + 1 for r in ranks))]
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 3}], ids=str)
@pytest.mark.parametrize("bucket", [16, 10_000])
def test_every_part_is_counted_once(stage: int, degrees: dict[str, int], bucket: int) -> None:
    world = 1
    for degree in degrees.values():
        world *= degree
    for rank, found in enumerate(run_ranks(world, sums, stage, bucket, degrees)):
        for name, values in expected(rank, degrees).items():
            # With small buckets a rank may own nothing of a parameter.
            assert found["gradients"][name] in ([], values), (rank, name)


@pytest.mark.gloo
def test_small_pieces_travel_together() -> None:
    assert run_ranks(2, sums, 1, 10_000, {"tp": 2})[0]["calls"] == {"tp": 1, "ends": 0}
    assert run_ranks(2, sums, 1, 10_000, {"dp": 2})[0]["calls"] == {"tp": 0, "ends": 0}


def test_a_spec_tells_along_which_axes_it_is_replicated() -> None:
    plain = ParamSpec("x", (4,), (4,), (0,))
    shared, sharded = replace(plain, summed_over=("ends",)), replace(plain, sharded_axes=("tp",))
    at = {"tp": 1, "ends": 1}
    assert [spec.is_counted_on(at) for spec in (plain, shared, sharded)] == [False, False, True]
    assert [spec.is_counted_on({"tp": 0, "ends": 1}) for spec in (plain, shared, sharded)] == [True, False, True]
