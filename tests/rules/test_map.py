"""docs/map.md names every folder of the package and every program, and nothing that is not there.

The map is the first fenced block that has a line `megazero/`.  Below a folder's line its files are indented: the first
word of a line is the name (a folder's ends in "/"), the rest describes it.
"""

import re

from support.source_tree import ROOT

# Folders whose files are programs, each with a line of its own.
PROGRAM_FOLDERS = ("scripts",)


def map_lines(page: str) -> list[str]:
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return next((block.splitlines() for block in blocks if re.search(r"^\s*megazero/", block, re.MULTILINE)), [])


def parse_map(lines: list[str]) -> dict[str, str]:
    """Return the description of each path in the map; folders' paths end in "/"."""
    found: dict[str, str] = {}
    folders: list[tuple[int, str]] = []
    for line in lines:
        words = line.split(maxsplit=1)
        if not words or not re.fullmatch(r"[\w-]*[./][\w.-]*/?|LICENSE", words[0]):
            continue
        indent = len(line) - len(line.lstrip())
        folders = [folder for folder in folders if folder[0] < indent]
        path = (folders[-1][1] if folders else "") + words[0]
        found[path] = words[1] if len(words) > 1 else ""
        if path.endswith("/"):
            folders.append((indent, path))
    return found


def must_be_named() -> set[str]:
    """Return the paths that the map must name: programs, files at the top and in megazero itself, and packages."""
    files = [path for folder in PROGRAM_FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [path for folder in (ROOT, ROOT / "megazero") for path in folder.iterdir() if path.is_file()]
    kept = [path for path in files if not path.name.startswith((".", "__init__", "py.typed")) and path.suffix != ".pyc"]
    packages = [path.parent for path in (ROOT / "megazero").glob("*/__init__.py")]
    return {path.relative_to(ROOT).as_posix() for path in kept} | {
        f"{path.relative_to(ROOT).as_posix()}/" for path in packages
    }


def test_the_map_is_the_tree() -> None:
    mapped = parse_map(map_lines((ROOT / "docs" / "map.md").read_text(encoding="utf-8")))
    assert sorted(must_be_named() - set(mapped)) == []
    assert [path for path in mapped if not (ROOT / path).exists()] == []
    folders_of_files = {"megazero/", "scripts/", "scripts/launch/", "scripts/slurm/"}
    assert [path for path, what in mapped.items() if not what and path not in folders_of_files] == []


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
