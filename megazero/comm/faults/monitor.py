"""The monitor of one rank: its heartbeat in the job's store, and the report when a rank of the job fails.

A thread beside the training writes where the rank is, and reads whether another rank has failed.  The first rank to
meet a fault writes the *note*; then every rank writes its stacks to a file and its last heartbeat to the store, the
note's author prints the report, and all end with the note's exit status, whatever their main thread is waiting for.

No call of the store is waited for without limit: a stopped server answers nothing and closes nothing.  Where the store
has gone, or stands still, ranks find each other's heartbeats in the files, and the first to claim the report prints it.
"""

import faulthandler
import json
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from megazero.comm.faults.abort import abort_groups, uses_nccl
from megazero.comm.faults.fault_report import Fault, Heartbeat, Waiting, report
from megazero.comm.faults.flight_record import FlightRecord
from megazero.comm.faults.suspension import kill_when_suspended
from megazero.comm.mesh import CONTROL
from megazero.errors import first_line
from megazero.owner import ProcessState, process_start, process_state
from megazero.parallel.topology import Topology

T = TypeVar("T")

_INTERVAL_SECONDS = 1.0
_RANKS_PER_SECOND = 500.0  # of a large job; above it, heartbeats are rarer
_ANSWER_SECONDS = 4.0  # how long one call of the store may take
_COLLECTING_SECONDS = 1.5  # how long the author waits for the others, beyond their interval
_ENDING_SECONDS = 2.0  # how long a main thread that is about to end may take for it
_GRACE_SECONDS = 0.5  # beyond the limit, in which the backend may end a collective with an error of its own
_MARGIN_SECONDS = 0.5  # beyond the interval, after which all ranks have read the note
_ABORTING_SECONDS = 2.0  # how long NCCL may take to abort its communicators
_FROZEN_SECONDS = 6.0  # beyond the limit, after which a rank that is alone on its node and stopped is killed
_FORCED_SECONDS = 6.0  # beyond the limit, after which a process ends whose threads cannot run
_PASSED_OVER = (*(f"{os.path.dirname(file)}{os.sep}" for file in (os.__file__, torch.__file__, __file__)), "<")


class StoreLost(Exception):
    """The job's store does not answer, or its process has gone."""


class BoundedStore:
    """The job's store, each of whose calls ends within a limit.

    The calls are made by a thread of its own.  One that a stopped server never answers keeps this thread; what is
    called after it fails at once.
    """

    def __init__(self, store: Any) -> None:  # torch's annotations of stores lack half of their methods
        self._store: Any = store.clone()
        self._calls: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._line = _open_line(store)
        self._is_stuck = False
        self.answered = time.monotonic()
        threading.Thread(target=self._serve, name="megazero store", daemon=True).start()

    def call(self, operation: Callable[[Any], T]) -> T:
        """Return what `operation` returns; raise StoreLost if the store doesn't answer in time, or has gone."""
        if self._is_stuck or self.has_gone:
            raise StoreLost
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((operation, answer))
        try:
            result = answer.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            self._is_stuck = True
            raise StoreLost from None
        if isinstance(result, BaseException):
            raise StoreLost from result
        self.answered = time.monotonic()
        return cast(T, result)

    @property
    def has_gone(self) -> bool:
        """True if the server has closed its connections; calls would print torch's stacks then."""
        return self._line is not None and bool(select.select([self._line], [], [], 0)[0])

    def _serve(self) -> None:
        while True:
            operation, answer = self._calls.get()
            try:
                result: Any = operation(self._store)
            except Exception as error:
                result = error
            self._is_stuck = False  # a server that was stopped and goes on
            answer.put(result)


