"""Tests the slices of a parameter that ranks keep, and the parameter's reconstruction from them."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from support.each import each
from support.late_copies import late_copies
from support.processes import mesh_in_worker, run_ranks
from torch import nn

from megazero.comm.local import LocalCommunicator
from megazero.library.partitioned_init import parameters as init_parameters
from megazero.library.partitioned_init.parameters import SlicedParameter, address, has_alias
from megazero.library.partitioned_init.slices import FileSlices, MemorySlices, SliceStore
from megazero.memory.homes import DeviceHome, HostHome
from megazero.zero.parameters.guard import ParameterOwner, PartitionedParameter, attach_handle

CPU = torch.device("cpu")
WHERE = ("device", "host", "files")


def store_of(where: str, folder: Path) -> SliceStore:
    if where == "files":
        return FileSlices(folder, CPU, is_pinned=False, io_block_bytes=4096, queue_depth=2, notify=print)
    return MemorySlices(DeviceHome(CPU) if where == "device" else HostHome(CPU))


def parameter_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter whose values differ from rank to rank."""
    values = torch.arange(torch.Size(shape).numel()).view(shape) + 1000 * rank
    return nn.Parameter(values.to(dtype), requires_grad=dtype.is_floating_point)


SHAPES = [(), (1,), (2,), (7,), (3, 4), (5, 1, 7)]


def through_slices(rank: int, source: int, gathered_numel: int, where: str, folder: Path) -> list[tuple[int, bool]]:
    """Return, for each shape, the bytes that the rank keeps, and whether all values came back as on the source rank.

    where: the memory or the files where slices live, to and from which copies are late.
    """
    found, communicator = [], mesh_in_worker(rank, dp=3).gathering
    with late_copies(), patch.object(init_parameters, "_GATHERED_NUMEL", gathered_numel):
        store = store_of(where, folder)
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            for shape in SHAPES:
                parameter = parameter_of(rank, shape, dtype)
                sliced = SlicedParameter("p", parameter, communicator, CPU, store)
                attach_handle(parameter, "p", _Nobody())
                sliced.partition(source)
                sliced.release()
                assert isinstance(parameter, PartitionedParameter) and parameter.shape == shape
                assert parameter.untyped_storage().nbytes() == 0 and parameter.dtype == dtype
                sliced.gather()
                assert type(parameter) is nn.Parameter
                same = torch.equal(parameter, parameter_of(source, shape, dtype))
                assert sliced._slice is not None
                found.append((sliced._slice.numel(), same and sliced.values().shape == (parameter.numel(),)))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("source", "gathered_numel", "where"),
    [(0, 1 << 22, "device"), (2, 4, "host"), (1, 1, "host"), (2, 4, "files"), (1, 1, "files")],
)
def test_what_is_kept_comes_back(source: int, gathered_numel: int, where: str, tmp_path: Path) -> None:
    sizes = [-(-torch.Size(shape).numel() // 3) for shape in SHAPES] * 3
    for found in run_ranks(3, through_slices, source, gathered_numel, where, tmp_path):
        assert found == [(size, True) for size in sizes]


def alone(parameter: nn.Parameter, where: str, folder: Path) -> SlicedParameter:
    attach_handle(parameter, "p", _Nobody())
    return SlicedParameter("p", parameter, LocalCommunicator(), CPU, store_of(where, folder))


@each("where", WHERE)
def test_memory_that_others_use_is_theirs(where: str, tmp_path: Path) -> None:
    values = torch.ones(3, 4)
    parameter = nn.Parameter(values[1:])
    sliced = alone(parameter, where, tmp_path)
    sliced.partition(0)
    sliced.release()
    values.zero_()
    sliced.gather()
    assert bool((parameter == 1).all()) and address(parameter) != address(values)
    before = parameter.data
    sliced.release()
    before.add_(1)  # memory that was filled is not taken from tensors that refer to it
    assert bool((before == 2).all())


@each("where", WHERE)
def test_odd_memory(where: str, tmp_path: Path) -> None:
    """A transposed parameter can be sliced, and be converted to another number format while it is released."""
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    sliced = alone(parameter, where, tmp_path)
    sliced.partition(0)
    sliced.release()
    with patch.object(init_parameters, "_GATHERED_NUMEL", 4):
        sliced.convert(torch.float64)
    assert parameter.dtype == torch.float64 and parameter.untyped_storage().nbytes() == 0
    sliced.gather()
    assert torch.equal(parameter, torch.tensor([[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]], dtype=torch.float64))


def test_a_parameter_is_not_kept_alive() -> None:
    parameter = nn.Parameter(torch.ones(2))
    sliced = SlicedParameter("p", parameter, LocalCommunicator(), CPU, MemorySlices(DeviceHome(CPU)))
    assert sliced.is_alive
    del parameter
    assert not sliced.is_alive


def test_aliases() -> None:
    parameter = nn.Parameter(torch.ones(4))
    assert not has_alias(parameter)
    view = parameter.data
    assert has_alias(parameter) and not has_alias(parameter, names=2) and address(view) == address(parameter)
    array = view.numpy()
    del view
    assert has_alias(parameter)
    del array
    assert not has_alias(parameter)


class _Nobody(ParameterOwner):
    """An owner whose methods are never called."""
