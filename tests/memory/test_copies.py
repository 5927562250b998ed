"""Tests copies between the device and host memory: made at once on a CPU, beside the computation on a GPU."""

import pytest
import torch

from megazero.memory.copies import ARRIVED, copy_stream

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_a_copy_has_been_made_when_the_call_returns(dtype: torch.dtype) -> None:
    source, target = torch.linspace(-3, 3, 7), torch.zeros(7, dtype=dtype)
    arrival = copy_stream(CPU).copy(target, source)
    source.fill_(9.0)
    assert torch.equal(target, torch.linspace(-3, 3, 7).to(dtype))
    assert arrival is ARRIVED


def test_what_has_arrived_can_be_waited_for_in_every_way() -> None:
    for _ in range(2):
        ARRIVED.wait()
        ARRIVED.finish()
        with ARRIVED.ahead():
            assert torch.ones(3).sum() == 3.0


@pytest.mark.cuda
@pytest.mark.parametrize("way", ["wait", "ahead", "finish"])
def test_on_a_gpu_results_hold_after_every_way_to_wait(way: str) -> None:
    """The host reads what `finish` has waited for; later work of the device, or of the block, what the others have."""
    device = torch.device("cuda", torch.cuda.current_device())
    away, back = copy_stream(device), copy_stream(device)
    busy = torch.randn(2048, 2048, device=device)
    there = torch.empty(1 << 22, pin_memory=True)
    for number in range(5):
        source, target = torch.full((1 << 22,), -1.0, device=device), torch.empty(1 << 22, device=device)
        busy @= busy
        busy /= busy.norm()
        source.fill_(number)  # queued before the copy, which reads it
        sent = away.copy(there, source)
        sent.finish()
        assert (there == number).all()
        arrival = back.copy(target, there)
        if way == "ahead":
            with arrival.ahead():
                found = (target == number).all()
            arrival.wait()
        elif way == "wait":
            arrival.wait()
            found = (target == number).all()
        else:
            arrival.finish()
            found = (target == number).all()
        assert found.item()
