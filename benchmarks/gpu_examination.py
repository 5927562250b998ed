"""Examines megazero on a machine with a GPU in at most nine minutes: correctness, speed, and use of memory.

    python benchmarks/gpu_examination.py [--device cpu] [--seconds 525] [--only PHASE ...] [--output NAME]

`gpu_examination.sh` does the same on a machine that lacks some packages and has no network.  Every phase is a process
of its own with a limit (`gpu_phases.py`); its findings are written as soon as it ends, so that no results are lost when
a later phase fails, hangs or gets no time.  The record goes to NAME.json in benchmarks/results/, the phases' output to
NAME.log.  Exit status 0: no phase failed; 1: at least one did.  The GPU's settings stay as they are.

With --device cpu the phases run at toy sizes, to test this program; those that need a GPU are recorded as such.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from report import HelpFormat, device_name, tell, today
from run_all import RESULTS, slug
from structure import commit

FOLDER = Path(__file__).resolve().parent
PASSED, NEEDS_GPU, NO_TIME = "passed", "needs a GPU", "no time left"
ALONE, BESIDE, TOGETHER = "alone", "beside", "together"
_LOG_BYTES = 40_000
_LEAST = 15.0  # seconds; with less left no phase is started


@dataclass(frozen=True)
class Phase:
    """A function of `gpu_phases.py` with its keyword arguments (options).

    limit: seconds after which it is ended.  runs: ALONE, since it is timed, or has as many processes as a GPU serves;
    BESIDE all others, since it works on CPU cores; or TOGETHER with others of that kind, since nothing in it is timed.
    """

    name: str
    limit: float
    options: Mapping[str, Any] = field(default_factory=dict)
    runs: str = ALONE
    needs_gpu: bool = False

    @property
    def key(self) -> str:
        """The phase's key in the record, such as `speed preset=gpt2-124m micro_batch=64 profile=True`."""
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.options.items())])


def _speed(limit: float, preset: str, micro_batch: int, needs_gpu: bool = False, **options: Any) -> Phase:
    return Phase("speed", limit, {"preset": preset, "micro_batch": micro_batch, **options}, needs_gpu=needs_gpu)


# The most valuable phases come first.  All together may take more time than there is, and then the last are left out.
PHASES = (
    Phase("losses", 400, {"where": "cpu"}, runs=BESIDE),
    Phase("environment", 40),
    Phase("ceilings", 40, needs_gpu=True),
    _speed(120, "gpt2-124m", 64, profile=True),
    Phase("plain", 110, {"preset": "gpt2-124m", "micro_batch": 64}),
    _speed(120, "gpt2-1.5b", 16, needs_gpu=True, profile=True),
    Phase("exactness", 130, runs=TOGETHER),
    Phase("collectives", 130, runs=TOGETHER),
    Phase("losses", 130, {"where": "device"}, runs=TOGETHER),
    Phase("ledger", 130, runs=TOGETHER),
    Phase("gpu_tests", 130, runs=TOGETHER),
    Phase("layouts", 130, runs=TOGETHER),
    Phase("plain", 150, {"preset": "gpt2-1.5b", "micro_batch": 16}, needs_gpu=True),
    Phase("settings", 130),
    Phase("determinism", 120),
    _speed(
        70, "gpt2-1.5b", 16, needs_gpu=True, fp8="hybrid", fp8_recipe="delayed", fp8_cache_weights=True, profile=True
    ),
    _speed(70, "gpt2-1.5b", 16, needs_gpu=True, fp8="hybrid", fp8_cache_weights=True, profile=True),
    _speed(70, "gpt2-1.5b", 16, needs_gpu=True, fp8="hybrid"),
    _speed(90, "gpt2-1.5b", 16, needs_gpu=True, stage=2, micro_batches=8),
    _speed(120, "gpt2-1.5b", 16, needs_gpu=True, stage=2, micro_batches=8, offload_optimizer=True),
    _speed(60, "gpt2-124m", 64, needs_gpu=True, stage=3),
    _speed(60, "gpt2-1.5b", 8, needs_gpu=True, compile="off"),
    _speed(70, "gpt2-1.5b", 32, needs_gpu=True),
    _speed(50, "gpt2-124m", 64, needs_gpu=True, compile="off"),
    _speed(60, "gpt2-124m", 128, needs_gpu=True),
    _speed(60, "gpt2-124m", 64, needs_gpu=True, attention="flash"),
    _speed(60, "gpt2-124m", 64, needs_gpu=True, compile_num_layers=4),
    _speed(60, "gpt2-124m", 64, needs_gpu=True, enable_cuda_graph=True),
    # In small micro-batches the host may take longer than the GPU.
    *(_speed(50, "gpt2-124m", 2, needs_gpu=True, **words) for words in ({}, {"enable_cuda_graph": True})),
    _speed(400, "gpt2-124m", 64, needs_gpu=True, compile="max"),
)


