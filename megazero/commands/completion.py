"""Print a script that completes megazero's commands and flags in a shell."""

import pkgutil
from collections.abc import Iterator, Mapping, Sequence

import megazero.commands
from megazero.command_line.flags import GROUPS
from megazero.command_line.names import OWN_NAMES, spellings
from megazero.command_line.tools import Flags, HelpFormatter
from megazero.config.fields import FieldInfo
from megazero.config.presets import PRESETS, ZERO_CONFIGS
from megazero.config.run import FIELDS
from megazero.console import Console

_MOST_NUMBERS = 10

# The flags of a run are in the script, since they are many and have known values; a tool's are read from its --help.
_BASH = """\
# Completes megazero's commands and flags in bash; write it to ~/.local/share/bash-completion/completions/megazero,
# or run: eval "$(megazero completion bash)"
_megazero() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} words=""
    [[ $1 == *pretrain_gpt.py ]] && command=pretrain
    if ((COMP_CWORD == 1)) && [[ $1 != *pretrain_gpt.py ]]; then
        words="COMMANDS"
    elif [[ $current == -* ]]; then
        case $command in
            pretrain | verify-layout) words="FLAGS" ;;
            *) words=$("$1" "$command" --help 2>/dev/null | grep -oE -- '--[a-z][a-z0-9-]*' | sort -u) ;;
        esac
    elif [[ $command == pretrain || $command == verify-layout ]]; then
        case $previous in
VALUES
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _megazero megazero pretrain_gpt.py"""


def main(words: Sequence[str]) -> None:
    """Print the script of the shell that is named."""
    parser = Flags(prog="megazero completion", description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    parser.add_argument("shell", choices=("bash",), help="the shell that is to complete")
    parser.parse_args(words)
    Console().line(bash_script())


def bash_script() -> str:
    """Return the script for bash, with the commands, flags and values that are there now."""
    commands = sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(megazero.commands.__path__))
    rows = (f'            {flag}) words="{" ".join(values)}" ;;' for flag, values in _values().items())
    script = _BASH.replace("COMMANDS", " ".join(commands)).replace("VALUES", "\n".join(rows))
    return script.replace("FLAGS", " ".join(f"--{name}" for name in OWN_NAMES))


def _values() -> Mapping[str, tuple[str, ...]]:
    """Return the values of every flag that has few, by its spelling."""
    named = {
        "--preset": tuple(PRESETS),
        "--zero-config": tuple(ZERO_CONFIGS),
        "--help": ("all", "presets", *(group.replace(" ", "-") for group in GROUPS)),
    }
    return named | {flag: values for info in FIELDS if (values := tuple(_legal(info))) for flag in spellings(info)}


def _legal(info: FieldInfo) -> Iterator[str]:
    """Yield the legal values of a setting if they are few."""
    low, high = (dict(info.bounds).get(name) for name in ("ge", "le"))
    if info.kind == "bool":
        yield from ("true", "false")
    elif info.kind == "int" and low is not None and high is not None and high - low < _MOST_NUMBERS:
        yield from map(str, range(int(low), int(high) + 1))
    else:
        yield from info.choices
