"""Makes a benchmark's report: a Markdown page that begins with the machine and the command, and its record as JSON.

A *record* states which program ran where, and has the figures of each of its *systems*: the engines, kernels or
encoders that were timed.  Figures are in seconds, bytes and operations, never in their multiples; numbers that are not
finite are null.  A system that did not run has one figure, "refused": the reason.  `readme.py` makes
benchmarks/README.md of the newest records.
"""

import argparse
import datetime
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from megazero.config import derived
from megazero.config.model import ModelConfig
from megazero.config.presets import PRESETS
from megazero.files import written_aside
from megazero.report.metrics import matmul_parameters

MIB = 1 << 20


class HelpFormat(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help format that keeps the module's text as it is and adds every option's default."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of all benchmarks that start jobs: --device and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where processes compute")
    add_output(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output", type=Path, metavar="FILE.md", help="file for the page, which is printed in any case"
    )


def today() -> str:
    """Return the date of today in the form `2026-11-21`."""
    return datetime.date.today().isoformat()


def device_name(device: str = "auto") -> str:
    """Return the GPU's name or "CPU", whichever processes compute on.  device: "auto", "cpu" or "cuda"."""
    import torch  # takes seconds, which programs that only read source code need not spend

    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return torch.cuda.get_device_name() if on_cuda else "CPU"


def machine(device: str = "auto") -> str:
    """Return the device that figures are made on: the GPU's name, or the CPU's with its number of cores."""
    name = device_name(device)
    if name != "CPU":
        return name
    told = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    lines = (line.partition(":") for line in told.splitlines())
    models = (value.strip() for key, _, value in lines if key.strip() == "model name")
    return f"CPU, {next(models, platform.machine())}, {os.cpu_count()} cores"


def command(argv: Sequence[str]) -> str:
    """Return the command that runs a program again from the project's folder, without --output."""
    words, kept = iter(argv[1:]), []
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])


def new_record(program: str, device: str, **figures: Any) -> dict[str, Any]:
    """Return a record of today's run of this program.

    `readme.py` needs the figures model (a mapping with a "name"), precision, world_size and systems.
    """
    made = {"date": today(), "device": device_name(device), "machine": machine(device), "torch": version("torch")}
    return {"program": program, **made, "command": command(sys.argv), **figures}


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
    low, median, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
    return low, median, high


def heading(title: str, device: str, precision: str = "fp32") -> str:
    """Return the top of a page: title, date, machine, versions and the command."""
    place = machine(device)
    if device_name(device) == "CPU":
        place += ", one thread a process"
    made = f"{today()}; {platform.system()}, {place}, torch {version('torch')}, {precision}."
    return f"# {title}\n\n{made}\n\n`{command(sys.argv)}`"


def paragraph(text: str) -> str:
    """Wrap a text into lines as long as the project's."""
    return textwrap.fill(text, 120)


def mib(nbytes: float) -> str:
    """Format bytes as a number of MiB, without the unit."""
    return f"{nbytes / MIB:.2f}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


class Column(NamedTuple):
    """A column of a table of systems: a figure's key, and the format in which it is shown times a factor."""

    title: str
    key: str
    form: str = ""
    factor: float = 1.0

    def cell(self, figures: Mapping[str, Any]) -> str:
        """Return the text for one system, "-" where the figure is missing, null or an empty text."""
        value = figures.get(self.key)
        if value is None or isinstance(value, str):
            return value or "-"
        return f"{value * self.factor:{self.form}}"


def table_of(systems: Mapping[str, Mapping[str, Any]], columns: Sequence[Column], first: str = "system") -> str:
    """Return a Markdown table with a row for each system; first: the title of the column with their names."""
    rows = []
    for name, figures in systems.items():
        refused = "refused" in figures
        cells = [figures["refused"], *["-"] * len(columns[1:])] if refused else [one.cell(figures) for one in columns]
        rows.append([name, *cells])
    return table([first, *(column.title for column in columns)], rows)


def spread(seconds: Sequence[float]) -> str:
    """Return the quartiles in milliseconds, such as `81.3 to 84.4`."""
    low, _, high = quartiles(seconds)
    return f"{1e3 * low:.1f} to {1e3 * high:.1f}"


def publish(parts: Iterable[str], output: Path | None, record: Mapping[str, Any] | None = None) -> None:
    """Print the page; with an output FILE.md write it there too, and the record, if there is one, to FILE.json.

    Both appear whole or not at all.  Raises DataError where one cannot be written.
    """
    text = "\n\n".join(parts) + "\n"
    print(text, end="")
    if output is None:
        return
    with written_aside(output) as file:
        file.write(text.encode())
    if record is not None:
        with written_aside(Path(f"{output}".removesuffix(".md") + ".json")) as file:
            file.write(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def tell(line: str) -> None:
    """Print a line on the program's progress to stderr."""
    print(line, file=sys.stderr, flush=True)
