"""Reads files that list corpora, which launch scripts of Megatron-LM and of BLOOM name: the content becomes settings.

So a run's saved configuration has the corpora themselves, and a resumed run notices a file that has changed.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megazero.config.corpora import FORM, GROUPS
from megazero.config.values import RawValue
from megazero.errors import ConfigError, Problem
from megazero.files import read_bounded

MAX_BYTES = 1 << 24


class CorpusFile(NamedTuple):
    """A flag that names a file: the settings it fills in, the words after each of them in a file's text, and its form.

    words: a function that raises ValueError for a text of another form.
    """

    settings: tuple[str, ...]
    words: Callable[[str], Mapping[str, tuple[str, ...]]]
    form: str


def _words(text: str) -> Mapping[str, tuple[str, ...]]:
    return {"data_path": tuple(text.split())}


def _by_split(text: str) -> Mapping[str, tuple[str, ...]]:
    content: Any = json.loads(text)
    if not isinstance(content, dict) or not content.keys() <= GROUPS.keys():
        raise ValueError(f"the keys are {', '.join(GROUPS)}")
    found = {split: value.split() if isinstance(value, str) else value or [] for split, value in content.items()}
    if not all(isinstance(value, list) for value in found.values()):
        raise ValueError("a value is a text, or a list of weights and prefixes")
    return {f"{split}_data_path": tuple(map(str, value)) for split, value in found.items()}


def _groups(setting: str) -> CorpusFile:
    return CorpusFile((setting,), lambda text: {setting: tuple(shlex.split(text))}, f"quoted groups, {FORM}")


FILES: Mapping[str, CorpusFile] = MappingProxyType(
    {
        "data-args-path": CorpusFile(("data_path",), _words, "the words of --data-path"),
        "per-split-data-args-path": CorpusFile(
            tuple(f"{split}_data_path" for split in GROUPS),
            _by_split,
            'JSON, {"train": "0.7 A 0.3 B", "valid": "C", "test": "D"}',
        ),
        **{f"{setting.replace('_', '-')}-path": _groups(setting) for setting in GROUPS.values()},
    }
)


def read_corpora(item: RawValue) -> list[RawValue]:
    """Return the settings in the file that a flag of `FILES` names; raise ConfigError if it has none."""
    kind = FILES[item.flag_name]
    words = item.value if isinstance(item.value, (tuple, list)) else (item.value,)
    legal = f"--{item.flag_name} FILE, a file of {kind.form}"
    if len(words) != 1:
        raise ConfigError(Problem(item.source, f"--{item.flag_name} needs one value", legal))
    try:
        found = kind.words(read_bounded(Path(str(words[0])), MAX_BYTES).decode())
    except OSError as error:
        raise ConfigError(Problem(item.source, f"the file can't be read: {error.strerror}", legal)) from None
    except ValueError as error:  # also what is no UTF-8, or no JSON
        raise ConfigError(Problem(item.source, f"the file lists corpora: {error}", legal)) from None
    if not any(found.values()):
        raise ConfigError(Problem(item.source, "the file lists corpora, and this one is empty", legal))
    return [RawValue(setting, value, item.source, item.origin) for setting, value in found.items() if value]
