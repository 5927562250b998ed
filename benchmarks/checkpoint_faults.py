"""Kills runs at random moments, and starts two jobs in one folder: is every checkpoint whole, and is anything lost?

    python benchmarks/checkpoint_faults.py --records FILE.jsonl [--kills 200] [--pairs 50] [--minutes 5]
        [--flags=--async-save]

A trial is a run of pretrain_gpt.py's `main` that is disturbed, and the same command line again, up to its last step:

    job        SIGKILL to all ranks at a random moment, of the whole run or since it has locked its folder
    rank       SIGKILL to one rank at such a moment, to the others up to a second later
    operation  rank 0 kills itself before its k-th operation on a file under --save (open, mkdir, link, rename, remove),
               the others are killed up to half a second later
    pair       a second job with another seed and the same --save starts, at once or later; in every other trial the
               folder has a checkpoint and the lock of a run that was killed, and both go on with that

After the disturbance every checkpoint in the folder is read and verified, `latest` names one of them, and what the run
has announced as saved is there, unless --keep-last let it go.  At the end weights, moments and the losses of all steps
are those of a run that was not disturbed, to the bit, and no hidden file and no lock is left.  Of a pair one job runs,
and the other one ends with status 2 and a message; or it comes so late that the first one has finished.

Ranks are forked from this program, which has imported torch and computed nothing, and end with it.  Trial i of a kind
is a function of --seed and i.  A line is appended to --records for every trial, and a trial with a line is not run
again, so the program may be stopped and started at will.  It ends with status 1 if any trial found damage, and with 2
if --minutes were over before all trials were run.
"""

import argparse
import ctypes
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from report import HelpFormat, heading, paragraph, publish, table, tell

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import megazero.train.program  # noqa: F401, E402 (imported before ranks are forked)
from megazero.checkpoint.folder_lock import LOCK  # noqa: E402
from megazero.checkpoint.folders import list_steps, newest  # noqa: E402
from megazero.checkpoint.reader import open_checkpoint  # noqa: E402
from megazero.commands.pretrain import main as pretrain_main  # noqa: E402
from megazero.console import run_program  # noqa: E402
from megazero.errors import UserError  # noqa: E402

Record = dict[str, Any]

