"""Tests homes of states: which memory they allocate, and what crosses between a home and the device, and when.

Copies that finish as late as they may show that a home writes over nothing that a copy still reads.
"""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from support.each import each
from support.late_copies import late_copies
from torch import Tensor

from megazero.memory.fused_buffers import FusedBuffers
from megazero.memory.homes import DeviceHome, HostHome, StateHome
from megazero.memory.ledger import Ledger

CPU = torch.device("cpu")
CUDA = torch.device("cuda")  # nothing is allocated on it here, so that any machine serves
NUMEL = 7


def values(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of values that bf16 must round, other ones for every number."""
    return (torch.arange(NUMEL, dtype=torch.float64).add(number).div(3)).to(dtype)


def is_unwritten(tensor: Tensor) -> bool:
    """Return True while a late copy to the tensor has not been made."""
    return bool(tensor.isnan().all())


# --- memory ----------------------------------------------------------------------------------------------------------


@each("make", [DeviceHome, HostHome])
@each("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_begin_as_zeros(make: Callable[[torch.device], StateHome], dtype: torch.dtype) -> None:
    home = make(CPU)
    made = home.zeros(NUMEL, dtype)
    assert (made.shape, made.dtype, made.device) == ((NUMEL,), dtype, home.device)
    assert torch.equal(made, torch.zeros(NUMEL, dtype=dtype))
    made.fill_(1)
    assert torch.equal(home.zeros(NUMEL, dtype), torch.zeros(NUMEL, dtype=dtype)), "each has memory of its own"
    assert home.zeros(0, dtype).numel() == 0


def test_which_memory_is_the_devices() -> None:
    assert DeviceHome(CUDA).is_device and DeviceHome(CUDA).device == CUDA
    with late_copies():
        host = HostHome(CUDA, is_pinned=False)
    assert not host.is_device and host.device == CPU


def test_memory_that_need_not_be_pinned_is_not() -> None:
    """A device that is no GPU copies without pinned memory, whatever the settings say."""
    with late_copies():
        homes = [HostHome(CUDA, is_pinned=False), HostHome(CPU, is_pinned=True), HostHome(CPU, is_pinned=False)]
    for home in homes:
        home.reserve(64)
        lease = home.scratch(FusedBuffers(64, CPU)).lease(4, torch.float32)
        assert not home.zeros(4, torch.float32).is_pinned() and not lease.tensor.is_pinned()
        lease.release()


@pytest.mark.cuda
@pytest.mark.parametrize("is_pinned", [True, False])
def test_memory_beside_a_gpu_is_pinned_if_it_shall_be(is_pinned: bool) -> None:
    home = HostHome(torch.device("cuda", torch.cuda.current_device()), is_pinned=is_pinned)
    assert home.zeros(4, torch.float32).is_pinned() is is_pinned


def test_host_memory_is_not_counted_as_the_devices() -> None:
    with Ledger(CPU) as ledger:
        host, device = HostHome(CPU, ledger=ledger), DeviceHome(CPU)
        state = host.zeros(100, torch.float32)
        host.reserve(400)
        lease = host.scratch(FusedBuffers(64, CPU)).lease(100, torch.float32)
        assert sum(ledger.live_bytes().values()) == 0
        own = device.zeros(100, torch.float32)
        assert sum(ledger.live_bytes().values()) == own.nbytes == state.nbytes == 400
        lease.release()


def test_temporaries_beside_a_home() -> None:
    """Beside the device's memory they are the device's; beside the host's they have a pool that grows and stays."""
    of_device = FusedBuffers(64, CPU)
    assert DeviceHome(CPU).scratch(of_device) is of_device
    home = HostHome(CPU)
    pool = home.scratch(of_device)
    assert pool is not of_device and home.scratch(of_device) is pool
    for nbytes, most in ((40, 40), (24, 40), (80, 80), (8, 80)):
        home.reserve(nbytes)
        lease = pool.lease(most // 4, torch.float32)
        assert lease.tensor.numel() == most // 4
        lease.release()
        with pytest.raises(AssertionError, match=f"buffers of {most}"):
            pool.lease(most // 4 + 1, torch.float32)


# --- what crosses ----------------------------------------------------------------------------------------------------


def test_states_at_home_on_the_device_are_used_where_they_are() -> None:
    home = DeviceHome(CPU)
    for copy in (home.store, home.load):
        target = torch.zeros(NUMEL)
        copy(target, values(1)).wait()
        assert torch.equal(target, values(1))
    source, into = values(2), torch.zeros(NUMEL)
    found, arrival = home.bring(source, into)
    arrival.finish()
    assert found is source and torch.equal(into, torch.zeros(NUMEL)), "nothing has been copied"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_travels_arrives_and_is_counted(dtype: torch.dtype) -> None:
    ways: list[tuple[Literal["store", "load"], int]] = []
    home = HostHome(CPU, record=lambda way, nbytes: ways.append((way, nbytes)))
    state, target, into = home.zeros(NUMEL, dtype), torch.zeros(NUMEL, dtype=dtype), torch.zeros(NUMEL, dtype=dtype)
    home.store(state, values(3, dtype)).finish()
    home.load(target, state).wait()
    found, arrival = home.bring(state, into)
    with arrival.ahead():
        assert found is into and torch.equal(into, values(3, dtype))
    assert torch.equal(state, values(3, dtype)) and torch.equal(target, state)
    nbytes = NUMEL * dtype.itemsize
    assert ways == [("store", nbytes), ("load", nbytes), ("load", nbytes)]


def test_a_gradient_is_stored_in_the_format_that_it_has() -> None:
    home = HostHome(CPU)
    with pytest.raises(AssertionError, match="converted on the device"):
        home.store(home.zeros(NUMEL, torch.float32), values(0, torch.bfloat16))


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_copies_run_beside_the_work(device: torch.device) -> None:
    """A copy is made when its arrival, or a later one's on the same way, is waited for; the two ways are apart."""
    with late_copies():
        home = HostHome(device, is_pinned=False)
    states, targets = [home.zeros(NUMEL, torch.float32) for _ in range(2)], [torch.zeros(NUMEL) for _ in range(2)]
    here, there = [values(number) for number in range(2)], [values(5 + number) for number in range(2)]
    fetched = [home.load(target, source) for target, source in zip(targets, there, strict=True)]
    sent = [home.store(state, source) for state, source in zip(states, here, strict=True)]
    assert all(is_unwritten(each) for each in (*states, *targets))
    sent[1].wait()
    assert [torch.equal(state, values(number)) for number, state in enumerate(states)] == [True, True]
    assert all(is_unwritten(target) for target in targets)
    fetched[0].finish()
    assert torch.equal(targets[0], values(5)) and is_unwritten(targets[1])
    found, arrival = home.bring(states[1], targets[0])
    assert is_unwritten(found)
    with arrival.ahead():
        assert found is targets[0] and torch.equal(found, states[1]) and torch.equal(targets[1], values(6))


# --- narrowing -------------------------------------------------------------------------------------------------------


def test_a_cpu_narrows_while_it_copies() -> None:
    home, target = HostHome(CPU), torch.zeros(NUMEL, dtype=torch.bfloat16)
    home.load(target, values(4)).wait()  # without temporaries
    assert torch.equal(target, values(4, torch.bfloat16))


def narrowing(numel: int) -> HostHome:
    """Return a home beside a GPU, whose copies are late, with temporaries of some bf16 elements."""
    with late_copies():
        home = HostHome(CUDA, is_pinned=False)
    home.reserve(2 * numel)
    return home


def test_what_is_narrowed_travels_narrow() -> None:
    """It crosses as a temporary in the target's format, so that its source may be written to at once."""
    ways: list[int] = []
    with late_copies():
        home = HostHome(CUDA, is_pinned=False, record=lambda way, nbytes: ways.append(nbytes))
    home.reserve(2 * NUMEL)
    source, target = values(1), torch.zeros(NUMEL, dtype=torch.bfloat16)
    arrival = home.load(target, source)
    source.fill_(100.0)
    assert is_unwritten(target) and ways == [2 * NUMEL]
    arrival.wait()
    assert torch.equal(target, values(1, torch.bfloat16))


def test_all_narrowed_weights_travel_at_once() -> None:
    """Only a second narrowing of the same weights waits, for their first copy, whose memory it takes."""
    home = narrowing(NUMEL)
    sources, targets = ([make(number) for number in range(5)] for make in (values, lambda number: zeros()))
    for source, target in zip(sources, targets, strict=True):
        home.load(target, source)
    assert all(map(is_unwritten, targets))
    again = zeros()
    sources[1].add_(1.0)
    arrival = home.load(again, sources[1])
    assert [is_unwritten(target) for target in (*targets, again)] == [False, False, True, True, True, True]
    arrival.finish()
    for number, target in enumerate(targets):
        assert torch.equal(target, values(number, torch.bfloat16)), number
    assert torch.equal(again, sources[1].bfloat16())


def zeros() -> Tensor:
    return torch.zeros(NUMEL, dtype=torch.bfloat16)


def test_temporaries_of_different_sizes_among_copies_without() -> None:
    home = narrowing(NUMEL)
    expected: list[tuple[Tensor, Tensor]] = []
    for number in range(9):
        dtype = torch.float32 if number % 3 == 2 else torch.bfloat16
        numel = 1 + number % NUMEL
        source, target = values(number)[:numel], torch.zeros(numel, dtype=dtype)
        arrival = home.load(target, source)
        expected.append((target, source.to(dtype)))
    arrival.finish()
    for number, (target, wanted) in enumerate(expected):
        assert torch.equal(target, wanted), number
