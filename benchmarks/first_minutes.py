"""Goes a newcomer's way from an empty folder to a model in transformers, and writes the transcript with its times.

    python benchmarks/first_minutes.py [--without-linux] [--no-install] [--folder FOLDER] [--output FILE.md]

The commands are those that README.md and --help show: install, train a tokenizer, preprocess, look at what a run would
be, train on 4 processes until Ctrl-C, go on with 2 processes at another layout, generate, export, load in transformers.
The text is this project's own sources.  They run one after another in an empty folder, in an environment without
variables of ours; a command that fails ends the way, with status 1.

--without-linux: without what Linux alone has, such as os.sched_getaffinity, /proc and fcntl, which
tests/support/without_linux.py takes away.
--no-install: with this Python and its packages, in place of a new virtual environment.
"""

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from report import HelpFormat, add_output, heading, paragraph, publish, tell

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 580.0
LINES_SHOWN = 5  # at the beginning of an output, and at its end
_STOP = "^C"
_SIZES = """\
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 4 \\
    --train-iters {steps} --lr 1e-3 --eval-iters 1 --data-path first_text_document --save first --load first"""
_TRANSFORMERS = """\
python -c "from transformers import pipeline; \\
    print(pipeline('text-generation', 'first-transformers')('def ', max_new_tokens=10)[0]['generated_text'])\""""


class Step(NamedTuple):
    """A command, and the beginning of the line of its output upon which Ctrl-C is pressed; "" for never."""

    command: str
    stop_at: str = ""


class Done(NamedTuple):
    """What became of a step: exit status, seconds, and lines of output, errors among them."""

    step: Step
    status: int
    seconds: float
    lines: list[str]


def install_steps(source: Path) -> list[Step]:
    """Return the steps that make an environment with the project and transformers."""
    quiet = "pip install -qq --disable-pip-version-check"
    pinned = shlex.quote(str(source / "scripts" / "constraints.txt"))
    return [
        Step("python3 -m venv environment"),
        Step(f"{quiet} -c {pinned} {shlex.quote(str(source))}"),
        Step(f"{quiet} -c {pinned} transformers"),
    ]


def steps(train_iters: int, stop_at: int) -> list[Step]:
    """Return the steps from `book.txt` to transformers, for a run that is stopped near a step and then goes on."""
    sizes = _SIZES.format(steps=train_iters)
    on_4 = f"megazero pretrain --processes 4 --tensor-model-parallel-size 2 --zero-stage 2 \\\n{sizes}"
    return [
        Step("megazero --help"),
        Step("megazero train-tokenizer --input book.txt --output first.model --vocab-size 512"),
        Step(
            "megazero preprocess --input book.txt --output-prefix first --append-eod \\\n"
            "    --tokenizer-type SentencePieceTokenizer --tokenizer-model first.model"
        ),
        Step(f"{on_4} --check"),
        Step(on_4, stop_at=f"iteration {stop_at}/"),
        Step(f"megazero pretrain --processes 2 --zero-stage 3 \\\n{sizes}"),
        Step('megazero generate --load first --prompt "def " --max-new-tokens 20'),
        Step("megazero convert export --load first --output first-transformers"),
        Step(_TRANSFORMERS),
        Step("megazero summarize --load first"),
    ]


