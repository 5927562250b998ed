"""Tests of the benchmark of the batch that fits with 1, 2 and 4 data-parallel processes, at a small size."""

from pathlib import Path

import pytest
from batch_scaling import Case, Step, Times, explanation, main

from megazero.errors import ConfigError

TINY = (
    "--num-layers 2 --hidden-size 64 --seq-length 16 --vocab-size 64 --bucket-size 8192 --limit 2.1 --rounds 1"
    " --steps 1 --device cpu"
)


def times(tokens: int, *, wall: float, cpu: float, update: float) -> Times:
    return Times(tokens, [Step(wall, cpu, update), Step(wall, cpu, update), Step(9 * wall, cpu, update)])


def test_figures_of_steps() -> None:
    found = times(100, wall=0.5, cpu=0.2, update=0.05)
    assert found.tokens_per_second == 200
    assert found.cpu_per_token == pytest.approx(0.002)
    assert found.update_per_token == pytest.approx(0.0005)


@pytest.mark.parametrize(("wall", "word"), [(1.5, "1.33 and 1.33 times"), (2.0, "(not superlinear")])
def test_what_the_figures_consist_of_is_computed(wall: float, word: str) -> None:
    small, large = 100, 200
    found = {
        Case(1, 2): times(small, wall=1.0, cpu=0.001, update=0.0005),
        Case(2, 4): times(large, wall=wall, cpu=0.001, update=0.0002),
        Case(4, 4): times(large, wall=wall, cpu=0.001, update=0.0002),
        Case(2, 2): times(small, wall=1.0, cpu=0.001, update=0.0005),
        Case(4, 2): times(small, wall=1.0, cpu=0.002, update=0.0004),
    }
    text = explanation(found)
    assert word in text and "takes 2.00 times its CPU time" in text
    assert "saves 15 CPU µs a token of Nd = 4: 3 in the optimizer's part of the step, 12 in" in text
    assert "from 2 to 16 samples" in text


@pytest.mark.gloo
def test_the_program(tmp_path: Path) -> None:
    assert main([*TINY.split(), "--output", str(tmp_path / "page.md")]) == 0
    page = (tmp_path / "page.md").read_text()
    memory, speed = (part.splitlines()[2:] for part in page.split("\n\n") if part.startswith("|"))
    batches = [int(row.split("|")[3]) for row in memory]
    assert 0 < batches[0] < batches[1] < batches[2]
    cases = [(int(cells[1]), int(cells[2])) for cells in (row.split("|") for row in speed)]
    assert cases == [*zip((1, 2, 4), batches, strict=True), (2, batches[0]), (4, batches[0])]


@pytest.mark.gloo
def test_a_limit_that_nothing_fits_is_the_users_to_mend() -> None:
    with pytest.raises(ConfigError, match="a sample a process with Nd = 1 holds more"):
        main([*TINY.split(), "--limit", "0.5"])
