"""Tests mirror the tree: tests/FOLDER/ for every megazero/FOLDER/, a file for what belongs together."""

from support.source_tree import ROOT, sources


def test_every_package_has_its_tests() -> None:
    folders = {source.path.parent.relative_to(ROOT / "megazero") for source in sources()}
    assert [str(folder) for folder in sorted(folders) if not list((ROOT / "tests" / folder).rglob("test_*.py"))] == []


def test_test_folders_are_no_packages() -> None:
    assert [source.name for source in sources("tests") if source.path.name == "__init__.py"] == []
