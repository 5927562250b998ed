"""Writes and reads the *records* of benchmarks: dated figures as JSON, of which `readme.py` makes tables.

A record states which program ran where, and has the figures of each of its *systems*: the engines or kernels that were
timed.  Figures are in seconds, bytes and operations, never in their multiples; numbers that are not finite are null.
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
# The figures that a system must have: one that trains, and a kernel.
TRAINING = ("tokens_per_second", "median_step_seconds", "step_seconds", "losses", "peak_bytes", "settings")
TIMED = ("median_step_seconds",)
# The figures that a system which turns text into tokens must have.
ENCODING = ("text_bytes", "cpu_seconds", "bytes_per_cpu_second", "bytes_per_second", "peak_bytes", "tokens", "verdict")
_OF_A_SYSTEM: Mapping[str, tuple[str, ...]] = {"kernels": TIMED, "corpora": ENCODING}


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write the record to a file, which exists whole or not at all.

    Raises ValueError with everything that a record must have and this one lacks; DataError where it cannot be written.
    """
    findings = list(problems(record))
    if findings:
        raise ValueError(f"no record for {path.name}: {'; '.join(findings)}")
    text = json.dumps(_finite(record), indent=1, allow_nan=False) + "\n"
    with written_aside(path) as file:
        file.write(text.encode())


def read(path: Path) -> dict[str, Any]:
    """Return the record that `write` has written to a file; raises ValueError for any other content."""
    record = json.loads(path.read_text(encoding="utf-8"))
    findings = list(problems(record)) if isinstance(record, dict) else ["it is no mapping"]
    if findings:
        raise ValueError(f"{path.name} is no record: {'; '.join(findings)}")
    return dict(record)


def problems(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why this is no valid record."""
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
    """Return the command that runs this program again."""
    return report.command(sys.argv)


def described(config: ModelConfig) -> dict[str, Any]:
    """Return the description of a model for a record; its name is that of a preset, or such as `8 x 256`."""
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
    """Return the first quartile, the median and the third quartile of one or more numbers."""
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low, middle, high


def place(output: Path, suffix: str) -> Path:
    """Return the path with `suffix` beside an output `name`, `name.md` or `name.json`.

    A name may have dots of its own, such as gpt2-1.5b.
    """
    return output.with_name(output.name.removesuffix(".md").removesuffix(".json") + suffix)


def publish(parts: Iterable[str], record: Mapping[str, Any], output: Path | None) -> None:
    """Print the page; with an output OUT also write it to OUT.md, and the record to OUT.json."""
    report.publish(parts, None if output is None else place(output, ".md"))
    if output is not None:
        write(record, place(output, ".json"))


def _finite(value: Any) -> Any:
    """Return the value made of JSON's own types, with None for numbers that JSON cannot express."""
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(part) for part in value]
    if isinstance(value, numbers.Real) and not math.isfinite(value):
        return None
    return value
