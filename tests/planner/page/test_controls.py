"""Tests the list of controls of a page."""

import pytest

from megazero.errors import ConfigError
from megazero.planner.page.controls import CONTROLS, DEFAULT, read_controls


def test_controls_have_an_order_of_their_own() -> None:
    assert read_controls(",".join(reversed(CONTROLS))) == tuple(CONTROLS)
    assert read_controls(DEFAULT) == ("micro-batch", "stage")
    assert read_controls("none") == ()


def test_an_unknown_control_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="recomputation"):
        read_controls("micro-batch,stages")
