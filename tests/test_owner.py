"""Tests of owners: which processes are known to be gone, as seen from this one."""

import os
import signal
import socket
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from support.each import each

from megazero import owner as owner_module
from megazero.operating_system import nameless_file
from megazero.owner import Owner, ProcessState, open_shared_file, process_start, process_state

HERE = Owner.of_this_process()
MANY_THREADS = """
import threading, time
kept = bytearray(20 << 20)
for _ in range(40):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("ready", flush=True)
time.sleep(60)
"""


def owner_of_a_child() -> tuple[int, Owner]:
    """Fork a child that waits for a signal; return its process id and its owner as it has found it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, Owner.of_this_process().tag.encode())
        signal.pause()
        os._exit(0)
    owner = Owner.from_tag(os.read(reading, 1000).decode())
    os.close(reading)
    os.close(writing)
    assert owner is not None and owner.pid == child
    return child, owner


def test_a_process_is_gone_once_it_is_killed_even_before_its_parent_has_asked_for_it() -> None:
    child, owner = owner_of_a_child()
    try:
        assert not owner.is_gone(HERE)
        os.kill(child, signal.SIGSTOP)
        assert not owner.is_gone(HERE), "a stopped process goes on when it is told to"
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and is there until somebody waits for it
        assert owner.is_gone(HERE)
    finally:
        os.waitpid(child, 0)
    assert owner.is_gone(HERE)


def test_a_process_is_gone_whose_parent_waits_for_it_while_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    child, owner = owner_of_a_child()
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    start = owner_module.process_start
    looks = iter([True, False])

    def start_before_the_parent_waits(pid: int) -> int | None:
        found = start(pid)
        if next(looks):
            os.waitpid(child, 0)
        return found

    monkeypatch.setattr(owner_module, "process_start", start_before_the_parent_waits)
    assert process_state(child, owner.started) is ProcessState.GONE


def test_a_process_is_gone_once_its_connections_are_closed() -> None:
    """A peer that finds a connection closed asks at once, while the killed process's threads still stand as running."""
    for _ in range(15):
        words = [sys.executable, "-c", MANY_THREADS]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
            started = process_start(child.pid) or 0
            assert process_state(child.pid, started) is ProcessState.RUNNING
            child.kill()
            assert child.stdout.read() == b"", "read to the end, when the child's files have been closed"
            assert process_state(child.pid, started) is ProcessState.GONE


def test_a_process_id_that_was_given_again_is_another_process() -> None:
    assert not HERE.is_gone(HERE)
    assert replace(HERE, started=HERE.started + 1).is_gone(HERE)


def test_the_first_process_of_the_machine_lives_whoever_reads_it() -> None:
    fields = Path("/proc/1/stat").read_text().rpartition(")")[2].split()
    assert not replace(HERE, pid=1, started=int(fields[19])).is_gone(HERE)


@each(
    ("changes", "gone"),
    [
        ({"namespace": 1}, False),  # a container on this machine: its ids are others'
        ({"boot": "00000000"}, True),  # this machine before it was started again
        ({"boot": "00000000", "machine": "00000000"}, False),
        ({"boot": "00000000", "machine": ""}, False),  # "localhost" is many machines
        ({"boot": ""}, False),
    ],
)
def test_what_cannot_be_seen_from_here_may_live(changes: dict[str, str | int], gone: bool) -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    owner = Owner.from_tag(replace(HERE, pid=process.pid).tag)
    assert owner is not None and owner.is_gone(HERE)
    assert replace(owner, **changes).is_gone(HERE) is gone


def test_where_the_system_tells_nothing_nobody_is_gone() -> None:
    blank = replace(HERE, boot="", machine="", namespace=0)
    assert not replace(blank, pid=2**30).is_gone(blank)


def test_only_tags_are_read_as_tags() -> None:
    for text in ("", "4711", "a-b-c-d-e", f"{HERE.tag}-1", f"../{HERE.tag}", f"{HERE.tag}\n", "1-2---3"):
        found = Owner.from_tag(text)
        assert found is None or found.tag == text
        assert Owner.from_tag(HERE.tag) == HERE


def test_a_system_without_proc_finds_a_process_gone_when_its_id_is_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(owner_module, "_PROCESSES", tmp_path)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-laptop")
    child, owner = owner_of_a_child()
    here = Owner.of_this_process()
    assert here.boot == "" and here.machine == owner.machine != ""
    assert not here.is_gone(here) and not owner.is_gone(here)
    assert not owner.is_comparable(here), "a process that has its id may be another one"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert owner.is_gone(here)
    for other in (replace(owner, machine="1a2b3c4d"), replace(owner, machine=""), replace(owner, namespace=7)):
        assert not other.is_gone(here)
    monkeypatch.setattr(uuid, "getnode", lambda: 1)
    assert not owner.is_gone(Owner.of_this_process()), "another machine of the same name"
    assert not owner.is_gone(HERE) and not HERE.is_gone(here)


def test_only_a_file_without_a_name_is_opened_for_another_process(tmp_path: Path) -> None:
    file, named = nameless_file(5), os.open(tmp_path / "named", os.O_CREAT | os.O_RDWR)
    opened = open_shared_file(os.getpid(), file)
    os.write(opened, b"seen")
    assert os.read(file, 9) == b"seen\0"
    with pytest.raises(FileNotFoundError, match="its memory is not there"):
        open_shared_file(os.getpid(), named)
    for descriptor in (opened, file, named):
        os.close(descriptor)
    with pytest.raises(FileNotFoundError):
        open_shared_file(os.getpid(), file)
