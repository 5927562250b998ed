"""Tests of the console: only rank 0 prints, pipes get plain text and terminals a bar, and programs have exit codes."""

import os
import pty
import sys
from collections.abc import Callable

import pytest

from megazero import console
from megazero.console import Console, launcher_rank, run_program
from megazero.errors import ConfigError, TrainingError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launcher's variables, as if the tests had been started by hand."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        monkeypatch.delenv(name, raising=False)


def on_a_terminal(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a terminal in place of standard output shows while the action runs."""
    shown, ours = pty.openpty()
    with os.fdopen(shown, "rb", buffering=0) as screen, os.fdopen(ours, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setenv("TERM", "xterm")
        action()
        Console(0).line("end")
        text = b""
        while not text.endswith(b"end\r\n"):
            text += screen.read(4096)
    return text.decode()


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "5"}, 5),
        ({"RANK": "0", "SLURM_PROCID": "5"}, 0),
        ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "1"}, 3),
        ({"PMI_RANK": "2"}, 2),
        # Other code reports a rank that makes no sense; here it must only not raise an error.
        ({"RANK": "abc"}, 0),
        ({"RANK": ""}, 0),
        ({"RANK": "-1"}, 0),
    ],
)
def test_launcher_rank(environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher_rank() == rank
    assert Console().prints == (rank == 0)


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    Console(1).line("not me")
    Console(0).line("me")
    assert capsys.readouterr().out == "me\n"


def test_a_rank_that_is_told_counts_more_than_the_launchers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "7")
    Console(0).line("me")
    Console().line("not me")
    assert capsys.readouterr().out == "me\n"


@pytest.mark.parametrize(
    "text", ["", "x" * 1000, " | ".join(["words"] * 500), "[bold]no markup[/bold] :smile:", "two\nlines", "1.5e-03 'q'"]
)
def test_a_pipe_gets_the_text_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Console(0).line(text)
    assert capsys.readouterr().out == text + "\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipe_gets_no_bar(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Console(rank).track(range(4), total=4, description="reading")) == [0, 1, 2, 3]
    with Console(rank).progress() as progress:
        progress.advance(progress.add_task("reading", total=2))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_terminal_gets_a_bar_from_rank_0(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        assert list(Console(rank).track("abc", total=3, description="reading")) == ["a", "b", "c"]

    shown = on_a_terminal(read, monkeypatch)
    if rank == 0:
        assert "reading" in shown and "3/3" in shown
    else:
        assert shown == "end\r\n"


@pytest.mark.parametrize(("result", "code"), [(None, 0), (0, 0), (4, 4)])
def test_exit_codes(result: int | None, code: int) -> None:
    assert run_program(lambda: result) == code


@pytest.mark.parametrize(("error", "code"), [(ConfigError("--lr 0"), 2), (TrainingError("--lr 9"), 3)])
def test_user_errors_have_a_text_and_no_traceback(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise error

    assert run_program(main) == code
    assert capsys.readouterr() == ("", f"{error}\n")


def test_user_errors_are_told_without_a_sensible_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise ConfigError("RANK")

    monkeypatch.setenv("RANK", "abc")
    assert run_program(main) == 2
    assert capsys.readouterr().err == "configuration error: RANK\n"


def test_another_rank_tells_its_error_after_a_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise ConfigError("only here")

    monkeypatch.setenv("RANK", "2")
    monkeypatch.setattr(console, "_SILENCE_SECONDS", 0.01)
    assert run_program(main) == 2
    assert capsys.readouterr().err == "configuration error: only here\n"


@pytest.mark.parametrize(("rank", "text"), [("0", "interrupted\n"), ("1", "")])
def test_an_interrupt_is_told_once(
    rank: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", rank)
    assert run_program(main) == 130
    assert capsys.readouterr().err == text


def test_our_own_errors_keep_their_traceback() -> None:
    def main() -> None:
        raise ArithmeticError("a bug")

    with pytest.raises(ArithmeticError):
        run_program(main)
