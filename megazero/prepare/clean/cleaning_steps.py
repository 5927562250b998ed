"""Steps of cleaning that judge one document at a time: each returns the text, mended or not, or a reason to drop it."""

import re
import unicodedata
from typing import NamedTuple, Protocol

from megazero.errors import DataError, Problem

# The number of characters from which a language is identified; more is slower and hardly more certain.
LANGUAGE_CHARACTERS = 4096
_REPLACEMENT = "\ufffd"
# Anything but the characters of ASCII that are no control characters and begin no character's name.
_MENDABLE = re.compile("[^\\n\\t -%'-~]")


class Dropped(NamedTuple):
    """The reason why a document is dropped."""

    reason: str


class Step(Protocol):
    """A step of cleaning; steps are applied one after the other to every document in turn."""

    @property
    def name(self) -> str:
        """The step's flag, for the summary."""
        ...

    def apply(self, text: str) -> str | Dropped:
        """Return the text, as it is or mended, or the reason to drop it."""
        ...


class FixText:
    """A step that mends damage by programs, by ftfy's rules: wrong encodings (`\u00c3\u00a9`), HTML's names of
    characters, control characters, ligatures, curly quotes, line ends; the result is in Unicode's form NFC.

    The library works line by line and is slow, so it is called only for lines with a character that it could mend; the
    result is the same as for the whole text.  Raises DataError where it is missing.
    """

    name = "--fix-text"

    def __init__(self) -> None:
        try:
            import ftfy
        except ImportError as error:
            raise DataError(missing_package(self.name, "ftfy")) from error
        self._fix = ftfy.fix_text
        self._config = ftfy.TextFixerConfig(explain=False)
        # From the first line with a < on, a text counts as HTML's source; there names of characters are not replaced.
        self._config_of_html = self._config._replace(unescape_html=False)

    def apply(self, text: str) -> str | Dropped:
        """Return the mended text."""
        first_bracket = text.find("<")
        pieces, done = [], 0
        while found := _MENDABLE.search(text, done):
            start = text.rfind("\n", done, found.start()) + 1 or done
            stop = text.find("\n", found.start()) + 1 or len(text)
            config = self._config_of_html if 0 <= first_bracket < start else self._config
            pieces += [text[done:start], self._fix(text[start:stop], config)]
            done = stop
        return "".join([*pieces, text[done:]]) if pieces else text


class Characters:
    """A step that drops texts that are shorter or longer than the limits."""

    name = "--min/max-characters"

    def __init__(self, least: int | None, most: int | None) -> None:
        self._least = least
        self._most = most

    def apply(self, text: str) -> str | Dropped:
        """Return the text, or its length as the reason."""
        if self._least is not None and len(text) < self._least:
            return Dropped(f"{len(text)} characters, fewer than {self._least}")
        if self._most is not None and len(text) > self._most:
            return Dropped(f"{len(text)} characters, more than {self._most}")
        return text


class Printable:
    """A step that drops texts with too many unprintable characters: control characters, unassigned codes, U+FFFD."""

    name = "--min-printable"

    def __init__(self, least: float) -> None:
        self._least = least

    def apply(self, text: str) -> str | Dropped:
        """Return the text, or its printable fraction as the reason."""
        share = printable_share(text)
        return text if share >= self._least else Dropped(f"{share:.3f} of it is printable, less than {self._least}")


class Languages:
    """A step that drops texts whose most probable language is not in the list, or not probable enough.

    The language is that of the text's first LANGUAGE_CHARACTERS.  Raises DataError without the library, and for
    languages that it does not support.
    """

    name = "--languages"

    def __init__(self, languages: tuple[str, ...], least_probability: float) -> None:
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise DataError(missing_package(self.name, "py3langid")) from error
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
        self._languages = frozenset(languages)
        self._least = least_probability
        unknown = sorted(self._languages.difference(self._identifier.labels))
        if unknown:
            legal = " ".join(sorted(self._identifier.labels))
            raise DataError(Problem(f"{self.name} {' '.join(unknown)}", "languages are given by ISO 639 codes", legal))

    def apply(self, text: str) -> str | Dropped:
        """Return the text, or its language and probability as the reason."""
        language, probability = self._identifier.classify(text[:LANGUAGE_CHARACTERS])
        if language not in self._languages:
            return Dropped(f"language {language} ({probability:.2f})")
        if probability < self._least:
            return Dropped(f"language {language} ({probability:.2f}), less probable than {self._least}")
        return text


def printable_share(text: str) -> float:
    """Return the fraction of a text's characters that can be printed, white space included; 1 for an empty text."""
    if not text:
        return 1.0
    return 1.0 - sum(text.count(character) for character in set(text) if not _is_printable(character)) / len(text)


def missing_package(flag: str, package: str) -> Problem:
    """Return the problem of a step whose library is not installed."""
    return Problem(f"{flag} without the package {package}", "the step needs it", 'pip install "megazero[corpora]"')


def _is_printable(character: str) -> bool:
    if character in "\t\n\r":
        return True
    # Python counts all spaces but the plain one as not printable, although they are shown as spaces.
    return character != _REPLACEMENT and (character.isprintable() or unicodedata.category(character)[0] == "Z")
