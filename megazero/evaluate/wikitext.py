"""Turns the tokenized text of WikiText (arXiv 1609.07843) back into text as it is written.

WikiText has blanks around marks, `@-@` for a hyphen inside a word, and so on.  A perplexity for each of its words is
that of the natural text, divided by the words of the tokenized one.  The rules, and their order, are those by which
published figures were made (Megatron-LM's and lm-evaluation-harness').
"""

import re

# {text: its replacement}, in order
_MARKS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    *((f" {mark} ", f"{mark} ") for mark in ":;.!?,"),
)
# Text between a pair of marks, which loses the blanks at its ends.
_PAIRS = tuple(
    re.compile(rf"({re.escape(left)})\s*([^{re.escape(right)}]*?)\s*({re.escape(right)})")
    for left, right in ("()", "[]", "{}", '""', "''")
)
_REST = (
    *((" ".join("=" * number), "=" * number) for number in (4, 3, 2)),
    (" \N{DEGREE SIGN} ", "\N{DEGREE SIGN}"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def natural_text(text: str) -> str:
    """Return the text without WikiText's blanks and marks."""
    for old, new in _MARKS:
        text = text.replace(old, new)
    for pair in _PAIRS:
        text = pair.sub(r"\1\2\3", text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text
