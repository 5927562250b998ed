"""The times of parts come to rank 0 at log intervals, one row of numbers from every other rank, and nothing else."""

from typing import Any

import pytest
import torch
from support.processes import mesh_in_worker, run_ranks

from megazero.comm.local import LocalCommunicator
from megazero.comm.mesh import Mesh
from megazero.comm.metered import Meter
from megazero.parallel.topology import Topology
from megazero.report.part_times import PartTimes
from megazero.report.timing_report import TimingReport
from megazero.timers import Timings, parts_of

CPU = torch.device("cpu")
BY_PART = {"step": (0.004, 0.003, 0.005), "forward-send": (0.0, 0.001, 0.0025)}


def alone() -> Mesh:
    return Mesh(Topology(), 0, CPU, {"world": LocalCommunicator()}, Meter())


@pytest.mark.parametrize(
    ("option", "rows", "figures"),
    [
        ("max", ["5.00", "2.50"], {"step": {"max": 0.005}, "forward-send": {"max": 0.0025}}),
        (
            "minmax",
            ["3.00 5.00", "1.00 2.50"],
            {"step": {"min": 0.003, "max": 0.005}, "forward-send": {"min": 0.001, "max": 0.0025}},
        ),
        (
            "all",
            ["4.00 3.00 5.00", "0.00 1.00 2.50"],
            {"step": [0.004, 0.003, 0.005], "forward-send": [0.0, 0.001, 0.0025]},
        ),
    ],
)
def test_options(option: Any, rows: list[str], figures: dict[str, Any]) -> None:
    """A rank without the part is none of those among which the fastest is found."""
    times = PartTimes(option, 3, BY_PART)
    heading, *lines = times.lines()
    assert heading.startswith("milliseconds a step, over 3 steps, ")
    assert [" ".join(line.split()) for line in lines] == [f"step {rows[0]}", f"forward-send {rows[1]}"]
    assert times.to_json() == figures


def test_means_over_an_interval() -> None:
    report = TimingReport(alone(), level=1, option="all", log_interval=2)
    assert report.step(1, 3.0, Timings({"optimizer": 1.0})) is None
    times = report.step(2, 5.0, Timings({"optimizer": 0.5, "batch-generator": 0.5}))
    assert times is not None and times.num_steps == 2
    assert times.by_part == {"step": [4.0], "batch-generator": [0.25], "optimizer": [0.75]}
    times = report.step(3, 7.0, Timings({}), is_last=True)
    assert times is not None and times.by_part == {"step": [7.0]} and times.num_steps == 1


def test_a_report_that_is_off_reads_nothing() -> None:
    class Unread(Timings):
        def read(self) -> Any:
            raise AssertionError("timings are read")

    report = TimingReport(alone(), level=2, option="max", log_interval=1, is_on=False)
    assert report.step(1, 1.0, Unread({}), is_last=True) is None


def four_steps(rank: int, level: int) -> tuple[list[Any], list[tuple[int, int]]]:
    """Report four steps on one of three ranks; return what comes of each, and messages and bytes sent after each."""
    mesh = mesh_in_worker(rank, dp=3)
    report = TimingReport(mesh, level=level, option="all", log_interval=2)
    found, sent = [], []
    for number in range(1, 5):
        mesh.meter.reset()
        times = report.step(number, number * (1.0 + rank), Timings({"optimizer": float(rank)} if level else {}))
        found.append(None if times is None else times.to_json())
        tables = mesh.meter.bytes_by_axis()
        assert all(list(table) == ["send"] for table in tables.values())
        count = mesh.meter.count("world", "send")
        sent.append((count.calls, count.nbytes))
    mesh.world.barrier()
    return found, sent


@pytest.mark.gloo
@pytest.mark.parametrize("level", [0, 2])
def test_one_row_a_rank_at_an_interval(level: int) -> None:
    first, *others = run_ranks(3, four_steps, level)
    optimizer = {"optimizer": [0.0, 1.0, 2.0]} if level else {}
    assert first[0] == [None, {"step": [1.5, 3.0, 4.5], **optimizer}, None, {"step": [3.5, 7.0, 10.5], **optimizer}]
    assert first[1] == [(0, 0)] * 4
    row = (1, 8 * len(parts_of(level)))
    for found, sent in others:
        assert found == [None] * 4
        assert sent == [(0, 0), row, (0, 0), row]
