"""Tests of the lock of a folder, with real processes that race for it and that are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.late_communicator import LateCommunicator
from support.thread_world import run_threads
from support.warm_python import warm_python

from megazero.checkpoint.folder_lock import LOCK, FolderLock, Holder, lock_folder, take_lock
from megazero.errors import CheckpointError
from megazero.owner import Owner

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = ("SLURM_JOB_ID", "SLURM_CLUSTER_NAME", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def in_a_child(action: Callable[[], object]) -> int:
    """Fork a child that calls `action` and ends with status 0, or 1 if that raises; return its process id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return child


def status_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def another_holder(root: Path, *, then: signal.Signals) -> Iterator[int]:
    """Let another process take the lock and wait; send it a signal, and end it behind the block."""

    def hold() -> None:
        take_lock(root)
        signal.pause()

    child = in_a_child(hold)
    try:
        while not (root / LOCK).exists():
            time.sleep(0.01)
        os.kill(child, then)
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_lock_names_its_holder_and_is_removed_at_the_end(tmp_path: Path) -> None:
    root = tmp_path / "new" / "run"
    lock = take_lock(root)
    assert [path.name for path in root.iterdir()] == [LOCK]
    held = json.loads((root / LOCK).read_text())
    assert held["owner"] == Owner.of_this_process().tag and held["pid"] == os.getpid()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", held["since"]) and held["host"]
    lock.ensure()
    lock.release()
    lock.release()
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("state", [signal.SIGCONT, signal.SIGSTOP])
def test_the_lock_of_a_living_process_is_refused_with_its_name(tmp_path: Path, state: signal.Signals) -> None:
    with another_holder(tmp_path, then=state) as child, pytest.raises(CheckpointError) as caught:
        take_lock(tmp_path)
    (problem,) = caught.value.problems
    assert re.search(rf"\.lock is held by process {child} on .*, since 20", problem.given)
    assert "that process is running" in problem.rule and problem.legal == "another folder"
    assert (tmp_path / LOCK).exists()


def test_the_lock_of_a_killed_process_is_broken(tmp_path: Path) -> None:
    with another_holder(tmp_path, then=signal.SIGKILL) as child:
        time.sleep(0.1)
        lock = take_lock(tmp_path)  # though the parent has not asked for the child's status yet
    assert re.search(rf"\.lock was held by process {child} on .*: broken, because that process is gone", lock.broken)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    lock.ensure()


def test_a_lock_that_cannot_be_seen_through_names_the_file_to_remove(tmp_path: Path) -> None:
    take_lock(tmp_path)
    elsewhere = replace(Owner.of_this_process(), machine="0" * 8, boot="0" * 8)
    rewrite(tmp_path / LOCK, owner=elsewhere.tag, host="node07", pid=4711, job="Slurm job 12")
    with pytest.raises(CheckpointError) as caught:
        take_lock(tmp_path)
    (problem,) = caught.value.problems
    assert "process 4711 on node07 (Slurm job 12), since" in problem.given
    assert problem.legal.endswith(f"if that job has ended, remove {tmp_path / LOCK}")
    (tmp_path / LOCK).unlink()
    assert take_lock(tmp_path).broken == ""


@pytest.mark.parametrize(
    ("job", "restarts", "is_broken"), [("12", "1", True), ("12", "0", False), ("13", "1", False), ("", "", False)]
)
def test_slurm_has_ended_a_job_that_it_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, restarts: str, is_broken: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    take_lock(tmp_path)
    elsewhere = replace(Owner.of_this_process(), machine="0" * 8, boot="0" * 8)
    rewrite(tmp_path / LOCK, owner=elsewhere.tag)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    if not is_broken:
        with pytest.raises(CheckpointError, match="Slurm job 12"):
            take_lock(tmp_path)
    else:
        assert "because Slurm has started that job again" in take_lock(tmp_path).broken


def test_torchruns_name_of_the_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "abc")
    assert "(torchrun's run abc)" in str(Holder.of_this_process())


