"""Tests of the planted faults: each can be planted, and a run records the faults that tests see and do not see."""

from pathlib import Path

import planted_faults
import pytest
from fault_table import FAULTS, PACKAGE_FAULTS, SHARED_FAULTS, Fault
from planted_faults import ROOT, first_failure, main, problems, read_records

SEEN = Fault("units.py", "halved", "return 2 * x", "return x", ("tests/test_a.py",))
UNSEEN = Fault("units.py", "unread", "unread = 1", "unread = 2", ("tests/test_a.py",))
ANYWAY = Fault("units.py", "halved", "return 2 * x", "return x", ("tests/test_b.py",))
BROKEN = Fault("units.py", "no Python", "return 2 * x", "return (", ("tests/test_a.py",))


def test_every_row_can_be_planted() -> None:
    assert list(problems(FAULTS)) == []


def test_rows_are_spread_over_all_packages() -> None:
    packages = {path.parent.name for path in (ROOT / "megazero").glob("*/__init__.py")}
    assert {fault.file.partition("/")[0] for fault in PACKAGE_FAULTS} == packages
    assert len(PACKAGE_FAULTS) >= 40
    assert len({(fault.file, fault.old, fault.new) for fault in PACKAGE_FAULTS}) == len(PACKAGE_FAULTS)


def test_every_fault_is_for_the_tests_of_its_own_package() -> None:
    for fault in PACKAGE_FAULTS:
        folder = f"tests/{fault.file.partition('/')[0]}"
        assert all(test == folder or test.startswith(f"{folder}/") for test in fault.tests), str(fault)


def test_a_fault_in_a_shared_piece_is_for_the_tests_of_both_doors() -> None:
    """Each shared fault has a row for tests of a run and one for tests of the library, and every piece has a fault."""
    doors: dict[tuple[str, str, str], list[str]] = {}
    for fault in SHARED_FAULTS:
        doors.setdefault((fault.file, fault.old, fault.new), []).extend(fault.tests)
    for tests in doors.values():
        run, library = tests
        assert run.startswith(("tests/train/", "tests/command_line/")) and library.startswith("tests/library/")
    assert {file for file, _, _ in doors} >= {
        "zero/step.py",
        "zero/engine.py",
        "memory/fused_buffers.py",
        "rules/moot.py",
        "config/engine_sections.py",
        "config/optimizers.py",
        "config/schedules.py",
        "config/values.py",
        "optim/schedules.py",
        "dialects/deepspeed/sections.py",
    }


def test_a_row_that_cannot_be_planted_is_named(tmp_path: Path) -> None:
    write_tree(tmp_path)
    gone = SEEN._replace(old="return 3 * x", tests=("tests/test_c.py",))
    assert list(problems([SEEN, UNSEEN], tmp_path)) == []
    assert list(problems([gone], tmp_path)) == [
        "units.py: halved: the old text is 0 times in megazero/units.py, not once",
        "units.py: halved: there is no tests/test_c.py",
    ]
    twice = SEEN._replace(old="= 1", new="= 1")
    assert [finding.partition(": the ")[2] for finding in problems([twice], tmp_path)] == [
        "old text is 2 times in megazero/units.py, not once",
        "new text is the old one",
    ]


def write_tree(root: Path) -> None:
    """Write a tree of one module and its tests."""
    (root / "megazero").mkdir()
    (root / "tests").mkdir()
    (root / "megazero/__init__.py").touch()
    (root / "megazero/units.py").write_text("unread = 1\nother = 1\ndef double(x):\n    return 2 * x\n")
    (root / ".pytest.ini").write_text("[pytest]\nmarkers =\n    gloo: real processes\n    cuda: a GPU\n")
    start = "import pytest\nfrom megazero.units import double\n"
    (root / "tests/test_a.py").write_text(f"{start}@pytest.mark.gloo\ndef test_it(): assert double(3) == 6\n")
    (root / "tests/test_b.py").write_text("def test_it(): assert False\n")


def test_what_comes_of_each_row_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(faults: tuple[Fault, ...]) -> None:
        monkeypatch.setattr(planted_faults, "FAULTS", faults)

    # Plugins take most of the start of pytest, which starts ten times here, and these tests use none.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(planted_faults, "copy_tree", write_tree)
    monkeypatch.setattr(planted_faults, "problems", lambda _: [])
    records = tmp_path / "r.jsonl"
    use((SEEN, UNSEEN, ANYWAY, BROKEN))
    assert main(["--records", str(records), "--minutes", "0"]) == 2 and not records.exists()
    assert main(["--records", str(records)]) == 1
    found = [(record["what"], record["outcome"]) for record in read_records(records)]
    assert found == [
        ("halved", "seen"),
        ("unread", "not seen"),
        ("halved", "not seen"),
        ("no Python", "error"),
    ]
    assert [record["test"] for record in read_records(records)[:3]] == [
        "tests/test_a.py::test_it",
        "",
        "fails without it too: tests/test_b.py::test_it",
    ]
    use((SEEN,))
    assert main(["--records", str(records)]) == 0
    assert len(records.read_text().splitlines()) == 4, "what has been seen is not run again"
    use((SEEN._replace(new="return x + x + x"),))
    assert read_records(records) == []


def test_the_first_failure_of_pytests_summary() -> None:
    text = "..F\n=== summary ===\nFAILED tests/a/test_b.py::test_c[x - y] - AssertionError: no [5 - 3]\n1 failed"
    assert first_failure(text) == "tests/a/test_b.py::test_c[x - y]"
    assert first_failure("3 passed") == ""
