"""Tests of the program that judges predicted times: its draw, its records and its figures."""

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from plan_time import (
    RATES,
    Drawn,
    Machine,
    Record,
    Records,
    draws,
    least_disturbed,
    main,
    page_of,
    parse_arguments,
    predicted,
    rank_correlation,
    read_records,
    summary,
)
from steps import configuration_of
from support.each import each

from megazero.parallel.nodes import Nodes
from megazero.planner.curves import constant
from megazero.planner.hardware import Hardware, Link
from megazero.planner.job_plan import DryRuns
from megazero.planner.machines import MACHINES


def test_the_draw_follows_from_its_seed() -> None:
    first, again, other = (list(itertools.islice(draws(seed, 4, 0.3), 12)) for seed in (1, 1, 2))
    assert first == again != other
    assert len({str(layout) for layout in first}) == 12
    for machine, words in first:
        configuration_of(words, machine.processes)  # raises what is not legal
    assert {machine.processes for machine, _ in itertools.islice(draws(1, 1, 0), 6)} == {1}


def test_a_share_of_the_draw_is_on_nodes() -> None:
    drawn = list(itertools.islice(draws(3, 2, 0.3), 200))
    on_nodes = [each for each in drawn if each.machine.mbit]
    assert 40 <= len(on_nodes) <= 80
    assert {each.machine for each in on_nodes} == {Machine(2, rate) for rate in RATES}
    assert all(each.machine.nodes == Nodes((1, 1)) for each in on_nodes)
    assert {each.machine.nodes for each in drawn} == {Nodes((1,)), Nodes((2,)), Nodes((1, 1))}
    configs = [configuration_of(each.words, 2) for each in on_nodes]
    layouts = {(one.parallel.tensor_model_parallel_size, one.parallel.pipeline_model_parallel_size) for one in configs}
    assert layouts == {(1, 1), (2, 1), (1, 2)}
    crossing = [one.parallel.tensor_model_parallel_size > 1 for one in configs]
    assert [one.parallel.allow_tensor_parallel_across_nodes for one in configs] == crossing
    assert not any(each.machine.mbit for each in itertools.islice(draws(3, 2, 0), 20))


SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 16 --vocab-size 64 --micro-batch-size 2"


def over(bytes_a_second: float) -> Hardware:
    """Return nodes of one process each whose link takes nothing but the time of its bytes."""
    links = {**MACHINES["cpu"].links, "across": Link(0.0, constant(bytes_a_second))}
    return replace(MACHINES["cpu"], devices_per_node=1, links=links, overlap_cost=0.0)


@each(
    ("words", "sent"),
    [
        # Four all-reduces of a layer's activations, one behind the embedding, one before the head.
        ("--tensor-model-parallel-size 2 --allow-tensor-parallel-across-nodes", (4 * 2 + 2) * 64 * 64 * 4),
        # Half of the gradients, then half of the parameters.
        ("--zero-stage 1", 2 * (2 * (12 * 64**2 + 13 * 64) + (128 + 16 + 2) * 64) / 2 * 4),
        # Activations of two micro-batches up, the second one's gradient down, and a sum of the embedding's gradient,
        # whose rows are a multiple of 128.
        ("--pipeline-model-parallel-size 2", (3 * 32 + 128) * 64 * 4),
    ],
)
def test_a_slow_link_adds_the_time_of_the_bytes_that_cross(words: str, sent: float) -> None:
    drawn = Drawn(
        Machine(2, 100), [*SMALL.split(), "--global-batch-size", "4" if "-par" in words else "8", *words.split()]
    )
    runs = DryRuns()
    fast, slow = (predicted(drawn, over(rate), runs).seconds for rate in (1e15, 1e3))
    assert slow - fast == pytest.approx(sent / 1e3, rel=0.1)


def test_the_page_has_the_figures_of_emulated_links_apart() -> None:
    def pair(mbit: int, guess: float, true: float) -> tuple[Record, Record]:
        one = {"layout": "--a 1", "processes": 2, "mbit": mbit, "seconds": guess, "binding": "products"}
        return one, {"seconds": true, "others": 0.0, "tries": 1}

    options = parse_arguments(["--records", "r.jsonl", "--seed", "1"])
    found = [pair(0, 1.0, 1.0), pair(0, 2.2, 2.0), pair(100, 3.0, 4.0)]
    page = "\n".join(page_of(found, options, " 3 layouts are left out."))
    told = " ".join(page.split())
    assert "all (3 layouts): median error 0.100, within 15 % 0.667, rank correlation 1.000" in told
    assert "emulated links (1 layouts): median error 0.250, within 15 % 0.000" in told
    assert "one node (2 layouts): median error 0.050, within 15 % 1.000" in told
    assert "3 layouts are left out." in told and "| 100 | 3.000 | 4.000 | -25.0 |" in told


def test_without_root_no_layout_is_on_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    words = ["--records", str(tmp_path / "r.jsonl"), "--seed", "1", "--emulated", "1", "--count", "3"]
    monkeypatch.setattr(sys, "argv", ["plan_time.py", *words])
    assert main() == 0
    assert "3 layouts over emulated links are left out: network namespaces" in capsys.readouterr().err


def test_the_figures_by_hand() -> None:
    rows = [(1.0, 1.0), (2.2, 2.0), (3.0, 4.0), (8.0, 8.0)]
    found = summary(rows)
    assert found["median error"] == pytest.approx((0.0 + 0.1) / 2)
    assert (found["within 15 %"], found["rank correlation"]) == (0.75, 1.0)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == -1


def test_a_record_is_found_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"key": "a", "seconds": 1.0}) + '\n{"key": "b", "seco')
    records = Records(path, minutes=1)
    assert records.get("a", lambda: pytest.fail("it is known")) == {"key": "a", "seconds": 1.0}
    found = records.get("b", lambda: {"seconds": 2.0})
    assert found == {"key": "b", "seconds": 2.0}
    assert read_records(path)["b"]["seconds"] == 2.0
    assert Records(path, minutes=0).get("c", dict) is None
    assert Records(path, minutes=0).get("b", dict) == found


def test_a_measurement_is_repeated_for_what_others_take_alone() -> None:
    quiet, noisy = {"seconds": 9.0, "others": 0.04}, {"seconds": 1.0, "others": 0.3}
    assert least_disturbed(lambda: quiet) == {**quiet, "tries": 1}
    source = iter([noisy, quiet])
    assert least_disturbed(lambda: next(source)) == {**quiet, "tries": 2}
    source = iter([noisy, {"seconds": 2.0, "others": 0.2}, noisy])
    assert least_disturbed(lambda: next(source)) == {"seconds": 2.0, "others": 0.2, "tries": 3}


def test_a_seed_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--records", "r.jsonl"])
    assert "--seed" in capsys.readouterr().err
