"""The same raw values for every setting, and the expected verdict on each from tables written by hand.

A *form* is one way to write a value, in a file, on the command line or in Python.  `expected` returns the verdict on a
form for one setting: the value in the setting's type, or REFUSED.  The tables are independent of
megazero/config/values.py: only a setting's kind, bounds, choices and optionality are read.
"""

import math
import operator
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megazero.config.fields import FieldInfo

REFUSED = "refused"

# Forms by name, as the values that YAML, JSON and Python give.  A string is a quoted word in a file and a bare one on a
# command line.
FORMS: Mapping[str, Any] = MappingProxyType(
    {
        "two": 2,
        "two quoted": "2",
        "one": 1,
        "one quoted": "1",
        "zero": 0,
        "minus three": -3,
        "minus three quoted": "-3",
        "half": 0.5,
        "half quoted": "0.5",
        "whole float": 3.0,
        "whole exponent": 5e8,
        "whole exponent quoted": "5e8",
        "whole exponent with a point quoted": "5.0e8",
        "digits quoted": "500000000",
        "grouped digits quoted": "500_000_000",
        "huge": 2**70,
        "huge quoted": str(2**70),
        "true": True,
        "false": False,
        "true quoted": "true",
        "False quoted": "False",
        "on quoted": "on",
        "word": "perhaps",
        "auto": "auto",
        "null quoted": "null",
        "nan quoted": "nan",
        "inf quoted": "-inf",
        "overflow quoted": "1e999",
        "empty": "",
        "null": None,
        "list": ["a", "b"],
        "list of one": ["2"],
    }
)
# Forms that JSON cannot express, and that megazero's reader of DeepSpeed files refuses before it looks at keys.
NOT_FINITE: Mapping[str, Any] = MappingProxyType({"nan": math.nan, "inf": math.inf})

NUMBERS: Mapping[str, float] = MappingProxyType(
    {
        "two": 2,
        "two quoted": 2,
        "one": 1,
        "one quoted": 1,
        "zero": 0,
        "minus three": -3,
        "minus three quoted": -3,
        "half": 0.5,
        "half quoted": 0.5,
        "whole float": 3,
        "whole exponent": 500_000_000,
        "whole exponent quoted": 500_000_000,
        "whole exponent with a point quoted": 500_000_000,
        "digits quoted": 500_000_000,
        "grouped digits quoted": 500_000_000,
        "huge": 1180591620717411303424,
        "huge quoted": 1180591620717411303424,
    }
)
SWITCHES: Mapping[str, bool] = MappingProxyType(
    {
        "one": True,
        "one quoted": True,
        "zero": False,
        "true": True,
        "true quoted": True,
        "on quoted": True,
        "false": False,
        "False quoted": False,
    }
)
# The string that a bare number becomes for a text setting; a quoted word stays as it is.
TEXTS: Mapping[str, str] = MappingProxyType(
    {
        "two": "2",
        "one": "1",
        "zero": "0",
        "minus three": "-3",
        "half": "0.5",
        "whole float": "3.0",
        "whole exponent": "500000000.0",
        "huge": "1180591620717411303424",
    }
)


def expected(info: FieldInfo, form: str) -> Any:
    """Return the verdict on a form for a setting: the value in the setting's type, or REFUSED."""
    raw = FORMS[form]
    if raw is None:
        return None if info.optional else REFUSED
    if info.kind in ("int", "float"):
        number = NUMBERS.get(form)
        if number is None or (info.kind == "int" and number == 0.5):
            return REFUSED
        fits = all(getattr(operator, name)(number, bound) for name, bound in info.bounds)
        return REFUSED if not fits else int(number) if info.kind == "int" else float(number)
    if info.kind in ("bool", "switch"):
        return "auto" if (info.kind, form) == ("switch", "auto") else SWITCHES.get(form, REFUSED)
    if info.kind == "list":
        if isinstance(raw, list):
            return tuple(raw)
        return REFUSED if raw == "" or isinstance(raw, bool) else (TEXTS.get(form, raw),)
    text = TEXTS.get(form, raw)
    if not isinstance(text, str) or not text or (info.choices and text not in info.choices):
        return REFUSED
    return Path(text) if info.kind == "path" else text


def as_words(info: FieldInfo, form: str) -> list[str] | None:
    """Return the words after a flag that express the form, or None if a command line cannot express it.

    A flag has no null, and a text setting has no truth value: `--split true` is the text "true".
    """
    raw = FORMS[form]
    is_text = info.kind in ("str", "path", "list")
    if raw is None or (isinstance(raw, bool) and is_text):
        return None
    if isinstance(raw, list):
        # A single word is a list only for a list setting; elsewhere it is the word itself.
        return list(raw) if info.kind == "list" or len(raw) > 1 else None
    return [str(raw).lower() if isinstance(raw, bool) else raw if isinstance(raw, str) else repr(raw)]


def same(found: Any, wanted: Any) -> bool:
    """Return True if two verdicts have the same value and type."""
    return bool(found == wanted) and type(found) is type(wanted)
