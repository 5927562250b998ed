"""Pictures as SVG files, and as parts of pages, in light or dark colours as the reader's system is set.

Text, lines and backgrounds get their colours from classes; what a picture shows has its own, which can be distinguished
from both backgrounds.
"""

import math
from collections.abc import Iterable, Mapping
from html import escape
from types import MappingProxyType

_NAMES = ("paper", "ink", "soft", "line", "faint", "band")


def _scheme(colours: str) -> Mapping[str, str]:
    return MappingProxyType(dict(zip(_NAMES, colours.split(), strict=True)))


# The colours that depend on the reader's scheme, by what they are for.
LIGHT = _scheme("#ffffff #1c2530 #4b5866 #c9d1d9 #e9edf1 #f3f5f8")
DARK = _scheme("#12171c #e6ebf0 #a7b3bf #46525e #29323b #1c232a")


def _variables(scheme: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in scheme.items())


COLOURS = f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
"""
CLASSES = """
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .paper { fill: var(--paper); }
svg .band { fill: var(--band); }
svg .faint-band { fill: var(--faint); }
svg .line-band { fill: var(--line); }
svg .ink { stroke: var(--ink); fill: none; }
svg .line { stroke: var(--line); fill: none; }
svg .edge { stroke: var(--line); }
svg .faint { stroke: var(--faint); fill: none; }
svg .title { font-size: 15px; font-weight: 600; fill: var(--ink); }
svg .strong { font-weight: 600; fill: var(--ink); }
svg .on-colour { font-weight: 600; fill: #fff; }
svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; }
"""
LETTER_WIDTH = 6.5
"""Pixels that a letter of 12 pixels' height takes at most, on average."""


def picture(width: float, height: float, parts: Iterable[str], *, label: str, style: str = "") -> str:
    """Return an SVG file with a background.

    label: the description that a screen reader reads out.  style: more CSS.
    """
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
    return "\n".join(
        [
            f'{head} height="{height:g}" role="img" aria-label="{escape(label)}">',
            f"<style>{COLOURS}{CLASSES}{style}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def part_of_page(width: float, height: float, parts: Iterable[str], *, label: str, role: str = "img") -> str:
    """Return an SVG element for a page that has `COLOURS` and `CLASSES`; role: "group" for one with parts to focus."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="{role}"'
    return "\n".join([f'{head} aria-label="{escape(label)}">', *parts, "</svg>"])


def text(x: float, y: float, content: str, classes: str = "") -> str:
    """Return a line of text; classes: `title`, `strong`, `middle`, `end`, or a picture's own."""
    kind = f' class="{classes}"' if classes else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{escape(content)}</text>'


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> list[str]:
    """Draw a square and a name for every (name, colour), in a row."""
    parts = []
    for name, colour in entries:
        parts.append(f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" fill="{colour}" class="edge"/>')
        parts.append(text(x + 18, y, name))
        x += 42 + LETTER_WIDTH * len(name)
    return parts


def round_up(amount: float) -> float:
    """Return the least of ..., 0.1, 0.2, 0.5, 1, 2, 5, 10, ... that is not below amount."""
    power: float = 10.0 ** math.floor(math.log10(amount))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= amount * (1 - 1e-9))


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return the round numbers from low to high, at most so many intervals apart."""
    step = round_up((high - low) / most)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
