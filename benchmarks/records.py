"""What a benchmark keeps: a *record*, dated figures as JSON, of which `readme.py` makes tables and a chart.

A record says what ran where, and has for each of its *systems* (what was timed: an engine, a kernel) the figures of
that system.  Seconds, bytes and operations, never their multiples; what is not finite is null.
"""

import json
import math
import numbers
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import report
from report import device_name, today

from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.files import written_aside
from megazero.report.metrics import matmul_parameters

__all__ = ["command", "described", "device_name", "place", "publish", "quartiles", "read", "today", "write"]

REQUIRED: Mapping[str, tuple[type, ...]] = {
    "program": (str,),
    "date": (str,),
    "device": (str,),
    "torch": (str,),
    "command": (str,),
    "model": (str, Mapping),
    "precision": (str,),
    "world_size": (int,),
    "systems": (Mapping,),
}
# What a system that trains has; of a kernel, one figure is asked for.
TRAINING = ("tokens_per_second", "median_step_seconds", "step_seconds", "losses", "peak_bytes", "settings")
TIMED = ("median_step_seconds",)
# What one that turns text into tokens has.
ENCODING = ("text_bytes", "cpu_seconds", "bytes_per_cpu_second", "bytes_per_second", "peak_bytes", "tokens", "verdict")
_OF_A_SYSTEM: Mapping[str, tuple[str, ...]] = {"kernels": TIMED, "corpora": ENCODING}


def write(record: Mapping[str, Any], path: Path) -> None:
    """The record as a file that is there whole or not at all.

    Raises ValueError with everything that a record must have and this one has not; DataError where nothing can be
    written.
    """
    findings = list(problems(record))
    if findings:
        raise ValueError(f"no record for {path.name}: {'; '.join(findings)}")
    text = json.dumps(_finite(record), indent=1, allow_nan=False) + "\n"
    with written_aside(path) as file:
        file.write(text.encode())


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; raises ValueError for anything else."""
    record = json.loads(path.read_text(encoding="utf-8"))
    findings = list(problems(record)) if isinstance(record, dict) else ["it is no mapping"]
    if findings:
        raise ValueError(f"{path.name} is no record: {'; '.join(findings)}")
    return dict(record)


def problems(record: Mapping[str, Any]) -> Iterator[str]:
    """What keeps this from being a record."""
    for name, kinds in REQUIRED.items():
        if name not in record:
            yield f"{name} is missing"
        elif not isinstance(record[name], kinds):
            yield f"{name} is {record[name]!r}, not of type {' or '.join(kind.__name__ for kind in kinds)}"
    systems = record.get("systems")
    needed = _OF_A_SYSTEM.get(str(record.get("program")), TRAINING)
    for name, system in systems.items() if isinstance(systems, Mapping) else ():
        missing = [key for key in needed if key not in system]
        if missing and not system.get("refused"):
            yield f"system {name} lacks {', '.join(missing)}"


def command() -> str:
    """What to type to run it again."""
    return report.command(sys.argv)


def described(config: ModelConfig) -> dict[str, Any]:
    """A model of a record; its name is a preset's, or `8 x 256`."""
    assert config.vocab_size is not None, "made-up samples have a stated vocabulary"
    rows = (name for name, row in PRESETS.items() if all(getattr(config, key) == value for key, value in row.items()))
    return {
        "name": next(rows, f"{config.num_layers} x {config.hidden_size}"),
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "ffn_hidden_size": derived.ffn_hidden_size(config),
        "seq_length": config.seq_length,
        "vocab_size": config.vocab_size,
        "matmul_parameters": matmul_parameters(config, vocab_size=config.vocab_size),
    }


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, of at least one."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def place(output: Path, suffix: str) -> Path:
    """`name.json` beside `name`, `name.md` or `name.json`; a name may have dots of its own, as gpt2-1.5b has."""
    return output.with_name(output.name.removesuffix(".md").removesuffix(".json") + suffix)


def publish(parts: Iterable[str], record: Mapping[str, Any], output: Path | None) -> None:
    """The page to stdout; with an output OUT also to OUT.md, and the record to OUT.json."""
    report.publish(parts, None if output is None else place(output, ".md"))
    if output is not None:
        write(record, place(output, ".json"))


def _finite(value: Any) -> Any:
    """The same of JSON's own types; numbers that JSON cannot write as None."""
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        return None
    return value
