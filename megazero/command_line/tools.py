"""The parser of a tool's flags, whose errors are those of a run: the given value, the rule, what would be legal.

`Flags` is the parser.  A number flag has `action=Number`; its values follow the one grammar of values
(`megazero/config/values.py`), and its range is given as in a table of parameters: `kind="int", ge=1`.
"""

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from megazero.config.fields import parameter
from megazero.config.values import InvalidValue, coerce, violation
from megazero.console import Console
from megazero.errors import ConfigError, Problem, raise_problems


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows the defaults of a tool's flags, where there are any."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


class Flags(argparse.ArgumentParser):
    """The flags of a tool that may be several processes: problems, and --help, are printed once for all of them.

    Parsing raises ConfigError with the problems of all number flags, and with argparse's error if there is one.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.problems: list[Problem] = []
        self._words: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a subcommand's parser is called by this method too."""
        self.problems.clear()
        self._words = list(args or ())
        parsed, rest = super().parse_known_args(args, namespace)
        if self.problems and rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise_problems(ConfigError, self.problems)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        raise ConfigError(*self.problems, *self._problems_of(message))

    def _problems_of(self, message: str) -> Iterator[Problem]:
        """Yield the problems that a message of argparse is about, one for each flag; else one with its text."""
        kind, _, rest = message.partition(": ")
        choice = re.fullmatch(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from .*\)", message)
        if kind == "the following arguments are required":
            unknown = [word for word in self._words if word.startswith("--") and not self._is_known(word)]
            for word in unknown:  # one of them may be the one that is missing, mistyped
                yield from self._problems_of(f"unrecognized arguments: {word}")
            yield from (self._missing(name) for name in rest.split(", "))
        elif kind == "unrecognized arguments":
            near = difflib.get_close_matches(rest.split()[0].partition("=")[0], self._spellings())
            yield Problem(rest, "there is no flag of this name; --help lists those that there are", ", ".join(near))
        elif choice is not None:
            legal = list(map(str, self._find(choice[1]).choices or ()))
            near = difflib.get_close_matches(choice[2], legal, n=1) or legal
            word = choice[1] if choice[1].startswith("-") else ""
            shown = ", ".join(f"{word} {each}".strip() for each in near)
            yield Problem(f"{word} {choice[2]}".strip(), f"{choice[1]} is one of {', '.join(legal)}", shown)
        else:
            yield Problem(message, "flags and their values are those that --help lists")

    def _is_known(self, word: str) -> bool:
        return word == "--" or word.partition("=")[0] in self._spellings()

    def _find(self, name: str) -> argparse.Action:
        """Return the argument that argparse's messages name so: by its spellings, its metavar or its destination."""
        names = {"/".join(each.option_strings) or str(each.metavar or each.dest): each for each in self._actions}
        return names[name]

    def _missing(self, name: str) -> Problem:
        action = self._find(name)
        metavar = action.metavar[0] if isinstance(action.metavar, tuple) else action.metavar
        values = tuple(map(str, action.choices or ())) or (str(metavar or action.dest.upper()),)
        flag = action.option_strings[0] if action.option_strings else ""
        legal = ", ".join(f"{flag} {value}".strip() for value in values)
        return Problem(
            f"{name} is missing", f"{self.prog} needs it" + (f": {action.help}" if action.help else ""), legal
        )

    def _spellings(self) -> list[str]:
        """Return every flag, those of subcommands too."""
        found = [spelling for action in self._actions for spelling in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [spelling for each in action.choices.values() for spelling in each._option_string_actions]
        return found

    def print_help(self, file: Any = None) -> None:
        Console().line(self.format_help())


class Number(argparse.Action):
    """The action of a flag with one number; a value that is not legal is added to the problems of its `Flags`.

    kind: "int" or "float".  bounds: ge, gt, le and lt, as in `megazero.config.fields.parameter`.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, *, kind: str, **options: Any) -> None:
        bounds = {name: options.pop(name) for name in ("ge", "gt", "le", "lt") if name in options}
        super().__init__(option_strings, dest, **options)
        self._info = parameter(dest, kind, None, **bounds)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert isinstance(parser, Flags) and flag is not None, "a number is the value of a flag of Flags"
        try:
            setattr(namespace, self.dest, coerce(self._info, values))
        except InvalidValue:
            parser.problems.append(violation(f"{flag} {values}", flag, self._info, values))
