"""Tests the names of the paper's parts: each is computed by something, and a wrong one is told from the right ones."""

import pytest

from megazero.errors import ConfigError
from megazero.planner.paper.names import NAMES, read_names
from megazero.planner.paper.parts import PARTS


def test_every_name_has_a_part() -> None:
    assert tuple(PARTS) == NAMES == read_names("all")


def test_lists_keep_the_papers_order() -> None:
    assert read_names("section-7,figure-1") == ("figure-1", "section-7")


@pytest.mark.parametrize("text", ["figure-5", "", "table-1,", "all,table-1"])
def test_a_wrong_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--paper {text}") as refused:
        read_names(text)
    assert any(name in str(refused.value) for name in NAMES)
