"""The README's map of the tree names every file, and no other.

The map is the first fenced block that has a line `megazero/`.  Below a folder's line its files are indented: the first
word of a line is the name (a folder's ends in "/"), the rest says what it is.
"""

import re

from support.source_tree import ROOT

MAPPED_FOLDERS = ("megazero", "tools", "scripts", "benchmarks")


def map_lines(readme: str) -> list[str]:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return next((block.splitlines() for block in blocks if re.search(r"^\s*megazero/", block, re.MULTILINE)), [])


def parse_map(lines: list[str]) -> dict[str, str]:
    """Path -> what the map says of it; folders' paths end in "/"."""
    found: dict[str, str] = {}
    folders: list[tuple[int, str]] = []
    for line in lines:
        words = line.split(maxsplit=1)
        if not words or not re.fullmatch(r"[\w.-]+/?", words[0]) or ("." not in words[0] and "/" not in words[0]):
            continue
        indent = len(line) - len(line.lstrip())
        folders = [folder for folder in folders if folder[0] < indent]
        path = (folders[-1][1] if folders else "") + words[0]
        found[path] = words[1] if len(words) > 1 else ""
        if path.endswith("/"):
            folders.append((indent, path))
    return found


def actual_files() -> set[str]:
    files = [path for folder in MAPPED_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith(".")]
    results = ROOT / "benchmarks" / "results"
    unnamed = (".pyc", "py.typed", "__init__.py")
    kept = [path for path in files if not path.name.endswith(unnamed) and results not in path.parents]
    return {path.relative_to(ROOT).as_posix() for path in kept}


def test_the_map_is_the_tree() -> None:
    readme = ROOT / "README.md"
    assert readme.is_file(), "README.md is missing"
    mapped = parse_map(map_lines(readme.read_text(encoding="utf-8")))
    files = {path for path in mapped if not path.endswith("/") and not path.startswith("tests/")}
    listed = {path for path in files if not path.endswith("__init__.py")}
    assert (sorted(actual_files() - listed), sorted(listed - actual_files())) == ([], [])
    assert [path for path, what in mapped.items() if not path.endswith("/") and not what] == []


EXAMPLE = """
```
setup.py   the package
megazero/
  errors.py  what went wrong
  zero/   one engine
    plan.py  table
tools/
  x.py  y
```
"""


def test_how_a_map_is_read() -> None:
    assert parse_map(map_lines(EXAMPLE)) == {
        "setup.py": "the package",
        "megazero/": "",
        "megazero/errors.py": "what went wrong",
        "megazero/zero/": "one engine",
        "megazero/zero/plan.py": "table",
        "tools/": "",
        "tools/x.py": "y",
    }
