"""Errors that a user can cause, with all that is needed to mend them.

A *problem* has three parts: what was given, which rule it breaks, what would be legal.  A `UserError` carries all
problems found in one pass, so that a command line need not be fixed one message at a time.  Programs print it without a
traceback and exit with `UserError.exit_code`; a bug in megazero stays an ordinary exception with a traceback.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A rule that the user has broken.

    given: the user's value, with the flag or file it came from ("--num-attention-heads 7").
    rule:  the rule it breaks, as a sentence.
    legal: what would be accepted, nearest values first; empty when there is nothing to suggest.
    """

    given: str
    rule: str
    legal: str = ""

    def __str__(self) -> str:
        lines = [self.given, f"    rule:  {self.rule}"]
        if self.legal:
            lines.append(f"    legal: {self.legal}")
        return "\n".join(lines)


class UserError(Exception):
    """An error that the user can mend; the base class of all errors printed without a traceback.

    Takes one message or several problems; `problems` holds them all.
    """

    exit_code = 2
    kind = "error"

    def __init__(self, *problems: Problem | str) -> None:
        self.problems: tuple[Problem, ...] = tuple(
            problem if isinstance(problem, Problem) else Problem(problem, "") for problem in problems
        )
        super().__init__(self.render())

    def render(self) -> str:
        """Return the text a program prints: a count when there are several, then every problem."""
        count = len(self.problems)
        head = f"{self.kind}: " if count == 1 else f"{count} {self.kind}s:\n"
        body = "\n".join(str(p) if p.rule else p.given for p in self.problems)
        return head + body


class ConfigError(UserError):
    """A flag, a configuration file or a combination of them breaks a rule."""

    kind = "configuration error"


class DataError(UserError):
    """A corpus, an index or a tokenizer is missing, damaged or does not fit the run."""

    kind = "data error"


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""

    kind = "checkpoint error"


class DamageError(CheckpointError):
    """A checkpoint's files are missing, or are not what was saved; an older checkpoint may be sound.

    files: the names of the data files in which damage was found.
    """

    def __init__(self, *problems: Problem | str, files: Iterable[str] = ()) -> None:
        super().__init__(*problems)
        self.files = frozenset(files)


class FileError(UserError):
    """A file that holds model states cannot be made, written or read, or is damaged."""

    kind = "file error"


class TopologyError(UserError):
    """The number of processes or devices does not fit the layout."""

    kind = "topology error"


class UsageError(UserError):
    """The library was called at a wrong time, or on a wrong object."""

    kind = "usage error"


class CollectiveError(UserError):
    """Ranks disagree: a collective was not entered by all of them, or one of them is gone."""

    kind = "collective error"
    exit_code = 3


class TrainingError(UserError):
    """Training cannot continue (the loss scale is exhausted, say); what could be saved has been saved."""

    kind = "training stopped"
    exit_code = 3


class MemoryLimitError(UserError):
    """The device's live bytes exceed the limit that the user has set for the ledger, or the host's what there is."""

    kind = "memory limit exceeded"
    exit_code = 3


def raise_problems(kind: type[UserError], problems: Iterable[Problem]) -> None:
    """Raise one error of class `kind` with all `problems`; do nothing when there are none."""
    found = tuple(problems)
    if found:
        raise kind(*found)


def first_line(error: BaseException) -> str:
    """Return the type of an error and its first line: of a user's error what was given and the rule.

    Of any other it is the beginning, without the place in torch's sources.
    """
    if isinstance(error, UserError):
        facts = (error.problems[0].given, error.problems[0].rule)
        return ": ".join((type(error).__name__, *filter(None, facts))).splitlines()[0]
    line = next(iter(str(error).strip().splitlines()), "")
    message = re.sub(r"^\[[^]]*\] ", "", line).partition(". This is typically")[0]
    return f"{type(error).__name__}: {message[:160]}" if message else type(error).__name__
