"""A page as one HTML document that needs no server and no network."""

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from megazero.svg import CLASSES, COLOURS

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def document(title: str, command: str, body: str, *, data: Mapping[str, Any] = _NOTHING, script: str = "") -> str:
    """Return the document.

    command: the one that has made it.  data: JSON that it carries, by the ids of its elements.  script: the file of its
    script, if it has one.
    """
    carried = "".join(f'<script type="application/json" id="{name}">{_json(data[name])}</script>\n' for name in data)
    carried += f"<script>{_file(script)}</script>\n" if script else ""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{COLOURS}{CLASSES}{_file('page.css')}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>\n"
        f"<p><code>{escape(command)}</code></p>\n{body}\n</main>\n{carried}</body></html>\n"
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(content: Any) -> str:
    """Return JSON that no HTML parser takes for the end of its element."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
