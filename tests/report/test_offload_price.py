"""Tests the estimate of what offloading costs a step."""

import torch

from megazero.report.offload_price import OffloadPrice, estimate_price
from megazero.zero.home_traffic import HomeTraffic

CPU = torch.device("cpu")


def price(copy: float, update: float, compute: float | None) -> OffloadPrice:
    return OffloadPrice(HomeTraffic(3 << 20, 1 << 20), 2_000_000, copy, update, compute, 3)


def test_a_step_takes_the_longer_of_copies_and_work() -> None:
    assert [price(*seconds).step_seconds for seconds in ((5, 1, 2), (1, 3, 2), (1, 2, 3))] == [5, 5, 5]
    names = [price(*seconds).binding for seconds in ((5, 1, 2), (1, 3, 2), (1, 2, 3))]
    assert names == ["the link to host memory", "the host's update", "the computation"]
    late = [price(*seconds)._replace(is_late=True) for seconds in ((2.5, 1, 2), (1, 3, 2), (1, 2, 3))]
    assert [one.step_seconds for one in late] == [2.5, 3, 3] and [one.binding for one in late] == names


def test_a_line_says_the_price_and_a_second_one_warns() -> None:
    (line,) = price(0.01, 0.004, 0.008).lines()
    assert line == (
        "offloading, a step of this rank: 3.0 MiB to host memory and 1.0 MiB back, 0.419 GB/s, 10.0 ms; 2,000,000"
        " elements updated by the host on 3 threads, 4.0 ms; computation, 8.0 ms | at least 12.0 ms a"
        " step: the computation binds"
    )
    in_files = HomeTraffic(3 << 20, 1 << 20, 1 << 20, 1 << 20)
    (line,) = price(0.01, 0.004, 0.008)._replace(traffic=in_files, file_seconds=0.001).lines()
    assert " ms; 1.0 MiB written to files and 1.0 MiB read, 2.1 GB/s, 1.0 ms; 2,000,000 elements" in line
    assert price(0.03, 0.0, 0.01).lines()[1:] == []
    (warning,) = price(0.0301, 0.0, 0.01).lines()[1:]
    assert warning.startswith("warning:") and "3.0 times" in warning and "the link" in warning


def test_where_the_computation_is_not_known_the_line_ends_with_one_that_is_too_short() -> None:
    (line,) = price(0.01, 0.004, None).lines()
    assert line.endswith(
        "4.0 ms; the computation beside | at least 10.0 ms a step: the link to host memory binds; a computation below"
        " 3.3 ms a step would be slowed over three times"
    )
    cases = {
        "3.3": price(0.01, 0.0, None),
        "4.0": price(0.01, 0.008, None),
        "2.0": price(0.003, 0.006, None)._replace(is_late=True),
        "5.0": price(1e-6, 0.0, None)._replace(file_seconds=0.015),
    }
    for most, one in cases.items():
        assert f"below {most} ms" in one.lines()[0]
        warned = [bool(one._replace(compute_seconds=1e-3 * float(most) * times).lines()[1:]) for times in (0.9, 1.1)]
        assert warned == [True, False]
    assert price(0.001, 0.004, None).binding == "the host's update"


def test_rates_are_measured() -> None:
    traffic = HomeTraffic(1 << 20, 1 << 19)
    found = estimate_price(traffic, updated=100_000, flops=1e8, dtype=torch.float32, device=CPU)
    assert found.compute_seconds and min(found.copy_seconds, found.update_seconds, found.compute_seconds) > 0
    doubled = estimate_price(traffic, updated=0, flops=0, dtype=torch.bfloat16, device=CPU)
    assert doubled.update_seconds == doubled.compute_seconds == 0 < doubled.copy_seconds
    assert estimate_price(traffic, updated=1, flops=None, dtype=torch.float32, device=CPU).compute_seconds is None
