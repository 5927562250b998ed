"""The folders of tests mirror the packages: tests/FOLDER holds the tests of megazero/FOLDER, nested folders too."""

from pathlib import Path

from support.source_tree import ROOT, sources

PACKAGES = {source.path.parent.relative_to(ROOT / "megazero") for source in sources() if source.path.stem == "__init__"}
# Folders in tests/ that belong to no single package.
BESIDE = {Path(name) for name in ("benchmarks", "end_to_end", "examples", "matrix", "rules", "scripts", "support")}


def test_every_package_has_its_tests_and_all_tests_are_found_there() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    without_modules = {package for package in PACKAGES if len(list((ROOT / "megazero" / package).glob("*.py"))) == 1}
    assert folders == PACKAGES - without_modules | BESIDE


def test_test_folders_are_no_packages() -> None:
    assert [source.name for source in sources("tests") if source.path.name == "__init__.py"] == []
