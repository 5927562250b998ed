"""Steps of cleaning that look at one document at a time: each gives the text back, or mended, or says why it goes."""

import re
import unicodedata
from typing import NamedTuple, Protocol

from megazero.errors import DataError, Problem

# What a language is told from; more makes it slower and hardly surer.
LANGUAGE_CHARACTERS = 4096
_REPLACEMENT = "\ufffd"
# Anything but the characters of ASCII that are no control characters and begin no character's name.
_MENDABLE = re.compile("[^\\n\\t -%'-~]")


class Dropped(NamedTuple):
    """Why a document is left out."""

    reason: str


class Step(Protocol):
    """One step; steps are applied one after the other to every document in turn."""

    @property
    def name(self) -> str:
        """Its flag, as the summary calls it."""
        ...

    def apply(self, text: str) -> str | Dropped:
        """The text as it goes on, or why it does not."""
        ...


class FixText:
    """Mends what programs did to a text, by ftfy's rules: wrong encodings (`\u00c3\u00a9`), HTML's names of characters,
    control characters, ligatures, curly quotes, line ends; the result is in Unicode's form NFC.

    The library looks at every line by itself and takes its time, so it is given only those that hold something it could
    mend; the result is what it makes of the whole.  Raises DataError where it is missing.
    """

    name = "--fix-text"

    def __init__(self) -> None:
        try:
            import ftfy
        except ImportError as error:
            raise DataError(missing_package(self.name, "ftfy")) from error
        self._fix = ftfy.fix_text
        self._config = ftfy.TextFixerConfig(explain=False)
        # From the first line with a < on, a text is taken for HTML's source; names of characters stay as they are.
        self._config_of_html = self._config._replace(unescape_html=False)

    def apply(self, text: str) -> str | Dropped:
        """The text, mended."""
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
    """Drops texts that are shorter or longer than asked."""

    name = "--min/max-characters"

    def __init__(self, least: int | None, most: int | None) -> None:
        self._least = least
        self._most = most

    def apply(self, text: str) -> str | Dropped:
        """The text, or its length."""
        if self._least is not None and len(text) < self._least:
            return Dropped(f"{len(text)} characters, fewer than {self._least}")
        if self._most is not None and len(text) > self._most:
            return Dropped(f"{len(text)} characters, more than {self._most}")
        return text


class Printable:
    """Drops texts of which too much is not for reading: control characters, codes without a character, U+FFFD."""

    name = "--min-printable"

    def __init__(self, least: float) -> None:
        self._least = least

    def apply(self, text: str) -> str | Dropped:
        """The text, or the fraction of it that can be printed."""
        share = printable_share(text)
        return text if share >= self._least else Dropped(f"{share:.3f} of it is printable, less than {self._least}")


class Languages:
    """Drops texts whose most probable language is none of those asked for, or not probable enough.

    Judged by the beginning of the text, LANGUAGE_CHARACTERS long.  Raises DataError without the library, and for
    languages it does not know.
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
            raise DataError(Problem(f"{self.name} {' '.join(unknown)}", "languages go by their ISO 639 codes", legal))

    def apply(self, text: str) -> str | Dropped:
        """The text, or its language and how probable that is."""
        language, probability = self._identifier.classify(text[:LANGUAGE_CHARACTERS])
        if language not in self._languages:
            return Dropped(f"language {language} ({probability:.2f})")
        if probability < self._least:
            return Dropped(f"language {language} ({probability:.2f}), less sure than {self._least}")
        return text


def printable_share(text: str) -> float:
    """The fraction of a text's characters that can be printed, white space included; 1 for an empty text."""
    if not text:
        return 1.0
    return 1.0 - sum(text.count(character) for character in set(text) if not _is_printable(character)) / len(text)


def missing_package(flag: str, package: str) -> Problem:
    """A step whose library is not installed."""
    return Problem(f"{flag} without the package {package}", "it does the work", 'pip install "megazero[corpora]"')


def _is_printable(character: str) -> bool:
    if character in "\t\n\r":
        return True
    # Python counts spaces other than the plain one as not printable; a reader sees them as spaces.
    return character != _REPLACEMENT and (character.isprintable() or unicodedata.category(character)[0] == "Z")
