"""One voice for many ranks, and exit codes of programs."""

import pytest

from megazero.console import Console, launcher_rank, run_program
from megazero.errors import ConfigError, TrainingError


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    Console(0).line("from 0")
    Console(3).line("from 3")
    assert capsys.readouterr().out == "from 0\n"


def test_lines_are_neither_wrapped_nor_styled_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[bold]x[/bold] :smile: " + "word " * 100
    Console(0).line(text)
    assert capsys.readouterr().out.rstrip() == text.rstrip()


@pytest.mark.parametrize("rank", [0, 1])
def test_tracking_yields_everything_on_every_rank(rank: int) -> None:
    assert list(Console(rank).track(range(5), total=5, description="counting")) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"RANK": "3"}, 3),
        ({"SLURM_PROCID": "5"}, 5),
        ({"RANK": "1", "SLURM_PROCID": "5"}, 1),
    ],
)
def test_the_launcher_tells_the_rank(environment: dict[str, str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launcher_rank() == rank


def raising(error: BaseException) -> int:
    def main() -> None:
        raise error

    return run_program(main)


def test_user_errors_end_a_program_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert raising(ConfigError("--lr -1")) == 2
    assert capsys.readouterr().err == "configuration error: --lr -1\n"
    assert raising(KeyboardInterrupt()) == 130
    assert run_program(lambda: None) == 0 and run_program(lambda: 4) == 4


def test_a_rank_that_nobody_ended_says_its_error_late(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 speaks at once and the launcher ends the others; one that is left has an error of its own."""
    waits: list[float] = []
    monkeypatch.setattr("megazero.console.time.sleep", waits.append)
    assert raising(TrainingError("the loss scale is exhausted")) == 3
    assert waits == []
    monkeypatch.setenv("RANK", "1")
    assert raising(TrainingError("only here")) == 3
    assert len(waits) == 1 and waits[0] >= 1
    assert capsys.readouterr().err.splitlines() == [
        "training stopped: the loss scale is exhausted",
        "training stopped: only here",
    ]


def test_our_own_bugs_keep_their_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        raising(ZeroDivisionError())
