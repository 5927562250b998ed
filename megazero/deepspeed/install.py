"""Puts megazero's DeepSpeed names under the name `deepspeed`, for libraries that import that: Accelerate, transformers.

    import megazero.deepspeed

    megazero.deepspeed.install_as_deepspeed()
    from transformers import Trainer, TrainingArguments

Accelerate and transformers look for an installed distribution when they are imported, and read its version later, so
that the call comes before their import.  It acts in this process only, and writes no file.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import Distribution, DistributionFinder
from importlib.util import find_spec
from os import PathLike
from typing import NoReturn

from megazero.deepspeed import __version__
from megazero.deepspeed.places import PACKAGE, put_modules
from megazero.errors import Problem, UsageError

NAME = "deepspeed"
# Modules that look for DeepSpeed while they are imported.
_LOOKING = ("accelerate", "transformers.integrations.deepspeed")
_ANY = DistributionFinder.Context()


def install_as_deepspeed() -> None:
    """Make `import deepspeed` and its documented modules give megazero's in this process; repeated calls do nothing.

    Raises UsageError where DeepSpeed itself is installed or imported, and where Accelerate or transformers' integration
    of DeepSpeed has been imported already.
    """
    own = import_module(PACKAGE)
    if sys.modules.get(NAME) is own:
        return
    _check_is_free()
    sys.modules[NAME] = own
    put_modules(NAME)
    sys.meta_path.append(_Finder())


def _check_is_free() -> None:
    legal = "a call before they are imported, at the top of the program"
    spec = None if NAME in sys.modules else find_spec(NAME)
    if NAME in sys.modules or (spec is not None and spec.origin is not None):  # a mere folder has no origin
        rule = "DeepSpeed itself is there, and a process has one of the two"
        raise UsageError(
            Problem("install_as_deepspeed()", rule, "an environment without DeepSpeed, or DeepSpeed's own")
        )
    if early := [name for name in _LOOKING if name in sys.modules]:
        given = f"install_as_deepspeed() after {', '.join(early)} was imported"
        raise UsageError(Problem(given, "they look for DeepSpeed when they are imported", legal))


class _Installed(Distribution):
    """The distribution that `importlib.metadata` finds under DeepSpeed's name: a version, and no files."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of a metadata file, None for those that are not there."""
        texts = {"METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {__version__}\n", "top_level.txt": NAME}
        return texts.get(filename)

    def locate_file(self, path: str | PathLike[str]) -> NoReturn:
        """Raise FileNotFoundError: there are no files."""
        raise FileNotFoundError(path)


class _Finder(DistributionFinder):
    """A finder of the distribution alone: the modules are in sys.modules."""

    def find_spec(self, *_module: object) -> None:
        """Return None: modules are found in sys.modules."""

    def find_distributions(self, context: DistributionFinder.Context = _ANY) -> Iterator[Distribution]:
        """Yield the distribution, if it is the one that is looked for."""
        if context.name in (None, NAME):
            yield _Installed()
