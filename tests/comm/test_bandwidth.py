"""Tests that the seconds of a gather are those of its bytes, waits included."""

import time
from typing import Any

import torch
from support.each import each

from megazero.comm.bandwidth import gather_seconds
from megazero.comm.local import LocalCommunicator


class _Slow:
    """A communicator of three ranks whose gathers, when they are waited for, have taken 50 ms."""

    size, rank = 3, 1

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def all_gather_into(self, output: torch.Tensor, input: torch.Tensor) -> "_Slow":
        self.shapes.append((output.numel(), input.numel()))
        return self

    def wait(self) -> None:
        time.sleep(0.05)


@each(("nbytes", "slice_bytes"), [(0, 1), (1, 1), (3001, 1000)])
def test_a_gather_is_waited_for(nbytes: int, slice_bytes: int) -> None:
    slow: Any = _Slow()
    assert gather_seconds(slow, nbytes, LocalCommunicator(), torch.device("cpu")) >= 0.05
    assert slow.shapes == [(3 * slice_bytes, slice_bytes)]