def take(step: Step, folder: Path, environment: dict[str, str]) -> Done:
    """Run a step in a shell of its own process group, with Ctrl-C where the step has it."""
    begun, lines = time.monotonic(), list[str]()
    shell = subprocess.Popen(
        ["bash", "-e", "-c", step.command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert shell.stdout is not None
    try:
        for line in shell.stdout:
            lines.append(line.rstrip("\n"))
            if step.stop_at and step.stop_at in " ".join(line.split()):
                os.killpg(shell.pid, signal.SIGINT)
                lines.append(_STOP)
                step = step._replace(stop_at="")
            if time.monotonic() - begun > LIMIT_SECONDS:
                break
        status = shell.wait(LIMIT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    return Done(step, status, time.monotonic() - begun, lines)


def environment_of(folder: Path, *, without_linux: bool, installed: bool) -> dict[str, str]:
    """Return the variables of a new shell, where `python` and `megazero` are those of the environment."""
    commands = folder / "environment" / "bin"
    if without_linux or not installed:
        commands.mkdir(parents=True, exist_ok=True)
        python = commands / "python" if installed else Path(sys.executable)
        program = ROOT / "tests" / "support" / "without_linux.py" if without_linux else "-m megazero"
        texts = {"megazero": f'exec {shlex.quote(str(python))} {program} "$@"'}
        texts |= {} if installed else {"python": f'exec {shlex.quote(str(python))} "$@"'}
        for name, text in texts.items():
            (commands / name).unlink(missing_ok=True)
            (commands / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            (commands / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name in ("HOME", "LANG", "TMPDIR")}
    source = {} if installed else {"PYTHONPATH": str(ROOT)}
    return {**kept, **source, "PATH": os.pathsep.join([str(commands), os.environ["PATH"]])}


def taken(options: argparse.Namespace, folder: Path) -> Iterator[Done]:
    """Yield the steps as they end, up to one that fails; a run that Ctrl-C has ended has not failed."""
    texts = sorted(ROOT.glob("megazero/*/*.py"))
    (folder / "book.txt").write_text("".join(path.read_text(encoding="utf-8") for path in texts), encoding="utf-8")
    bare = {**environment_of(folder, without_linux=False, installed=True), "PIP_NO_INPUT": "1"}
    installing = [] if options.no_install else install_steps(ROOT)
    for step in installing:
        yield (done := take(step, folder, bare))
        if done.status:
            return
    environment = environment_of(folder, without_linux=options.without_linux, installed=not options.no_install)
    for step in steps(options.train_iters, options.stop_at):
        yield (done := take(step, folder, environment))
        if done.status and not step.stop_at:
            return


def shown(lines: Sequence[str]) -> list[str]:
    """Return an output as the transcript has it: its beginning, what is around Ctrl-C, and its end, long lines cut."""
    places = {*range(LINES_SHOWN), *range(len(lines) - LINES_SHOWN, len(lines))}
    for place in (place for place, line in enumerate(lines) if line == _STOP):
        places |= {place - 1, place, place + 1}
    kept, before = [], -1
    for place in sorted(place for place in places if 0 <= place < len(lines)):
        if place == before + 2:
            kept.append(lines[before + 1])
        elif place > before + 2:
            kept.append(f"... ({place - before - 1} lines)")
        kept.append(lines[place])
        before = place
    return [line if len(line) <= 160 else f"{line[:157]}..." for line in kept]


def page(found: Sequence[Done], options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the parts of the transcript."""
    places = {str(folder): "FOLDER", str(ROOT): "SOURCES"}
    blocks, since = [], 0.0
    for done in found:
        text = "\n".join([f"$ {done.step.command}", *shown(done.lines)])
        for place, name in places.items():
            text = text.replace(place, name)
        # Fences would end the block.
        text = re.sub(r"^```", "'''", text, flags=re.MULTILINE)
        since += done.seconds
        told = f"{done.seconds:.1f} s, status {done.status}; {since / 60:.1f} minutes since the beginning"
        blocks.append(f"```text\n{text}\n```\n\n{told}")
    system = "Linux without Linux's own calls" if options.without_linux else "Linux"
    python = "this project's own environment" if options.no_install else "a new virtual environment"
    words = (
        f"The commands of README.md one after another in an empty folder, on {system}, in {python}; the text is the"
        " project's sources. Long outputs and lines are cut. Times include what else the machine was doing."
    )
    title = "The first minutes" + (", without Linux's own calls" if options.without_linux else "")
    return [heading(title, "cpu"), paragraph(words), *blocks]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--without-linux", action="store_true", help="take away what Linux alone has")
    parser.add_argument("--no-install", action="store_true", help="use this Python and its packages")
    parser.add_argument("--folder", type=Path, help="an empty or new folder, in place of one that is removed")
    parser.add_argument("--train-iters", type=int, default=400, help="steps of the run")
    parser.add_argument("--stop-at", type=int, default=100, help="step at which Ctrl-C is pressed")
    add_output(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    with tempfile.TemporaryDirectory(prefix="first_minutes_") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = []
        for done in taken(options, folder):
            found.append(done)
            tell(f"{done.step.command.splitlines()[0]}: status {done.status}, {done.seconds:.1f} s")
        publish(page(found, options, folder), options.output)
    return int(len(found) < 10 or bool(found[-1].status))


if __name__ == "__main__":
    sys.exit(main())
