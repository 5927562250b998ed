"""Tests of the transcript of a newcomer's way: Ctrl-C, outputs that are cut, commands without Linux's calls."""

import argparse
from pathlib import Path

import first_minutes
import pytest
from first_minutes import Done, Step, environment_of, page, shown, take

import megazero

RUN = """\
trap 'echo saved; exit 130' INT
for step in 1 2 3; do echo "[now] iteration  $step/ 9"; done
echo "[now] iteration  4/9"
for wait in $(seq 600); do sleep 0.1; done
echo not reached
"""


def test_a_step_gets_ctrl_c_where_it_has_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(RUN)
    environment = environment_of(tmp_path, without_linux=False, installed=True)
    done = take(Step("bash run.sh", stop_at="iteration 4/9"), tmp_path, environment)
    assert done.status == 130 and done.lines[3:] == ["[now] iteration  4/9", "^C", "saved"]
    failed = take(Step("cat nothing"), tmp_path, environment)
    assert failed.status == 1 and "No such file" in failed.lines[0]


def test_long_outputs_are_cut_in_the_middle() -> None:
    assert shown(["a", "b" * 200]) == ["a", "b" * 157 + "..."]
    lines = [str(number) for number in range(30)]
    assert shown(lines) == ["0", "1", "2", "3", "4", "... (20 lines)", "25", "26", "27", "28", "29"]
    assert shown(lines[:11]) == lines[:11]
    stopped = [*lines[:12], "^C", *lines[13:]]
    assert shown(stopped)[4:11] == ["4", "... (6 lines)", "11", "^C", "13", "... (11 lines)", "25"]


@pytest.mark.parametrize("without_linux", [False, True])
def test_the_command_is_this_trees_in_an_environment_of_its_own(without_linux: bool, tmp_path: Path) -> None:
    environment = environment_of(tmp_path, without_linux=without_linux, installed=False)
    assert not [name for name in environment if name.startswith(("OMP_", "RANK", "MASTER_"))]
    done = take(Step("megazero --version"), tmp_path, environment)
    assert (done.status, done.lines) == (0, [megazero.__version__])
    seen = take(Step("python -c 'import megazero; print(megazero.__file__)'"), tmp_path, environment)
    assert seen.lines == [megazero.__file__]


def test_the_page_has_every_command_with_its_time(tmp_path: Path) -> None:
    (*_, on_4, on_2, _, _, _, _) = first_minutes.steps(40, 10)
    assert "--processes 4" in on_4.command and on_4.stop_at == "iteration 10/" and "--processes 2" in on_2.command
    found = [Done(Step("one"), 0, 30.0, [f"in {tmp_path}/first"]), Done(Step("two"), 1, 60.0, ["```"])]
    options = argparse.Namespace(without_linux=True, no_install=True)
    text = "\n\n".join(page(found, options, tmp_path))
    assert "$ one\nin FOLDER/first\n" in text and "30.0 s, status 0; 0.5 minutes since the beginning" in text
    assert "$ two\n'''\n```\n\n60.0 s, status 1; 1.5 minutes" in text and "without Linux's own calls" in text
