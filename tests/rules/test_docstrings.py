"""Every file has a docstring; docstrings are sentences with a subject, and no code is spoken of as of a person."""

import re

from support.source_tree import PROGRAMS, sources

EVERYTHING = sources("megazero", "tests", *PROGRAMS)
# Comments may stand above it.  Reading the first lines is a hundred times faster than parsing all tests.
DOCSTRING = re.compile(r'(#.*\n|\s)*r?"""\S')
# Words that begin a phrase without a subject: "Of activations.", "What it said."
FRAGMENT = re.compile(
    r'^ *r?"""(As|At|By|For|From|How|In|Into|Not|Nothing|Of|On|To|What|Where|Whether|Which|With)\b.*', re.MULTILINE
)
PERSONIFIED = re.compile(
    r"\b(nobody|somebody|whoever|hears?|heard|knows|minds|wants|says|said|tells|told)\b", re.IGNORECASE
)
# A text that tokenizers are tried on.
NOT_PROSE = "It's what they're saying"


def test_every_file_says_what_it_is() -> None:
    assert [source.name for source in EVERYTHING if not DOCSTRING.match(source.text)] == []


def test_docstrings_begin_with_a_subject_or_an_imperative() -> None:
    found = [
        f"{source.name}: {line.group().strip()}" for source in sources() for line in FRAGMENT.finditer(source.text)
    ]
    assert found == []


def test_code_does_not_hear_know_say_or_want() -> None:
    found = [
        f"{source.name}: {line.strip()}"
        for source in sources()
        for line in source.text.splitlines()
        if PERSONIFIED.search(line) and NOT_PROSE not in line
    ]
    assert found == []