def _open_line(store: Store) -> socket.socket | None:
    """Open a connection to the store's server on which nothing is sent: it becomes readable when the server ends."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    try:
        return socket.create_connection((store.host, store.port), _ANSWER_SECONDS)
    except OSError:
        return None


@dataclass(frozen=True)
class Note:
    """The first fault of the job: the rank that met it, the exit status of all, and what it was.

    is_reported: False for an error whose message the author prints itself, so that no report follows.
    """

    rank: int
    status: int
    text: str
    is_reported: bool
    time: float

    def to_json(self) -> str:
        return json.dumps(self.__dict__)


class JobPlace(NamedTuple):
    """The place of this rank in the job.

    members: returns the ranks that a rank meets on an axis.  folder: gets a folder `faults` at a fault.
    store_host: the host that holds the store.  holds_store: True if the store ends with this process.
    is_run: True if the process is a run's, whose end may be forced while native code keeps all threads from running.
    is_alone: True if torchrun has started no other rank on this node, so that it would not kill this one once stopped.
    on_report: is called with the report's lines on the rank that prints it.
    """

    rank: int
    world_size: int
    limit_seconds: float
    folder: Path
    members: Callable[[int, str], Sequence[int]]
    store_host: str
    holds_store: bool
    is_run: bool
    is_alone: bool = False
    on_report: Callable[[Sequence[str]], object] | None = None


class Monitor:
    """The monitor of one rank; `start` begins its thread, `close` ends it when the rank leaves without a fault."""

    def __init__(self, store: Store, flight: FlightRecord, job: JobPlace) -> None:
        self.job = job
        self.error: BaseException | None = None
        """The error of the main thread; its traceback goes to the file of stacks."""
        self.note: Note | None = None
        """The fault that ends the job, once this rank has met one or has read another's note."""
        self._store = BoundedStore(PrefixStore("faults", store))
        self._flight = flight
        self._host = socket.gethostname()
        self._main = threading.main_thread().ident or 0
        self._interval = max(_INTERVAL_SECONDS, job.world_size / _RANKS_PER_SECOND)
        self._wake = threading.Event()
        self._is_done = threading.Event()
        self._is_closing = False
        self._is_failing = False  # the main thread has an error, and ends with it as soon as the report is done
        self._name = datetime.now().strftime("%Y-%m-%d_%H%M%S")
        self._peers: dict[int, tuple[int, int]] = {}  # ranks of this host: process and its start
        self._known: dict[int, bytes] = {}  # heartbeats of those, and of rank 0
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115
        self._thread = threading.Thread(target=self._run, name="megazero monitor", daemon=True)

    def start(self) -> None:
        self.follow(self._flight)
        self._thread.start()
        if self.job.is_alone:  # the process is kept by name: python warns of one that is forgotten while it runs
            self._beside = kill_when_suspended(self.job.limit_seconds + _FROZEN_SECONDS)

    def follow(self, flight: FlightRecord) -> None:
        """Take the rank's position from this flight record from here on."""
        self._flight = flight
        flight.on_failure = self._alarm

    def close(self) -> None:
        """End the monitor of a rank that leaves the job by itself."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(2 * _ANSWER_SECONDS)
        if self.job.is_run:
            faulthandler.cancel_dump_traceback_later()

    def fail(self, error: BaseException, text: str, *, status: int, is_reported: bool) -> int:
        """Make an error of the main thread known to all ranks; return the exit status, once that has been done.

        is_reported: False if the error's own message is all that is to be printed.
        """
        self.error, self._is_failing = error, True
        if is_reported and self._flight.waiting is None and self._flight.begun:
            self._flight.fail(self._flight.begun[-1], error)  # it failed before it could be waited for
        if self.note is None:
            self.note = Note(self.job.rank, status, text, is_reported, time.time())
        self._alarm()
        self._is_done.wait(self._longest_end(self.note))
        return self.note.status

    def claim(self, error: BaseException, text: str, *, status: int) -> bool:
        """Make an error of the main thread the job's fault; return False if there was one before.

        One rank of several that fail at the same time succeeds; it prints the error, and then calls `fail`.
        """
        self.error = error
        if self.note is not None:
            return False
        _outlast_the_launcher()
        mine = found = Note(self.job.rank, status, text, is_reported=False, time=time.time())
        with suppress(StoreLost):
            found = self._note(mine)
        self.note = found
        return found == mine

    def position_of(self, error: BaseException) -> str:
        """Return the line that follows an error's own traceback."""
        beat = self._beat()
        who = f"rank {beat.rank} (host {beat.host}, process {beat.pid})"
        return f"fault: {who} failed: {first_line(error)}; {beat.position}. The other ranks end too."

    def _alarm(self) -> None:
        self._wake.set()
        _outlast_the_launcher()

    def _run(self) -> None:
        try:
            self._announce()
            while not self._is_closing:
                note = self.note or self._look()
                if note is not None:
                    break
                self._wake.wait(self._pause())
                self._wake.clear()
            else:
                with suppress(StoreLost):
                    self._write_beat(replace(self._beat(), ended=True))
                    self._store.call(lambda store: store.add("answered", 1))  # a report need not wait for this rank
                return
        except Exception:  # a monitor that fails must not end a sound run
            traceback.print_exc()
            self._is_done.set()
            return
        self._end(note)

    def _announce(self) -> None:
        """Add this process to those of its host, and agree on the name of the folder."""
        mine = f"{self.job.rank} {os.getpid()} {process_start(os.getpid()) or 0};"
        with suppress(StoreLost):
            self._name = self._store.call(lambda store: store.compare_set("name", "", self._name)).decode()
            self._store.call(lambda store: store.append(f"host/{self._host}", mine))

    def _look(self) -> Note | None:
        """Write the heartbeat; return the fault that another rank has noted, or that this rank meets now."""
        if self.job.is_run:
            faulthandler.dump_traceback_later(self.job.limit_seconds + _FORCED_SECONDS, exit=True, file=self._nowhere)
        with suppress(StoreLost):
            if note := self._read_note():
                return note
            self._write_beat(self._beat())
            listed = self._store.call(lambda store: store.get(f"host/{self._host}")).decode()
            rows = (row.split() for row in listed.split(";") if row)
            self._peers = {int(rank): (int(pid), int(start)) for rank, pid, start in rows}
            self._known = self._store.call(lambda store: _read_all(store, "beat", {0, *self._peers}))
        return self._meets()

    def _pause(self) -> float:
        """Return the seconds until the next look: less than the interval if the limit of a collective ends sooner."""
        if self._flight.waiting is None:
            return self._interval
        left = self._flight.waiting_since + self.job.limit_seconds + _GRACE_SECONDS - time.perf_counter()
        return min(max(left, 0.0) + 0.01, self._interval)

    def _meets(self) -> Note | None:
        limit, waiting, failed = self.job.limit_seconds, self._flight.waiting, self._flight.failed
        if failed is not None:
            self.error = failed
            return self._new_note(f"{waiting}: {first_line(failed)}")
        if waiting is not None and time.perf_counter() - self._flight.waiting_since > limit + _GRACE_SECONDS:
            return self._new_note(f"{waiting}: no end after {limit:g} s")
        if time.monotonic() - self._store.answered > limit and not self._store.has_gone:
            return self._new_note(f"no answer of the job's store for {limit:g} s")
        return None

    def _new_note(self, text: str) -> Note:
        return Note(self.job.rank, 1, text, is_reported=True, time=time.time())

    def _note(self, note: Note) -> Note:
        """Write the job's note, unless there is one; return the one that stands."""
        written = self._store.call(lambda store: store.compare_set("note", "", note.to_json()))
        return Note(**json.loads(written))

    def _read_note(self) -> Note | None:
        found = self._store.call(lambda store: store.get("note") if store.check(["note"]) else b"")
        return Note(**json.loads(found)) if found else None

    def _beat(self) -> Heartbeat:
        flight, waiting = self._flight, self._flight.waiting
        seconds = 0.0 if waiting is None else time.monotonic() - waiting.time
        return Heartbeat(
            self.job.rank,
            self._host,
            os.getpid(),
            time.time(),
            step=flight.iteration,
            micro_batch=flight.micro_batch,
            activity=flight.activity,
            unit=flight.unit,
            where=_where(self._main),
            waiting=None if waiting is None else Waiting(waiting.axis, waiting.collective, waiting.number, seconds),
        )

    def _write_beat(self, beat: Heartbeat, key: str = "beat") -> None:
        self._store.call(lambda store: store.set(f"{key}/{beat.rank}", beat.to_json()))

    def _end(self, note: Note) -> None:
        """Report the fault, or leave that to its author, and end this process."""
        # A file system may hang.
        faulthandler.dump_traceback_later(self._longest_end(note), exit=True, file=self._nowhere)
        try:
            has_store = True
            try:
                note = self._note(note)
            except StoreLost:
                has_store = False
            self.note = note
            if note.is_reported:
                states = {rank: process_state(*peer) for rank, peer in self._peers.items()}
                beat = replace(self._beat(), peers=states)
                folder = self._write_stacks(beat)
                try:
                    self._report_by_store(note, beat, folder)
                except StoreLost:
                    self._report_by_files(note, folder)
            else:
                self._record_own_error(note)
                if has_store:
                    with suppress(StoreLost):  # its process has gone, without waiting for this one
                        self._let_all_leave(self.job.world_size)
            if uses_nccl():
                time.sleep(self._interval + _MARGIN_SECONDS)
                abort_groups(_ABORTING_SECONDS)
            self._is_done.set()
            # A main thread without an error must not go on with what an aborted collective has left.
            if self._is_failing:
                time.sleep(_ENDING_SECONDS)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(note.status)

    def _longest_end(self, note: Note) -> float:
        """Return the seconds that the end of this process may take, counted from when it has the fault's note.

        After an error that its author prints, that is less than 10 seconds (in a job of more than 500 ranks, whose
        interval is longer, more); a report may take twice as long where the store or a file system is slow or hangs.
        """
        leaving = self._interval + _COLLECTING_SECONDS + _ENDING_SECONDS
        aborting = self._interval + _MARGIN_SECONDS + _ABORTING_SECONDS if uses_nccl() else 0.0
        return leaving + aborting + (2 * _ANSWER_SECONDS + 2 if note.is_reported else 0.5)

    def _record_own_error(self, note: Note) -> None:
        """Give `on_report` an error that this rank has printed itself, if training had begun."""
        if not isinstance(self.error, Exception) or note.rank != self.job.rank or not self._flight.iteration:
            return
        if self.job.on_report is not None:
            self.job.on_report([self.position_of(self.error)])

    def _report_by_store(self, note: Note, beat: Heartbeat, folder: Path) -> None:
        """Wait until all ranks that can have written where they are; print the report if this rank is to."""
        self._write_beat(beat, "last")
        self._store.call(lambda store: store.add("answered", 1))
        deadline = time.monotonic() + self._interval + _COLLECTING_SECONDS
        unable = sum(state in (ProcessState.GONE, ProcessState.STOPPED) for state in (beat.peers or {}).values())
        able = self.job.world_size - unable
        if note.rank == self.job.rank:
            self._wait_until(lambda store: store.add("answered", 0) >= able, deadline)
            everyone = range(self.job.world_size)
            last = self._store.call(lambda store: _read_all(store, "last", everyone))
            beats = self._store.call(lambda store: _read_all(store, "beat", everyone))
            self._print(note, beats | last, frozenset(last), "", folder)
            self._store.call(lambda store: store.set("reported", str(len(last))))
        else:
            self._wait_until(lambda store: store.check(["reported"]), deadline + _COLLECTING_SECONDS)
        reported = self._store.call(lambda store: store.get("reported") if store.check(["reported"]) else b"")
        self._let_all_leave(int(reported or able))

    def _report_by_files(self, note: Note, folder: Path) -> None:
        """Print the report once, from the files that ranks with the same file system have written."""
        time.sleep(_COLLECTING_SECONDS)
        try:
            (folder / "report.txt").touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError:
            pass  # rather twice than never
        written: dict[int, bytes] = {}
        for path in folder.glob("rank_*.txt"):
            with suppress(OSError, ValueError), path.open("rb") as file:
                written[int(path.stem.removeprefix("rank_"))] = file.readline(1 << 16)
        state = "has closed its connections" if self._store.has_gone else "does not answer"
        store = f"{self.job.store_host} (node 0), which holds the job's store, {state}"
        self._print(note, self._known | written, frozenset(written), store, folder)

    def _print(
        self, note: Note, beats: Mapping[int, bytes], answered: frozenset[int], store: str, folder: Path
    ) -> None:
        read = {rank: Heartbeat.from_json(text) for rank, text in beats.items()}
        noticed = f"rank {note.rank}: {note.text}"
        fault = Fault(self.job.world_size, note.time, read, answered, noticed, store, f"{folder}/rank_*.txt")
        lines = report(fault, self.job.members)
        with suppress(OSError):
            (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print("\n".join(lines), file=sys.stderr, flush=True)
        if self.job.on_report is not None:
            self.job.on_report(lines)

    def _let_all_leave(self, expected: int) -> None:
        """Count this rank as one that can leave; the rank that holds the store waits until `expected` can."""
        self._store.call(lambda store: store.add("left", 1))
        if self.job.holds_store:
            deadline = time.monotonic() + self._interval + _COLLECTING_SECONDS
            self._wait_until(lambda store: store.add("left", 0) >= expected, deadline)

    def _wait_until(self, condition: Callable[[Any], bool], deadline: float) -> None:
        while not self._store.call(condition) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write_stacks(self, beat: Heartbeat) -> Path:
        """Write this rank's heartbeat, last collectives, error and stacks to its file; return the folder."""
        name = f"rank_{self.job.rank}.txt"
        for parent in (self.job.folder, Path(tempfile.gettempdir())):
            folder = parent / "faults" / self._name
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                with (folder / f".{name}").open("w", encoding="utf-8") as file:
                    file.write(beat.to_json() + "\n\nlast collectives:\n")
                    now = time.monotonic()
                    file.writelines(
                        f"{now - one.time:9.3f} s ago  {one}, {one.nbytes} bytes\n" for one in self._flight.begun
                    )
                    if self.error is not None:
                        file.writelines(["\n", *traceback.format_exception(self.error)])
                    file.write("\nstacks:\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
                os.replace(folder / f".{name}", folder / name)
                return folder
        return Path()


def place_in_job(
    rank: int,
    topology: Topology,
    *,
    limit_seconds: float,
    folder: str | Path,
    is_run: bool,
    on_report: Callable[[Sequence[str]], object] | None = None,
) -> JobPlace:
    """Return the place of a rank whose launcher describes the job's store by torch's variables."""

    def members(of: int, key: str) -> Sequence[int]:
        if key == CONTROL:
            return range(topology.world_size)
        return topology.group_of(of, "pp" if key.startswith("pp") else key.removesuffix("_gather"))

    holds_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host = os.environ.get("MASTER_ADDR", "the first host")
    is_alone = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("LOCAL_WORLD_SIZE") == "1"
    return JobPlace(
        rank,
        topology.world_size,
        limit_seconds,
        Path(folder),
        members,
        host,
        holds_store,
        is_run,
        is_alone and topology.world_size > 1,
        on_report,
    )


def _outlast_the_launcher() -> None:
    """Ignore a launcher's SIGTERM, sent because another rank has ended: it must not cut the report short."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: None)


def _read_all(store: Any, key: str, ranks: Iterable[int]) -> dict[int, bytes]:
    """Return what there is under the key of these ranks."""
    return {rank: store.get(f"{key}/{rank}") for rank in ranks if store.check([f"{key}/{rank}"])}


def _where(thread: int) -> str:
    """Return the innermost place of a thread that is neither in Python's library, nor in torch, nor in a collective."""
    frame = innermost = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    path = frame.f_code.co_filename
    return f"{path.removeprefix(os.getcwd() + os.sep)}:{frame.f_lineno} in {frame.f_code.co_name}"
