"""Makes one rank of a training run fail in twenty ways: what is printed, and when has the last process ended?

    python benchmarks/fault_reports.py --records FILE.jsonl [--output FILE.md] [--only WORD] [--minutes 30]

Every fault is met by two ranks without a launcher (srun's case), under torchrun, and under two torchruns, one a node;
one of each class also by three ranks, and by four under two torchruns.
A line is appended to --records for every job as soon as it has ended, and a job that is in there is not run again, so
the program may be stopped and started at will.  The page has the reports of all of them, as they were printed.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

from report import HelpFormat, add_output, heading, paragraph, publish, tell
from report import table as grid

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 5.0
PATIENCE_SECONDS = 75.0  # from the fault, after which what is left is killed


class Launch(NamedTuple):
    """A way to start a job.  agents: the number of torchruns, one a node; 0 without a launcher."""

    agents: int
    ranks: int


LAUNCHES: Mapping[str, Launch] = MappingProxyType(
    {
        "ranks": Launch(0, 2),
        "torchrun": Launch(1, 2),
        "two agents": Launch(2, 2),
        "three without a launcher": Launch(0, 3),
        "two agents, two ranks each": Launch(2, 4),
    }
)
_SPOILED_STEP = 40
_FLAGS = (
    "--mock-data --vocab-size 100 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16"
    " --micro-batch-size 2 --global-batch-size 24 --train-iters 1000000 --lr 1e-3 --lr-decay-style constant"
    " --eval-iters 0 --zero-stage 2 --log-interval 1000000 --device cpu --cpu-threads 1"
    f" --distributed-timeout-seconds-after-init {LIMIT_SECONDS:g} --distributed-join-timeout-minutes 0.25"
)


def sleep_in_native_code() -> None:
    """Sleep with Python's lock held, so that no other thread of the process runs."""
    ctypes.PyDLL(None).sleep(1000)


def loop() -> None:
    while True:
        pass


def exhaust_memory() -> None:
    bytearray(1 << 60)


