"""Tests of the communicator of one rank: every collective has the result of a group of one."""

import pytest
import torch

from megazero.comm.local import LocalCommunicator

ALONE = LocalCommunicator()


def test_a_group_of_one() -> None:
    assert (ALONE.size, ALONE.rank) == (1, 0)
    ALONE.barrier()


def test_gathering_and_scattering_copy() -> None:
    for collective in (ALONE.all_gather_into, ALONE.reduce_scatter_into, ALONE.all_to_all_into):
        source, target = torch.arange(5.0), torch.full((5,), -1.0)
        collective(target, source).wait()
        assert target.tolist() == source.tolist() == [0, 1, 2, 3, 4]


def test_in_place_stays_in_place() -> None:
    for collective in (ALONE.all_gather_into, ALONE.reduce_scatter_into):
        tensor = torch.arange(5.0)
        version = tensor._version
        collective(tensor[0:5], tensor).wait()
        assert tensor.tolist() == [0, 1, 2, 3, 4]
        assert tensor._version == version, "nothing was copied onto itself"


def test_reductions_and_broadcasts_change_nothing() -> None:
    tensor = torch.tensor([3.0, -1.0])
    for kind in ("sum", "max", "min"):
        ALONE.all_reduce(tensor, kind).wait()
        ALONE.all_reduce_scalars(tensor, kind).wait()
    ALONE.broadcast(tensor, 0).wait()
    assert tensor.tolist() == [3.0, -1.0]


def test_nobody_to_exchange_with() -> None:
    alone = LocalCommunicator()
    with pytest.raises(AssertionError, match="no other rank to send to"):
        alone.send(torch.ones(2), 0)
    with pytest.raises(AssertionError, match="no other rank to receive from"):
        alone.receive_into(torch.ones(2), 0)