@dataclass(frozen=True)
class _Process:
    """A phase under way.

    log: the file of its output.  found: the file of its findings so far, which may not exist yet.  began: in seconds.
    """

    phase: Phase
    process: subprocess.Popen[bytes]
    log: Path
    found: Path
    began: float


class Examination:
    """Runs phases, and after each of them writes the record at `record` and the phases' output beside it.

    device: "cuda" or "cpu".  seconds: the time for all phases together.
    """

    def __init__(self, device: str, seconds: float, record: Path) -> None:
        self._device, self._path = device, record
        self._began, self._seconds = time.monotonic(), seconds
        self._logs: dict[str, str] = {}
        self.record: dict[str, Any] = {
            "examines": "a GPU",
            "date": today(),
            "device": device_name(device),
            "torch": torch.__version__,
            "commit": commit(FOLDER.parent),
            "phases": {},
        }

    def run(self, phases: Sequence[Phase]) -> bool:
        """Run all phases that there is time for, and return True if none failed."""
        able = [phase for phase in phases if self._device == "cuda" or not phase.needs_gpu]
        for phase in phases:
            if phase not in able:
                self.record["phases"][phase.key] = {"status": NEEDS_GPU}
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            if self._device == "cuda":
                self._run_on_gpu(able, scratch)
            else:
                for phase in able:
                    self._run_in_turn([phase], scratch)
        self.record["loss_curves"] = compared_losses(self.record["phases"])
        self._publish()
        return all(row["status"] in (PASSED, NEEDS_GPU, NO_TIME) for row in self.record["phases"].values())

    def _run_on_gpu(self, phases: Sequence[Phase], scratch: Path) -> None:
        beside = [self._start(phase, scratch) for phase in phases if phase.runs == BESIDE]
        together = [phase for phase in phases if phase.runs == TOGETHER]
        for phase in phases:
            if phase.runs == ALONE:
                self._run_in_turn([phase], scratch)
            elif phase.runs == TOGETHER and phase is together[0]:
                self._run_in_turn(together, scratch)
        for under_way in beside:
            self._finish(under_way, time.monotonic() - under_way.began + self._left())

    def _run_in_turn(self, phases: Sequence[Phase], scratch: Path) -> None:
        """Run these phases at the same time, each at most until its limit or the end of the examination."""
        if self._left() < _LEAST:
            self.record["phases"] |= {phase.key: {"status": NO_TIME} for phase in phases}
            return
        for under_way in [self._start(phase, scratch) for phase in phases]:
            # A toy model on a busy CPU takes longer than the real one on a GPU.
            limit = under_way.phase.limit * (1 if self._device == "cuda" else 5)
            self._finish(under_way, min(limit, time.monotonic() - under_way.began + self._left()))

    def _left(self) -> float:
        return self._seconds - (time.monotonic() - self._began)

    def _start(self, phase: Phase, scratch: Path) -> _Process:
        stem = scratch / f"{len(list(scratch.iterdir()))}-{phase.name}"
        log, found = stem.with_suffix(".log"), stem.with_suffix(".json")
        words = [str(FOLDER / "gpu_phases.py"), phase.name, json.dumps(phase.options)]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, *words, "--device", self._device, "--output", str(found)],
                cwd=FOLDER.parent,
                env=_environment(),
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Process(phase, process, log, found, time.monotonic())

    def _finish(self, under_way: _Process, seconds: float) -> None:
        """Wait for a phase until it has run for `seconds`, then end all its processes, and record its results."""
        process, key = under_way.process, under_way.phase.key
        try:
            status = process.wait(max(seconds - (time.monotonic() - under_way.began), 0.1))
            row: dict[str, Any] = {"status": PASSED if status == 0 else f"failed, exit status {status}"}
        except subprocess.TimeoutExpired:
            row = {"status": f"failed, ended after {seconds:.0f} s"}
        with contextlib.suppress(ProcessLookupError):  # its own child processes are ended too
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        row["seconds"] = round(time.monotonic() - under_way.began, 1)
        if under_way.found.exists():
            row["found"] = json.loads(under_way.found.read_text(encoding="utf-8"))
        text = under_way.log.read_text(encoding="utf-8", errors="replace")
        self._logs[key] = text[-_LOG_BYTES:]
        if row["status"] != PASSED:
            row["tail"] = text[-1500:].replace(f"{FOLDER.parent}/", "")
        self.record["phases"][key] = row
        found = row.get("found", {})
        brief = found.get("error") or found.get("summary", "")
        tell(f"[{time.monotonic() - self._began:4.0f}s] {key}: {row['status']}; {brief}")
        self._publish()

    def _publish(self) -> None:
        self.record["seconds"] = round(time.monotonic() - self._began, 1)
        self._path.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        text = "".join(f"===== {key}\n{log}\n" for key, log in self._logs.items())
        self._path.with_suffix(".log").write_text(text, encoding="utf-8")