def break_links() -> None:
    """Shut down all connections to other ranks, as a link that breaks does."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found = socket.socket(fileno=os.dup(int(number)))
            if found.family == socket.AF_INET and str(found.getpeername()[1]) != os.environ["MASTER_PORT"]:
                found.shutdown(socket.SHUT_RDWR)


def another_collective(context: Any) -> None:
    import torch

    context.mesh.world.all_reduce_scalars(torch.ones(3)).wait()


def barrier_of_torch() -> None:
    import torch.distributed as dist

    dist.barrier()


def user_error() -> None:
    from megazero.errors import DataError

    raise DataError("token 70000 of document 12 is outside of the vocabulary")


def bug() -> None:
    raise KeyError("a bug")


class Kind(NamedTuple):
    """A fault: what rank `rank` does in place of a training step or, if `in_data`, of reading a batch.

    stays: True if the process itself cannot end, so that only a launcher ends it.
    """

    rank: int
    act: Callable[..., object]
    in_data: bool = False
    stays: bool = False


def _send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "killed, rank 1": Kind(1, _send(signal.SIGKILL)),
        "killed, rank 0": Kind(0, _send(signal.SIGKILL)),
        "crashed in native code": Kind(1, _send(signal.SIGSEGV)),
        "stopped, rank 1": Kind(1, _send(signal.SIGSTOP), stays=True),
        "stopped, rank 0": Kind(0, _send(signal.SIGSTOP), stays=True),
        "asleep in data": Kind(1, lambda: time.sleep(1000), in_data=True),
        "asleep in forward, rank 1": Kind(1, lambda: time.sleep(1000)),
        "asleep in forward, rank 0": Kind(0, lambda: time.sleep(1000)),
        "endless loop": Kind(1, loop),
        "native code that holds Python's lock": Kind(1, sleep_in_native_code),
        "no memory": Kind(1, exhaust_memory),
        "exception in forward": Kind(1, bug),
        "exception in data": Kind(0, bug, in_data=True),
        "user's error, rank 0": Kind(0, user_error),
        "user's error, rank 1": Kind(1, user_error, in_data=True),
        "left by os._exit": Kind(1, lambda: os._exit(7)),
        "left by sys.exit": Kind(1, lambda: sys.exit(0)),
        "broken link": Kind(1, break_links),
        "mismatched collectives": Kind(1, another_collective),
        "a barrier of torch on one rank": Kind(1, barrier_of_torch),
    }
)


def run_rank(kind: Kind) -> int:
    """Train as pretrain_gpt.py does, and fail at a step."""
    sys.path.insert(0, str(ROOT))
    import megazero.train.loop as training
    from megazero.commands.pretrain import main
    from megazero.console import run_program
    from megazero.data.loader import BatchLoader

    step, read, taken = training.training_step, BatchLoader.__next__, [0]

    def act(*context: Any) -> None:
        taken[0] += 1
        if taken[0] == _SPOILED_STEP:
            time.sleep(1.5)  # until there are heartbeats of this step
            if int(os.environ["RANK"]) == kind.rank:
                Path("fault_time").write_text(str(time.time()), encoding="utf-8")
                kind.act(*context[: kind.act is another_collective])

    def failing_step(context: Any, *rest: Any) -> Any:
        act(context)
        return step(context, *rest)

    def failing_read(loader: BatchLoader) -> Any:
        act()
        return read(loader)

    if kind.in_data:
        patch.object(BatchLoader, "__next__", failing_read).start()
    else:
        training.training_step = failing_step
    return run_program(lambda: main(_FLAGS.split()))


# The faults that jobs of more than two ranks meet: a kind each of what is missing, late, mismatched, and an error.
IN_LARGER_JOBS = (
    "killed, rank 1",
    "stopped, rank 1",
    "asleep in data",
    "native code that holds Python's lock",
    "left by sys.exit",
    "exception in forward",
    "mismatched collectives",
)


def table() -> Iterator[tuple[str, str]]:
    """Yield the launch and the fault of every job."""
    for launch, (_, ranks) in LAUNCHES.items():
        yield from ((launch, name) for name in (KINDS if ranks == 2 else IN_LARGER_JOBS))


@contextmanager
def started(launch: str, name: str, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the job of a fault, with the output of each process in `folder`; kill what is left at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = [str(Path(__file__).resolve()), "--rank-of", name]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", port]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    commands: list[tuple[list[str], dict[str, str]]] = []
    agents, ranks = LAUNCHES[launch]
    for rank in range(0 if agents else ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        commands.append(([sys.executable, *own], {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}))
    for node in range(agents):
        nodes = ["--nnodes", str(agents), "--node-rank", str(node), "--nproc-per-node", str(ranks // agents)]
        commands.append(([*torchrun, *nodes, *own], {}))
    processes = []
    for number, (command, place) in enumerate(commands):
        with (folder / f"{number}.txt").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    command, cwd=folder, env={**common, **place}, stdout=output, stderr=output, start_new_session=True
                )
            )
    try:
        yield processes
    finally:
        for process in processes:
            for pid in (*children_of(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def children_of(parent: int) -> list[int]:
    """Return the processes that a process has started and that still exist."""
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


def try_out(launch: str, name: str, folder: Path) -> dict[str, Any]:
    """Run the job of a fault; return what its processes printed, and the seconds from the fault to each one's end.

    What torchrun prints of its own is left out.  ended: False if a process had to be killed that can end.
    load: the machine's, over the last minute.
    """
    with started(launch, name, folder) as processes:
        while not (folder / "fault_time").exists() and any(process.poll() is None for process in processes):
            time.sleep(0.05)
        begun = time.monotonic()
        codes: dict[int, int] = {}
        ends: list[float] = []
        # What has stopped ends when a launcher kills it, or what stands beside a rank that is alone under torchrun.
        agents, _ = LAUNCHES[launch]
        least = len(processes) - (KINDS[name].stays and agents == 0)
        while len(codes) < least and time.monotonic() - begun < PATIENCE_SECONDS:
            for number, process in enumerate(processes):
                if number not in codes and (code := process.poll()) is not None:
                    codes[number] = code
                    ends.append(time.time())
            time.sleep(0.05)
    if not (folder / "fault_time").exists():
        raise SystemExit(f"{launch}: {name}: the job ended before the fault\n{(folder / '0.txt').read_text()}")
    fault_time = float((folder / "fault_time").read_text())
    printed = [own_lines((folder / f"{number}.txt").read_text()) for number in range(len(processes))]
    return {
        "fault": name,
        "launch": launch,
        "codes": [codes.get(number) for number in range(len(processes))],
        "seconds": [round(end - fault_time, 1) for end in ends],
        "ended": len(codes) >= least,
        "load": round(os.getloadavg()[0], 1),
        "printed": printed,
    }


def own_lines(output: str) -> list[str]:
    """Return the lines of an output from the fault on, up to torchrun's own report."""
    lines = []
    for line in output.splitlines():
        if "<frozen runpy>" in line:  # torchrun's own traceback, whose first line came before
            lines.pop()
            break
        if "iteration " not in line and "torch/distributed/elastic" not in line:
            lines.append(line)
    first = next(
        (number for number, line in enumerate(lines) if line.startswith(("fault", "data error", "Traceback"))), None
    )
    return [] if first is None else lines[first:]


