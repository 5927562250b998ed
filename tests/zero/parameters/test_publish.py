"""Publishing is lazy: the engine waits for a unit's gathers when the unit is about to run, and not before."""

import pytest
import torch
from support.irregular_model import Options, batch, loss_of, make_engine
from support.late_copies import late_copies
from support.processes import run_ranks

from megazero.optim.inner import StepInputs

OFFLOADED = (("offload_optimizer", "cpu"),)


def in_flight_after(rank: int, stage: int, zero: tuple[tuple[str, str], ...] = ()) -> dict[str, list[str]]:
    """Return the units in flight after an update, after one unit's forward, and after a whole forward.

    zero: further settings; copies are late.
    """
    with late_copies():
        model, engine, _ = make_engine(rank, Options(stage=stage, dp=2, zero=zero))
    engine.begin_step()
    engine.backward(loss_of(model, *batch(rank)), is_last=True)
    engine.finish_reductions()
    engine.update(StepInputs(1e-2, torch.ones((), dtype=torch.float64), None))
    pending = engine._publisher._in_flight
    seen = {"update": sorted(pending)}
    model.last(torch.zeros(1, 11, dtype=torch.float64))
    seen["one unit"] = sorted(pending)
    model(batch(0)[0])
    seen["forward"] = sorted(pending)
    engine.ensure_parameters()
    seen["all"] = sorted(pending)
    engine.close()
    return seen


@pytest.mark.gloo
@pytest.mark.parametrize(("stage", "zero"), [(1, ()), (2, ()), (1, OFFLOADED), (3, OFFLOADED)])
def test_units_are_waited_for_just_before_their_use(stage: int, zero: tuple[tuple[str, str], ...]) -> None:
    """What comes from host memory to partitions is waited for as what is gathered."""
    units = ["first", "last", "middle", "root", "unused"]
    for seen in run_ranks(2, in_flight_after, stage, zero):
        assert seen == {
            "update": units,
            "one unit": ["first", "middle", "root", "unused"],
            "forward": ["unused"],
            "all": [],
        }


@pytest.mark.gloo
def test_replicated_parameters_are_not_gathered() -> None:
    assert run_ranks(2, in_flight_after, 0)[0]["update"] == []
