"""Tests mirror the tree: tests/FOLDER/test_FILE.py for every megazero/FOLDER/FILE.py."""

from support.source_tree import ROOT, Source, sources


def test_file(source: Source) -> str:
    """Where the tests of a module stand."""
    folder, _, file = source.name.removeprefix("megazero/").rpartition("/")
    return f"tests/{folder}/test_{file}" if folder else f"tests/test_{file}"


test_file.__test__ = False  # type: ignore[attr-defined]


def test_every_module_has_its_tests() -> None:
    modules = [source for source in sources() if source.path.name != "__init__.py"]
    assert [source.name for source in modules if not (ROOT / test_file(source)).is_file()] == []


def test_test_folders_are_no_packages() -> None:
    assert [source.name for source in sources("tests") if source.path.name == "__init__.py"] == []