def page(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the parts of the page: seconds by fault and launch, then what was printed."""
    slowest = max((second for row in rows for second in row["seconds"] if not KINDS[row["fault"]].stays), default=0.0)
    yield heading("Twenty kinds of fault, and what is printed", "cpu")
    yield paragraph(
        f"Seconds from the fault to the end of each process, in {len(rows)} jobs. The time limit of a collective is"
        f" {LIMIT_SECONDS:g} s, and what can run ends within ten more: the slowest took {slowest:g} s. A stopped"
        f" process is killed by its launcher, for which torchrun takes 30 s."
    )
    cells = {(row["launch"], row["fault"]): " ".join(map(str, row["seconds"])) for row in rows}
    yield grid(
        ["fault", *LAUNCHES], [[name, *(cells.get((launch, name), "-") for launch in LAUNCHES)] for name in KINDS]
    )
    for row in rows:
        codes = " ".join("stopped" if code is None else str(code) for code in row["codes"])
        texts = ("\n".join(lines) for lines in row["printed"] if lines)
        printed = "\n\n".join(texts)
        yield f"## {row['fault']}: {row['launch']}\n\nExit statuses: {codes}.\n\n```text\n{printed}\n```"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    add = parser.add_argument
    add("--records", type=Path, help="JSON lines of what has been run; appended to")
    add("--only", default="", help="jobs whose fault or launch has this word")
    add("--minutes", type=float, default=float("inf"), help="begin no job after so long")
    add("--rank-of", choices=KINDS, help=argparse.SUPPRESS)
    add_output(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    if options.rank_of:
        return run_rank(KINDS[options.rank_of])
    there = options.records.read_text(encoding="utf-8").splitlines() if options.records.exists() else []
    done = {(row["launch"], row["fault"]) for row in map(json.loads, there)}
    start = time.monotonic()
    for launch, name in table():
        if (launch, name) in done or options.only not in f"{launch}: {name}":
            continue
        if time.monotonic() - start > 60 * options.minutes:
            return 2
        with tempfile.TemporaryDirectory(prefix="fault_reports_") as folder:
            row = try_out(launch, name, Path(folder))
        with options.records.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        tell(f"{launch}: {name}: {row['codes']} after {row['seconds']} s")
    if options.output is not None:
        lines = options.records.read_text(encoding="utf-8").splitlines()
        publish(page([json.loads(line) for line in lines]), options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
