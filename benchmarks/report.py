"""What a benchmark prints and keeps: one Markdown page, with how it came about on top."""

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
    """The module's text as it stands, and every option's default."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark of several jobs has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormat)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where processes compute")
    parser.add_argument("--output", type=Path, help="file for the page, which is printed in any case")
    return parser


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def paragraph(text: str) -> str:
    """Words, in lines as long as the project's."""
    return textwrap.fill(text, 120)


def heading(title: str, device: str, precision: str = "fp32") -> str:
    """Title, date, machine, versions and the command."""
    place = device_name(device)
    if place == CPU:
        place = f"CPU, {os.cpu_count()} cores, one thread a process"
    made = f"{today()}; {platform.system()}, {place}, torch {version('torch')}, {precision}."
    return f"# {title}\n\n{made}\n\n`{command(sys.argv)}`"


def device_name(device: str = "auto") -> str:
    """What processes compute on, by the maker's name or as "CPU"; device: "auto", "cpu" or "cuda"."""
    import torch  # takes seconds, which programs that only read the source need not wait for

    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return torch.cuda.get_device_name() if on_cuda else CPU


def today() -> str:
    """`2026-11-21`."""
    return datetime.date.today().isoformat()


def command(argv: Sequence[str]) -> str:
    """What to type to run it again, from the project's folder; where the page went doesn't matter."""
    words, kept = iter(argv[1:]), []
    for word in words:
        if word == "--output":
            next(words, None)
        elif not word.startswith("--output="):
            kept.append(word)
    return shlex.join(["python", f"benchmarks/{Path(argv[0]).name}", *kept])


def mib(nbytes: float) -> str:
    """Bytes as MiB, for a column that says so."""
    return f"{nbytes / MIB:.2f}"


def tell(line: str) -> None:
    """How far it has come, for who waits."""
    print(line, file=sys.stderr, flush=True)


def publish(parts: Iterable[str], output: Path | None) -> None:
    """The page to stdout, and to the file if there is to be one."""
    text = "\n\n".join(parts) + "\n"
    print(text, end="")
    if output is not None:
        output.write_text(text, encoding="utf-8")
