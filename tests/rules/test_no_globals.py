"""No module-level name changes after import: no `global`, no assignment to a module's names, no mutated table."""

import ast
from collections.abc import Iterator

from support.source_tree import PROGRAMS, sources, walk

MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear"}


def findings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and kind of each statement that changes a module-level name from inside a function."""
    top = set(_bound(tree.body))
    modules = {alias.asname or alias.name.split(".")[0] for alias in _module_imports(tree)}
    for node in walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "global"
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            outer = top - _locals(node)
            yield from _changes(node, outer, modules)


def _changes(function: ast.AST, names: set[str], modules: set[str]) -> Iterator[tuple[int, str]]:
    for node in walk(function):
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            if isinstance(node.value, ast.Name) and node.value.id in names:
                kind = "sets a name of module" if node.value.id in modules else "changes"
                yield node.lineno, f"{kind} {node.value.id}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id in names - modules:
                yield node.lineno, f"changes {owner.id}"


def _module_imports(tree: ast.Module) -> Iterator[ast.alias]:
    return (alias for node in walk(tree) if isinstance(node, ast.Import) for alias in node.names)


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
            continue
        for node in walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield node.asname or node.name.split(".")[0]


def _locals(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    names = {argument.arg for argument in walk(function) if isinstance(argument, ast.arg)}
    return names | {n.id for n in walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


HOOKS = {"megazero/comm/faults/shutdown.py": ["sys.excepthook"]}  # where the end of a program is reported


def test_no_module_keeps_state() -> None:
    """No module keeps state, but for the hook that Python itself has for a program's last exception."""
    found = [
        f"{source.name}:{line} {what}"
        for source in sources("megazero", *PROGRAMS)
        for line, what in findings(source.tree)
        if source.text.splitlines()[line - 1].split(" = ")[0].strip() not in HOOKS.get(source.name, ())
    ]
    assert found == []


def test_the_check_sees_what_it_looks_for() -> None:
    code = """
import os
CACHE = {}
SEEN = []
def f(x):
    global CACHE
    CACHE[x] = 1
    SEEN.append(x)
    os.environ = {}
    local = []
    local.append(x)
    x.y = 2
"""
    assert [what for _, what in sorted(findings(ast.parse(code)))] == [
        "global",
        "changes CACHE",
        "changes SEEN",
        "sets a name of module os",
    ]


def plain_tables(tree: ast.Module) -> Iterator[str]:
    """Yield the module-level names of dictionaries, which any caller could change."""
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Dict, ast.DictComp)):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def test_tables_are_read_only() -> None:
    """A table at the top of a module is a MappingProxyType: writing to it raises TypeError."""
    assert [f"{source.name}: {name}" for source in sources("megazero") for name in plain_tables(source.tree)] == []
    code = "A = {}\nB: dict[int, int] = {n: n for n in ()}\nC = MappingProxyType({1: 2})\ndef f():\n    d = {}\n"
    assert [*plain_tables(ast.parse(code))] == ["A", "B"]


def test_nothing_is_cached_by_function() -> None:
    """A function's cache is module state without an owner; values read from the environment would go stale in it."""
    found = [f"{source.name}: {name}" for source in sources("megazero", *PROGRAMS) for name in cached(source.tree)]
    assert found == []
    code = (
        "from functools import cache, partial\nimport functools\n@functools.lru_cache\ndef f(cache):\n    cache.get()\n"
    )
    assert [*cached(ast.parse(code))] == ["cache", "lru_cache"]


def cached(tree: ast.Module) -> Iterator[str]:
    """Yield the ways in which a module remembers what functions return."""
    names = ("lru_cache", "cache")
    for node in walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "functools":
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "functools":
            yield from (name for name in names if node.attr == name)
