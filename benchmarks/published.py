"""Puts published configurations of DeepSpeed and launch scripts of Megatron through both doors' checks.

    python benchmarks/published.py FOLDER --records FILE.jsonl [--output FILE.md]

FOLDER holds other people's files as OWNER+NAME/PATH, one folder a repository; they stay where they are, and the records
have their repository, path and what became of each.  Of its .json files those are taken that DeepSpeed would read: an
object with sizes of a batch or a section of ZeRO.  The door of a run checks a small GPT with the file, on as many
processes as the file's sizes of the batch make; the library's loads it as `megazero.initialize` does, before a process
group exists.

Of its shell scripts those are taken that start pretrain_gpt.py.  A script is expanded by bash in a namespace of its
own, without a network, on a throw-away copy of the file system, where every launcher is a stand-in that writes its
words down (Linux, as root: `unshare`, `setpriv` and overlay file systems).  The words after the program's name are what
a run checks: of them only paths are replaced, and the number of processes where the script leaves it open.

What a file becomes: *accepted*, *noticed* (accepted, with lines about keys without effect), or *refused*.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from report import HelpFormat, add_output, publish, table, tell, today  # noqa: E402

from megazero.command_line.parse import resolve  # noqa: E402
from megazero.command_line.sources import with_sources  # noqa: E402
from megazero.errors import Problem, UserError  # noqa: E402
from megazero.library.config import load_engine_config, resolve_batch, without_training  # noqa: E402
from megazero.rules.run import check  # noqa: E402

LIMIT_SECONDS = 8.0
_SHELL = (".sh", ".slurm", ".sbatch")
_KEYS = frozenset({"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"})
_SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 64 --mock-data"
_PROGRAM = re.compile(r"pretrain_gpt\w*\.py$")
# Flags whose values are paths, with those that take their place.
_PATHS = {
    **dict.fromkeys(("data-path", "train-data-path", "valid-data-path", "test-data-path"), "text_document"),
    **{"vocab-file": "vocab.json", "merge-file": "merges.txt", "tokenizer-model": "pieces.model"},
    **dict.fromkeys(("tokenizer-name-or-path", "tokenizer-file"), "pieces.model"),
    **{"save": "saved", "load": "saved", "tensorboard-dir": "figures", "data-cache-path": "cache"},
    **{f"{split}-weighted-split-paths-path": "groups.txt" for split in ("train", "valid", "test")},
    **{"data-args-path": "words.txt", "per-split-data-args-path": "splits.json"},
}
# What is in those files that say which corpora are read.
_LISTS = {
    "groups.txt": '"all: 1 0:1 text_document"',
    "words.txt": "text_document",
    "splits.json": '{"train": "text_document", "valid": "text_document", "test": "text_document"}',
}
# Takes the place of launchers: notes its words, and the DeepSpeed configuration that they name; runs `bash -c`.
_STAND_IN = """#!/bin/bash
for word; do
    [[ -z "$shell" ]] || exec bash -c "$word"
    [[ "$before" =~ ^(ba)?sh$ && "$word" =~ ^-l?c$ ]] && shell=yes
    [[ "$before=$word" =~ --deepspeed[-_]config=(.*)$ ]] && cp "${BASH_REMATCH[1]}" "$CALLS/$$.json"
    before="$word"
done
printf '%s\\0' "$(basename "$0")" "$@" >"$CALLS/$$"
"""
# A script goes on where its own machine's modules, folders and settings are missing; some look for the program.
_SETTINGS = """
source() { [[ ! -f "$1" ]] || builtin source "$@"; }
cd() { builtin cd "$@" 2>/dev/null || true; }
set() { :; }
"""
_LAUNCHERS = "python python3 torchrun deepspeed srun mpirun mpiexec aprun jsrun ibrun accelerate nsys uv numactl"
_NOTHING = "sbatch scontrol nvidia-smi wget curl pip git ssh pdsh module conda source-env sleep ifconfig ip ds_ssh"
_SANDBOX = """
mount -t tmpfs none "$PLACE" && mkdir -p "$PLACE"/{up,work,root} &&
mount -t overlay none -o "lowerdir=/,upperdir=$PLACE/up,workdir=$PLACE/work" "$PLACE/root" &&
mkdir -p "$PLACE/root$FILES" "$PLACE/root$CALLS" &&
mount --bind "$CALLS" "$PLACE/root$CALLS" && cp -r "$FILES/." "$PLACE/root$FILES" &&
cp "$CALLS/commands/script" "$PLACE/root$SCRIPT" && touch "$PLACE/root$FOLDER/pretrain_gpt.py" &&
exec chroot "$PLACE/root" setpriv --bounding-set=-all --inh-caps=-all \
    bash -c 'cd "$0" && exec bash "$1"' "$FOLDER" "$SCRIPT"
