"""Hard limits of size: a file, a class or a function beyond them is split."""

import ast
from collections.abc import Iterator

from support.source_tree import PROGRAMS, Source, line_count, sources

FILE_LINES = 450
TOOL_LINES = 120
CLASS_LINES = 250
FUNCTION_LINES = 80
PARAMETERS = 6
# The first parameter of methods, class methods and autograd functions.
IMPLIED = ("self", "cls", "ctx")

EVERYTHING = sources("megazero", "tests", *PROGRAMS)


def long_definitions(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and line_count(node) > CLASS_LINES:
            yield f"{source.name}: class {node.name} has {line_count(node)} lines"
    for function in source.functions():
        if line_count(function) > FUNCTION_LINES:
            yield f"{source.name}: {function.name} has {line_count(function)} lines"


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = function.args
    named = [arg.arg for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return named[1:] if named[:1] and named[0] in IMPLIED else named


def test_files() -> None:
    lengths = {source.name: len(source.text.splitlines()) for source in EVERYTHING}
    assert {name: lines for name, lines in lengths.items() if lines > FILE_LINES} == {}
    assert {name: n for name, n in lengths.items() if name.startswith("tools/") and n > TOOL_LINES} == {}


def test_classes_and_functions() -> None:
    assert [found for source in EVERYTHING for found in long_definitions(source)] == []


def test_parameters() -> None:
    found = [
        f"{source.name}: {function.name} has {len(parameters(function))}"
        for source in sources("megazero", *PROGRAMS)
        for function in source.functions()
        if len(parameters(function)) > PARAMETERS
    ]
    assert found == []


def test_every_file_says_what_it_is() -> None:
    assert [source.name for source in EVERYTHING if not ast.get_docstring(source.tree)] == []
