"""Tests of the benchmark of C1 to C5, at a small size: the program, and its check of the paper's order."""

from pathlib import Path

import pytest
from zero_configs import main, out_of_order, parse_arguments

LIMIT = 1.6  # MiB of a process
TINY = (
    "--num-layers 4 --hidden-size 32 --seq-length 32 --vocab-size 64 --micro-batch-size 16 --bucket-size 8192"
    f" --limit {LIMIT} --largest C5 --rounds 2 --steps 2 --device cpu"
)


def test_the_papers_order() -> None:
    assert out_of_order({"C1": 20, "C2": 30, "C3": 21, "C4": 31, "C5": 31}) == []
    assert out_of_order({"C1": 20, "C2": 30, "C3": 20, "C4": 31, "C5": 40}) == ["C1 < C3 is not so (20 and 20 layers)"]
    wrong = out_of_order({"C1": 5, "C2": 5, "C3": 5, "C4": 5, "C5": 4})
    assert [text.split(" is")[0] for text in wrong] == ["C1 < C3", "C1 < C2", "C2 < C4", "C4 <= C5", "C1 < C5"]
    assert out_of_order({"C1": 5, "C4": 6}) == []


def test_every_option_has_a_default() -> None:
    assert all(value is not None for name, value in vars(parse_arguments([])).items() if name != "output")


@pytest.mark.gloo
def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main([*TINY.split(), "--output", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert capsys.readouterr().out == page
    assert code == 0 and "\nIn the paper's order" in page
    memory, times, largest = (part.splitlines()[2:] for part in page.split("\n\n") if part.startswith("|"))
    assert [len(rows) for rows in (memory, times, largest)] == [5, 5, 1]
    losses = {row.split("|")[4] for row in times}
    assert len(losses) == 1, losses
    states, checkpoints, host = ([float(row.split("|")[column]) for row in memory] for column in (2, 3, 7))
    assert states[0] == states[1] > states[2] == states[3] == states[4]
    assert checkpoints == pytest.approx([0.25, 0.125, 0.25, 0.125, 0.09], abs=0.01)  # b s h fp32 a layer, half with Pa
    assert host == pytest.approx([0, 0, 0, 0, 0.125], abs=0.01)
    layers = [int(row.split("|")[2]) for row in largest]
    # At this size a peak differs from run to run by more than a layer, because gloo keeps messages after sending them.
    # The default sizes tell the configurations apart, and the program fails on another order.
    peaks = [float(row.split("|")[6]) for row in largest]
    assert min(layers) > 0 and max(peaks) <= LIMIT, page
