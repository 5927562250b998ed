"""Tests the benchmark of wires over slow links as far as it needs no cluster: its flags are legal, and its page."""

from collections import defaultdict

import slow_nodes
from slow_nodes import Figures, Measured

from megazero.command_line.parse import parse
from megazero.rules import run as rules


def test_the_flags_of_all_variants_are_legal() -> None:
    options = slow_nodes.parse_arguments([])
    for variant in slow_nodes.VARIANTS:
        config = parse(slow_nodes.flags(variant, options)).config
        assert rules.check(config, slow_nodes.NODES * slow_nodes.PROCESSES) == ()


def test_rates_are_compared_where_the_link_is_slowest() -> None:
    options = slow_nodes.parse_arguments(["--rates", "100", "--variants", "stage 3", "MiCS"])
    measured: Measured = defaultdict(Figures)
    for name, rate, seconds, sent in (
        ("stage 3", None, [0.5, 0.7, 0.6], 4_000_000),
        ("stage 3", 100.0, [3.0, 2.0, 2.5], 4_000_000),
        ("MiCS", None, [0.4, 0.4, 0.5], 1_000_000),
        ("MiCS", 100.0, [1.0, 1.25, 1.5], 1_000_000),
    ):
        figures = measured[name, rate]
        figures.seconds, figures.sent, figures.loss = seconds, [sent] * 3, 6.25
        figures.counted = [sent - 10_000] * 3

    def by_formula(multiple: int) -> str:
        """Half of so many times all parameters, 2 bytes each: of 4 blocks of width 256, 512 words and 64 positions."""
        psi = 4 * (12 * 256**2 + 13 * 256) + (512 + 64) * 256 + 2 * 256
        return f"{multiple * psi / 1e6:.2f}"

    *_, table = slow_nodes.parts_of(measured, options)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert rows[2] == ["stage 3", "0.600", "2.500", "4.00", "3.99", by_formula(6), "6", "1.00", "6.2500"]
    assert rows[3] == ["MiCS", "0.400", "1.250", "1.00", "0.99", by_formula(2), "2", "2.00", "6.2500"]


def test_what_ranks_of_a_node_have_counted() -> None:
    ranks = [{"bytes_across_nodes": {"dp": {"all_gather": 3, "scalars": 1}, "tp": {"send": 5}}}, {}, {}, {}]
    assert slow_nodes.counted_by_node(ranks) == [9, 0]