STEPS = 5
_MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100 --micro-batch-size 2"
    " --global-batch-size 4 --lr 1e-3 --lr-decay-style constant --eval-iters 0 --mock-data --num-workers 0"
    f" --train-iters {STEPS} --save-interval 1 --log-interval 1 --device cpu --distributed-timeout-minutes 0.5"
    " --distributed-join-timeout-minutes 0.5"
)
KILLS = ("job", "rank", "operation")
_PATIENCE_SECONDS = 60.0
_EVENTS = ("open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "shutil.rmtree")


class Variant(NamedTuple):
    """A layout and its flags."""

    name: str
    ranks: int
    flags: str


VARIANTS = (
    Variant("1 rank", 1, ""),
    Variant("2 ranks, ZeRO 2", 2, "--zero-stage 2"),
    Variant("2 ranks, tensor parallel, --keep-last 2", 2, "--tensor-model-parallel-size 2 --keep-last 2"),
)


class Places(NamedTuple):
    """The files of a trial."""

    folder: Path

    @property
    def save(self) -> Path:
        return self.folder / "saved ü"

    def metrics(self, job: str = "") -> Path:
        return self.folder / f"steps{job}.jsonl"


class Finished(NamedTuple):
    """A job that has ended: the status of each rank (-9: killed), and what all ranks have printed."""

    statuses: tuple[int, ...]
    text: str
    seconds: float


class Job:
    """The processes of one run, forked from this one."""

    def __init__(self, variant: Variant, places: Places, *, name: str = "", seed: int = 1234, kill_at: int = 0) -> None:
        words = [*_MODEL.split(), *variant.flags.split(), "--seed", str(seed), "--save", str(places.save)]
        words += ["--load", str(places.save), "--metrics-file", str(places.metrics(name))]
        self._output = places.folder / f"output{name}"
        self._output.unlink(missing_ok=True)
        self.started = time.monotonic()
        port = free_port()
        self.pids = [
            fork(lambda rank=rank: self._run(rank, variant.ranks, port, words, places.save, kill_at))
            for rank in range(variant.ranks)
        ]
        self._statuses: dict[int, int] = {}

    def _run(self, rank: int, ranks: int, port: int, words: list[str], root: Path, kill_at: int) -> int:
        """Run the program as this rank; return its status."""
        output = os.open(self._output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if ranks > 1:
            launcher = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
            os.environ.update({name: str(value) for name, value in launcher.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        if rank == 0:
            operations = _count_operations(root, kill_at)
        status = run_program(lambda: pretrain_main(words))
        if rank == 0:
            print(f"operations {operations[0]}", flush=True)
        return status

    def poll(self) -> bool:
        """Return True if all ranks have ended."""
        for pid in self.pids:
            if pid not in self._statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._statuses[pid] = os.waitstatus_to_exitcode(status)
        return len(self._statuses) == len(self.pids)

    def wait(self, until: Callable[[], bool] | None = None, seconds: float = _PATIENCE_SECONDS) -> bool:
        """Wait until all ranks have ended, or `until` holds, at most so long; return True if all have ended."""
        give_up = time.monotonic() + seconds
        while not self.poll() and time.monotonic() < give_up and not (until and until()):
            time.sleep(0.002)
        return len(self._statuses) == len(self.pids)

    def has_lost(self, rank: int) -> bool:
        """Return True if a rank has ended."""
        self.poll()
        return self.pids[rank] in self._statuses

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        for rank, pid in enumerate(self.pids):
            if pid not in self._statuses and (ranks is None or rank in ranks):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> Finished:
        """Wait for all ranks, and kill those that do not end; return how they ended."""
        if not self.wait():
            self.kill()
            self.wait()
        seconds = time.monotonic() - self.started
        text = self._output.read_text(encoding="utf-8", errors="replace") if self._output.exists() else ""
        return Finished(tuple(self._statuses[pid] for pid in self.pids), text, seconds)


def fork(action: Callable[[], int]) -> int:
    """Fork a process that ends with the status that `action` returns, or with this program; return its id."""
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not even SIGKILL of the parent leaves ranks
        if os.getppid() == parent:
            status = action()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _count_operations(root: Path, kill_at: int) -> list[int]:
    """Count this process's operations on files under `root` in the list that is returned; end it before the k-th."""
    count, prefix = [0], str(root)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and arguments and str(arguments[0]).startswith(prefix):
            count[0] += 1
            if count[0] == kill_at:
                print(f"killed before {event} {Path(str(arguments[0])).name}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    return count


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Reference(NamedTuple):
    """A run that was not disturbed: its losses by step, the hashes of its last state, its length and operations.

    lock_seconds: the time until it has locked its folder.
    """

    losses: Mapping[int, Any]
    state: Sequence[str]
    seconds: float
    lock_seconds: float
    operations: int


def losses(path: Path) -> dict[int, Any]:
    """Return loss and gradient norm by iteration; of an iteration that was done twice, those of the last time."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ())
    return {row["iteration"]: (row["loss"], row["grad_norm"]) for row in rows if "iteration" in row}


def state(root: Path) -> list[str]:
    """Return a line on every box of the newest checkpoint: what it holds, and its hash."""
    boxes = open_checkpoint(root).boxes()
    return [f"{box.kind} {box.parameter} {box.offset} {box.sha256}" for _, box in boxes]


def refer(variant: Variant, folder: Path) -> Reference:
    """Make an undisturbed run."""
    places = Places(folder)
    folder.mkdir()
    job = Job(variant, places)
    job.wait((places.save / LOCK).exists)
    lock_seconds = time.monotonic() - job.started
    done = job.end()
    if any(done.statuses):
        raise SystemExit(f"{variant.name}: the undisturbed run failed\n{done.text}")
    operations = int(re.findall(r"^operations (\d+)$", done.text, re.MULTILINE)[-1])
    found = Reference(losses(places.metrics()), state(places.save), done.seconds, lock_seconds, operations)
    shutil.rmtree(folder)
    return found


def damage(root: Path, announced: Sequence[int], keep_last: int) -> Iterator[str]:
    """Yield what is wrong with a folder; announced: the steps that were said to be saved."""
    steps = [folder.step for folder in list_steps(root)]
    for folder in list_steps(root):
        try:
            for problems in open_checkpoint(folder.path).verify():
                yield from (f"{folder.path.name}: {problem}" for problem in problems)
        except UserError as error:
            yield f"{folder.path.name}: {error}"
    try:
        found = newest(root)
    except UserError as error:
        yield f"latest: {error}"
        return
    if announced and (found is None or open_checkpoint(found).step < max(announced)):
        yield f"step {max(announced)} was announced, and the newest is {found}"
    for step in announced:
        if step not in steps and sum(other > step for other in steps) < keep_last:
            yield f"step {step} is gone"


def litter(root: Path) -> list[str]:
    """Return the names under `root` that a finished run does not leave; the reports of an earlier fault stay."""
    usual = re.compile(r"step_\d{7}(_\d+)?|latest|config\.yaml|run\.html|.*\.jsonl?|faults")
    return [path.name for path in sorted(root.iterdir()) if not usual.fullmatch(path.name)]


def announced(text: str) -> list[int]:
    return [int(step) for step in re.findall(r"^saved checkpoint of iteration (\d+) ", text, re.MULTILINE)]


def kill_trial(kind: str, draw: random.Random, variant: Variant, reference: Reference, folder: Path) -> Record:
    """Run a trial of one of KILLS; return its record."""
    places = Places(folder)
    record: Record = {"kind": kind, "variant": variant.name}
    kill_at = draw.randint(1, reference.operations) if kind == "operation" else 0
    since_lock = draw.random() < 0.75
    moment = draw.uniform(0.0, reference.seconds - since_lock * reference.lock_seconds)
    later = draw.choice((0.0, draw.uniform(0.0, 0.5 if kind == "operation" else 1.0)))
    victim = draw.randrange(variant.ranks)
    job = Job(variant, places, kill_at=kill_at)
    if kind == "operation":
        record["moment"] = f"operation {kill_at} of {reference.operations}"
        job.wait(lambda: job.has_lost(0))
    else:
        record["moment"] = f"{moment:.3f} s since the {'lock' if since_lock else 'start'}"
        if since_lock:
            job.wait((places.save / LOCK).exists)
        job.wait(seconds=moment)
        job.kill(None if kind == "job" else [victim])
    if kind != "job":
        job.wait(seconds=later)
        record["later"] = round(later, 2)
    job.kill()
    killed = job.end()
    before = re.findall(r"^killed before (.*)$", killed.text, re.MULTILINE)
    record["before"] = re.sub(r"(?<=after\.)\S*|\d{3,}\S*", "*", before[-1]) if before else ""
    record["statuses"] = killed.statuses
    record["left"] = sorted(
        {re.sub(r"(?<=after\.).*|\.\d+-.*", "", name) for name in litter(places.save)} if places.save.exists() else ()
    )
    keep_last = 2 if "keep-last" in variant.flags else STEPS
    said = announced(killed.text)
    record["announced"] = len(said)
    found = list(damage(places.save, said, keep_last)) if places.save.exists() else []
    done = Job(variant, places).end()
    if any(done.statuses):
        found.append(f"the second start ended with {done.statuses}: {done.text[-1500:]}")
    else:
        found += damage(places.save, [*said, *announced(done.text)], keep_last)
        found += [f"left behind: {name}" for name in litter(places.save)]
        found += ["another state at the end"] * (state(places.save) != reference.state)
        found += ["other losses"] * (losses(places.metrics()) != reference.losses)
    return {**record, "damage": found, "resumed_seconds": round(done.seconds, 2)}


def pair_trial(draw: random.Random, variant: Variant, reference: Reference, folder: Path, *, has_lock: bool) -> Record:
    """Start two jobs in one folder; return the record of what became of them.

    has_lock: the folder has a checkpoint and the lock of a run that was killed.
    """
    places = Places(folder)
    apart = draw.choice((0.0, draw.uniform(0.0, 0.2), draw.uniform(0.0, reference.seconds)))
    record: Record = {"kind": "pair", "variant": variant.name, "moment": f"{apart:.2f} s apart", "had_lock": has_lock}
    if has_lock:
        first = Job(variant, places)
        first.wait(lambda: bool(list_steps(places.save)))
        first.kill()
        first.end()
    seeds = (1234, 1234 if has_lock else 1235)
    one = Job(variant, places, name="a", seed=seeds[0])
    one.wait(seconds=apart)
    two = Job(variant, places, name="b", seed=seeds[1])
    jobs = [one.end(), two.end()]
    found = list(damage(places.save, [], STEPS))
    fates = [fate(job) for job in jobs]
    if not any(name.startswith("finished") for name in fates):
        found.append("neither job finished: " + " | ".join(job.text[-700:] for job in jobs))
    if any(name.startswith("failed") for name in fates):
        found.append(" | ".join(job.text[-700:] for job in jobs))
    found += [f"left behind: {name}" for name in litter(places.save)]
    found += ["the folder is not at its last step"] * (open_checkpoint(places.save).step != STEPS)
    if fates[0] == "finished" and state(places.save) != reference.state:
        found.append("another state at the end")
    return {**record, "fates": fates, "damage": found}


def fate(job: Finished) -> str:
    """Return what became of a job: finished, refused because of another one, or failed."""
    if not any(job.statuses):
        return "finished" if re.search(r"^saved checkpoint", job.text, re.MULTILINE) else "finished, nothing to do"
    message = re.search(r"^checkpoint error: .*", job.text, re.MULTILINE)
    if set(job.statuses) != {2} or message is None or "Traceback" in job.text:
        return "failed"
    return "refused: the folder is locked" if ".lock is held by" in message[0] else "refused: another run's checkpoints"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, required=True, help="JSON lines of what has been run; appended to")
    add("--kills", type=int, default=200, help="trials with a kill, of the kinds in turn")
    add("--pairs", type=int, default=50, help="trials with two jobs in one folder")
    add("--flags", default="", help="further flags of all runs, such as --async-save, in one word")
    add("--seed", type=int, default=1, help="of the draw")
    add("--minutes", type=float, default=float("inf"), help="begin no trial after so long")
    add("--output", type=Path, help="file for the page, which is printed in any case")
    return parser.parse_args(words)


def read_records(path: Path) -> dict[str, Record]:
    """Return the records by trial."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["trial"]: record for record in map(json.loads, lines)}


@contextmanager
def trial_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="checkpoint faults ", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def page(records: Sequence[Record]) -> list[str]:
    """Return the parts of the report."""
    rows = []
    for kind in (*KILLS, "pair"):
        of_kind = [record for record in records if record["kind"] == kind]
        inside = sum(any(name.startswith(".saving_step") for name in record.get("left", ())) for record in of_kind)
        locked = sum(".lock" in record.get("left", ()) for record in of_kind)
        whole = sum(not record["damage"] for record in of_kind)
        rows.append([kind, len(of_kind), inside if kind != "pair" else "-", locked if kind != "pair" else "-", whole])
    fates = Counter(" / ".join(record["fates"]) for record in records if record["kind"] == "pair")
    places = Counter(record["before"] for record in records if record["kind"] == "operation" and record["before"])
    damaged = [f"- {record['trial']}: {' '.join(text.split())}" for record in records for text in record["damage"]]
    return [
        heading(f"What became of {len(records)} disturbed runs", "cpu"),
        paragraph(
            "Each row counts trials: those in which a save was under way and a lock was held when the processes were"
            " gone, and those in which nothing was damaged or lost: every checkpoint verified, `latest` sound, all that"
            " was announced there, and at the end of a second start weights, moments and losses to the bit those of a"
            " run that was not disturbed, and no hidden file and no lock left."
        ),
        table(["kind", "trials", "in a save", "lock left", "nothing damaged or lost"], rows),
        table(["two jobs: the first / the second", "trials"], fates.most_common()),
        table(["rank 0 ended before", "trials"], places.most_common()),
        "\n".join(damaged) or "No damage was found.",
    ]


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    kills = [(KILLS[number % len(KILLS)], number) for number in range(options.kills)]
    trials = [*kills, *(("pair", number) for number in range(options.pairs))]
    done = read_records(options.records)
    start = time.monotonic()
    missing = [(kind, number) for kind, number in trials if f"{kind} {number}" not in done]
    references: dict[Variant, Reference] = {}
    for count, (kind, number) in enumerate(missing, start=1):
        if time.monotonic() - start > 60 * options.minutes:
            return 2
        with trial_folder() as folder:
            draw = random.Random(f"{options.seed} {kind} {number}")
            variant = draw.choice(VARIANTS)
            if options.flags:
                name, flags = f"{variant.name}, {options.flags}", f"{variant.flags} {options.flags}"
                variant = variant._replace(name=name, flags=flags)
            if variant not in references:
                references[variant] = refer(variant, folder / "reference")
            if kind == "pair":
                record = pair_trial(draw, variant, references[variant], folder, has_lock=number % 2 == 1)
            else:
                record = kill_trial(kind, draw, variant, references[variant], folder)
        record = {"trial": f"{kind} {number}", **record}
        done[record["trial"]] = record
        with options.records.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")
        tell(f"{count} of {len(missing)}: {record['trial']}, {record['moment']}: {record['damage'] or 'whole'}")
    publish(page([done[f"{kind} {number}"] for kind, number in trials]), options.output)
    return 1 if any(record["damage"] for record in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
