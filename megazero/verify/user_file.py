"""Takes functions by their names from a Python file of a user, without importing torch itself."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from megazero.errors import ConfigError, Problem, raise_problems


def split_place(place: str) -> tuple[Path, str]:
    """Return file and name of a place written FILE.py:NAME; raise ConfigError if it is none, or there is no file."""
    path, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier():
        rule = "a module is named by its file and the function in it that makes it"
        raise ConfigError(Problem(place, rule, f"{place.partition(':')[0]}:make_model"))
    if not Path(path).is_file():
        raise ConfigError(Problem(place, f"there is no file {path}", "the path of a Python file"))
    return Path(path), name


def functions_of(path: Path, names: Sequence[str]) -> list[Callable[..., Any]]:
    """Run a file as a module, and return its functions of these names; raise ConfigError for all that are not there.

    Modules beside the file can be imported by it, as by a program that Python starts.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(Problem(str(path), "functions are taken from a Python file", f"{path}.py"))
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # classes are pickled by the name of their module
    spec.loader.exec_module(module)
    raise_problems(ConfigError, _problems(module, path, names))
    return [getattr(module, name) for name in names]


def _problems(module: ModuleType, path: Path, names: Sequence[str]) -> Iterator[Problem]:
    for name in names:
        if not callable(getattr(module, name, None)):
            is_there = hasattr(module, name)
            given = (
                f"{path}: {name}, which is a {type(getattr(module, name)).__name__}" if is_there else f"{path}:{name}"
            )
            known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            rule = "each name is that of a function in the file"
            yield Problem(given, rule, ", ".join(get_close_matches(name, known) or known))
