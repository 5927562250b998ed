"""Tests of the measurements of code structure, on a small tree counted by hand, and of the comparison of records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import source_measures as source
import structure
from structure import FOLDER, RESULTS, figures, is_record, main, newest_record, rows, size_report, sizes
from support.each import each
from support.source_tree import ROOT
from support.warm_python import warm_python
from walks import WALKS, Station, measure_walk, measure_walks, stations

ONE = '''"""Two lines

of a docstring."""

import os
from megazero.two import inner, other


# A comment.
class Thing:
    """What it is."""

    def first(self) -> str:
        return """
# no comment, but text

"""

    def second(self):
        def within():
            pass
        return os  # code

'''
RUN = '"""Runs the loop."""\nfrom megazero.train.loop import loop\n\nloop()\n'
LOOP = """from megazero.train.step import training_step
from megazero.two.inner import helper

def loop():
    for number in range(4):
        helper(number)
        training_step()
"""
STEP = """from megazero.two.inner import helper, numbers

def training_step():
    helper(1)
    return own() + sum(numbers())

def own():
    return helper(2)
"""
INNER = """def helper(number):
    return number

def numbers():
    yield 1
    yield 2
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "pretrain_gpt.py": RUN,
        "megazero/__init__.py": "",
        "megazero/one.py": ONE,
        "megazero/two/__init__.py": '"""Two."""\n',
        "megazero/two/inner.py": INNER,
        "megazero/train/__init__.py": "",
        "megazero/train/loop.py": LOOP,
        "megazero/train/step.py": STEP,
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def test_every_line_is_of_one_kind(tree: Path) -> None:
    one = next(file for file in source.read_files(tree) if file.name == "megazero/one.py")
    kinds = source.line_kinds(one)
    assert kinds == {"lines": 23, "code": 11, "comments": 1, "docstrings": 4, "blank": 7}
    assert dict(one.functions()) == {"Thing.first": 5, "Thing.second": 4, "Thing.second.within": 2}


@pytest.mark.parametrize("folder", ["megazero", "tools", "benchmarks"])
def test_kinds_of_lines_sum_up(folder: str) -> None:
    for file in source.read_files(ROOT, folder):
        kinds = source.line_kinds(file)
        assert kinds.pop("lines") == sum(kinds.values()) == len(file.lines), file.name


def test_packages_and_imports(tree: Path) -> None:
    files = source.read_files(tree)
    packages = source.by_package(files)
    assert {name: len(inside) for name, inside in packages.items()} == {"top level": 2, "train": 3, "two": 2}
    row = source.package_row(packages["train"])
    assert (row["files"], row["functions"], row["file_lines"]["max"]) == (3, 3, 8)
    graph = source.imports(files)
    assert graph["megazero.one"] == {"megazero.two", "megazero.two.inner"}
    assert source.fan_in(graph)["megazero.two.inner"] == 3 and source.fan_out(graph)["megazero.train.loop"] == 2


@each(
    ("lengths", "expected"),
    [([], (0, 0, 0)), ([7], (7, 7, 7)), (range(1, 11), (6, 10, 10)), (range(1, 101), (50, 91, 100))],
)
def test_spreads(lengths: list[int], expected: tuple[int, int, int]) -> None:
    assert tuple(source.spread(lengths).values()) == expected


def test_a_repeated_run_counts_once(tree: Path) -> None:
    same = "".join(f"    x = {number}\n" for number in range(source.REPEATED_LINES + 2))
    (tree / "megazero" / "a.py").write_text(f"def a():\n{same}")
    (tree / "megazero" / "b.py").write_text(f"\ndef b():\n    if True:\n{same.replace('    ', '        ')}")
    assert source.repeated_runs(source.read_files(tree)) == [("megazero/a.py:2", "megazero/b.py:4")]


def test_calls_of_a_step_are_those_of_one_round_of_the_loop(tree: Path) -> None:
    assert count(tree, tree.parent / "calls.json") == ""
    # training_step, helper, own, helper, numbers (resumed twice more, to its end), and helper of the loop.
    expected = {"files": 2, "functions": 4, "calls": 8, "moves": 7, "depth": 4}
    assert json.loads((tree.parent / "calls.json").read_text()) == expected


def test_a_step_of_twelve_layers_makes_at_most_12_000_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """It made 21,005 before the indices of a layout were computed once."""
    monkeypatch.setattr(sys, "executable", warm_python())
    assert structure.step_calls(ROOT, 12)["calls"] <= 12_000


