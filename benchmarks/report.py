"""Helpers that make and print a benchmark's report, a Markdown page that begins with the machine and the command."""

import argparse
import datetime
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

MIB = 1 << 20
CPU = "CPU"


class HelpFormat(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help format that keeps the module's text as it is and adds every option's default."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks which start jobs have: --device and --output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where processes compute")
    parser.add_argument("--output", type=Path, help="file for the page, which is printed in any case")
    return parser


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def paragraph(text: str) -> str:
    """Wrap a text into lines as long as the project's."""
    return textwrap.fill(text, 120)


def heading(title: str, device: str, precision: str = "fp32") -> str:
    """Return the top of a page: title, date, machine, versions and the command."""
    place = device_name(device)
    if place == CPU:
        place = f"CPU, {os.cpu_count()} cores, one thread a process"
    made = f"{today()}; {platform.system()}, {place}, torch {version('torch')}, {precision}."
    return f"# {title}\n\n{made}\n\n`{command(sys.argv)}`"


def device_name(device: str = "auto") -> str:
    """Return the GPU's name or "CPU", whichever processes compute on.  device: "auto", "cpu" or "cuda"."""
    import torch  # takes seconds, which programs that only read source code need not spend

    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return torch.cuda.get_device_name() if on_cuda else CPU


def today() -> str:
    """Return the date of today in the form `2026-11-21`."""
    return datetime.date.today().isoformat()


def command(argv: Sequence[str]) -> str:
    """Return the command that runs a program again from the project's folder, without --output."""
    words, kept = iter(argv[1:]), []
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])


def mib(nbytes: float) -> str:
    """Format bytes as a number of MiB, without the unit."""
    return f"{nbytes / MIB:.2f}"


def tell(line: str) -> None:
    """Print a line on the program's progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def publish(parts: Iterable[str], output: Path | None) -> None:
    """Print the page, and write it to the file if there is one."""
    text = "\n\n".join(parts) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")