def _environment() -> dict[str, str]:
    root = str(FOLDER.parent)
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    # torch.compile starts a worker for every core, in every process that compiles.
    return {"TORCHINDUCTOR_COMPILE_THREADS": "8", **os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}


def compared_losses(phases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Compare each loss curve of the `losses` phases with the CPU's in fp32.

    Returns, by curve, its last loss and its largest relative distance from the CPU's.
    """
    curves: dict[str, list[float]] = {}
    for row in phases.values():
        curves |= row.get("found", {}).get("curves", {})
    base = curves.get("cpu fp32", [])
    return {
        name: {
            "last": curve[-1] if curve else None,
            "largest_relative": max((abs(a - b) / b for a, b in zip(curve, base, strict=False)), default=None),
        }
        for name, curve in curves.items()
    }


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: toy sizes")
    parser.add_argument("--seconds", type=float, default=525.0, help="of all phases together")
    known = sorted({phase.name for phase in PHASES} | {phase.key for phase in PHASES})
    parser.add_argument(
        "--only",
        nargs="+",
        choices=known,
        metavar="PHASE",
        help="phases, each by its name or by its key in the record: " + "; ".join(known),
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the record")
    parser.add_argument("--output", help="name of the record; DATE-DEVICE-examination without")
    options = parser.parse_args(words)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU on this machine; --device cpu tests this program")
    return options


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    name = options.output or f"{today()}-{slug(device_name(options.device))}-examination"
    options.results.mkdir(parents=True, exist_ok=True)
    examination = Examination(options.device, options.seconds, options.results / f"{name}.json")
    passed = examination.run(
        [phase for phase in PHASES if not options.only or {phase.name, phase.key} & set(options.only)]
    )
    for key, row in examination.record["phases"].items():
        print(f"{key:60s} {row['status']}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
