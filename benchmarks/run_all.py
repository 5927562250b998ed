"""Measures anew what benchmarks/README.md shows, but for preprocessing, in one run of at most nine minutes.

    python benchmarks/run_all.py [--time-limit 540] [--device cpu]

One program after the other, so that nothing runs beside what is timed: `compare.py` on one process and on several,
`throughput.py`, `kernels.py`, then `readme.py`.  On CPUs they train 8 layers x 256 in fp32, on GPUs gpt2-124m and
gpt2-1.5b in bf16, on as many processes as the machine has GPUs, two at most.  Every part has a share of the time; what
it leaves goes to the parts after it, and a part that takes a quarter more than its share is ended.  Records go to
benchmarks/results/DATE-DEVICE-WHAT.json, pages beside them.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from report import HelpFormat, device_name, tell, today

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
_SMALL = "--num-layers 8 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 4096"
# The models on GPUs: preset, samples of a process and step, and systems whose models fit on a GPU together.
_LARGE = (
    ("gpt2-124m", 8, "floor ddp zero1-torch fsdp2 megazero-0 megazero-1 megazero-2 megazero-3"),
    ("gpt2-1.5b", 4, "ddp fsdp2 megazero-2 megazero-3"),
)
_GRACE = 1.25  # a part is ended after this many times its seconds, since programs keep a time limit only roughly
_LAST = 10.0  # seconds for readme.py


class Part(NamedTuple):
    """A program with its options.

    what: the last part of the record's name.  share: its weight in the division of the time.  flags: those of
    pretrain_gpt.py, which follow `--`.
    """

    what: str
    program: str
    options: str
    share: float
    flags: str = ""

    def words(self, output: Path, seconds: float, device: str) -> list[str]:
        """Return the words of the command line that follow Python's."""
        own = ["--device", device, "--time-limit", f"{seconds:.0f}", "--output", str(output)]
        behind = ["--", *self.flags.split()] if self.flags else []
        return [str(FOLDER / self.program), *self.options.split(), *own, *behind]


def parts(device: str, num_devices: int) -> list[Part]:
    """Return the parts that run on "cpu", or on "cuda" with so many devices."""
    if device == "cpu":
        model = f"{_SMALL} --micro-batch-size 2"
        return [
            Part("compare-1", "compare.py", f"{model} --world-size 1", 2.0),
            Part("compare-2", "compare.py", f"{model} --world-size 2", 5.0),
            Part("throughput", "throughput.py", "--world-size 2", 1.0, f"{model} --zero-stage 2"),
            Part("kernels", "kernels.py", model, 1.0),
        ]
    found, world_size = [], min(num_devices, 2)
    for preset, samples, systems in _LARGE:
        model = f"--preset {preset} --micro-batch-size {samples}"
        compared = f"{model} --precision bf16 --world-size"
        found.append(Part(f"{preset}-compare-1", "compare.py", f"{compared} 1", 3.0))
        if world_size > 1:
            found.append(Part(f"{preset}-compare-2", "compare.py", f"{compared} 2 --systems {systems}", 5.0))
        processes = f"--world-size {world_size}"
        found.append(Part(f"{preset}-throughput", "throughput.py", processes, 1.0, f"{model} --bf16 --zero-stage 2"))
        found.append(Part(f"{preset}-kernels", "kernels.py", f"{model} --precision bf16", 0.5))
    return found


def slug(device: str) -> str:
    """Return a device's name in a form for file names, such as `h200` for `NVIDIA H200`."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return "-".join(word for word in words if word != "nvidia")


def budget(left: float, ahead: Sequence[Part]) -> float:
    """Return the seconds for the first of these parts, by its share of what is left."""
    return max(left - _LAST, 0.0) * ahead[0].share / sum(part.share for part in ahead)


def run(words: Sequence[str], limit: float) -> int | None:
    """Run a program and return its exit status, or None where it and all its processes had to be ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(
        [sys.executable, *words], env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where processes compute")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds of all of it")
    parser.add_argument("--only", nargs="+", help="parts by name; all without")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    options = parser.parse_args(words)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    began, failed = time.monotonic(), []
    ahead = parts(options.device, torch.cuda.device_count())
    unknown = set(options.only or ()) - {part.what for part in ahead}
    if unknown:
        tell(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.what for part in ahead)}")
        return 2
    ahead = [part for part in ahead if not options.only or part.what in options.only]
    stem = f"{today()}-{slug(device_name(options.device))}"

    def left() -> float:
        return options.time_limit - (time.monotonic() - began)

    def say(line: str) -> None:
        tell(f"[{time.monotonic() - began:4.0f}s] {line}")

    while ahead:
        part, seconds = ahead[0], budget(left(), ahead)
        say(f"{part.what}: {seconds:.0f} s")
        limit = min(_GRACE * seconds, left() - _LAST)
        status = run(part.words(options.results / f"{stem}-{part.what}.md", seconds / _GRACE, options.device), limit)
        if status != 0:
            failed.append(part.what)
            say(f"{part.what}: " + ("ended, out of time" if status is None else f"exit status {status}"))
        ahead = ahead[1:]
    if options.results == RESULTS and run([str(FOLDER / "readme.py")], max(left(), _LAST)) != 0:
        failed.append("readme")
    say("done" + f", but for {', '.join(failed)}" * bool(failed))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
