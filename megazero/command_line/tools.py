"""The parser of a tool's flags, whose errors are those of a run: the given value, the rule, what would be legal.

`Flags` is the parser.  A number flag has `action=Number`; its values follow the one grammar of values
(`megazero/config/values.py`), and its range is given as in a table of parameters: `kind="int", ge=1`.
"""

import argparse
from collections.abc import Sequence
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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; a subcommand's parser is called by this method too."""
        self.problems.clear()
        parsed, rest = super().parse_known_args(args, namespace)
        if self.problems and rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        raise_problems(ConfigError, self.problems)
        return parsed, rest

    def error(self, message: str) -> NoReturn:
        raise ConfigError(*self.problems, Problem(message, "flags and their values are those that --help lists"))

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
