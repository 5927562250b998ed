"""Tests that a plan takes as many hops as its machine's links make faster."""

from dataclasses import replace

import pytest
import torch
from support.configs import make_run
from torch import nn

import megazero
from megazero.parallel.nodes import Nodes
from megazero.planner.curves import constant
from megazero.planner.dry.rank import DryJob
from megazero.planner.hardware import Hardware, Link
from megazero.planner.hops import with_hops
from megazero.planner.job_plan import make_plan
from megazero.planner.machines import MACHINES

SIZES = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64}
AUTO = {"zero_stage": 3, "hierarchical_collectives": "auto", "micro_batch_size": 1, "lr": 1e-3, "mock_data": True}


def job(nodes: Nodes) -> DryJob:
    return DryJob(make_run(**SIZES, **AUTO, global_batch_size=nodes.world_size), 64, nodes, is_gpu=True)


def machine(latency: float) -> Hardware:
    """Return a machine whose links between nodes begin a message so late, and have 0.6 of the rate of those inside."""
    found = MACHINES["dgx-a100"]
    inside = Link(0.0, constant(1e11))
    links = {**found.links, "inside": inside, "across": Link(latency, constant(6e10))}
    return replace(found, links=links, devices_per_node=2)


SLOW, QUICK = machine(1e-2), machine(0.0)


def axes_of(found: DryJob, hardware: Hardware) -> set[str]:
    return {*make_plan(found, hardware, parts=("start-up", "first step")).ranks[0].parts["first step"].traffic}


def test_the_faster_number_of_hops_is_taken() -> None:
    """One hop passes from node to node eight times, and the first of two seven times, at half the rate."""
    two, (reason,) = with_hops(job(Nodes((2,) * 8)), SLOW)
    assert two.config.zero.hierarchical_collectives is True
    assert reason.startswith("hierarchical_collectives auto: two hops, since 16.0 MiB are gathered in ")
    assert {"dp_inside", "dp_across"} <= axes_of(two, SLOW)
    one, (reason,) = with_hops(job(Nodes((2,) * 8)), QUICK)
    assert reason.startswith("hierarchical_collectives auto: one hop, since 16.0 MiB are gathered in ")
    assert "dp_across" not in axes_of(one, QUICK)


@pytest.mark.parametrize("sizes", [(8,), (1, 1, 1), (2, 3)])
def test_one_hop_is_taken_where_there_are_no_two(sizes: tuple[int, ...]) -> None:
    found, (reason,) = with_hops(job(Nodes(sizes)), SLOW)
    assert found.config.zero.hierarchical_collectives is False and "is on one node" in reason


def test_what_is_given_stays() -> None:
    given = job(Nodes((2, 2)))
    given = replace(given, config=replace(given.config, zero=replace(given.config.zero, hierarchical_collectives=True)))
    assert with_hops(given, QUICK) == (given, ())


def test_a_module_is_planned_with_them_too() -> None:
    zero = {"zero_stage": 3, "hierarchical_collectives": "auto"}
    config = {"zero": zero, "optimizer": {"type": "AdamW", "lr": 1e-3}}
    for hardware, expected in ((SLOW, True), (QUICK, False)):
        plan = megazero.plan(lambda: nn.Linear(32, 32), config, torch.zeros(1, 32), world_size=16, hardware=hardware)
        assert ("dp_across" in plan.plan.ranks[0].parts["first step"].traffic) is expected
