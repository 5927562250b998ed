"""Every file has a docstring."""

import re

from support.source_tree import PROGRAMS, sources

EVERYTHING = sources("megazero", "tests", *PROGRAMS)
# Comments may stand above it.  Reading the first lines is a hundred times faster than parsing all tests.
DOCSTRING = re.compile(r'(#.*\n|\s)*r?"""\S')


def test_every_file_says_what_it_is() -> None:
    assert [source.name for source in EVERYTHING if not DOCSTRING.match(source.text)] == []
