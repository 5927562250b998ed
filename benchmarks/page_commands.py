"""Runs every block of commands of README.md and docs/, small, in the order in which README.md lists the pages.

    python benchmarks/page_commands.py --records FILE.jsonl [--only WORD] [--folder FOLDER] [--output FILE.md]
    python benchmarks/page_commands.py --records FILE.jsonl --missing

A block runs as it stands on its page, in a shell that ends at the first command that fails, in a copy of the working
tree at --folder.  A page marks what one machine without GPUs cannot do by a hidden comment right above the
block: "run small:" with lines `OLD => NEW`, which are replaced in it, or "not run:" with the reason.  Slurm's
commands are stand-ins of one node of two tasks, as is Open MPI's.  Files of the reader's own (a book, GPT-2's
tokenizer, a checkpoint of Megatron-LM's) are made first.

A line is appended to --records for every block as soon as it has ended.  What is recorded as done, with the same text,
is not run again, so the program may be stopped and started at will; --folder keeps what earlier blocks have made.
--missing runs nothing, and lists the blocks that have no record of an end without an error as they stand now: new ones,
changed ones, and those that failed.  Status 1: some block has failed, or is listed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from report import HelpFormat, add_output, heading, paragraph, publish, table, tell

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 560.0
_BLOCK = re.compile(
    r"(?:^<!-- (?P<kind>run small|not run):(?P<mark>.*?)-->\n+)?^```bash\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL
)
_FILE = re.compile(r"^cat >(\S+) <<'(\w+)'\n(.*?)^\2\n", re.MULTILINE | re.DOTALL)
_ARROW = " => "
Record = dict[str, Any]

# The commands of an activated environment, Open MPI's, and Slurm's, by which one node runs two tasks.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "python": 'exec "$PAGES_PYTHON" "$@"',
        "python3": 'exec "$PAGES_PYTHON" "$@"',
        "torchrun": 'exec "$PAGES_PYTHON" -m torch.distributed.run "$@"',
        "megazero": 'exec "$PAGES_PYTHON" -m megazero "$@"',
        "mpirun": """\
ranks=1
while case "$1" in -*) true ;; *) false ;; esac; do
    case "$1" in -np) ranks="$2" ;; -x) export "${2?}" ;; esac
    shift 2
done
started=""
for rank in $(seq 0 $((ranks - 1))); do
    OMPI_COMM_WORLD_RANK="$rank" OMPI_COMM_WORLD_SIZE="$ranks" OMPI_COMM_WORLD_LOCAL_RANK="$rank" \\
        OMPI_COMM_WORLD_LOCAL_SIZE="$ranks" "$@" &
    started="$started $!"
done
for rank in $started; do wait "$rank" || exit $?; done""",
        "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; fi',
        "srun": """\
while case "$1" in --*) true ;; *) false ;; esac; do shift; done
tasks=""
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID="$task" SLURM_LOCALID="$task" SLURM_NNODES=1 "$@" &
    tasks="$tasks $!"
done
for task in $tasks; do wait "$task" || exit $?; done""",
        "sbatch": """\
export SLURM_JOB_ID=$$ SLURM_ARRAY_JOB_ID=$$ SLURM_JOB_NODELIST=127.0.0.1 SLURM_JOB_NUM_NODES=1 SLURM_NTASKS=2
export SLURM_CPUS_PER_TASK=1
indices="" wrapped=""
while case "$1" in --*) true ;; *) false ;; esac; do
    case "$1" in
        --job-name=*) SLURM_JOB_NAME="${1#*=}" ;;
        --array=*) indices="$(seq "$(echo "${1#*=}" | cut -d- -f1)" "${1##*-}")" SLURM_ARRAY_TASK_MAX="${1##*-}" ;;
        --wrap) wrapped="$2"; shift ;;
        --parsable) exec 3>&1 1>&2 ;;
    esac
    shift
done
export SLURM_JOB_NAME="${SLURM_JOB_NAME:-$(basename "$1" .sbatch)}"
for SLURM_ARRAY_TASK_ID in ${indices:-0}; do
    export SLURM_ARRAY_TASK_ID SLURM_ARRAY_TASK_COUNT="$(echo "$indices" | wc -w)" SLURM_ARRAY_TASK_MIN=0
    export SLURM_ARRAY_TASK_MAX="${SLURM_ARRAY_TASK_MAX:-0}"
    if [ -n "$wrapped" ]; then sh -c "$wrapped"; else bash "$@"; fi || exit $?