def test_files_that_are_no_locks_are_named(tmp_path: Path) -> None:
    """All at once: each is waited for, since what its holder writes may come late."""

    def complaint(root: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            take_lock(root)
        return str(caught.value)

    contents = ["", "{", "[]", '{"owner": 1}', "x" * 100_000, None]
    roots = [tmp_path / str(number) for number in range(len(contents))]
    for root, content in zip(roots, contents, strict=True):
        root.mkdir()
        if content is None:
            os.mkfifo(root / LOCK)
        else:
            (root / LOCK).write_text(content)
    with ThreadPoolExecutor(len(roots)) as pool:
        for root, found in zip(roots, pool.map(complaint, roots), strict=True):
            assert re.search(rf"{re.escape(str(root))}/\.lock\n.*does not name its holder: .*\n.*remove it", found)


def test_without_hard_links_a_lock_is_made_by_opening_a_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    with another_holder(tmp_path, then=signal.SIGCONT), pytest.raises(CheckpointError, match="is running"):
        take_lock(tmp_path)
    assert "broken" in take_lock(tmp_path).broken


def test_one_message_on_all_ranks(tmp_path: Path) -> None:
    def action(world: LateCommunicator) -> FolderLock | None:
        return lock_folder(tmp_path / "run", control=world)

    with another_holder(tmp_path / "run", then=signal.SIGCONT):
        results = run_threads(3, action)
    assert {type(result) for result in results} == {CheckpointError}
    assert len({str(result) for result in results}) == 1
    lock, *others = run_threads(3, action)
    assert isinstance(lock, FolderLock) and others == [None, None]
    assert "broken" in lock.broken


def race(root: Path, start: int, *, keeps: bool) -> None:
    """Take the lock once `start` can be read, make and remove a file that no other process may have.

    Ends, with or without the lock, with status 1 if another process has the file, 2 if the lock was refused, 3 or 4 if
    it was free or broken.
    """
    os.read(start, 1)
    try:
        lock = take_lock(root)
    except CheckpointError:
        os._exit(2)
    os.close(os.open(root / "writing", os.O_CREAT | os.O_EXCL))
    time.sleep(0.01)
    os.unlink(root / "writing")
    lock.ensure()
    if not keeps:
        lock.release()
    os._exit(4 if lock.broken else 3)


def many_processes_race(root: Path) -> None:
    rounds = []
    for keeps in (True, False, False):
        start, started = os.pipe()
        children = [in_a_child(partial(race, root, start, keeps=keeps)) for _ in range(10)]
        os.write(started, bytes(len(children)))
        rounds.append({status_of(child) for child in children})
        os.close(start)
        os.close(started)
    assert set.union(*rounds) == {2, 3, 4}, "refused, free and broken locks, and no file of two processes"
    assert 3 in rounds[0] and 4 in rounds[1] and 4 not in rounds[2]


def killed_at(number: int, root: Path) -> bool:
    """Take the lock in a fork that kills itself at its n-th file operation; return True if it took it before."""

    def take() -> None:
        seen = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            if event in ("open", "os.rename", "os.link", "os.remove") and str(root) in str(arguments[0]):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        take_lock(root).release()

    return status_of(in_a_child(take)) == 0


def a_process_is_killed_anywhere(root: Path, *, is_held: bool) -> None:
    assert status_of(in_a_child(lambda: take_lock(root))) == 0
    left = (root / LOCK).read_bytes()
    (root / LOCK).unlink()
    for number in range(1, 60):
        if is_held:
            (root / LOCK).write_bytes(left)
        finished = killed_at(number, root)
        take_lock(root).release()
        assert [path.name for path in root.iterdir() if LOCK in path.name] == []
        if finished:
            break
    assert finished and number > 5


SMALL: dict[str, Callable[[Path], None]] = {
    "race": many_processes_race,
    "killed, free": partial(a_process_is_killed_anywhere, is_held=False),
    "killed, held": partial(a_process_is_killed_anywhere, is_held=True),
}


def in_a_small_process(name: str, root: Path) -> None:
    """Make one of these trials in a process that forks far faster than the tests' own, which has a lot of memory."""
    paths = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [warm_python(), __file__, name, str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_of_many_processes_that_race_for_a_lock_one_has_it_at_a_time(tmp_path: Path) -> None:
    in_a_small_process("race", tmp_path)


@pytest.mark.parametrize("state", ["free", "held"])
def test_a_process_killed_anywhere_leaves_a_lock_that_can_be_taken(tmp_path: Path, state: str) -> None:
    in_a_small_process(f"killed, {state}", tmp_path)


if __name__ == "__main__":
    SMALL[sys.argv[1]](Path(sys.argv[2]))
