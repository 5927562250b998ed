"""Compares preprocessing with other systems: the same text to token files, in MB of jsonl a second of CPU.

    python benchmarks/corpora.py [--vocab-file V --merge-file M] [--megatron FOLDER] [--workers 2] [--rounds 3]

The text is what this machine has installed, as `corpus_text.py` finds it, or `--input FILE.jsonl`.  `megazero` is
`tools/preprocess_data.py` with GPT-2's byte-level BPE, on 1, 2 and `--workers` workers; `gigatoken`, `tokenizers` and
`tiktoken` encode alone (`encoders.py`), one thread each; `Megatron-LM` is its `tools/preprocess_data.py` and
`tools/preprocess_data_fast.py` in a checkout of it, which this Python must be able to run.  megazero and Megatron-LM
are also compared with SentencePiece models, BPE and unigram, that tools/train_tokenizer.py trains here.  Slow systems
get the front of the text, as does megazero once more.  Without `--vocab-file` a BPE is trained on that front.

Seconds of CPU are those of all of a command's processes, start-up included, user and system; systems that encode alone
count only those of encoding (with `read` also of reading JSON).  Start-up is the time of the whole command on one short
document, so a longer text would come near to the rate beyond start-up.  Every command runs in processes of its own and
in turns, A B A B; figures are medians.  Token files are compared byte by byte with megazero's on one worker, and where
nothing is written tokens are counted; other tokens make the exit status 1.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import contestants
import corpus_text
import encoders
import report
from contestants import Contestant, Files
from corpus_text import Text
from report import MIB, Column, HelpFormat, add_output, new_record, paragraph, publish, table_of, tell
from usage import CommandFailed

MB = 1_000_000
_TOLD = ("--input", "--vocab-file", "--merge-file", "--megatron")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormat)
    parser.add_argument("--megabytes", type=float, default=400.0, help="of jsonl, if there is so much text here")
    parser.add_argument("--slow-megabytes", type=float, default=20.0, help="for those that would take minutes")
    parser.add_argument("--input", type=Path, metavar="FILE.jsonl", help="text of yours, key `text`")
    parser.add_argument("--vocab-file", type=Path, help="vocab.json of a byte-level BPE")
    parser.add_argument("--merge-file", type=Path, help="merges.txt of it")
    parser.add_argument("--vocab-size", type=int, default=32768, help="tokens of the BPE that is learned without these")
    parser.add_argument("--pieces", type=int, default=8000, help="of the SentencePiece models")
    parser.add_argument("--megatron", type=Path, metavar="FOLDER", help="a checkout of Megatron-LM")
    parser.add_argument("--remark", default="", metavar="TEXT", help="what else a reader must know; it is kept")
    parser.add_argument("--workers", type=int, default=2, help="megazero is measured with as many as well")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every system")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help="those whose names begin so; all without")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="end after the round that goes beyond it")
    parser.add_argument("--scratch", type=Path, help="folder for text and token files; the system's without")
    parser.add_argument("--keep", action="store_true", help="leave them there")
    add_output(parser)
    options = parser.parse_args(words)
    if (options.vocab_file is None) != (options.merge_file is None):
        parser.error("--vocab-file and --merge-file: both or neither")
    if min(options.rounds, options.workers) < 1:
        parser.error("--rounds and --workers: at least 1")
    for name in ("input", "vocab_file", "merge_file", "megatron"):
        given = getattr(options, name)
        if given is not None and not given.exists():
            parser.error(f"--{name.replace('_', '-')} {given}: there is no such file")
        setattr(options, name, None if given is None else given.resolve())
    return options


def prepare(options: argparse.Namespace, folder: Path) -> Files:
    """Make the text, its front, one document, and the files of tokenizers below `folder`, and return their paths."""
    text = _text(options, folder / "text.jsonl")
    part = corpus_text.front(text, int(options.slow_megabytes * MB), folder / "part.jsonl")
    one = folder / "one.jsonl"
    one.write_text('{"text": "One short document."}\n', encoding="utf-8")
    tell(f"text: {text.documents} documents, {text.nbytes / MB:.1f} MB; its front: {part.nbytes / MB:.1f} MB")
    vocab_file, merge_file = options.vocab_file, options.merge_file
    if vocab_file is None:
        vocab_file, merge_file = encoders.train(part.path, options.vocab_size, folder)
    models = {}
    for kind in ("bpe", "unigram"):
        try:
            models[kind] = contestants.train_pieces(part.path, kind, options.pieces)
        except CommandFailed as error:
            tell(f"no SentencePiece model ({kind}): {error}")
    contestants.name_gpt2(folder, vocab_file, merge_file)
    return Files(folder, text, part, Text(one, 1, one.stat().st_size), vocab_file, merge_file, models, options.megatron)


def _text(options: argparse.Namespace, place: Path) -> Text:
    if options.input is not None:
        return corpus_text.counted(options.input)
    text = corpus_text.gather(corpus_text.installed(), int(options.megabytes * MB), place)
    if text.nbytes < options.megabytes * MB:
        tell(f"{options.megabytes:.0f} MB were asked for, but there are only {text.nbytes / MB:.1f} MB of text here")
    return text


def take_turns(field: Sequence[Contestant], options: argparse.Namespace) -> None:
    """Run the contestants, first on one document, then round by round; one that fails gets no more turns."""
    began = time.monotonic()
    for contestant in field:
        _try(contestant, contestant.start)
    for number in range(options.rounds):
        for contestant in field:
            _try(contestant, contestant.turn)
        tell(f"round {number + 1} of {options.rounds}")
        if options.time_limit is not None and time.monotonic() - began > options.time_limit:
            break


def _try(contestant: Contestant, call: Callable[[], None]) -> None:
    if contestant.refused:
        return
    try:
        call()
    except (CommandFailed, OSError, ValueError) as error:
        contestant.refused = f"failed: {error}"
        tell(f"{contestant.name} {contestant.refused}")


def figures(contestant: Contestant, base: Contestant | None) -> dict[str, Any]:
    """Return the figures of a contestant for the record; base: megazero on one worker, with its text and tokenizer.

    The figure `ratio` is the base's bytes a second of CPU divided by the contestant's.
    """
    if contestant.refused or not contestant.turns:
        return {"refused": contestant.refused or "no turn"}
    turns = contestant.turns
    cpu, wall = _cpu_seconds(contestant), statistics.median(turn.wall for turn in turns)
    nbytes, last = contestant.text.nbytes, turns[-1]
    found: dict[str, Any] = {
        "text_bytes": nbytes,
        "cpu_seconds": cpu,
        "turn_cpu_seconds": [turn.cpu for turn in turns],
        "turn_wall_seconds": [turn.wall for turn in turns],
        "bytes_per_cpu_second": nbytes / cpu,
        "bytes_per_second": nbytes / wall,
        "peak_bytes": max(turn.peak for turn in turns),
        "tokens": last.tokens,
        "verdict": "" if base is None else last.beside(base.turns[-1]),
    }
    if base is not None and base is not contestant:
        found["ratio"] = cpu / _cpu_seconds(base)
    if contestant.first is not None:
        found["startup_seconds"], found["startup_cpu_seconds"] = contestant.first.wall, contestant.first.cpu
        beyond = cpu - contestant.first.cpu
        found["bytes_per_cpu_second_beyond_startup"] = nbytes / beyond if beyond > 0 else None
    return found


def _cpu_seconds(contestant: Contestant) -> float:
    return statistics.median(turn.cpu for turn in contestant.turns)


def record(field: Sequence[Contestant], files: Files, options: argparse.Namespace) -> dict[str, Any]:
    bases = {one.kind: one for one in field if one.is_base and one.turns}
    systems = {one.name: figures(one, bases.get(one.kind)) for one in field}
    return new_record(
        "corpora",
        "cpu",
        command=command(sys.argv),
        model="preprocessing",
        precision="GPT-2's BPE" if options.vocab_file else f"a BPE of {options.vocab_size}",
        world_size=1,
        text={"bytes": files.text.nbytes, "documents": files.text.documents, "asked": options.megabytes * MB},
        part_bytes=files.part.nbytes,
        cores=len(os.sched_getaffinity(0)),
        versions=contestants.versions(),
        remark=options.remark,
        systems=systems,
    )


def command(argv: Sequence[str]) -> str:
    """Return the command for the record: without --scratch and --remark, and with only the last names of files.

    The folders of one machine mean nothing on another.
    """
    words, before = [], ""
    for word in (part for given in argv[1:] for part in given.split("=", 1)):
        if not {before, word} & {"--scratch", "--remark"}:
            words.append(Path(word).name if before in _TOLD else word)
        before = word
    return report.command([argv[0], *words])


COLUMNS = (
    Column("text, MB", "text_bytes", ".0f", 1 / MB),
    Column("MB a CPU second", "bytes_per_cpu_second", ".3g", 1 / MB),
    Column("megazero beside it, x", "ratio", ".2f"),
    Column("beyond start-up", "bytes_per_cpu_second_beyond_startup", ".3g", 1 / MB),
    Column("MB a second", "bytes_per_second", ".3g", 1 / MB),
    Column("start-up, s", "startup_seconds", ".2f"),
    Column("peak, MiB", "peak_bytes", ".0f", 1 / MIB),
    Column("tokens, millions", "tokens", ".2f", 1e-6),
    Column("output", "verdict"),
)


def body_of(made: Mapping[str, Any]) -> str:
    """Return a record's table, below the paragraph that explains it."""
    text = made["text"]
    less = f" ({text['asked'] / MB:.0f} MB were asked for)" if text["bytes"] < text["asked"] else ""
    words = paragraph(
        f"{text['documents']} documents in {text['bytes'] / MB:.1f} MB of jsonl{less}, slow systems the first"
        f" {made['part_bytes'] / MB:.1f} MB of it; {made['precision']}, {made['cores']} cores. Seconds of CPU are those"
        " of all processes, start-up included, but of those that encode alone only of encoding. Peak is of the largest"
        " process, and the output is beside megazero's on one worker."
        f" {', '.join(f'{name} {version}' for name, version in made['versions'].items())}. {made['remark']}".rstrip()
    )
    return f"{words}\n\n{table_of(made['systems'], COLUMNS)}"


def main(words: Sequence[str] | None = None) -> int:
    options = parse_arguments(words)
    with ExitStack() as stack:
        if options.keep:
            folder = Path(tempfile.mkdtemp(prefix="corpora-", dir=options.scratch))
            tell(f"kept: {folder}")
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corpora-", dir=options.scratch)))
        files = prepare(options, folder)
        field = contestants.line_up(files, options.workers)
        field = [one for one in field if not options.systems or one.name.startswith(tuple(options.systems))]
        take_turns(field, options)
        made = record(field, files, options)
    publish([f"# Preprocessing\n\n`{made['command']}`", body_of(made)], options.output, made)
    return 1 if contestants.OTHER_TOKENS in [system.get("verdict") for system in made["systems"].values()] else 0


if __name__ == "__main__":
    sys.exit(main())