done
echo "$SLURM_JOB_ID" 2>/dev/null >&3 || true""",
    }
)

_OWN_FILES = """\
cat megazero/*/*.py megazero/*.py docs/*.md >runs/book.txt
python tools/train_tokenizer.py --input runs/book.txt --model-type byte-level-bpe --vocab-size 1000 --output runs/gpt2
mv runs/gpt2/vocab.json runs/gpt2-vocab.json
mv runs/gpt2/merges.txt runs/gpt2-merges.txt
PYTHONPATH=tests:$PYTHONPATH python - <<'END'
from pathlib import Path
from support import foreign_files
foreign_files.VOCABULARY, foreign_files.PADDED = 1000, 1024
foreign_files.write_legacy(Path("megatron", "checkpoints"), foreign_files.gpt2(), tp=2, pp=2)
END
"""
_LAST_OWN_FILE = Path("megatron", "checkpoints", "latest_checkpointed_iteration.txt")


class Block(NamedTuple):
    """A block of commands of a page, the `number`-th from 1.

    changes: what is replaced in it, to run small.  reason: why it is not run, empty if it is.
    """

    page: str
    number: int
    text: str
    changes: tuple[tuple[str, str], ...] = ()
    reason: str = ""

    @property
    def name(self) -> str:
        return f"{self.page}, block {self.number}"

    def small(self) -> str:
        """Return the commands as they are run."""
        text = self.text
        for old, new in self.changes:
            if old not in text:
                raise ValueError(f"{self.name}: its mark replaces {old!r}, which is not in it")
            text = text.replace(old, new)
        return text

    def files(self) -> dict[str, str]:
        """Return the files that it writes with `cat`, text by name."""
        return {name: text for name, _, text in _FILE.findall(self.text)}

    def lines(self) -> list[str]:
        """Return its commands, a line each, without what it writes into files."""
        lines = _FILE.sub("", self.text).replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line.strip() and not line.startswith("#")]


def blocks(tree: Path = ROOT) -> list[Block]:
    """Return the blocks of README.md and of the pages in docs/, in the order of README.md's list of pages."""
    readme = (tree / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\]\((docs/[\w-]+\.md)\)", readme.partition("\n## Pages\n")[2])
    rest = (path.relative_to(tree).as_posix() for path in sorted((tree / "docs").glob("*.md")))
    found = []
    for page in dict.fromkeys(("README.md", *listed, *rest)):
        for number, match in enumerate(_BLOCK.finditer((tree / page).read_text(encoding="utf-8")), 1):
            mark = (match["mark"] or "").strip()
            if match["kind"] == "not run":
                found.append(Block(page, number, match["text"], reason=" ".join(mark.split())))
            else:
                found.append(Block(page, number, match["text"], tuple(_changes(mark))))
    return found


def _changes(mark: str) -> Iterator[tuple[str, str]]:
    for line in mark.splitlines():
        old, arrow, new = line.partition(_ARROW)
        if not arrow:
            raise ValueError(f"a mark without {_ARROW.strip()}: {line}")
        yield old.strip(), new.strip()


def make_place(tree: Path, folder: Path) -> None:
    """Make the folder in which blocks run: a copy of a working tree with the reader's own files, unless it is there."""
    make_commands(folder)
    if (folder / _LAST_OWN_FILE).exists():
        return
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=tree, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, folder / name)
    # Only in a checkout do linters pass over what .gitignore names.
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    status, output, _ = run(_OWN_FILES, folder)
    if status:
        raise SystemExit(output)


def make_commands(folder: Path) -> None:
    """Put the commands of an activated environment, and stand-ins for Slurm's, into a folder's .venv/bin."""
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (commands / name).chmod(0o755)


def run(commands: str, folder: Path, python: str = sys.executable) -> tuple[int, str, float]:
    """Run commands by a shell in the folder; return its status, all output, and seconds."""
    given = os.environ
    environment = {
        "OMP_NUM_THREADS": "1",
        **given,
        "PATH": os.pathsep.join([str(folder / ".venv" / "bin"), given["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), given.get("PYTHONPATH")])),
        "PAGES_PYTHON": python,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    (folder / "runs").mkdir(exist_ok=True)
    begun = time.monotonic()
    with (folder / ".output").open("w+", encoding="utf-8", errors="replace") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", commands],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            status = 124
        finally:
            for number, seconds in ((signal.SIGTERM, 40.0), (signal.SIGKILL, 5.0)):  # torchrun ends its ranks itself
                if shell.poll() is None:
                    os.killpg(shell.pid, number)
                    with suppress(subprocess.TimeoutExpired):
                        shell.wait(seconds)
        output.seek(0)
        return status, output.read(), time.monotonic() - begun


def try_out(block: Block, folder: Path, python: str = sys.executable) -> Record:
    """Run a block, unless its page says that it is not run; return its record."""
    row: Record = {"page": block.page, "block": block.number, "text": block.text, "changes": block.changes}
    if block.reason:
        return {**row, "reason": block.reason}
    status, output, seconds = run(block.small(), folder, python)
    told = output.replace(str(folder), "FOLDER")
    end = {"output": told if len(told) < 6000 else f"{told[:3000]}\n...\n{told[-3000:]}"} if status else {}
    return {**row, "status": status, "seconds": round(seconds, 1), **end}


def read_records(path: Path, tree: Path = ROOT) -> dict[str, Record]:
    """Return the newest record of every block that stands so on its page, in the pages' order."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {
        _key(row["page"], row["text"], row["changes"], row.get("reason", "")): row for row in map(json.loads, lines)
    }
    keys = ((block, _key(block.page, block.text, block.changes, block.reason)) for block in blocks(tree))
    return {block.name: {**known[key], "block": block.number} for block, key in keys if key in known}


def _key(page: str, text: str, changes: Sequence[Sequence[str]], reason: str) -> tuple[str, str, str, bool]:
    """Return what a block and its record have in common; the words of the reason may change."""
    return page, text, json.dumps(changes), bool(reason)


def page(records: Mapping[str, Record]) -> list[str]:
    """Return the parts of the report."""
    ran = [row for row in records.values() if "status" in row]
    good = sum(row["status"] == 0 for row in ran)
    rows = []
    for name, row in records.items():
        command = Block(row["page"], row["block"], row["text"]).lines()[0]
        cut = command if len(command) <= 70 else command[:67] + "..."
        small = "; ".join(f"`{old}` => `{new}`" for old, new in row["changes"]) or "as it stands"
        outcome = f"status {row['status']}" if "status" in row else "not run"
        rows.append([name, f"`{cut}`".replace("|", "\\|"), row.get("reason", small), outcome, row.get("seconds", "-")])
    words = (
        f"{len(records)} blocks, {len(ran)} run, {good} of them to their end without an error."
        " Each ran after those above it, in one folder, on the text of this project in place of a book; seconds include"
        " what else the machine was doing."
    )
    return [
        heading("Every command of the pages, run small", "cpu"),
        paragraph(words),
        table(["block", "begins with", "run as", "outcome", "seconds"], rows),
    ]


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines of what has been run; appended to")
    parser.add_argument("--missing", action="store_true", help="list the blocks that would be run, and run none")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose pages are run")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "pages", help="where the blocks run")
    parser.add_argument("--only", default="", help='blocks whose name ("docs/data.md, block 2") or text has this word')
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no block after so long")
    add_output(parser)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options, begun = parse_arguments(words), time.monotonic()
    folder, tree = options.folder.resolve(), options.tree.resolve()
    done = {name for name, row in read_records(options.records, tree).items() if row.get("status", 0) == 0}
    wanted = (block for block in blocks(tree) if options.only in block.name or options.only in block.text)
    missing = [block for block in wanted if block.name not in done]
    if options.missing:
        for block in missing:
            tell(f"{block.name}: {block.lines()[0]}")
        return int(bool(missing))
    make_place(tree, folder)
    for block in missing:
        if time.monotonic() - begun > 60 * options.minutes:
            break
        row = try_out(block, folder)
        with options.records.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        tell(f"{block.name}: status {row.get('status', 'not run')}, {row.get('seconds', 0)} s")
    records = read_records(options.records, tree)
    publish(page(records), options.output)
    return int(any(row.get("status", 0) for row in records.values()))


if __name__ == "__main__":
    sys.exit(main())
