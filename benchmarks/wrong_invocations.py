"""Types every command of `wrong_table.py`: does each end soon, with a message, without a traceback and without harm?

    python benchmarks/wrong_invocations.py --records FILE.jsonl [--only WORD] [--output FILE.md]

Each command runs as a process of its own, forked from one that has imported torch and the programs, in a folder of
corpora, checkpoints and files of other kinds.  It is refused well if its status is neither 0 nor a signal's, it prints
no traceback, its message holds the row's words, it takes less than 10 seconds, and no file has changed or is new.

A line is appended to --records for every row as soon as it has been tried; a row that was refused well is not tried
again, so the program may be stopped and started at will.  Status 1: some row was not refused well.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from report import HelpFormat, add_output, publish, table, tell, today  # noqa: E402
from wrong_table import FILES, SHORT, Row, rows  # noqa: E402

LIMIT_SECONDS = 10.0
_KILL_SECONDS = 15.0
IMPORTED = ("torch", "megazero.train.program", "megazero.library.initialize", "megazero.verify.program")
LIBRARY = """
import sys
import torch
from torch.nn import Linear
from megazero import initialize
from megazero.errors import UserError
GOOD = {{"optimizer": {{"type": "Adam", "params": {{"lr": 1e-3}}}}}}
try:
    {call}
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
Record = dict[str, Any]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines of what has been run; appended to")
    parser.add_argument("--only", default="", help="rows whose command has this word")
    add_output(parser)
    return parser.parse_args(words)


def make_files(folder: Path) -> None:
    """Fill the folder in which commands run; raises AssertionError if a good command fails."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "corpus.jsonl").write_text('{"text": "a line of text to learn from"}\n' * 40)
    (folder / "empty_folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 8)
    for name in ("fifo", "text_fifo.idx", "text_fifo.bin"):
        os.mkfifo(folder / name)
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    preprocess = "preprocess_data --input corpus.jsonl --output-prefix made {bytes}"
    for command in (preprocess, "pretrain {small} --save saved", "pretrain {corpus} made_text_document"):
        record = run(Row(command, ()), folder)
        assert record["status"] == 0, record
    for ending in (".bin", ".idx", ".json"):
        (folder / f"made_text_document{ending}").rename(folder / f"text{ending}")
        if ending != ".json":
            whole = (folder / f"text{ending}").read_bytes()
            (folder / f"text_cut{ending}").write_bytes(whole[:-10] if ending == ".bin" else whole)
            (folder / f"text_binary{ending}").write_bytes(bytes(range(256)))
            (folder / f"text_empty{ending}").touch()


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of everything below a folder."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[path.relative_to(folder).as_posix()] = (0 if path.is_dir() else status.st_size, status.st_mtime_ns)
    return {name: figures for name, figures in found.items() if not name.startswith(".output")}


def run(row: Row, folder: Path) -> Record:
    """Run a row's command in the folder; return what came of it."""
    is_call = row.command.startswith("library")
    words = row.command.split(maxsplit=1) if is_call else shlex.split(row.words())
    variables: dict[str, str] = {}
    while "=" in words[0] and not is_call:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program, *arguments = words
    before, started = contents(folder), time.monotonic()
    output = folder / ".output"
    pid = os.fork()
    if not pid:
        _become(program, arguments, variables, folder, output)
    status = _wait(pid, started + _KILL_SECONDS)
    seconds = time.monotonic() - started
    after = contents(folder)
    text = output.read_text(errors="replace")
    changed = [name for name, figures in after.items() if before.get(name) != figures and not (folder / name).is_dir()]
    return {
        "command": row.command,
        "told": list(row.told),
        "status": status,
        "seconds": round(seconds, 2),
        "message": _without_places(text, folder)[-3000:],
        "changed": sorted(changed + [name for name in before if name not in after]),
    }


def _without_places(text: str, folder: Path) -> str:
    places = {str(folder): "FOLDER", str(ROOT): "ROOT", sys.prefix: "PYTHON", sys.base_prefix: "PYTHON"}
    return functools.reduce(lambda found, place: found.replace(*place), places.items(), text)


