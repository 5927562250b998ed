"""Measures Python source by its text and syntax trees: lines, lengths, imports, repeated lines.

Every line of a file is exactly one of code, comment (nothing but a comment), docstring (its blank lines too) and blank.
A function's length goes from its `def` to its last line, docstring included.
"""

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "megazero"
TOP_LEVEL = "top level"
# Shorter runs of equal lines are mostly calls that have no reason to differ.
REPEATED_LINES = 8

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef)
_DOCUMENTED = (ast.Module, *_DEFINITIONS)


@dataclass(frozen=True)
class SourceFile:
    """A Python file.  name: its path from the tree's root, with slashes."""

    name: str
    lines: Sequence[str]
    syntax: ast.Module

    @property
    def module(self) -> str:
        """The dotted name of the module; a package's `__init__.py` has the package's name."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def package(self) -> str:
        """The first folder below the package's root, such as `zero`, or "top level"."""
        folders = self.name.split("/")[1:-1]
        return folders[0] if folders else TOP_LEVEL

    def functions(self) -> Iterator[tuple[str, int]]:
        """Yield the qualified name and the length of every function and method, nested ones included."""
        yield from _functions(self.syntax, "")


def read_files(tree: Path, folder: str = PACKAGE) -> list[SourceFile]:
    """Return all Python files below a folder of the tree, sorted by name."""
    found = []
    for path in sorted((tree / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(SourceFile(path.relative_to(tree).as_posix(), text.splitlines(), ast.parse(text)))
    return found


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # expressions hold no definitions, and are most of the tree
            continue
        inner = prefix
        if isinstance(child, _DEFINITIONS):
            inner = f"{prefix}{child.name}."
        if isinstance(child, _FUNCTIONS):
            yield inner[:-1], (child.end_lineno or child.lineno) - child.lineno + 1
        yield from _functions(child, inner)


def line_kinds(file: SourceFile) -> dict[str, int]:
    """Return the numbers of lines by kind ("code", "comments", "docstrings", "blank") and their sum ("lines")."""
    docstrings, strings = _string_lines(file.syntax)
    kinds = Counter({"lines": len(file.lines), "code": 0, "comments": 0, "docstrings": 0, "blank": 0})
    for number, line in enumerate(file.lines, start=1):
        text = line.strip()
        if number in docstrings:
            kinds["docstrings"] += 1
        elif not text:
            kinds["blank"] += 1
        elif text.startswith("#") and number not in strings:
            kinds["comments"] += 1
        else:
            kinds["code"] += 1
    return dict(kinds)


def _string_lines(syntax: ast.Module) -> tuple[set[int], set[int]]:
    """Return the line numbers of docstrings, and those of all strings of more than one line."""
    docstrings: set[int] = set()
    strings: set[int] = set()
    for node in ast.walk(syntax):
        kind = type(node)
        if kind in (ast.Constant, ast.JoinedStr) and node.end_lineno != node.lineno:
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if kind in _DOCUMENTED and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            docstrings.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return docstrings, strings


def spread(lengths: Iterable[int]) -> dict[str, int]:
    """Return the median of lengths, the length that nine in ten do not exceed, and the largest; zeros without any."""
    ordered = sorted(lengths)
    if not ordered:
        return {"median": 0, "p90": 0, "max": 0}
    return {
        "median": round(statistics.median(ordered)),
        "p90": ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
    }


def package_row(files: Sequence[SourceFile]) -> dict[str, Any]:
    """Return the number of files, their lines by kind, and the spreads of function and file lengths."""
    kinds: Counter[str] = Counter()
    for file in files:
        kinds.update(line_kinds(file))
    functions = [length for file in files for _, length in file.functions()]
    return {
        "files": len(files),
        **{kind: kinds[kind] for kind in ("lines", "code", "comments", "docstrings", "blank")},
        "functions": len(functions),
        "function_lines": spread(functions),
        "file_lines": spread(len(file.lines) for file in files if not file.name.endswith("/__init__.py")),
    }


def by_package(files: Sequence[SourceFile]) -> dict[str, list[SourceFile]]:
    packages: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    return dict(sorted(packages.items()))


def longest_functions(files: Sequence[SourceFile], number: int) -> list[tuple[str, int]]:
    """Return the longest functions, each as `path:Class.method` and its length in lines, the longest first."""
    found = [(f"{file.name}:{name}", length) for file in files for name, length in file.functions()]
    return sorted(found, key=lambda row: (-row[1], row[0]))[:number]


def longest_files(files: Sequence[SourceFile], number: int) -> list[tuple[str, int]]:
    return sorted(((file.name, len(file.lines)) for file in files), key=lambda row: (-row[1], row[0]))[:number]


def imports(files: Sequence[SourceFile]) -> dict[str, set[str]]:
    """Return for each module the modules among `files` that it imports, anywhere in its text."""
    known = {file.module for file in files}
    graph = {}
    for file in files:
        found = set()
        for node in ast.walk(file.syntax):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    found.add(inner if inner in known else node.module)
        graph[file.module] = (found & known) - {file.module}
    return graph


def fan_in(graph: Mapping[str, set[str]]) -> Counter[str]:
    """Return for each module the number of other modules that import it."""
    return Counter(target for targets in graph.values() for target in targets)


def fan_out(graph: Mapping[str, set[str]]) -> Counter[str]:
    """Return for each module the number of other modules that it imports."""
    return Counter({module: len(targets) for module, targets in graph.items()})


def repeated_runs(files: Sequence[SourceFile]) -> list[tuple[str, str]]:
    """Return pairs of places (`path:line`) at which `REPEATED_LINES` or more lines of code are equal.

    Indentation, imports and docstrings do not count; a longer run counts once.
    """
    windows: dict[tuple[str, ...], list[tuple[str, int, int]]] = defaultdict(list)
    for file in files:
        code = list(_code_lines(file))
        for index in range(len(code) - REPEATED_LINES + 1):
            window = code[index : index + REPEATED_LINES]
            windows[tuple(text for _, text in window)].append((file.name, window[0][0], index))
    pairs = {
        (first, second) for places in windows.values() for i, first in enumerate(places) for second in places[i + 1 :]
    }
    # A pair is part of a longer run if the lines before it are a pair too.
    starts = {((a[0], a[2]), (b[0], b[2])) for a, b in pairs}
    return sorted(
        (f"{a[0]}:{a[1]}", f"{b[0]}:{b[1]}") for a, b in pairs if ((a[0], a[2] - 1), (b[0], b[2] - 1)) not in starts
    )


def _code_lines(file: SourceFile) -> Iterator[tuple[int, str]]:
    docstrings, _ = _string_lines(file.syntax)
    left_out = set(docstrings)
    for node in ast.walk(file.syntax):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(file.lines, start=1):
        text = line.strip()
        if text and not text.startswith("#") and number not in left_out:
            yield number, text
