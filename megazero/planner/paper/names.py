"""The tables and figures that there are, and the words of `--paper` that name them.  Pure."""

import difflib

from megazero.errors import ConfigError, Problem

NAMES = (
    *("figure-1", "table-1", "table-2", "table-3", "section-6.3", "section-7", "section-8"),
    *("figure-2", "figure-3", "figure-4", "figure-6", "figure-7", "figure-8", "section-10.6"),
)
ALL = "all"


def read_names(text: str) -> tuple[str, ...]:
    """Return the names of a list with commas, of "all" all of them; raise ConfigError for a word that is none."""
    words = NAMES if text == ALL else text.split(",")
    for word in words:
        if word not in NAMES:
            near = difflib.get_close_matches(word, NAMES, n=3) or NAMES
            raise ConfigError(
                Problem(
                    f"--paper {text}", "these parts of the paper are computed, with commas between", ", ".join(near)
                )
            )
    return tuple(name for name in NAMES if name in words)
