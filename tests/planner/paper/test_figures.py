"""Tests that the paper's figures have the paper's orders and crossing points, by numbers that its text has.

The figures are those of arXiv 1910.02054; TFLOP/s are of a device.
"""

import pytest
from support.each import each

from megazero.planner.advice.shallow import Measured
from megazero.planner.job_plan import DryRuns
from megazero.planner.paper import points
from megazero.planner.paper.figures import DGX2, baseline, figure_6, figure_7, largest, largest_batch, tflops, zero
from megazero.planner.paper.points import PaperRun
from megazero.planner.paper.tables import TABLE_2


@each("point", [*points.FIGURE_2, *points.FIGURE_2_BASELINE, *points.FIGURE_3, *points.FIGURE_4])
def test_a_shape_has_the_parameters_of_its_name(point: PaperRun) -> None:
    """A block has 12 h^2 parameters, the vocabulary 50,257 h."""
    parameters = 12 * point.layers * point.hidden**2 + 50_257 * point.hidden
    assert parameters / 1e9 == pytest.approx(float(point.size[:-1]), rel=0.07)
    assert point.devices % point.tp == 0 and point.hidden % point.heads == 0 and point.heads % point.tp == 0


def of(size: str, chosen: tuple[PaperRun, ...]) -> PaperRun:
    return next(point for point in chosen if point.size == size)


@pytest.fixture(scope="module")
def samples() -> DryRuns:
    """Return the dry runs of all figures, which have some in common."""
    return DryRuns()


@pytest.fixture(scope="module")
def of_100b(samples: DryRuns) -> Measured:
    return zero(of("100B", points.FIGURE_2), samples=samples)


def test_figure_2_the_baseline_falls_behind_where_it_leaves_a_node(of_100b: Measured, samples: DryRuns) -> None:
    """At 1.5B the two are near each other; from 40B on the baseline's model parallelism crosses nodes; 10 x at 100B."""
    ours = {size: zero(of(size, points.FIGURE_2), samples=samples) for size in ("1.5B", "8B", "40B")}
    ours["100B"] = of_100b
    plain = {size: baseline(of(size, points.FIGURE_2_BASELINE), samples) for size in ours}
    speedup = {size: tflops(ours[size]) / tflops(plain[size]) for size in ours}
    assert 1 < speedup["1.5B"] < 1.3 < speedup["8B"] < speedup["40B"] < speedup["100B"]
    assert speedup["8B"] < 2 < 3 < speedup["40B"] and 5 < speedup["100B"] < 20
    # "over 38 TFlops per GPU" at 100B, more than 30 % of 125; about 5 at 40B, which this model has 3.4 times as high.
    assert 38 < tflops(ours["100B"]) < 38 * 1.3
    assert 5 < tflops(plain["40B"]) < 5 * 3.6
    assert all(found.fits(DGX2) for found in (*ours.values(), *plain.values()))


def test_figure_2_falls_a_little_beyond_100b(of_100b: Measured, samples: DryRuns) -> None:
    beyond = [zero(of(size, points.FIGURE_2), samples=samples) for size in ("120B", "140B")]
    found = [tflops(one) for one in (of_100b, *beyond)]
    assert found == sorted(found, reverse=True) and found[-1] > 0.8 * found[0]


def test_figure_3_is_superlinear_for_batches_grow_with_the_devices(samples: DryRuns) -> None:
    few, many = points.FIGURE_3[0], points.FIGURE_3[-1]
    small, large = zero(few, samples=samples), zero(many, samples=samples)
    assert tflops(large) * 400 / (tflops(small) * 64) > 400 / 64
    assert small.fits(DGX2) and large.fits(DGX2)
    batches = largest_batch(few, small, samples), largest_batch(many, large, samples)
    assert 16 <= batches[0] < 64 <= batches[1], "64 devices have no room for the batch of 400"


def test_figure_4_trains_13b_without_model_parallelism_and_ddp_not_2b(samples: DryRuns) -> None:
    wide, alone = points.FIGURE_4[-1], points.FIGURE_4_BASELINE[-1]
    found, plain = zero(wide, samples=samples), baseline(alone, samples)
    assert found.fits(DGX2) and plain.fits(DGX2)
    assert tflops(found) > 40 and tflops(plain) < tflops(found) / 1.5
    assert 13 <= largest(wide, "--zero-config", "C3", samples=samples) < 14
    assert 1.4 < largest(alone, "--zero-stage", "0", "--recompute-granularity", "full", samples=samples) < 2


def test_figure_6_the_largest_models(samples: DryRuns) -> None:
    """40B, 60B, 50B, 140B and 150B of C1 to C5: the order, and each but C2 within a fifth."""
    found = {row.name: row.ours for row in figure_6(samples).rows}
    assert sorted(found, key=lambda name: found[name]) == ["C1", "C3", "C2", "C4", "C5"]
    for name, papers in {"C1": 40, "C3": 50, "C4": 140, "C5": 150}.items():
        assert found[name] == pytest.approx(papers, rel=0.2), name
    assert found["C4"] > 2 * found["C3"] and found["C5"] < 1.15 * found["C4"]


def test_figure_7_what_is_cached(samples: DryRuns) -> None:
    """Pa cuts 16-fold checkpoints; moving them to the host shows at 100B, and hardly at 40B."""
    found = {row.name: row.ours for row in figure_7(samples).rows}
    assert found["40B, C1"] > found["40B, C3"] > found["40B, C2"] > found["40B, C4"] >= found["40B, C5"]
    checkpoints = 50 * 16 * 1024 * 8192 * 2 / 1e9
    assert found["40B, C1"] - found["40B, C2"] == pytest.approx(checkpoints * 15 / 16, rel=0.05)
    small, large = (found[f"{size}, C4"] - found[f"{size}, C5"] for size in ("40B", "100B"))
    assert large > 3.5 and small < 1.1
    assert all(gigabytes < 32 for gigabytes in found.values())


def test_figure_8_memory_becomes_throughput(samples: DryRuns) -> None:
    found = {name: zero(point, name, samples) for name, point in points.FIGURE_8_60B.items()}
    rates = {name: tflops(one) for name, one in found.items()}
    assert rates["C1"] < rates["C2"] < rates["C3"] < rates["C4"] and rates["C5"] == pytest.approx(rates["C4"], rel=0.15)
    assert all(one.fits(DGX2) for one in found.values())
    assert [zero(points.FIGURE_8_170B, name, samples).fits(DGX2) for name in ("C4", "C5")] == [False, True]


@each("tp", [4, 16])
def test_table_2_models_that_were_trained_fit_and_larger_ones_than_the_theory_do_not(tp: int, samples: DryRuns) -> None:
    """The paper measured 62 to 66 % of its theory without ZeRO, and 82 % with Pos, of which a plan has most."""
    point, without, with_pos = points.TABLE_2[tp]
    plain, pos = (
        largest(point, "--zero-stage", "0", "--recompute-granularity", "full", samples=samples),
        largest(point, "--zero-config", "C1", samples=samples),
    )
    assert without < plain < TABLE_2[tp][0] and plain < 1.6 * without
    assert with_pos < pos < TABLE_2[tp][1] and pos < 1.15 * with_pos
