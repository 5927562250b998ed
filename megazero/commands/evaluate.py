"""Evaluate a trained model on files of yours: perplexity, last words, multiple choice; on one process or several.

megazero evaluate --load runs/demo --perplexity wiki.test.txt --output runs/demo.json
megazero evaluate --processes 4 --load runs/demo --lambada lambada.jsonl --choices questions.jsonl
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megazero.command_line.processes import HELP
from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.evaluate.inputs import read_passages, read_questions, read_texts
from megazero.evaluate.wikitext import natural_text
from megazero.files import written_aside
from megazero.generate.arguments import add_model_arguments, add_place_arguments
from megazero.parallel.job import read_job
from megazero.prepare.arguments import local_path, with_tokenizer_flags, wrong_new_file

if TYPE_CHECKING:
    from megazero.data.tokenizers import Tokenizer
    from megazero.evaluate.tasks import Task

# {task: the function that reads its files}
_READERS: Mapping[str, Any] = MappingProxyType(
    {"perplexity": read_texts, "lambada": read_passages, "choices": read_questions}
)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(
        prog="megazero evaluate",
        description=(__doc__ or "").partition("\n")[0],
        epilog=HELP,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    add_model_arguments(parser)
    parser.add_argument("--output", type=local_path, metavar="FILE.json", help="the figures as JSON, in a new file")
    parser.add_argument(
        "--micro-batch-size", action=Number, kind="int", ge=1, default=8, metavar="N", help="texts read at a time"
    )
    tasks = parser.add_argument_group("tasks", "each file is a task of its own")
    each_line = "JSON lines with a text each"
    tasks.add_argument("--perplexity", nargs="+", type=Path, metavar="FILE", help=f"a text, or .jsonl: {each_line}")
    tasks.add_argument(
        "--lambada", nargs="+", type=Path, metavar="FILE", help=f"{each_line}, whose last word is asked for"
    )
    tasks.add_argument(
        "--choices", nargs="+", type=Path, metavar="FILE", help="JSON lines with context, choices and label"
    )
    tasks.add_argument(
        "--stride",
        action=Number,
        kind="int",
        ge=1,
        metavar="N",
        help="tokens of a text that each window but its first predicts; without it, as many as the model reads",
    )
    tasks.add_argument(
        "--detokenize", choices=("wikitext",), help="marks that the model does not read, while words are counted with"
    )
    tasks.add_argument("--delimiter", metavar="TEXT", help="text between a context and a choice; without it, a blank")
    add_place_arguments(parser, "the product divides their number")
    return parser.parse_args(words)


def wrong_flags(options: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems of the flags by themselves."""
    tasks = [name for name in _READERS if getattr(options, name)]
    if not tasks:
        yield Problem("no task", "a model is evaluated on files", ", ".join(f"--{name} FILE" for name in _READERS))
    for name, task in (("stride", "perplexity"), ("detokenize", "perplexity"), ("delimiter", "choices")):
        if getattr(options, name) is not None and task not in tasks:
            given = f"--{name} {getattr(options, name)!s} without --{task}"
            yield Problem(given, f"--{name} is about the files of --{task}", f"--{task} FILE, or no --{name}")
    if options.output is not None:
        yield from wrong_new_file("--output", options.output)


def make_tasks(options: argparse.Namespace, content: Mapping[str, Any], tokenizer: "Tokenizer") -> "list[Task]":
    """Return the task of every file, from its content by name and file."""
    from megazero.evaluate.tasks import choices, lambada, perplexity

    natural = natural_text if options.detokenize else str
    makers: Mapping[str, Any] = {
        "perplexity": partial(perplexity, tokenizer=tokenizer, natural=natural, stride=options.stride),
        "lambada": partial(lambada, tokenizer=tokenizer),
        "choices": partial(
            choices, tokenizer=tokenizer, delimiter=" " if options.delimiter is None else options.delimiter
        ),
    }
    return [makers[name](file, read) for name, files in content.items() for file, read in files]


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the results as lines of a table: task, file, figure and value."""
    rows = [("task", "file", "figure", "value")]
    for result in results:
        for name, value in result["figures"].items():
            if not name.endswith("_stderr"):
                error = result["figures"].get(f"{name}_stderr")
                shown = _shown(value) + (f" +- {_shown(error)}" if error is not None else "")
                rows.append((result["task"], result["file"], name, shown))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return ["  ".join((*(each.ljust(width) for each, width in zip(row, widths, strict=False)), row[3])) for row in rows]


def _shown(value: float | int | None) -> str:
    if value is None:
        return "not finite"
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def main(words: Sequence[str]) -> int:
    """Evaluate the model on every file, print the figures and write them; return the exit status."""
    job = read_job(words)
    options, launch = parse_arguments(job.rest), job.launch
    raise_problems(ConfigError, wrong_flags(options))
    content = {name: [(file, read(file)) for file in getattr(options, name) or ()] for name, read in _READERS.items()}
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    console = Console(launch.rank)
    for notice in job.notices:
        console.line(notice)
    # This imports torch; flags and files are checked without it.
    from megazero.evaluate.model import open_model

    model = open_model(
        options.load,
        launch,
        step=options.step,
        tp=options.tensor_model_parallel_size,
        pp=options.pipeline_model_parallel_size,
        across_nodes=options.across_nodes,
        device=options.device,
        with_flags=lambda data: with_tokenizer_flags(data, options),
    )
    if options.stride is not None and options.stride > model.length:
        rule = f"a window predicts at most the {model.length} tokens that the model reads"
        raise ConfigError(Problem(f"--stride {options.stride}", rule, f"--stride {model.length}"))
    results = []
    with model.loaded(rows=options.micro_batch_size, console=console) as scorer:
        for task in make_tasks(options, content, model.tokenizer):
            scores = scorer.score(task.requests, stride=task.stride, name=f"{task.name} {task.file}")
            results.append({"task": task.name, "file": str(task.file), "figures": dict(task.figures(scores))})
    for line in table(results):
        console.line(line)
    if options.output is not None and launch.rank == 0:
        described = {
            "checkpoint": str(model.checkpoint.folder),
            "step": model.checkpoint.step,
            "length": model.length,
            "stride": options.stride or model.length,
            "detokenize": options.detokenize,
            "results": results,
        }
        with written_aside(options.output) as stream:
            stream.write(json.dumps(described, indent=2, allow_nan=False).encode() + b"\n")
        console.line(f"figures: {options.output}")
    return 0
