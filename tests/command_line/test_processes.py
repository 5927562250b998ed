"""Tests of how `--processes N` is read."""

import pytest
from support.each import each

from megazero.command_line.processes import OwnProcesses, split_processes
from megazero.errors import ConfigError


def test_the_flag_is_separated_from_the_others() -> None:
    words = ["--lr", "1", "--processes", "2", "--bf16", "--processes=3", "--processes-of-others"]
    assert split_processes(words) == OwnProcesses(3, ["--lr", "1", "--bf16", "--processes-of-others"])
    assert split_processes(["--bf16"]) == OwnProcesses(None, ["--bf16"])


@each("words", ["--processes 0", "--processes", "--processes --lr 1", "--processes=2.5", "--processes ²"])
def test_values_that_are_none(words: str) -> None:
    with pytest.raises(ConfigError, match="a whole number, at least 1\n    legal: --processes 4"):
        split_processes(words.split())
