"""Tests that planned peaks of a GPU are the allocator's, as measured on the null GPU and on one H200."""

import json
from pathlib import Path

import pytest
from plan_peaks import H200, NULL_GPU, page, planned
from support.each import each

from megazero.planner.dry.hollow import Operators

RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "2026-11-27-plan-peaks.jsonl"
PEAKS = {line["case"]: line["peak_bytes"] for line in map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())}
# Those that take a dry run the least time, of every kind.
QUICK = (
    "GPT",
    "GPT, dropout",
    "GPT, selective recomputation",
    "GPT, fp8 tensorwise",
    "GPT, fp8 delayed",
    "GPT, pipeline 2, zero-bubble, tensor 2, stage 1",
    "Llama",
    "Llama, not compiled",
    "Llama, full recomputation",
    "Llama, data 4, stage 3",
)


@pytest.fixture(scope="module")
def operators() -> Operators:
    """Return the operators that dry runs have called, of which they share most."""
    return Operators()


@each("name", QUICK)
def test_a_plan_is_within_a_hundredth_of_the_null_gpus_allocator(name: str, operators: Operators) -> None:
    assert abs(planned(NULL_GPU[name], operators) / PEAKS[name] - 1) < 0.01


def test_a_plan_is_within_a_hundredth_of_an_h200s_allocator() -> None:
    case = H200["GPT-2 124M, 64 sequences"]
    assert case.measured is not None
    assert abs(planned(case) / case.measured - 1) < 0.01


def test_every_case_has_been_measured() -> None:
    assert {*PEAKS} == {*NULL_GPU} and {*QUICK} <= {*PEAKS}


def test_the_page_has_both_figures_and_their_distance() -> None:
    parts = page({"On a machine": [("a job", 4.0 * 2**30, 3 * 2**30)]})
    assert "| a job | 4.000 | 3.000 | -25.00 % |" in parts[-1]
