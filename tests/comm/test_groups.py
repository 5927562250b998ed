"""Tests of a mesh's process groups: the list that all ranks share, and how gloo and NCCL make groups from it."""

import os
import sys
import threading
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import run_ranks

from megazero.comm import groups
from megazero.comm.groups import Limits, Split, SplitMaker, group_maker, make_groups, splits
from megazero.comm.process_group import ProcessGroupCommunicator
from megazero.memory.fused_buffers import FusedBuffers
from megazero.parallel.topology import Topology

CPU = torch.device("cpu")
NO_LIMITS = Limits(None, None)

# (pipeline, data, tensor): splits, groups of the whole job, and groups of a rank of the first and of a middle stage.
COUNTS = {
    (1, 1, 1): (0, 0, 0, 0),
    (1, 8, 1): (2, 2, 2, 2),
    (2, 2, 2): (8, 32, 8, 8),
    (3, 1, 1): (7, 7, 7, 6),
    (4, 2, 2): (10, 52, 10, 9),
    (8, 16, 8): (10, 1152, 10, 9),
    (16, 128, 8): (10, 9472, 10, 9),
}


@pytest.mark.parametrize("degrees", COUNTS, ids=str)
@pytest.mark.parametrize("order", [("pp", "dp", "tp"), ("tp", "pp", "dp")], ids=str)
def test_every_rank_is_in_its_groups_and_in_no_other(degrees: tuple[int, int, int], order: tuple[str, ...]) -> None:
    pp, dp, tp = degrees
    topology = Topology(pp=pp, dp=dp, tp=tp, order=order)
    planned = splits(topology)
    total = sum(len(split.groups) for split in planned)
    per_rank: Counter[int] = Counter()
    for split in planned:
        members = [rank for group in split.groups for rank in group]
        assert len(set(members)) == len(members), "a rank has one colour at most"
        assert all(list(group) == sorted(group) for group in split.groups), "torch sorts the ranks of a split"
        for rank in range(0, topology.world_size, 1 if topology.world_size <= 1024 else 509):
            colour, expected = split.colour_of(rank), topology.group_of(rank, split.axis)
            assert (colour is None and expected == (rank,)) or split.groups[colour or 0] == expected
        per_rank.update(members)
    first, middle = topology.rank_of(), topology.rank_of(pp=pp // 2)
    assert (len(planned), total, per_rank[first], per_rank[middle]) == COUNTS[degrees]


def test_what_only_some_ranks_make_comes_last() -> None:
    """Torch names a group by the number of those before it, which its members must agree on."""
    topology = Topology(pp=4, dp=2)
    partial = [sum(map(len, split.groups)) < topology.world_size for split in splits(topology)]
    assert partial == sorted(partial) and any(partial)


def shared_devices(rank: int) -> tuple[int, int, int]:
    """Return the numbers of groups and gloo devices of a mesh, and of its groups that torch has listed."""
    groups = [group for group in make_groups(splits(Topology(pp=2, tp=2)), rank, CPU, NO_LIMITS).values() if group]
    backends: list[Any] = [group._get_backend(CPU) for group in groups]
    devices = {id(device) for backend in backends for device in backend.options._devices}
    listed = [group for group in groups if group in dist.distributed_c10d._world.pg_map]
    dist.barrier()  # another rank may still be connecting to the groups that end with this call
    return len(groups), len(devices), len(listed)


@pytest.mark.gloo
def test_all_gloo_groups_of_a_mesh_share_one_device() -> None:
    assert run_ranks(4, shared_devices) == [(6, 1, 0)] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
def test_threads_of_gloo_do_not_interrupt_the_one_that_computes() -> None:
    """They have the batch policy, the thread that makes them keeps its own."""
    found = []

    def make_devices() -> None:  # in a thread, since tests have another policy than programs
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        before = set(os.listdir("/proc/self/task"))
        devices = groups._gloo_devices()
        made = set(os.listdir("/proc/self/task")) - before
        found.extend(os.sched_getscheduler(thread) for thread in (*map(int, made), 0) if devices)

    thread = threading.Thread(target=make_devices)
    thread.start()
    thread.join()
    assert found == [os.SCHED_BATCH, os.SCHED_OTHER]


def made_by_members(rank: int) -> list[float]:
    """Make a group of ranks 0 and 2 while the others do not take part, and add up over it."""
    maker = group_maker(CPU, Limits(timedelta(seconds=50), timedelta(seconds=20)))
    if rank in (1, 3):
        return []
    group = maker.make(Split("dp", "dp", ((1,), (0, 2))), rank)
    assert group is not None
    axis, total = ProcessGroupCommunicator(group, FusedBuffers(0, CPU)), torch.tensor([rank + 1.0])
    axis.all_reduce(total).wait()
    axis.barrier()
    return [axis.rank, axis.size, total.item(), group._get_backend(CPU).options._timeout.total_seconds()]


@pytest.mark.gloo
def test_a_gloo_group_is_made_by_its_members_alone() -> None:
    assert run_ranks(4, made_by_members) == [[0, 2, 4.0, 50.0], [], [1, 2, 4.0, 50.0], []]


def test_nccl_groups_are_colours_of_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every split is one call with the groups of all ranks; the channels of a pipeline have few thread blocks."""
    calls: list[dict[str, Any]] = []
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", options, raising=False)
    monkeypatch.setattr(dist, "split_group", lambda **given: calls.append(given))
    maker, planned = SplitMaker(Limits(None, timedelta(minutes=3))), splits(Topology(pp=4, tp=2))
    assert [maker.make(split, rank=5) for split in planned] == [None] * len(planned)
    assert [call["split_ranks"] for call in calls] == [[list(group) for group in split.groups] for split in planned]
    assert {call["timeout"] for call in calls} == {timedelta(minutes=3)}
    limited = {split.key for split, call in zip(planned, calls, strict=True) if call["pg_options"] is not None}
    assert limited == {split.key for split in planned if split.axis == "pp"} | {"pp"}
    assert {call["pg_options"].config.max_ctas for call in calls if call["pg_options"]} == {4}
    assert [call["group_desc"] for call in calls][:2] == ["megazero_pp_1", "megazero_tp_2"]
