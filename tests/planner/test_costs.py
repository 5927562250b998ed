"""Tests the seconds of kernels and messages against formulas by hand, and that they grow as they must."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from megazero.planner.costs import (
    Group,
    attention_rate,
    collective_seconds,
    copy_seconds,
    file_seconds,
    kernel_seconds,
    kind_of,
)
from megazero.planner.curves import Curve, constant
from megazero.planner.hardware import Hardware, Link, Matrix
from megazero.planner.machines import MACHINES
from megazero.planner.trace import Operand, Operation

US = 1e-6
LINKS = {
    "inside": Link(2 * US, constant(100e9)),
    "across": Link(5 * US, constant(10e9)),
    "host": Link(10 * US, constant(20e9)),
    "disk": Link(100 * US, constant(1e9)),
}


def machine(**changes: object) -> Hardware:
    given: dict[str, object] = {
        "name": "of a test",
        "source": "of a test",
        "device": "cuda",
        "devices_per_node": 8,
        "memory_bytes": 10**9,
        "matrix": {"bf16": Matrix(100e12, Curve(((100, 10e12), (1000, 80e12)))), "fp32": Matrix(10e12, constant(8e12))},
        "kernels": {"memory": constant(1e12), "functions": constant(0.5e12)},
        "links": LINKS,
        "kernel_seconds": 3 * US,
        "fused": 0.5,
    }
    return Hardware(**{**given, **changes})


def product(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 0) -> Operation:
    lead = (batch,) if batch else ()
    operands = (Operand((*lead, m, k), dtype), Operand((*lead, k, n), dtype))
    size = 2 if dtype == "bfloat16" else 4
    times = batch or 1
    return Operation(
        "bmm" if batch else "mm",
        operands,
        (Operand((*lead, m, n), dtype),),
        2 * m * n * k * times,
        dtype,
        size * times * (m * k + k * n),
        size * times * m * n,
    )


def elementwise(nbytes: int, name: str = "add") -> Operation:
    return Operation(name, (), (), 0, "", nbytes // 2, nbytes - nbytes // 2)


def test_a_large_product_takes_its_flops_at_the_rate_of_its_size() -> None:
    assert kernel_seconds(machine(), product(2000, 2000, 2000)) == pytest.approx(2 * 2000**3 / 80e12)
    assert kernel_seconds(machine(), product(100, 100, 100, "float32")) == 3 * US  # the shortest kernel
    between = 10e12 * 8**0.5  # halfway between 100 and 1000 on both logarithmic axes
    size = 100 * 10**0.5
    m = round(size)
    assert kernel_seconds(machine(kernel_seconds=0.0), product(m, m, m)) == pytest.approx(2 * m**3 / between, rel=0.01)


def test_a_product_by_columns_and_an_operator_may_have_rates_of_their_own() -> None:
    matrix = {"bf16": Matrix(100e12, constant(80e12), {"columns": constant(20e12)})}
    own = machine(matrix=matrix, operators={"gelu": constant(1e11)})
    by_rows = product(2000, 2000, 2000)
    assert kernel_seconds(own, by_rows) == pytest.approx(2 * 2000**3 / 80e12)
    assert kernel_seconds(own, replace(by_rows, order="columns")) == pytest.approx(2 * 2000**3 / 20e12)
    assert kernel_seconds(own, elementwise(10**9, "gelu")) == pytest.approx(1e-2)
    assert kernel_seconds(own, elementwise(10**9, "exp")) == pytest.approx(2e-3)
    assert kernel_seconds(own, elementwise(1000, "gelu")) == 3 * US  # the shortest kernel


def test_a_product_with_few_flops_a_byte_takes_its_bytes() -> None:
    thin = product(1, 4096, 4096)
    assert kernel_seconds(machine(), thin) == pytest.approx(2 * (4096 * 4096 + 2 * 4096) / 1e12)


def test_a_batch_is_a_number_of_products_on_a_cpu_and_one_on_a_gpu() -> None:
    batch = product(100, 100, 100, batch=1000)
    flops = 2 * 100**3 * 1000
    cpu = machine(device="cpu", kernel_seconds=0.0)
    assert kernel_seconds(cpu, batch) == pytest.approx(flops / 10e12)
    assert kernel_seconds(machine(), batch) == pytest.approx(max(flops / 80e12, 6e7 / 1e12))


def test_other_kernels_take_their_bytes_by_kind() -> None:
    assert kernel_seconds(machine(), elementwise(10**9)) == pytest.approx(1e-3)
    assert kernel_seconds(machine(), elementwise(10**9, "gelu_backward")) == pytest.approx(2e-3)
    assert kernel_seconds(machine(), elementwise(8)) == 3 * US
    assert kernel_seconds(machine(), elementwise(10**9), is_fused=True) == pytest.approx(0.5e-3)
    assert kernel_seconds(machine(), elementwise(8), is_fused=True) < 1e-9


@each(
    ("name", "kind"),
    [
        ("add", "memory"),
        ("copy_", "memory"),
        ("gelu", "functions"),
        ("_softmax_backward_data", "functions"),
        ("native_layer_norm_backward", "norms"),
        ("sum", "reductions"),
        ("linalg_vector_norm", "reductions"),
        ("_fused_adamw_", "optimizer"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_attention_has_its_own_rate_or_a_share_of_the_products() -> None:
    assert attention_rate(machine(), "bf16", length=4096, width=128) == pytest.approx(0.55 * 80e12)
    own = {"memory": constant(1e12), "attention": Curve(((100, 1e12), (10_000, 4e12)))}
    assert attention_rate(machine(kernels=own), "bf16", length=1000, width=64) == pytest.approx(2e12)
    shapes = (Operand((2, 8, 1000, 64), "bfloat16"),)
    attention = Operation("_scaled_dot_product_flash_attention", shapes, (), 4 * 2 * 8 * 1000**2 * 64, "bfloat16", 8, 8)
    assert kernel_seconds(machine(kernels=own), attention) == pytest.approx(attention.flops / 2e12)


MIB = 2**20


@each(
    ("collective", "group", "algorithm", "seconds"),
    [
        ("all_gather", Group(8), "ring", 7 * 2 * US + MIB * 7 / 8 / 100e9),
        ("reduce_scatter", Group(8), "exchange", 7 * 2 * US + MIB * 7 / 8 / 100e9),
        # Sixteen ranks on two nodes: 13 hops inside, 2 across; eight links leave each node.
        ("all_gather", Group(16, 2), "ring", (13 * 2 + 2 * 5) * US + MIB * 15 / 16 / 80e9),
        # One rank of each of four nodes: one link.
        ("all_gather", Group(4, 4), "ring", 3 * 5 * US + MIB * 3 / 4 / 10e9),
        ("all_reduce", Group(4, 4), "exchange", 2 * (3 * 5 * US + MIB * 3 / 4 / 10e9)),
        ("all_reduce", Group(8), "ring", min(14 * 2 * US + 2 * MIB * 7 / 8 / 100e9, 6 * 2 * US + 2 * MIB / 100e9)),
        ("broadcast", Group(8), "ring", 7 * 2 * US + MIB / 100e9),
        ("send", Group(2), "ring", 2 * US + MIB / 100e9),
        ("receive", Group(2, 2), "ring", 5 * US + MIB / 10e9),
        ("all_to_all", Group(16, 2), "ring", (13 * 2 + 2 * 5) * US + MIB * 8 / 16 / 10e9),
        (
            "all_gather",
            Group(16, 2),
            "hierarchical",
            7 * 2 * US + MIB * 7 / 8 / 100e9 + 5 * US + MIB / 8 / 2 / 10e9,
        ),
        ("all_gather", Group(1), "ring", 0.0),
    ],
)
def test_collectives_by_hand(collective: str, group: Group, algorithm: str, seconds: float) -> None:
    found = collective_seconds(machine(), collective, MIB, group, algorithm)
    assert found == pytest.approx(seconds, rel=1e-12)


def test_a_measured_collective_counts_before_the_formula() -> None:
    measured = {"all_gather": {4: Curve(((2**20, 1e9), (2**24, 4e9)))}}
    found = machine(links={**LINKS, "inside": Link(2 * US, constant(100e9), measured)})
    assert collective_seconds(found, "all_gather", 2**20, Group(4)) == pytest.approx(2**20 * 0.75 / 1e9)
    assert collective_seconds(found, "all_gather", 2**22, Group(4)) == pytest.approx(2**22 * 0.75 / 2e9)
    # What is smaller than the smallest measured takes as long as that: its time is latency.
    assert collective_seconds(found, "all_gather", 2**10, Group(4)) == pytest.approx(2**20 * 0.75 / 1e9)
    assert collective_seconds(found, "all_gather", 2**20, Group(8)) == pytest.approx(14 * US + 2**20 * 7 / 8 / 100e9)


def test_copies_and_files() -> None:
    assert copy_seconds(machine(), 20e9) == pytest.approx(1 + 10 * US)
    assert file_seconds(machine(), 1e9) == pytest.approx(1 + 100 * US)


COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


@given(
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from(COLLECTIVES),
    st.integers(0, 10),
    st.integers(0, 6),
    st.integers(0, 2**36),
    st.integers(0, 2**36),
)
def test_more_bytes_never_take_less(
    name: str, collective: str, ranks: int, nodes: int, first: int, second: int
) -> None:
    group = Group(2**ranks, 2 ** min(nodes, ranks))
    less, more = sorted((first, second))
    found = [collective_seconds(MACHINES[name], collective, nbytes, group) for nbytes in (less, more)]
    assert found[0] <= found[1] * (1 + 1e-9)
    assert math.isfinite(found[1])


@given(st.sampled_from(("all_gather", "all_reduce")), st.integers(1, 9), st.integers(0, 5), st.integers(1, 2**34))
def test_a_gather_over_more_nodes_never_takes_less(collective: str, ranks: int, nodes: int, nbytes: int) -> None:
    nodes = min(nodes, ranks - 1)
    found = [
        collective_seconds(machine(), collective, nbytes, Group(2**ranks, 2**n), "ring") for n in (nodes, nodes + 1)
    ]
    assert found[0] <= found[1] * (1 + 1e-9)


@given(st.integers(1, 13), st.integers(1, 13), st.integers(1, 13), st.sampled_from(sorted(MACHINES)))
def test_a_product_of_twice_the_work_never_takes_less(m: int, n: int, k: int, name: str) -> None:
    once, twice = (kernel_seconds(MACHINES[name], product(2**m, 2**n, 2**deep)) for deep in (k, k + 1))
    assert once <= twice * (1 + 1e-9)


@given(st.sampled_from(sorted(MACHINES)), st.integers(1, 2**34), st.integers(1, 2**34))
def test_a_kernel_of_more_bytes_never_takes_less(name: str, first: int, second: int) -> None:
    less, more = sorted((first, second))
    assert kernel_seconds(MACHINES[name], elementwise(less)) <= kernel_seconds(MACHINES[name], elementwise(more)) * (
        1 + 1e-9
    )
