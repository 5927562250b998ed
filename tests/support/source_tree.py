"""Reads the repository's files as text and syntax trees, for the tests of its rules."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("tools", "pretrain_gpt.py", "pretrain_bloom.py")
# Folders made by tools or runs, never part of the repository; hidden folders are left out too, apart from .ci.
MADE = ("runs", "build", "__pycache__")


@dataclass(frozen=True)
class Source:
    """A Python file of the repository."""

    path: Path

    @property
    def name(self) -> str:
        """The path from the root, such as `megazero/zero/plan.py`."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def module(self) -> str:
        """The dotted name, such as `megazero.zero.plan`; a package's own file has the package's name."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def package(self) -> str:
        """The first folder (or module) below megazero: `zero`, `errors`; "" for megazero/__init__.py."""
        return self.module.partition(".")[2].partition(".")[0]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Return every function and method of the file, nested ones too."""
        return (node for node in walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@cache
def source(path: Path) -> Source:
    """Return the file at `path`, the same object for all tests, so that it is read and parsed once."""
    return Source(path)


@cache
def walk(tree: ast.AST) -> tuple[ast.AST, ...]:
    """Return the nodes of `ast.walk`, once for all tests: a dozen of rules go through the same trees."""
    found = [tree]
    for node in found:
        found.extend(ast.iter_child_nodes(node))
    return tuple(found)


def sources(*places: str) -> tuple[Source, ...]:
    """Return the Python files at or below the places, by default all of megazero, sorted."""
    found: list[Path] = []
    for place in places or ("megazero",):
        path = ROOT / place
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return tuple(source(path) for path in found if "__pycache__" not in path.parts)


def repository_files() -> Iterator[Path]:
    """Yield every file of the repository, but for those that tools or runs have made."""
    pending = [ROOT]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            if path.is_dir():
                hidden = path.name.startswith(".") and path.name != ".ci"
                if not hidden and path.name not in MADE and not path.name.endswith(".egg-info"):
                    pending.append(path)
            elif path.name != ".git":  # In a worktree .git is a file.
                yield path


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for every import below `tree`.

    The name is "" for `import module`; a relative module starts with a dot.
    """
    for node in walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (("." * node.level + (node.module or ""), alias.name) for alias in node.names)
