"""Tests of the flight record, as a metered communicator writes it."""

import pytest
import torch

from megazero.comm.faults.flight_record import FlightRecord
from megazero.comm.interface import CompletedWork, Work
from megazero.comm.local import LocalCommunicator
from megazero.comm.metered import Meter, MeteredCommunicator


class Breaks(LocalCommunicator):
    """Two ranks, of which the other one breaks the connection while a barrier or a broadcast is waited for."""

    size = 2

    def __init__(self, flight: FlightRecord) -> None:
        self.flight = flight
        self.waited: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, kind: str = "sum") -> Work:
        return self

    def wait(self) -> None:
        self.waited.append(str(self.flight.waiting))

    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return Broken()

    def barrier(self) -> None:
        raise RuntimeError("Connection closed by peer")


class Broken(CompletedWork):
    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_collectives_are_numbered_and_waits_are_noted() -> None:
    meter = Meter()
    inner = Breaks(meter.flight)
    axis = MeteredCommunicator(inner, "dp", meter, "dp_gather")
    tensor = torch.ones(4)
    first, second = axis.all_reduce(tensor), axis.all_reduce(tensor)
    second.wait()
    first.wait()
    assert inner.waited == ["all_reduce number 2 on dp_gather", "all_reduce number 1 on dp_gather"]
    assert meter.flight.waiting is None
    assert meter.flight.begun[-1].nbytes == 16


@pytest.mark.parametrize("name", ["barrier", "broadcast"])
def test_a_failed_collective_stays_the_one_waited_for(name: str) -> None:
    meter, calls = Meter(), []
    meter.flight.on_failure = lambda: calls.append(1)
    axis = MeteredCommunicator(Breaks(meter.flight), "dp", meter)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Connection closed"):
            axis.barrier() if name == "barrier" else axis.broadcast(torch.ones(1), 0).wait()
    assert meter.flight.waiting is not None and meter.flight.waiting.collective == name
    assert str(meter.flight.failed) == "Connection closed by peer"
    assert calls == [1]


def test_an_axis_of_one_rank_is_not_recorded() -> None:
    meter = Meter()
    MeteredCommunicator(LocalCommunicator(), "tp", meter).all_reduce(torch.ones(1)).wait()
    assert not meter.flight.begun
