"""Tests of the journal of long work: what counts as finished, what is cleared, and what each kind of end leaves."""

import errno
import fcntl
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from megazero.errors import DataError
from megazero.files import cannot_write
from megazero.prepare.tokens.journal import FULL, JOURNAL, WorkJournal

WORK = {"input": [["a.jsonl", 10, 5]], "rules": {"keys": ("text",)}, "shard": 0}


def states(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]


def interrupted(
    folder: Path, *finished: dict[str, Any], error: BaseException | None = None, resume: bool = False
) -> None:
    """Run work that finishes the given partitions and is then ended by an error."""
    error = error or KeyboardInterrupt()
    with pytest.raises(type(error)), WorkJournal(folder, WORK, resume=resume) as journal:
        (folder / "c.bin").write_bytes(b"made so far")
        for state in finished:
            journal.finish(state)
        raise error


def test_work_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    with WorkJournal(tmp_path / "deep" / "s", WORK, resume=False) as journal:
        assert journal.last is None and not journal.can_resume
        journal.finish({"chunks": 1})
        assert journal.last == {"chunks": 1} and journal.can_resume
        assert len(states(journal.folder)) == 2
    assert not journal.folder.exists()


def test_an_interruption_before_the_first_partition_leaves_nothing(tmp_path: Path) -> None:
    interrupted(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_later_work_goes_on_after_the_last_partition(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    interrupted(folder, {"chunks": 1}, {"chunks": 2})
    interrupted(folder, {"chunks": 3}, resume=True)
    with WorkJournal(folder, WORK, resume=True) as journal:
        assert journal.last == {"chunks": 3}
        assert (folder / "c.bin").read_bytes() == b"made so far"
        assert [state.get("chunks") for state in states(folder)] == [None, 1, 2, 3]


def test_without_resume_everything_is_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    interrupted(folder, {"chunks": 1})
    (folder / "below").mkdir()
    (folder / "below" / "x").write_bytes(b"")
    with WorkJournal(folder, WORK, resume=False) as journal:
        assert journal.last is None
        assert [path.name for path in folder.iterdir()] == [JOURNAL]
        assert len(states(folder)) == 1


def test_there_may_be_nothing_to_resume(tmp_path: Path) -> None:
    with WorkJournal(tmp_path / "s", WORK, resume=True) as journal:
        assert journal.last is None


def test_a_journal_cut_anywhere_counts_its_whole_lines(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    interrupted(folder, {"chunks": 1}, {"chunks": 2})
    whole = (folder / JOURNAL).read_bytes()
    for size in range(len(whole) + 1):
        interrupted(folder, {"chunks": 1})
        (folder / JOURNAL).write_bytes(whole[:size])
        lines = whole[:size].count(b"\n")
        with pytest.raises(KeyboardInterrupt), WorkJournal(folder, WORK, resume=True) as journal:
            assert journal.last == (None, None, {"chunks": 1}, {"chunks": 2})[lines]
            assert (folder / "c.bin").exists() == (lines > 1)
            journal.finish({"chunks": 9})
            assert states(folder)[-1] == {"chunks": 9} and len(states(folder)) == max(lines, 1) + 1
            raise KeyboardInterrupt


def test_a_line_that_never_reached_the_disk_does_not_count(tmp_path: Path) -> None:
    """A line of zeros is ignored: after a crash of the machine a file may have its length and end in zeros."""
    folder = tmp_path / "s"
    interrupted(folder, {"chunks": 1})
    with open(folder / JOURNAL, "ab") as stream:
        stream.write(b"\0" * 40 + b"\n" + b"\0" * 7)
    with WorkJournal(folder, WORK, resume=True) as journal:
        assert journal.last == {"chunks": 1}
        assert len(states(folder)) == 2


def test_other_work_is_refused_and_told_apart(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    interrupted(folder, {"chunks": 1})
    other = {**WORK, "input": [["a.jsonl", 11, 5]], "shard": 1, "new": True}
    with pytest.raises(DataError) as caught:
        WorkJournal(folder, other, resume=True)
    given = [problem.given for problem in caught.value.problems]
    assert len(given) == 3
    assert "input was" in given[0] and '"a.jsonl", 10' in given[0] and '"a.jsonl", 11' in given[0]
    assert "shard was 0" in given[1] and "is 1" in given[1]
    assert "new was null" in given[2]
    with WorkJournal(folder, WORK, resume=True) as journal:  # the refusals have not changed the journal
        assert journal.last == {"chunks": 1}


def test_of_long_lists_what_differs_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    files = [[f"/some/folder/{number}.jsonl", 10, 5] for number in range(100)]
    with pytest.raises(KeyboardInterrupt), WorkJournal(folder, {"input": files}, resume=False) as journal:
        journal.finish({"chunks": 1})
        raise KeyboardInterrupt
    changed = [*files[:70], ["/some/folder/70.jsonl", 12, 6], *files[71:]]
    with pytest.raises(DataError, match=r'"/some/folder/70.jsonl", 10, 5\].*"/some/folder/70.jsonl", 12, 6\]'):
        WorkJournal(folder, {"input": changed}, resume=True)
    with pytest.raises(DataError, match=r'input was \["/some/folder/99.jsonl", 10, 5\].* and is null'):
        WorkJournal(folder, {"input": files[:99]}, resume=True)


@pytest.mark.parametrize("resume", [False, True])
def test_one_at_a_time(tmp_path: Path, resume: bool) -> None:
    with WorkJournal(tmp_path / "s", WORK, resume=False) as journal:
        journal.finish({"chunks": 1})
        before = (journal.folder / JOURNAL).read_bytes()
        with pytest.raises(DataError, match="another one is running"):
            WorkJournal(tmp_path / "s", WORK, resume=resume)
        assert (journal.folder / JOURNAL).read_bytes() == before


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EIO])
def test_a_file_system_may_know_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if number == errno.EIO:
        with pytest.raises(DataError, match="must be writable"):
            WorkJournal(tmp_path / "s", WORK, resume=False)
    else:
        with WorkJournal(tmp_path / "s", WORK, resume=False) as journal:
            journal.finish({"chunks": 1})
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", sorted(FULL))
def test_a_full_disk_leaves_nothing(tmp_path: Path, number: int) -> None:
    try:
        raise cannot_write(tmp_path, OSError(number, "full")) from OSError(number, "full")
    except DataError as error:
        interrupted(tmp_path / "s", {"chunks": 1}, error=error)
    assert list(tmp_path.iterdir()) == []


def test_another_error_of_the_disk_leaves_what_was_finished(tmp_path: Path) -> None:
    try:
        raise cannot_write(tmp_path, OSError(errno.EIO, "broken")) from OSError(errno.EIO, "broken")
    except DataError as error:
        interrupted(tmp_path / "s", {"chunks": 1}, error=error)
    assert (tmp_path / "s" / JOURNAL).exists()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="must be writable"):
        WorkJournal(tmp_path / "file" / "s", WORK, resume=False)


def test_a_line_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(DataError, match="No space left") as caught,
        WorkJournal(tmp_path / "s", WORK, resume=False) as journal,
    ):
        monkeypatch.setattr(os, "fsync", refuse)
        journal.finish({"chunks": 1})
    assert JOURNAL in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_from_the_start_is_told(tmp_path: Path) -> None:
    """A disk that refuses the first write raises a DataError, although closing the stream tries the write again."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(DataError, match="must be writable"):
            WorkJournal(tmp_path / "s", WORK, resume=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
