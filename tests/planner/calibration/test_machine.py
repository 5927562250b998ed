"""Tests the calibration of a machine: every figure is there, the same on all processes, and its file is read again."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import yaml
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.interface import Communicator
from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import Mesh
from megazero.comm.startup import make_mesh
from megazero.errors import ConfigError
from megazero.parallel.launch import Launch
from megazero.parallel.topology import Topology
from megazero.planner.calibration import links
from megazero.planner.calibration.links import link_across, link_inside
from megazero.planner.calibration.machine import calibrate, host_seconds_of_a_tiny_step, measured, repeated_kernels
from megazero.planner.calibration.measuring import Effort, GroupStopwatch, Place, SmallModel, kernels_of
from megazero.planner.hardware import COLLECTIVES, LINKS, Link, read_hardware, to_yaml
from megazero.planner.machines import hardware_of

CPU = torch.device("cpu")
LEAST = Effort(
    *(0.0001, 1),
    sizes=(16, 32),
    lengths=(16,),
    messages=(1 << 10, 1 << 14),
    nbytes=(1 << 12, 1 << 14),
    models=(SmallModel(32, 2, 16, 1, 64),),
    held_out=(SmallModel(32, 2, 16, 1, 64),),
)


def described(rank: int, *ranks_per_node: tuple[int, ...]) -> str:
    place = Place(rank, 2, CPU, mesh_in_worker(rank, dp=2).world, *ranks_per_node)
    return to_yaml(measured(place, LEAST, name="here", report=lambda line: None))


@pytest.mark.gloo
def test_two_processes_find_one_machine() -> None:
    first, second = run_ranks(2, described)
    assert first == second
    found = read_hardware(yaml.safe_load(first), origin="here")
    assert (found.device, found.devices_per_node) == ("cpu", 2)
    assert found.matrix.keys() == {"fp32", "fp64", "bf16"}
    assert found.matrix["fp32"].by_order.keys() == {"columns"}
    assert "gelu" in found.operators
    assert {"memory", "functions", "norms", "reductions", "optimizer", "attention"} == found.kernels.keys()
    assert found.links.keys() == LINKS.keys()
    assert found.links["inside"].collectives.keys() == set(COLLECTIVES)
    assert all(curves.keys() == {2} for curves in found.links["inside"].collectives.values())
    assert found.host_seconds >= 0  # one repetition, beside other programs, may find none
    assert found.held_out > 0 and found.held_out != 1
    assert 0 <= found.overlap_cost <= 1
    assert 1 <= found.at_once <= 2
    assert "--calibrate on 2 processes" in found.source


@pytest.mark.gloo
def test_nodes_of_one_process_find_the_link_between_them() -> None:
    first, second = run_ranks(2, described, (1, 1))
    assert first == second
    found = read_hardware(yaml.safe_load(first), origin="here")
    assert (found.devices_per_node, found.at_once) == (1, 1)
    assert found.nodes(2).ranks_per_node == (1, 1)
    assert found.links["inside"].collectives == {}
    assert {kind: set(curves) for kind, curves in found.links["across"].collectives.items()} == {
        kind: {2} for kind in COLLECTIVES
    }
    assert "on 2 processes, 2 nodes of 1 rank" in found.source


def groups_that_are_measured(rank: int) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    place = Place(rank, 4, CPU, mesh_in_worker(rank, dp=4).world, (2, 2))
    meter = GroupStopwatch(place, replace(LEAST, messages=(1 << 10,)))
    layouts: list[Topology] = []

    def noted(layout: Topology, *others: Any) -> Mesh:
        layouts.append(layout)
        return make_mesh(layout, *others)

    def groups(measure: Callable[[GroupStopwatch], Link]) -> set[tuple[int, ...]]:
        layouts.clear()
        measure(meter)
        return {group for layout in layouts for group in layout.groups("dp")}

    with patch.object(links, "make_mesh", noted):
        return groups(link_inside), groups(link_across)


@pytest.mark.gloo
def test_groups_lie_inside_nodes_or_cross_them() -> None:
    for inside, across in run_ranks(4, groups_that_are_measured):
        assert inside == {(0, 1), (2, 3)}
        assert across == {(0, 2), (1, 3), (0, 1, 2, 3)}


def test_nodes_with_other_numbers_of_processes_have_no_description(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every node has the same number of processes"):
        calibrate(tmp_path / "mine.yaml", Launch(0, 3, 0, (2, 1)), device="cpu", effort=LEAST)


class _Slow:
    """A communicator of two ranks whose all-reduces take a quarter of a second each from 16 KiB on."""

    size, rank = 2, 0

    def all_reduce(self, tensor: torch.Tensor, kind: str = "sum") -> Any:
        self.waits = 0.25 * (tensor.nbytes >= 1 << 14)
        return self

    def wait(self) -> None:
        time.sleep(self.waits)


def test_no_message_is_longer_than_the_first_that_takes_long() -> None:
    effort = replace(LEAST, messages=(1 << 10, 1 << 14, 1 << 18, 1 << 22))
    meter = GroupStopwatch(Place(0, 1, CPU, LocalCommunicator()), effort)
    curve = links._collective(meter, cast(Communicator, _Slow()), "all_reduce")
    assert [size for size, _ in curve.points] == [1 << 10, 1 << 14]
    assert curve.at(1 << 22) == pytest.approx((1 << 14) / 0.25, rel=0.2)


def test_one_process_writes_a_file_that_a_plan_reads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    calibrate(path, Launch(0, 1, 0), device="cpu", effort=LEAST)
    found = hardware_of(str(path))
    assert (found.name, found.devices_per_node, found.links["inside"].collectives) == ("mine", 1, {})
    assert all(rate < 1e15 for _, rate in found.matrix["fp32"].rates.points)
    written = path.read_bytes()
    with pytest.raises(ConfigError, match="a calibration writes a new file"):
        calibrate(path, Launch(0, 1, 0), device="cpu", effort=LEAST)
    assert path.read_bytes() == written
    with pytest.raises(ConfigError, match="into a folder that is there"):
        calibrate(tmp_path / "no" / "mine.yaml", Launch(0, 1, 0), device="cpu", effort=LEAST)


def test_a_quick_calibration_measures_fewer_sizes_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "quick.yaml"
    calibrate(path, Launch(0, 1, 0), device="cpu", effort=LEAST, is_quick=True)
    found = hardware_of(str(path))
    assert len(found.matrix["fp32"].rates.points) == 1
    assert (LEAST.error, found.error) == (0.15, 0.3)
    assert Effort().coarse().sizes == (16, 128, 1024)


def test_kernels_are_counted_as_in_a_dry_run() -> None:
    x, weight = torch.ones(3, 5), torch.ones(7, 5)
    (product, total) = kernels_of(lambda: torch.mm(x, weight.t()).sum())
    assert (product.name, product.flops, product.math) == ("mm", 2 * 3 * 5 * 7, "float32")
    assert (total.name, total.flops, total.read_bytes, total.written_bytes) == ("sum", 0, 4 * 21, 4)


def test_repeated_kernels_have_a_rate_by_kind_and_a_tiny_step_has_a_host() -> None:
    meter = GroupStopwatch(Place(0, 1, CPU, LocalCommunicator()), LEAST)
    found = repeated_kernels(meter, torch.float32)
    assert {"memory", "functions", "norms", "reductions", "optimizer", "attention"} == found.keys()
    assert [len(found[kind].points) for kind in ("memory", "attention")] == [2, 1]
    start = time.perf_counter()
    assert 0 < host_seconds_of_a_tiny_step(meter) < (time.perf_counter() - start) / 50  # a step has more kernels


def slow_second(rank: int) -> tuple[float, float]:
    meter = GroupStopwatch(Place(rank, 2, CPU, mesh_in_worker(rank, dp=2).world), LEAST)
    seconds = 0.02 * (1 + 2 * rank)
    return meter.seconds(lambda: time.sleep(seconds)), meter.seconds(lambda: time.sleep(seconds), alone=True)


@pytest.mark.gloo
def test_a_figure_is_the_slowest_process_s_and_alone_the_first_s() -> None:
    for together, alone in run_ranks(2, slow_second):
        assert together >= 0.06
        assert 0.02 <= alone < 0.06


def test_a_figure_is_of_one_call() -> None:
    meter = GroupStopwatch(Place(0, 1, CPU, LocalCommunicator()), Effort(seconds=0.05, repetitions=3))
    assert 0.002 <= meter.seconds(lambda: time.sleep(0.002)) < 0.02
