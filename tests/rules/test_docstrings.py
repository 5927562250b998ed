"""Every file has a docstring."""

import ast

from support.source_tree import PROGRAMS, sources

EVERYTHING = sources("megazero", "tests", *PROGRAMS)


def test_every_file_says_what_it_is() -> None:
    assert [source.name for source in EVERYTHING if not ast.get_docstring(source.tree)] == []
