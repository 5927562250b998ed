"""Tests of a job's end: one rank reports its error, later failures stay quiet, and bugs keep their traceback."""

import pytest
from torch.distributed import HashStore, Store

from megazero.comm.shutdown import single_failure_report
from megazero.errors import DataError, TrainingError


class GoneStore(Store):
    """A store whose host process has ended."""

    def compare_set(self, *unused: object) -> bytes:
        raise RuntimeError("connection reset by peer")

    def check(self, *unused: object) -> bool:
        raise RuntimeError("connection reset by peer")


def end(store: Store | None, rank: int, error: Exception) -> int:
    """Return the exit code of a rank whose training raises `error`."""
    with pytest.raises(SystemExit) as caught, single_failure_report(store, rank):
        raise error
    code = caught.value.code
    assert isinstance(code, int)
    return code


def test_the_first_rank_speaks_and_all_leave_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    store = HashStore()
    assert end(store, 3, TrainingError("the loss is lost")) == 3
    assert capsys.readouterr() == ("", "training stopped: the loss is lost\n")
    assert end(store, 2, TrainingError("the loss is lost")) == 3
    assert end(store, 0, DataError("the file is gone")) == 3
    assert end(store, 1, RuntimeError("Connection closed by peer")) == 3
    assert capsys.readouterr() == ("", "")


def test_broken_communication_without_a_note_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"), single_failure_report(HashStore(), 0):
        raise RuntimeError("Connection closed by peer")


def test_bugs_keep_their_traceback() -> None:
    store = HashStore()
    end(store, 1, DataError("the file is gone"))
    with pytest.raises(KeyError), single_failure_report(store, 0):
        raise KeyError("a bug")


def test_without_a_store_everyone_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    assert end(GoneStore(), 2, DataError("the file is gone")) == 2
    assert capsys.readouterr() == ("", "data error: the file is gone\n")
    with pytest.raises(RuntimeError, match="Connection closed"), single_failure_report(GoneStore(), 0):
        raise RuntimeError("Connection closed by peer")


def test_a_job_of_one_process_raises_as_ever() -> None:
    with pytest.raises(DataError), single_failure_report(None, 0):
        raise DataError("the file is gone")
    with single_failure_report(None, 0):
        pass
