"""Tests of the python that has its imports: programs get what they were started with, and their ends are seen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.warm_python import warm_python

# The fork server takes seconds to start, which is too long for a quick selection of tests.
pytestmark = pytest.mark.gloo

WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def both(*words: str, **options: Any) -> list[tuple[int, str, str]]:
    """Return exit status and output of a program under python itself and under the executable."""
    done = [
        subprocess.run([python, *words], capture_output=True, text=True, timeout=60, **options)
        for python in (sys.executable, warm_python())
    ]
    return [(each.returncode, each.stdout, each.stderr) for each in done]


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import sys; print(sys.argv, sys.stdin.read()); sys.exit(3)", "a", "b c"],
        ["-c", "import sys; sys.exit('a message')"],
        ["-c", "import os; os.kill(os.getpid(), 15)"],
        ["-u", "-B", "-c", "import os; print(sorted(os.environ), os.getcwd(), end=''); os._exit(0)"],
        ["-c", "import atexit; atexit.register(print, 'last'); print('first')"],
        ["-m", "json.tool", "--compact"],
        ["-O", "-c", "import sys; print(sys.flags.optimize)"],
    ],
    ids=str,
)
def test_a_program_runs_as_under_python(words: list[str], tmp_path: Path) -> None:
    plain, warm = both(*words, input='{"a": 1}', cwd=tmp_path, env={"PATH": os.defpath, "A": "ü", "LC_ALL": "C.UTF-8"})
    assert plain == warm


def test_a_file_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("word = 5\n")
    (tmp_path / "a.py").write_text("import beside, sys\nprint(__name__, __file__, sys.argv, beside.word)\n1 / 0\n")
    plain, warm = both(str(tmp_path / "a.py"), "x", cwd="/")
    assert plain[:2] == warm[:2] and plain[0] == 1
    assert warm[2].endswith(plain[2].partition("\n")[2]) and "1 / 0" in warm[2]


def test_its_imports_are_there() -> None:
    program = "import sys; assert {'torch', 'megazero.train.program'} <= set(sys.modules)"
    assert subprocess.run([warm_python(), "-c", program]).returncode == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, -signal.SIGINT)])
def test_signals_reach_the_program(number: signal.Signals, status: int) -> None:
    with subprocess.Popen([warm_python(), "-c", WAITS], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None and program.stdout.readline()
        program.send_signal(number)
        assert program.wait(30) == status


def test_killed_it_takes_the_program_along() -> None:
    with subprocess.Popen([warm_python(), "-c", WAITS], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        process = int(program.stdout.readline())
        program.kill()
    give_up = time.monotonic() + 30
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
