"""Tests descriptions of machines: those with a name, files of a user's own, and what is refused in them."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.each import each

from megazero.errors import ConfigError
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import LINKS, Hardware, read_hardware, to_yaml
from megazero.planner.machines import MACHINES, hardware_of

SMALLEST: dict[str, Any] = {
    "device": "cuda",
    "devices_per_node": 8,
    "memory_bytes": "80e9",
    "matrix": {"bf16": {"rates": 200e12}},
    "kernels": {"memory": 1.5e12},
    "links": {"inside": {"latency_seconds": 4e-6, "rates": 2e11}},
}


def described(**changes: Any) -> Hardware:
    return read_hardware({**SMALLEST, **changes}, origin="mine.yaml")


def test_the_smallest_description_has_values_for_all_else() -> None:
    found = described()
    assert found.memory_bytes == 80 * 10**9
    assert found.matrix["bf16"].peak == 200e12
    assert found.matrix["bf16"].rates == constant(200e12)
    assert (found.name, found.source) == ("mine.yaml", "mine.yaml")
    assert found.links.keys() == LINKS.keys()
    assert found.links["across"] == found.links["inside"]
    assert found.kernel_rate("norms") == found.kernels["memory"]
    assert found.is_asynchronous


def test_every_machine_and_what_is_written_of_it_are_read_alike(tmp_path: Path) -> None:
    for name, machine in MACHINES.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(machine), encoding="utf-8")
        assert hardware_of(str(path)) == machine == hardware_of(name)


def test_measured_collectives_are_written_and_read() -> None:
    link = {"latency_seconds": 0, "rates": 1e9, "collectives": {"all_gather": {"2": [[1, 1e6], [1e6, 1e9]], 4: 1e8}}}
    found = described(links={"inside": link})
    curves = found.links["inside"].collectives["all_gather"]
    assert curves == {2: Curve(((1, 1e6), (1e6, 1e9))), 4: constant(1e8)}
    assert read_hardware(yaml.safe_load(to_yaml(found)), origin="mine.yaml") == found


def test_rates_by_order_and_of_single_operators_are_written_and_read() -> None:
    matrix = {"fp32": {"peak": 1e12, "rates": 9e11, "by_order": {"columns": [[8, 1e11], [64, 2e11]]}}}
    found = described(matrix=matrix, operators={"gelu": [[1, 1e8], [100, 1e9]]})
    assert found.matrix["fp32"].at(8, "columns") == 1e11
    assert found.matrix["fp32"].at(8, "far columns") == found.matrix["fp32"].at(8) == 9e11
    assert found.matrix["fp32"].times(2.0).at(64, "columns") == 4e11
    assert found.operators == {"gelu": Curve(((1, 1e8), (100, 1e9)))}
    assert read_hardware(yaml.safe_load(to_yaml(found)), origin="mine.yaml") == found


@each(
    ("changes", "given", "rule"),
    [
        ({"memory": "80e9"}, 'mine.yaml: memory: "80e9"', "there is no key of this name"),
        ({"device": "tpu"}, 'mine.yaml: device: "tpu"', "device is one of cpu, cuda"),
        ({"devices_per_node": 0}, "mine.yaml: devices_per_node: 0", "at least 1"),
        ({"devices_per_node": 2.5}, "mine.yaml: devices_per_node: 2.5", "a whole number"),
        ({"memory_bytes": "many"}, 'mine.yaml: memory_bytes: "many"', "a whole number"),
        ({"operators": {"gelu": 0}}, "mine.yaml: operators.gelu: 0", "rates are one number above 0"),
        (
            {"matrix": {"bf16": {"rates": 1e12, "by_order": {"diagonals": 1}}}},
            "mine.yaml: matrix.bf16.by_order.diagonals: 1",
            "there is no key of this name",
        ),
        ({"watts": -1}, "mine.yaml: watts: -1", "at least 0"),
        ({"fused": 0}, "mine.yaml: fused: 0", "greater than 0"),
        ({"error": float("nan")}, "mine.yaml: error", "finite"),
        ({"overlap_cost": 2}, "mine.yaml: overlap_cost: 2", "at most 1"),
        ({"matrix": {}}, "mine.yaml: matrix.bf16 is missing", "a description of a machine has it"),
        ({"matrix": 5}, "mine.yaml: matrix: 5", "matrix is a mapping"),
        ({"matrix": {"bf17": {"rates": 1}}}, "mine.yaml: matrix.bf17", "there is no key of this name"),
        ({"matrix": {"bf16": {}}}, "mine.yaml: matrix.bf16.rates is missing", "has it"),
        ({"matrix": {"bf16": {"rates": 0}}}, "mine.yaml: matrix.bf16.rates: 0", "one number above 0"),
        ({"matrix": {"bf16": {"rates": [[2, 1], [1, 1]]}}}, "mine.yaml: matrix.bf16.rates", "the sizes growing"),
        ({"matrix": {"bf16": {"rates": [[1]]}}}, "mine.yaml: matrix.bf16.rates", "pairs [size, rate]"),
        ({"matrix": {"bf16": {"rates": [[1, "fast"]]}}}, "mine.yaml: matrix.bf16.rates", "pairs [size, rate]"),
        ({"matrix": {"bf16": {"rates": []}}}, "mine.yaml: matrix.bf16.rates", "one number above 0"),
        ({"kernels": {"norms": 1e9}}, "mine.yaml: kernels.memory is missing", "has it"),
        ({"links": {"across": {"latency_seconds": 0, "rates": 1}}}, "mine.yaml: links.inside is missing", "has it"),
        ({"links": {"inside": {"rates": 1}}}, "links.inside.latency_seconds is missing", "has it"),
        (
            {"links": {"inside": {"latency_seconds": 0, "rates": 1, "collectives": {"gather": {2: 1}}}}},
            "links.inside.collectives.gather",
            "there is no key of this name",
        ),
        (
            {"links": {"inside": {"latency_seconds": 0, "rates": 1, "collectives": {"send": {1: 1}}}}},
            "links.inside.collectives.send",
            "2 or more",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], given: str, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        described(**changes)
    (problem,) = error.value.problems
    assert given in problem.given
    assert rule in problem.rule
    assert problem.legal


def test_all_problems_of_a_file_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        read_hardware({"device": "cuda", "watts": "x", "speed": 3}, origin="mine.yaml")
    given = "\n".join(problem.given for problem in error.value.problems)
    for part in ("watts", "speed", "devices_per_node is missing", "memory_bytes is missing", "links.inside is missing"):
        assert part in given


def test_a_name_of_no_machine_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"(?s)--hardware dgx-h10\n.*legal: dgx-h100, FILE.yaml") as error:
        hardware_of("dgx-h10")
    assert "names a machine, or a YAML file" in str(error.value)
    with pytest.raises(ConfigError, match=r"(?s)gone.yaml.*can't be read"):
        hardware_of("gone.yaml")


def test_a_format_without_rates_has_those_of_the_next_wider() -> None:
    assert MACHINES["dgx2-v100"].format_of("bf16") == "fp16"
    assert MACHINES["dgx-a100"].format_of("fp8") == "bf16"
    assert MACHINES["dgx2-v100"].format_of("tf32") == "fp32"
    assert MACHINES["h200"].peak("fp8") == 2 * MACHINES["h200"].peak("bf16") + 1e12


def test_processes_that_share_cores_are_faster_while_others_wait() -> None:
    shared = described(device="cpu", devices_per_node=4, at_once=2)
    assert [shared.speed(working) for working in (1, 2, 3, 4, 9)] == pytest.approx([2, 2, 4 / 3, 1, 1])
    assert {described().speed(working) for working in range(1, 9)} == {1.0}
