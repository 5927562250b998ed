"""Every setting is read by code that acts on it, because a setting without a reader would have no effect.

Reading means `SECTION.name` or `config.name`, where the words before the dot end in a section's name, in "config", or
in a parameter that is annotated with a section's class.  What a function of config/derived.py reads counts only if the
function is used outside that file.
"""

import ast
from collections.abc import Collection, Iterator, Sequence

from support.source_tree import PROGRAMS, Source, sources, walk

from megazero.config.run import FIELDS, SECTIONS

SECTION_OF_CLASS = {cls.__name__: section for section, cls in SECTIONS}


def reads(nodes: Sequence[ast.AST], section: str, owners: frozenset[str]) -> Iterator[str]:
    """Yield the names that are read as attributes of an expression that stands for the section."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = _last_name(node.value)
            if owner in (section, f"{section}_config", "config") or owner in owners:
                yield node.attr


def _last_name(node: ast.expr) -> str:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_")


def annotated(nodes: Sequence[ast.AST], section: str) -> frozenset[str]:
    """Return the names of parameters and attributes that are annotated with the section's class."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.arg) and _section(node.annotation) == section:
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and _section(node.annotation) == section:
            found.add(_last_name(node.target))
    return frozenset(found)


def _section(annotation: ast.expr | None) -> str | None:
    return SECTION_OF_CLASS.get(_last_name(annotation)) if annotation is not None else None


def used_figures(outside: tuple[Source, ...], derived: Source) -> set[str]:
    """Return the functions of derived.py that other files use, and those that these call."""
    calls = {function.name: set(_names(function)) for function in derived.functions()}
    pending = [name for source in outside for name in _names(source.tree) if name in calls]
    used: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in used:
            used.add(name)
            pending += [called for called in calls[name] if called in calls]
    return used


def _names(tree: ast.AST) -> Iterator[str]:
    for node in walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _matters(node: ast.AST, names: Collection[str]) -> bool:
    """Return True for the attributes that have a setting's name, and for what may be annotated with a section."""
    return node.attr in names if isinstance(node, ast.Attribute) else isinstance(node, (ast.arg, ast.AnnAssign))


def unread(outside: tuple[Source, ...], derived: Source) -> list[str]:
    """Return the settings that no acting code reads, as section.name."""
    used = used_figures(outside, derived)
    trees: list[ast.AST] = [source.tree for source in outside]
    trees += [function for function in derived.functions() if function.name in used]
    names = {info.name for info in FIELDS}
    walked = [[node for node in walk(tree) if _matters(node, names)] for tree in trees]
    read = {
        f"{section}.{name}"
        for nodes in walked
        for section, _ in SECTIONS
        for name in reads(nodes, section, annotated(nodes, section))
    }
    return [f"{info.section}.{info.name}" for info in FIELDS if f"{info.section}.{info.name}" not in read]


# These packages declare, parse and check settings; they do not act on them.
CONFIGURATION = ("config", "rules", "dialects", "command_line")
# These files of checking packages do act on settings: they make of them a run's optimizer, and its curriculum.
ACTING = ("megazero/rules/optimizer.py", "megazero/config/curriculum.py")
OUTSIDE = tuple(s for s in sources("megazero", *PROGRAMS) if s.package not in CONFIGURATION or s.name in ACTING)
(DERIVED,) = sources("megazero/config/derived.py")


def test_every_setting_is_read() -> None:
    assert unread(OUTSIDE, DERIVED) == []


def test_the_check_can_fail() -> None:
    everything = {f"{info.section}.{info.name}" for info in FIELDS}
    assert set(unread((), DERIVED)) == everything
    code = "def f(settings: ModelConfig, x): return settings.num_layers, x.split, config.data.split"
    nodes = list(walk(ast.parse(code)))
    owners = annotated(nodes, "model")
    assert list(reads(nodes, "model", owners)) == ["data", "num_layers"] or owners == {"settings"}
    assert "split" in list(reads(nodes, "data", frozenset()))
    assert "split" not in list(reads(list(walk(ast.parse("x.split"))), "data", frozenset()))
