"""The progress of long work is shown as lines in a file or pipe, and as a bar of one line on a terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from megazero.console import Console
from megazero.prepare.tokens import progress as module
from megazero.prepare.tokens.progress import NOTHING, TextProgress, WorkCount

ROOT = Path(__file__).parents[3]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock by a list of one number of seconds, which the test sets."""
    seconds = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_a_line_every_so_many_documents(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TextProgress(Console(rank=0), 10 << 20, 100, NOTHING) as progress:
        for _ in range(10):
            clock[0] += 0.5
            progress.advance(WorkCount(40, 1000, 1 << 20))
    found = lines(capsys)
    assert [line.split()[0] for line in found] == ["120", "200", "320", "400"]
    assert found[1] == "200 documents, 5.0K tokens, 5.0 MiB of 10.0 MiB | 80 documents/s | 2.1 MB/s | ETA 2.5s"
    assert found[-1].endswith("ETA 0.0s")


def test_what_was_done_earlier_counts_but_not_for_the_rates(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with TextProgress(Console(rank=0), 9_000_000, 1, WorkCount(500, 50_000, 5_000_000)) as progress:
        clock[0] = 2.0
        progress.advance(WorkCount(20, 2000, 2_000_000))
    assert lines(capsys) == ["520 documents, 52.0K tokens, 6.7 MiB of 8.6 MiB | 10 documents/s | 1.0 MB/s | ETA 2.0s"]


def test_of_a_pipe_nobody_knows_the_end(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with TextProgress(Console(rank=0), 0, 1, NOTHING) as progress:
        clock[0] = 1.0
        progress.advance(WorkCount(1, 10, 3_000_000))
    assert lines(capsys) == ["1 documents, 10 tokens, 2.9 MiB | 1 documents/s | 3.0 MB/s"]


PROGRAM = """
import time
from megazero.console import Console
from megazero.prepare.tokens.progress import WorkCount, TextProgress
console = Console(rank=0)
with TextProgress(console, 50_000_000, 1) as progress:
    for number in range(50):
        progress.advance(WorkCount(1000, 1_000_000, 1_000_000))
        if number == 25:
            console.line("a line between")
        time.sleep(0.01)
print("the end")
"""


def on_a_terminal(columns: int) -> str:
    """Return everything that the program sends to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "RANK", "NO_COLOR")}
    environment |= {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment):
        os.close(theirs)
        text = b""
        try:
            while block := os.read(ours, 4096):
                text += block
        except OSError:
            pass  # how a pseudo-terminal reports that its last writer has closed it
        os.close(ours)
    return text.decode()


@pytest.mark.parametrize("columns", [80, 50])
def test_a_bar_stays_on_its_line_and_goes_away(columns: int) -> None:
    text = on_a_terminal(columns)
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    whole = visible.split("\r\n")
    assert len(whole) <= 5, "a picture of the bar that stays"
    pictures = [picture for line in whole for picture in line.split("\r")]
    assert max(map(len, pictures)) <= columns
    assert any("documents" in picture and "MB/s" in picture for picture in pictures)
    if columns == 80:
        assert any(picture.startswith("100% ") and picture.rstrip().endswith("ETA 0.0s") for picture in pictures)
    assert "a line between" in pictures and pictures[-2] == "the end"
