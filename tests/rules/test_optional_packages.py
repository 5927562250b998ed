"""Tests are collected, and those marked `cuda` run, where packages are missing that a training step doesn't need."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source_tree import imports, sources

# GPU machines that have torch for CUDA often lack these.
OPTIONAL = {
    "bitsandbytes", "datasketch", "ftfy", "gigatoken", "lm_eval", "megatron", "mlflow", "py3langid", "pyarrow", "ray",
    "sentencepiece", "tiktoken", "transformers", "wandb",
}  # fmt: skip
# Programs that other programs start where the package is there, and a module that only its users import: it has a class
# derived from the package's.
STARTED = ("benchmarks/megatron_gpt.py", "megazero/evaluate/harness.py")


def taken_at_import(tree: ast.Module) -> Iterator[str]:
    """Yield the packages that a module imports while it is imported itself, in the order of its text."""
    pending: list[ast.AST] = list(reversed(tree.body))
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from dict.fromkeys(module.partition(".")[0] for module, _ in imports(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += reversed(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += reversed(list(ast.iter_child_nodes(node)))


@pytest.mark.parametrize("place", ["megazero", "tests", "benchmarks", "tools", "pretrain_gpt.py"])
def test_no_module_needs_an_optional_package_to_be_imported(place: str) -> None:
    named = [source for source in sources(place) if any(package in source.text for package in OPTIONAL)]
    found = {source.name: sorted(OPTIONAL & set(taken_at_import(source.tree))) for source in named}
    assert {name: packages for name, packages in found.items() if packages and name not in STARTED} == {}


def test_a_module_whose_package_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test module that is about an optional package is skipped as a whole, which is not an error of collection."""
    monkeypatch.setitem(sys.modules, "ftfy", None)
    path = Path(__file__).parents[1] / "prepare" / "clean" / "test_cleaning_steps.py"
    with pytest.raises(pytest.skip.Exception, match="ftfy"):
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), {"__name__": "test_cleaning_steps"})


def test_what_is_imported_is_seen() -> None:
    text = "import a\nif TYPE_CHECKING:\n    import b\ntry:\n    from c.d import e\nexcept ImportError:\n    pass\n"
    text += "def f():\n    import g\nclass H:\n    import i\n    def j(self):\n        import k\n"
    assert list(taken_at_import(ast.parse(text))) == ["a", "c", "i"]
