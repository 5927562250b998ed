"""A module imports only from the layers above its own and from its own package, without circles."""

import ast
from collections.abc import Iterator
from functools import cache

from support.each import each
from support.source_tree import PROGRAMS, Source, imports, sources

# Top to bottom; a module imports from lines above its own, and from its own package.
LAYERS = (
    {"errors", "units", "console", "timers", "generators", "operating_system", "owner", "files", "interrupts", "svg"},
    {"signals"},
    {"config"},
    {"rules"},
    {"dialects"},
    {"command_line"},
    {"parallel"},
    {"memory"},
    {"comm"},
    {"optim"},
    {"tensor_parallel", "activations", "pipeline", "zero", "data", "cluster"},
    {"model", "prepare"},
    {"checkpoint", "generate", "report"},
    {"train", "library"},
    {"verify", "deepspeed", "evaluate"},
    {"planner"},
    {"commands"},
    {"__main__"},
    {"command"},
)
DEPTH = {package: depth for depth, layer in enumerate(LAYERS) for package in layer}

# Packages that users import from; their __init__ loads a name only when it is accessed, but that of deepspeed.runtime,
# which makes other modules importable below it.
PUBLIC_FACES = (
    "megazero/zero/__init__.py",
    "megazero/deepspeed/__init__.py",
    "megazero/deepspeed/runtime/__init__.py",
    "megazero/deepspeed/utils/__init__.py",
)

# Packages that few runs need and all would wait for, and optional ones: only these may be imported within a function.
SELDOM = ("fsspec", "sentencepiece", "torch._inductor", "fcntl", "resource")
OPTIONAL = (
    *("torch.utils.tensorboard", "PIL", "transformers", "gigatoken", "pyarrow", "ftfy", "datasketch", "py3langid"),
    *("ray", "wandb", "mlflow"),
    "megazero.tensor_parallel.float8_kernels",  # of Triton, which torch for GPUs has
    "megazero.tensor_parallel.cross_entropy_kernel",
    "megazero.tensor_parallel.bias_gradient_kernels",
)

# The files that users start.  torch takes most of a second to load, so programs read their command line without it:
# no import at the top of these files loads torch; the functions that need such modules import them.
STARTED = sources("megazero/__main__.py", "megazero/commands", *PROGRAMS)

MODULES = {source.module: source for source in sources()}


def target(module: str, name: str) -> str:
    """Return the name of the module that an import statement loads."""
    inner = f"{module}.{name}"
    return inner if inner in MODULES else module


def targets(source: Source) -> Iterator[str]:
    """Yield the modules of megazero that the source imports."""
    for module, name in imports(source.tree):
        if module.split(".")[0] == "megazero":
            yield target(module, name)


def may_import(importer: str, imported: str) -> bool:
    """Return True if package `importer` may import from package `imported` (names below megazero)."""
    if importer == imported or imported == "":
        return True
    # console prints errors, files raises them, names owners and limits: only these may import a sibling of that layer.
    if (importer, imported) in (("console", "errors"), *(("files", name) for name in ("errors", "owner", "units"))):
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


@each(
    ("importer", "imported", "legal"),
    [
        ("zero", "config", True),
        ("zero", "zero", True),
        ("console", "errors", True),
        ("files", "owner", True),
        ("console", "owner", False),
        ("zero", "pipeline", False),
        ("config", "zero", False),
        ("config", "rules", False),
        ("zero", "library", False),
        ("data", "prepare", False),
        ("report", "train", False),
        ("train", "verify", False),
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
    """Yield the imports that run when the module is loaded, not those within functions or for types only."""
    for statement in source.tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from imports(statement)


@cache
def loads_torch(module: str) -> bool:
    """Return True if importing the module loads torch or safetensors, itself or through other modules of megazero."""
    if module.split(".")[0] in ("torch", "safetensors"):
        return True
    found = top_imports(MODULES[module]) if module in MODULES else ()
    return any(loads_torch(target(*imported)) for imported in found)


def late(source: Source) -> Iterator[tuple[str, str]]:
    """Yield place and module of each import within a function."""
    for function in source.functions():
        for imported in imports(function):
            yield f"{source.name}:{function.lineno}", target(*imported)


def test_imports_stand_at_the_top() -> None:
    wrong = [
        f"{where} imports {module}"
        for source in sources("megazero", *PROGRAMS)
        for where, module in late(source)
        if not (module.startswith((*OPTIONAL, *SELDOM)) or (source in STARTED and loads_torch(module)))
        and source.name != "megazero/command.py"  # which prepares for an interrupt while the others are imported
    ]
    assert wrong == []


def test_programs_start_without_torch() -> None:
    wrong = [(s.name, target(*found)) for s in STARTED for found in top_imports(s) if loads_torch(target(*found))]
    assert wrong == []


def test_what_loads_torch() -> None:
    assert [loads_torch(f"megazero.{name}") for name in ("zero.engine", "train.program", "comm.startup")] == [True] * 3
    assert [loads_torch(f"megazero.{name}") for name in ("command_line.parse", "train.check", "parallel.launch")] == [
        False
    ] * 3


def test_only_few_talk_to_torch_distributed() -> None:
    """Only `comm`, `cluster`, `deepspeed`, which has its names, and three files of `library` import it.

    Those are for a user's groups, meshes and DTensors.
    """
    adapters = [f"megazero/library/adopted/{name}.py" for name in ("group", "mesh", "dtensors")]
    wrong = [
        s.name
        for s in sources("megazero", *PROGRAMS)
        if s.package not in ("comm", "cluster", "deepspeed")
        and s.name not in adapters
        and any(f"{module}.{name}".startswith("torch.distributed") for module, name in imports(s.tree))
    ]
    assert wrong == []


def test_configuration_needs_no_torch() -> None:
    """The modules that check a command line do not import torch, so that the check takes milliseconds."""
    pure = [source for source in sources() if source.package in ("config", "rules", "dialects", "command_line")]
    assert [s.name for s in pure if any(m.split(".")[0] == "torch" for m, _ in imports(s.tree))] == []
