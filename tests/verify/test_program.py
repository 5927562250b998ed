"""Tests of layout verification after its command line is parsed; test___main__ tests the whole program."""

import pytest
from support.small_runs import tiny_run

from megazero.parallel.launch import Launch
from megazero.train.start.check import check
from megazero.verify.program import verify_layout

ALONE = Launch(0, 1, 0)


def test_the_deterministic_mode_is_entered_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """On CPUs, where there is nothing to enter, the notice shows that the mode has been looked at."""
    config = tiny_run(deterministic_mode=True, device="auto")
    verify_layout(config, ALONE, check(config, ALONE), steps=1)
    assert "--deterministic-mode: moot here" in capsys.readouterr().out


def test_a_layout_of_one_process_is_its_own_reference() -> None:
    config = tiny_run()
    report = verify_layout(config, ALONE, check(config, ALONE), steps=2)
    assert report.agrees and len(report.steps) == 2
