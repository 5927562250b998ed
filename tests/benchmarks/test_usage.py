"""Tests of measuring commands: the seconds and memory of a command and its children, not of the measuring process."""

import sys
from pathlib import Path

import pytest
from usage import CommandFailed, measure


def run(tmp_path: Path, program: str, **environment: str) -> tuple[float, float, int, str]:
    return measure([sys.executable, "-S", "-E", "-c", program], tmp_path, environment)


def test_seconds_and_memory_are_the_commands() -> None:
    quiet = run(Path("/"), "import time; time.sleep(0.2)")
    busy = run(Path("/"), "import time\nwhile time.process_time() < 0.3: pass")
    assert quiet[0] < 0.2 <= quiet[1] and busy[0] >= 0.3
    held = b"x" * (300 << 20)  # held by the measuring process, whose memory must not count
    assert 1 << 20 < run(Path("/"), "pass")[2] < 100 << 20
    assert 150 << 20 < run(Path("/"), "x = b'x' * (150 << 20)")[2] < 250 << 20 < len(held)


def test_processes_below_it_count() -> None:
    below = "import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', sys.argv[1]])"
    busy = "import time; x = b'x' * (150 << 20)\nwhile time.process_time() < 0.3: pass"
    usage = measure([sys.executable, "-S", "-c", below, busy], Path("/"))
    assert usage.cpu >= 0.3 and usage.peak > 150 << 20


def test_what_it_says_and_where_it_runs(tmp_path: Path) -> None:
    usage = run(tmp_path, "import os; print(os.getcwd(), os.environ['WORD'])", WORD="yes")
    assert usage[3] == f"{tmp_path} yes\n"


@pytest.mark.parametrize(
    ("program", "message"),
    [("raise SystemExit('no\\nwords')", "exit status 1: words"), ("import os; os.kill(os.getpid(), 9)", "status 137")],
)
def test_a_failure_says_why(tmp_path: Path, program: str, message: str) -> None:
    with pytest.raises(CommandFailed, match=message):
        run(tmp_path, program)