def _wait(pid: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _become(program: str, arguments: list[str], variables: Mapping[str, str], folder: Path, output: Path) -> None:
    """Turn this forked process into the program; never returns."""
    status = 70
    try:
        os.setsid()
        os.chdir(folder)
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in enumerate((nothing, opened, opened)):
            os.dup2(source, target)
        for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_", "LOCAL_"))]:
            del os.environ[name]
        os.environ.update(variables, OMP_NUM_THREADS=variables.get("OMP_NUM_THREADS", "1"), PYTHONPATH=str(ROOT))
        if program.startswith("scripts/"):
            os.environ.setdefault("PYTHON", sys.executable)
            no_install = ["--no-install"] if "quickstart" in program else []
            os.chdir(ROOT if "slurm" in program else folder)
            os.execvp("bash", ["bash", str(ROOT / program), *no_install, *arguments])
        status = _status_of(program, arguments)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _status_of(program: str, arguments: list[str]) -> int:
    if program == "library":
        exec(LIBRARY.format(call=arguments[0]), {"__name__": "__main__"})
        return 0
    names = {"pretrain": "pretrain_gpt.py", "verify": "megazero/__main__.py"}
    path = str(ROOT / names.get(program, f"tools/{program}.py"))
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
    return 0


def faults(record: Record) -> list[str]:
    """Return in words what is wrong with a refusal; nothing for a good one."""
    message = record["message"]
    lost = [part for part in record["told"] if part not in message]
    found = {
        "a traceback": "Traceback (most recent call last)" in message,
        f"status {record['status']}": record["status"] <= 0 or record["status"] >= 70,
        f"{record['seconds']} s": record["seconds"] >= LIMIT_SECONDS,
        f"without {' and '.join(map(repr, lost))}": bool(lost),
        f"changed {', '.join(record['changed'])}": bool(record["changed"]),
    }
    return [fault for fault, is_so in found.items() if is_so]


def read_records(path: Path) -> dict[str, Record]:
    """Return the newest record of every row that is still in the table, in the table's order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {record["command"]: record for record in map(json.loads, lines)}
    return {
        row.command: known[row.command]
        for row in rows()
        if row.command in known and tuple(known[row.command]["told"]) == row.told
    }


def page(records: Mapping[str, Record]) -> list[str]:
    """Return the parts of the report."""
    bad = {command: found for command, record in records.items() if (found := faults(record))}
    slowest = max(records.values(), key=lambda record: float(record["seconds"]))
    parts = [
        f"# Wrong invocations\n\n{today()}; {len(records)} commands, {len(records) - len(bad)} refused with their"
        f" message; the slowest took {slowest['seconds']} s: `{slowest['command']}`.",
        *(f"`{short}` is `{words}`" for short, words in SHORT.items()),
    ]
    if bad:
        parts.append(table(["not refused well", "fault"], [[f"`{name}`", "; ".join(why)] for name, why in bad.items()]))
    for command, record in records.items():
        head = f"    {command}\n\nstatus {record['status']}, {record['seconds']} s"
        parts.append(f"{head}\n\n```text\n{record['message'].rstrip()}\n```")
    return parts


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    known = read_records(options.records)
    with tempfile.TemporaryDirectory(prefix="wrong_") as place:
        folder = Path(place)
        make_files(folder)
        with options.records.open("a", encoding="utf-8") as file:
            for row in rows():
                if options.only not in row.command or (row.command in known and not faults(known[row.command])):
                    continue
                record = run(row, folder)
                print(json.dumps(record), file=file, flush=True)
                why = faults(record)
                tell(f"{'; '.join(why) or 'refused'}: {row.command}")
                if record["changed"]:
                    for entry in folder.iterdir():
                        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
                    make_files(folder)
    records = read_records(options.records)
    if options.output is not None:
        publish(page(records), options.output)
    return 1 if any(faults(record) for record in records.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
