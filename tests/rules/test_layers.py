"""Who may import whom: only from layers above; siblings of a layer don't know each other; no circles."""

import ast
from collections.abc import Iterator
from functools import cache

import pytest
from support.source_tree import PROGRAMS, Source, imports, sources

# Top to bottom; a module imports from lines above its own, and from its own package.
LAYERS = (
    {"errors", "units", "console", "timers", "generators"},
    {"config"},
    {"parallel"},
    {"memory"},
    {"comm"},
    {"optim"},
    {"tensor_parallel", "activations", "pipeline", "zero", "data"},
    {"model"},
    {"checkpoint", "generate"},
    {"train", "library"},
    {"planner"},
    {"__main__"},
)
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}

# Packages whose names users write; their __init__ hands names out without importing anything itself.
PUBLIC_FACES = ("megazero/zero/__init__.py",)

# What a run can do without, and what few runs need and all would wait for: only these may be imported by a function.
SELDOM = ("fsspec", "sentencepiece")
OPTIONAL = ("torch.utils.tensorboard", "transformers", "gigatoken", "pyarrow", "ftfy", "datasketch", "py3langid")

# What users start.  torch takes most of a second to load, so programs read their command line without it: at the top
# stands nothing that loads torch, and what does is imported by the function that needs it.
STARTED = sources("megazero/__main__.py", *PROGRAMS)

MODULES = {source.module: source for source in sources()}


def target(module: str, name: str) -> str:
    """The module that an import imports."""
    inner = f"{module}.{name}"
    return inner if inner in MODULES else module


def targets(source: Source) -> Iterator[str]:
    """Modules of megazero that the source imports."""
    for module, name in imports(source.tree):
        if module.split(".")[0] == "megazero":
            yield target(module, name)


def may_import(importer: str, imported: str) -> bool:
    """Whether package `importer` may import from package `imported` (names below megazero)."""
    if importer == imported or imported == "":
        return True
    # console prints what errors says: the one pair of siblings that the first layer needs.
    if (importer, imported) == ("console", "errors"):
        return True
    return DEPTH[imported] < DEPTH[importer]


def test_every_package_has_a_layer() -> None:
    assert sorted({s.package for s in sources()} - set(DEPTH) - {""}) == []


def test_imports_go_upwards() -> None:
    wrong = [
        f"{source.name} imports {target}"
        for source in sources()
        for target in targets(source)
        if not may_import(source.package, target.partition(".")[2].partition(".")[0])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("importer", "imported", "legal"),
    [
        ("zero", "config", True),
        ("zero", "zero", True),
        ("console", "errors", True),
        ("zero", "pipeline", False),
        ("config", "zero", False),
        ("errors", "console", False),
        ("generate", "checkpoint", False),
        ("zero", "model", False),
    ],
)
def test_the_rule_itself(importer: str, imported: str, legal: bool) -> None:
    assert may_import(importer, imported) is legal


def test_no_circle_of_modules() -> None:
    graph = {name: sorted(set(targets(source)) - {name}) for name, source in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for target in graph.get(name, []):
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_packages_are_empty_and_imports_are_absolute() -> None:
    files = [source for source in sources() if source.path.name == "__init__.py" and source.package]
    assert [s.name for s in files if ast.get_docstring(s.tree) is None] == []
    assert [s.name for s in files if s.name not in PUBLIC_FACES and len(s.tree.body) != 1] == []
    assert [s.name for s in files if s.name in PUBLIC_FACES and list(targets(s))] == []
    everywhere = [(s.name, module, name) for s in sources("megazero", *PROGRAMS) for module, name in imports(s.tree)]
    assert [found for found in everywhere if found[1].startswith(".") or found[2] == "*"] == []


def top_imports(source: Source) -> Iterator[tuple[str, str]]:
    """Those that take place when the module is loaded, not within functions or for types only."""
    for statement in source.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from imports(statement)


@cache
def loads_torch(module: str) -> bool:
    """Whether importing the module imports torch, as far as our own modules go."""
    if module.split(".")[0] in ("torch", "safetensors"):
        return True
    found = top_imports(MODULES[module]) if module in MODULES else ()
    return any(loads_torch(target(*imported)) for imported in found)


def late(source: Source) -> Iterator[tuple[str, str]]:
    """(where, module) of the imports within functions."""
    for function in source.functions():
        for imported in imports(function):
            yield f"{source.name}:{function.lineno}", target(*imported)


def test_imports_stand_at_the_top() -> None:
    wrong = [
        f"{where} imports {module}"
        for source in sources("megazero", *PROGRAMS)
        for where, module in late(source)
        if not (module.startswith((*OPTIONAL, *SELDOM)) or (source in STARTED and loads_torch(module)))
    ]
    assert wrong == []


def test_programs_start_without_torch() -> None:
    wrong = [(s.name, target(*found)) for s in STARTED for found in top_imports(s) if loads_torch(target(*found))]
    assert wrong == []


def test_what_loads_torch() -> None:
    assert [loads_torch(f"megazero.{name}") for name in ("zero.engine", "train.program", "comm.build")] == [True] * 3
    assert [loads_torch(f"megazero.{name}") for name in ("config.cli", "train.check", "parallel.launch")] == [False] * 3


def test_only_comm_talks_to_torch_distributed() -> None:
    wrong = [
        s.name
        for s in sources("megazero", *PROGRAMS)
        if s.package != "comm"
        and any(f"{module}.{name}".startswith("torch.distributed") for module, name in imports(s.tree))
    ]
    assert wrong == []


def test_config_knows_no_torch() -> None:
    """A command line is checked in milliseconds, before anything heavy is loaded."""
    pure = [source for source in sources() if source.package == "config"]
    assert [s.name for s in pure if any(m.split(".")[0] == "torch" for m, _ in imports(s.tree))] == []
