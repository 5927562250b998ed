"""Each cleaning step is compared with the definition of what it looks for."""

import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megazero.errors import DataError
from megazero.prepare.clean.cleaning_steps import (
    LANGUAGE_CHARACTERS,
    Characters,
    Dropped,
    FixText,
    Languages,
    Printable,
    printable_share,
)

ftfy = pytest.importorskip("ftfy")

ENGLISH = "The committee has decided that the bridge over the river will be closed to traffic until the spring."
GERMAN = "Der Ausschuss hat beschlossen, dass die Brücke über den Fluss bis zum Frühjahr für den Verkehr gesperrt wird."
FRENCH = "Le comité a décidé que le pont sur la rivière sera fermé à la circulation jusqu'au printemps prochain."
# Pieces of text that ftfy has a rule for, and pieces that its rules depend on.
FRAGMENTS = ["\n", "\r\n", "\r", "&amp;", "&lt;", "&", "<", "a", "é", "Ã©", "\u2028", "\x1b[31m", "\ufeff", "ﬁ", "“"]
FRAGMENTS += ["schÃ¶n", "\x85", "e\u0301", "\x0c", "  ", "\u00e2\u20ac\u0153", "\u00a0", "\uff21", "\x00", "word\n"]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join))
def test_texts_are_fixed_as_the_library_fixes_the_whole(text: str) -> None:
    assert FixText().apply(text) == ftfy.fix_text(text)


def test_what_fixing_means() -> None:
    fix = FixText().apply
    assert fix("schÃ¶n â€œ&amp;\u201d\r\n\x00e\u0301 ﬁ") == 'schön "&"\né fi'
    plain = "if a < b and not c:\n\treturn {'x': 1}\n" * 50
    assert fix(plain) is plain


def test_lengths_count_characters() -> None:
    step = Characters(3, 5)
    assert [step.apply(text) for text in ("∀∀∀", "12345")] == ["∀∀∀", "12345"]
    assert step.apply("🎉🎉") == Dropped("2 characters, fewer than 3")
    assert step.apply("123456") == Dropped("6 characters, more than 5")
    assert Characters(None, 1).apply("") == "" and Characters(1, None).apply("x" * 9) == "x" * 9


def test_every_character_is_printable_or_not() -> None:
    """A character prints unless its general category is control, format, surrogate, private or unassigned."""
    for code in [*range(0x3000), *range(0xD7F0, 0xD7FF), *range(0xE000, 0xE010), 0xFFFD, 0x1F389, 0xE0041]:
        character = chr(code)
        expected = (unicodedata.category(character)[0] != "C" or character in "\t\n\r") and character != "\ufffd"
        assert printable_share(character) == expected, hex(code)


def test_the_printable_share_is_a_fraction_of_characters() -> None:
    assert printable_share("") == 1.0
    assert printable_share("ab\0\0\ufffd cdef") == pytest.approx(0.7)
    assert Printable(0.7).apply("abcdefg\0\0\0") == "abcdefg\0\0\0"
    assert Printable(0.8).apply("abcdefg\0\0\0") == Dropped("0.700 of it is printable, less than 0.8")


def test_languages_are_told_apart() -> None:
    step = Languages(("en", "de"), 0.5)
    assert [step.apply(text) for text in (ENGLISH, GERMAN)] == [ENGLISH, GERMAN]
    dropped = step.apply(FRENCH)
    assert isinstance(dropped, Dropped) and dropped.reason.startswith("language fr (")
    assert isinstance(Languages(("en",), 0.0).apply(GERMAN), Dropped)


def test_an_unsure_language_is_dropped() -> None:
    assert Languages(("en",), 0.9).apply(ENGLISH * 3) == ENGLISH * 3
    dropped = [Languages(("en", "de", "fr"), 1.0).apply(text) for text in (ENGLISH[:9], GERMAN[:9], FRENCH[:9])]
    assert all(isinstance(found, Dropped) for found in dropped)
    assert any("less probable than 1.0" in found.reason for found in dropped if isinstance(found, Dropped))


def test_a_language_is_told_by_the_beginning() -> None:
    long = ENGLISH * (LANGUAGE_CHARACTERS // len(ENGLISH) + 1)
    mixed = long + GERMAN * 500
    assert Languages(("en",), 0.5).apply(mixed) == mixed


def test_unknown_languages_are_told_with_the_known() -> None:
    with pytest.raises(DataError, match="--languages klingon xx") as caught:
        Languages(("en", "xx", "klingon"), 0.5)
    assert " en " in caught.value.problems[0].legal


@pytest.mark.parametrize(
    ("package", "make"), [("ftfy", FixText), ("py3langid.langid", lambda: Languages(("en",), 0.5))]
)
def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch, package: str, make: Any) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r'pip install "megazero\[corpora\]"') as caught:
        make()
    assert package.split(".")[0] in caught.value.problems[0].given
