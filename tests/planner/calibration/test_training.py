"""Tests what is measured in training steps: rates by which the steps take what they took, and what a message takes."""

import time
from typing import Any, cast

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.planner.calibration.measuring import Effort, GroupStopwatch, Place, SmallModel
from megazero.planner.calibration.training import (
    ClockedMeter,
    held_out,
    kernels_in_training,
    messages_in_training,
    rates_of,
)
from megazero.planner.machines import MACHINES
from megazero.planner.trace import Operand, Operation, Order

CPU = torch.device("cpu")
SMALL = SmallModel(32, 2, 16, 1, 64)
EFFORT = Effort(0.0001, 2, models=(SMALL, SMALL._replace(dropout=0.1)), held_out=(SMALL,))


def kernel(name: str, nbytes: int, flops: int = 0, order: Order = "rows") -> Operation:
    return Operation(name, (Operand((4, 8, 64, 16), "float32"),), (), flops, "float32", nbytes, 0, order)


def test_rates_by_kind_order_and_name() -> None:
    found = rates_of(
        [
            (kernel("mm", 9, 2 * 8**3), 10, 1.0),
            (kernel("mm", 9, 2 * 8**3, "columns"), 10, 2.0),
            (kernel("flash_attention", 9, 1000), 2, 4.0),
            (kernel("gelu", 128), 3, 0.5),
            (kernel("exp", 128), 1, 0.5),
            (kernel("add", 64), 1, 0.001),
        ],
        0.25,
    )
    assert found.products.points == (pytest.approx((8, 10 * 2 * 8**3)),)
    assert found.by_order["columns"].points == (pytest.approx((8, 5 * 2 * 8**3)),)
    rates = {kind: curve.points for kind, curve in found.kernels.items()}
    assert rates == {
        "attention": (pytest.approx((64, 500)),),
        "functions": (pytest.approx((128, 512)),),
        "memory": (pytest.approx((64, 64_000)),),
    }
    assert {name: curve.points for name, curve in found.operators.items()} == {
        "gelu": (pytest.approx((128, 768)),),  # an operator that takes less than a thousandth has its kind's
        "exp": (pytest.approx((128, 256)),),
    }
    assert found.host_seconds == 0.25


def test_all_kernels_of_steps_have_a_rate() -> None:
    start = time.perf_counter()
    found = kernels_in_training(GroupStopwatch(Place(0, 1, CPU, LocalCommunicator()), EFFORT))
    assert found.kernels.keys() == {"memory", "functions", "norms", "reductions", "optimizer", "attention"}
    assert found.by_order.keys() == {"columns"}
    smallest, largest = found.products.points[0][0], found.products.points[-1][0]
    assert 8 <= smallest < 32  # attention of 16 tokens in heads of 16
    assert 32 < largest < 64  # 16 tokens by 32 by 128
    assert 0 < found.host_seconds < (time.perf_counter() - start) / 50  # a step has more kernels


def measured_messages(rank: int) -> dict[str, list[float]]:
    meter = GroupStopwatch(Place(rank, 2, CPU, mesh_in_worker(rank, dp=2).world), EFFORT)
    return {kind: [size for size, _ in curve.points] for kind, curve in messages_in_training(meter, 2).items()}


@pytest.mark.gloo
def test_messages_of_steps_have_rates_by_collective() -> None:
    first, second = run_ranks(2, measured_messages)
    assert first == second
    assert first.keys() == {"all_reduce", "all_gather", "reduce_scatter"}
    activations = 4 * 16 * 32
    assert any(abs(size / activations - 1) < 0.01 for size in first["all_gather"])


def held_out_on(rank: int, size: int) -> tuple[float, float]:
    world = LocalCommunicator() if size == 1 else mesh_in_worker(rank, dp=size).world
    meter = GroupStopwatch(Place(rank, size, CPU, world), EFFORT)
    return held_out(meter, MACHINES["cpu"]), held_out(meter, MACHINES["cpu"].slowed(1e-6))


@pytest.mark.gloo
def test_steps_that_are_held_out_are_compared_with_their_prediction() -> None:
    for found in ([held_out_on(0, 1)], run_ranks(2, held_out_on, 2)):
        for here, predicted_a_million_times_faster in found:
            assert 1e4 < predicted_a_million_times_faster / here < 1e8
        assert len(set(found)) == 1


class _Slow:
    """A communicator of two ranks whose messages take 20 ms, half of them before the wait."""

    size, rank = 2, 0

    def all_reduce(self, tensor: torch.Tensor, kind: str = "sum") -> Any:
        time.sleep(0.01)
        return self

    def wait(self) -> None:
        time.sleep(0.01)


def test_a_message_takes_its_start_and_its_wait() -> None:
    meter = ClockedMeter()
    axis = meter.communicator(cast(Communicator, _Slow()), "tp")
    axis.all_reduce(torch.zeros(8)).wait()
    later = axis.all_reduce(torch.zeros(4))
    beside = axis.all_reduce(torch.zeros(2))
    time.sleep(0.03)
    later.wait()
    later.wait()
    beside.wait()
    alone = meter.communicator(LocalCommunicator(), "dp")
    alone.all_reduce(torch.zeros(2)).wait()
    first, second, third = meter.taken
    assert (first.alone, second.alone, third.alone, meter.in_flight) == (True, True, False, 0)
    assert (first.begun.collective, first.begun.nbytes, second.begun.nbytes) == ("all_reduce", 32, 16)
    assert second.before >= 0.03
    assert all(taken.seconds >= taken.before + 0.02 for taken in (first, second))