"""
Record = dict[str, Any]


class Call(NamedTuple):
    """A start of the program by a script: its words, its processes (0: not said), and a DeepSpeed configuration."""

    words: list[str]
    processes: int
    config: str | None


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="published files, as OWNER+NAME/PATH")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines of what became of each; written anew")
    add_output(parser)
    return parser.parse_args(words)


# --- DeepSpeed's configurations --------------------------------------------------------------------------------------


def read_config(path: Path) -> Mapping[str, Any] | None:
    """Return the content of a file that DeepSpeed would read; None for any other, such as a template to be filled."""
    with suppress(ValueError, OSError):  # a template is no JSON
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.keys() & _KEYS:
            return content
    return None


def processes_of(content: Mapping[str, Any]) -> int:
    """Return the number of processes that the file's sizes of the batch make; 1 where they leave it open."""
    sizes = [content.get(name) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")]
    each = content.get("gradient_accumulation_steps", 1)
    whole, micro, steps = (size if type(size) is int and size > 0 else 0 for size in (*sizes, each))
    return whole // (micro * (steps or 1)) if whole and micro and whole % (micro * (steps or 1)) == 0 else 1


def _parameter(content: Mapping[str, Any], section: str, name: str) -> Any:
    found: Any = content
    for key in (section, "params", name):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def by_a_run(path: Path, content: Mapping[str, Any]) -> tuple[list[Problem], int]:
    """Return the problems of a small run with the file, and the number of notices."""
    words = [*_SHAPE.split(), "--train-iters", "1000000", "--deepspeed_config", str(path)]
    if not {type(content.get(name)) for name in ("train_batch_size", "train_micro_batch_size_per_gpu")} & {int}:
        words += ["--micro-batch-size", "1"]
    rates = (_parameter(content, "optimizer", "lr"), _parameter(content, "scheduler", "warmup_max_lr"))
    if not any(isinstance(rate, int | float) for rate in rates):
        words += ["--lr", "1e-4"]
    return _checked(words, processes_of(content))


def by_the_library(path: Path, content: Mapping[str, Any]) -> tuple[list[Problem], int]:
    """Return the problems of the library with the file, and the number of notices."""
    config = without_training(load_engine_config(path))
    resolve_batch(config, processes_of(content))
    return [], len(config.notices)


def _checked(words: Sequence[str], processes: int) -> tuple[list[Problem], int]:
    found = resolve(words, world_size=processes)
    problems = found.problems or check(found.config, processes)
    return list(with_sources(problems, found.sources)), len(found.notices)


# --- launch scripts --------------------------------------------------------------------------------------------------


def expand(script: Path, folder: Path) -> list[Call]:
    """Return what a script would start, by bash in a namespace of its own; `folder` is its repository."""
    temporary = tempfile.TemporaryDirectory
    with temporary(prefix="published_") as place, temporary(prefix="calls_") as told:
        commands = Path(told, "commands")
        commands.mkdir()
        for name in (*_LAUNCHERS.split(), *_NOTHING.split()):
            text = _STAND_IN if name in _LAUNCHERS.split() else "#!/bin/sh\n"
            (commands / name).write_text(text, encoding="utf-8")
            (commands / name).chmod(0o755)
        text = script.read_text(encoding="utf-8")
        # <Specify path> stands for a path of the reader's, and would be a redirection to bash.
        (commands / "script").write_text(re.sub(r"(?<!<)<(?=[A-Za-z])[^<>\n|&;]*>", "PLACE", text), encoding="utf-8")
        (commands / "settings").write_text(_SETTINGS, encoding="utf-8")
        slurm = {"SLURM_JOBID": "1", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
        for name, option in (
            ("NNODES", "nodes"),
            ("GPUS_PER_NODE", "gpus-per-node"),
            ("CPUS_PER_TASK", "cpus-per-task"),
        ):
            found = re.search(rf"^#SBATCH.*--{option}[= ](\d+)", text, re.MULTILINE)
            slurm[f"SLURM_{name}"] = found[1] if found else "1"
        environment = {
            "PATH": f"{commands}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root",
            "BASH_ENV": str(commands / "settings"),
            **{name: str(path.resolve()) for name, path in (("FILES", folder), ("SCRIPT", script))},
            **{"PLACE": place, "CALLS": told, "FOLDER": str(script.resolve().parent)},
            **slurm,
        }
        words = ["unshare", "--mount", "--net", "--pid", "--fork", "bash", "-c", _SANDBOX]
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        files = sorted(path for path in Path(told).iterdir() if path.name.isdecimal())
        return [call for path in files if (call := _read_call(path)) is not None]


def _read_call(path: Path) -> Call | None:
    """Return the call that a stand-in has noted; None if it starts another program."""
    words = path.read_text(encoding="utf-8", errors="replace").split("\0")[:-1]
    # A whole command line may be one word, and so may several flags; a group of corpora is one.
    words = [part for word in words for part in (_split(word) if " --" in word else [word])]
    start = next((place for place, word in enumerate(words) if _PROGRAM.search(word)), None)
    if start is None:
        return None
    counts = [_number(words[:start], name) for name in (r"nproc[-_]per[-_]node|num_gpus", "nnodes|num_nodes")]
    config = path.with_suffix(".json")
    processes = counts[0] * max(counts[1], 1)
    return Call(words[start + 1 :], processes, config.read_text("utf-8") if config.exists() else None)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _number(words: Sequence[str], name: str) -> int:
    found = re.search(rf"--(?:{name})[= ](\d+)\b", " ".join(words))
    return int(found[1]) if found else 0


def by_script(call: Call, place: Path) -> tuple[list[Problem], int]:
    """Return the problems of a run with a script's words, and the number of notices; `place` has the files it names."""
    words = list(_with_own_paths(call, place))
    parts = (_number(words, "(?:tensor-)?model-parallel-size") or 1) * (
        _number(words, "pipe(?:line-model)?-parallel-size") or 1
    )
    copies = _number(words, "global-batch-size") // (_number(words, "micro-batch-size") or 1)
    counts = [count for count in (call.processes, parts, parts * copies) if count and count % parts == 0]
    return min((_checked(words, count) for count in counts), key=lambda found: len(found[0]))


def _with_own_paths(call: Call, place: Path) -> Iterator[str]:
    """Yield the words with paths that exist; the files behind the program's own launcher flags are left out."""
    skipping = False
    for word in call.words:
        name = word.removeprefix("--").partition("=")[0].replace("_", "-") if word.startswith("--") else ""
        if not name and skipping:
            continue
        skipping = name in _PATHS or name == "deepspeed-config"
        if name in _PATHS:
            yield from (f"--{name}", str(place / _PATHS[name]))
        elif name == "deepspeed-config":
            if call.config is not None:
                (place / "ds_config.json").write_text(call.config, encoding="utf-8")
                yield from (word.partition("=")[0], str(place / "ds_config.json"))
        elif word in ("&>", ">", "2>&1", "|"):
            return
        else:
            yield word


# --- records ---------------------------------------------------------------------------------------------------------


def record(kind: str, door: str, path: Path, root: Path, found: tuple[Sequence[Problem], int]) -> Record:
    """Return what became of a file at a door."""
    folder, _, name = path.relative_to(root).as_posix().partition("/")
    problems, notices = found
    where = {str(path): path.name, str(root): "FOLDER"}
    return {
        "kind": kind,
        "door": door,
        "repository": folder.replace("+", "/", 1),
        "path": name,
        "sha256": _digest(path),
        "outcome": "refused" if problems else "noticed" if notices else "accepted",
        "notices": notices,
        "problems": [
            {part: _without(getattr(problem, part), where)[:300] for part in ("given", "rule", "legal")}
            for problem in problems
        ],
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _without(text: str, places: Mapping[str, str]) -> str:
    for old, new in places.items():
        text = text.replace(old, new)
    return re.sub(r"/tmp/\w+/", "", text)


def attempt(work: Any, *arguments: Any) -> tuple[Sequence[Problem], int]:
    """Return what `work` returns, or the problems that it raises."""
    try:
        found: tuple[Sequence[Problem], int] = work(*arguments)
    except UserError as error:
        return error.problems, 0
    return found


def tried(root: Path) -> Iterator[Record]:
    """Yield the records of all files below a folder, of those with the same content the first one's."""
    files: dict[str, Path] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in (".json", *_SHELL)):
        files.setdefault(_digest(path), path)
    for path in (path for path in files.values() if path.suffix == ".json"):
        content = read_config(path)
        if content is not None:
            for door, work in (("run", by_a_run), ("library", by_the_library)):
                yield record("DeepSpeed", door, path, root, attempt(work, path, content))
    with tempfile.TemporaryDirectory(prefix="place_") as name:
        place = Path(name)
        for ending in ("text_document.bin", "text_document.idx", "vocab.json", "merges.txt", "pieces.model"):
            (place / ending).touch()
        for ending, text in _LISTS.items():
            (place / ending).write_text(text, encoding="utf-8")
        for path in (path for path in files.values() if path.suffix != ".json"):
            calls = expand(path, root / path.relative_to(root).parts[0])
            if not calls:
                tell(f"starts nothing here: {path.relative_to(root)}")
                continue
            found = attempt(by_script, calls[0], place)
            if any(problem.rule.endswith("needs a value") for problem in found[0]):
                tell(f"needs arguments of its own: {path.relative_to(root)}")
            else:
                yield record("Megatron", "run", path, root, found)


def reason(problem: Mapping[str, str]) -> str:
    """Return the key or flag of a problem, by which files are counted."""
    given = re.sub(r"^\S+\.json: ", "", problem["given"])
    found = re.match(r"--[\w-]+|[\w.]+", given)
    return found[0] if found else given[:40]


def reasons(records: Iterable[Record]) -> list[list[str]]:
    """Return rows of what refuses files: the key or flag, the rule, files, and files that nothing else refuses."""
    files: Counter[tuple[str, str]] = Counter()
    alone: Counter[tuple[str, str]] = Counter()
    for one in records:
        names = {(reason(problem), problem["rule"]) for problem in one["problems"]}
        files.update(names)
        alone.update(names if len(names) == 1 else ())
    rows = [[f"`{name}`", rule, str(count), str(alone[name, rule])] for (name, rule), count in files.most_common()]
    return [["refused for", "rule", "files", "alone"], *rows]


def page(records: Sequence[Record]) -> list[str]:
    """Return the parts of the report."""
    parts = [f"# Published configurations and launch scripts\n\n{today()}"]
    groups = dict.fromkeys((one["kind"], one["door"]) for one in records)
    rows = []
    for kind, door in groups:
        own = [one for one in records if (one["kind"], one["door"]) == (kind, door)]
        count = Counter(one["outcome"] for one in own)
        places = len({one["repository"] for one in own})
        rows.append([kind, door, *map(str, (places, len(own), *(count[name] for name in OUTCOMES)))])
    parts.append(table(["files of", "door", "repositories", "files", *OUTCOMES], rows))
    for kind, door in groups:
        own = [one for one in records if (one["kind"], one["door"]) == (kind, door)]
        head, *found = reasons(own)
        parts += [f"## {kind}, {door}", table(head, found)]
    return parts


OUTCOMES = ("accepted", "noticed", "refused")


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    records = []
    with options.records.open("w", encoding="utf-8") as file:
        for one in tried(options.folder):
            print(json.dumps(one), file=file, flush=True)
            records.append(one)
    publish(page(records), options.output)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