def test_a_run_without_steps_is_an_error(tree: Path) -> None:
    (tree / "pretrain_gpt.py").write_text("import sys\nsys.exit()\n")
    assert "training_step was called 0 times" in count(tree, tree.parent / "calls.json")


def count(tree: Path, found: Path) -> str:
    """Count the calls of the tree's training step into the file `found`, and return the output on stderr."""
    command = [sys.executable, str(FOLDER / "step_calls.py"), str(found)]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stderr


def test_stations_of_the_walks_are_there() -> None:
    walks = measure_walks(ROOT)
    assert {name: walk["missing"] for name, walk in walks.items()} == {name: [] for name in WALKS}


def test_a_station_that_has_moved_has_two_places() -> None:
    text = "a:one\n    b:two  was c:other.two"
    assert stations(text) == [("a", "one"), ("b", "two")]
    assert stations(text, before=True) == [("a", "one"), ("c", "other.two")]


def test_a_walk_counts_files_and_returns(tree: Path) -> None:
    walk = stations(
        "train/loop:loop\n  train/step:training_step\n  train/step:own\n  two/inner:helper\n  train/loop:loop"
    )
    assert measure_walk(tree, walk) == {"files": 3, "returns": 1, "stations": 5, "missing": []}
    wrong = [Station("train/step", "gone"), Station("nowhere", "f"), Station("one", "Thing.second.within")]
    assert measure_walk(tree, wrong)["missing"] == ["train/step:gone", "nowhere:f"]


def test_sizes_beside_a_record(tree: Path) -> None:
    before = {"commit": "abc", "package_lines": {"train": 10, "gone": 5}, "longest_functions": [], "longest_files": []}
    before["longest_files"] = [["megazero/one.py", 20]]
    now = sizes(tree)
    assert now["package_lines"] == {"top level": 23, "train": 15, "two": 7}
    packages, functions, files = size_report(now, before)
    assert "at abc" in packages
    assert "| train | 15 | 10 | +5 |" in packages and "| gone | - | 5 | -5 |" in packages
    assert "| two | 7 | - | - |" in packages and "| all | 45 | 15 | +30 |" in packages
    assert "| megazero/train/loop.py:loop | 4 | - |" in functions and "| megazero/one.py | 23 | 20 |" in files


def test_size_report_needs_no_torch(tree: Path) -> None:
    words = "import sys, structure; structure.main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", words, "--sizes", "--tree", str(tree)]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip().endswith("False"), done.stderr


def test_records_are_compared_figure_by_figure() -> None:
    newest = newest_record()
    assert newest is not None and newest.parent == RESULTS
    record = json.loads(newest.read_text())
    names = [name for name, _ in figures(record)]
    assert len(names) == len(set(names)) and names[0] == "commit"
    shown = {row[0]: row[1:] for row in rows(record, {**record, "fast_seconds": 12.5, "commit": "other"})}
    assert shown["commit"] == [record["commit"], "other"] and shown["test.sh --fast, seconds"][1] == "12.5"
    assert all(before == after for name, (before, after) in shown.items() if name.startswith(("zero", "a training")))
    assert {row[1] for row in rows({}, record)} == {"-"}


def test_the_old_tree_is_on_record() -> None:
    record = json.loads((RESULTS / "2026-11-22-structure-a6d51de.json").read_text())
    assert record["commit"] == "a6d51de" and record["whole"]["files"] == 239 and record["whole"]["lines"] == 31310
    assert {name: walk["files"] for name, walk in record["walks"].items()} == {
        "a loss": 20,
        "a parameter": 23,
        "the ZeRO stage": 23,
    }


@pytest.mark.parametrize("words", [["--tree", "nowhere"], ["--against", "nowhere"], ["--against", "README.md"]])
def test_paths_that_are_neither_tree_nor_record(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        structure.parse_arguments(words)
    assert words[1] in capsys.readouterr().err


def test_main_measures_and_writes(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(structure, "RESULTS", tree.parent)
    words = ["--tree", str(tree), "--against", str(RESULTS / "2026-11-22-structure-a6d51de.json"), "--output", "made"]
    assert main([*words, "--fast-seconds", "99"]) == 1  # because the tree lacks the stations of the walks
    shown = capsys.readouterr()
    assert "train/step:StepReport" in shown.err and "| test.sh --fast, seconds | - | 99 |" in shown.out
    assert "| a training step, 2 layers: files, functions, calls, moves, depth |" in shown.out
    assert "| 2, 4, 8, 7, 4 |" in shown.out
    assert is_record(tree.parent / "made.json")
