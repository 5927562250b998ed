"""Continue texts with a trained model: a checkpoint of any layout, on one process or over several.

megazero generate --load runs/demo --prompt "def main("
megazero generate --load runs/demo --prompts-file questions.jsonl --stop "Q:" --output answers.jsonl
megazero generate --processes 2 --tensor-model-parallel-size 2 --load runs/demo --prompt "def main("
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megazero.command_line.parse import from_yaml
from megazero.command_line.processes import HELP
from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.config import derived
from megazero.console import Console
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.generate.arguments import add_model_arguments, add_place_arguments
from megazero.generate.model_layout import choose_layout
from megazero.generate.prompts import JSON_ENDING, KEY, has_surrogates, read_prompts
from megazero.generate.texts import StopTexts, Text, shown, write_texts
from megazero.parallel.job import read_job
from megazero.prepare.arguments import with_tokenizer_flags, wrong_new_file
from megazero.train.start.inputs import tokenizer_of_run


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(
        prog="megazero generate",
        description=(__doc__ or "").partition("\n")[0],
        epilog=HELP,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, may be repeated; empty, or none at all, starts a new document",
    )
    parser.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help=f'texts to continue, one a line; of FILE{JSON_ENDING} a line is {{"{KEY}": "..."}}',
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"write the texts there in place of printing them; to FILE{JSON_ENDING} as JSON lines",
    )
    parser.add_argument(
        "--max-new-tokens",
        action=Number,
        kind="int",
        ge=1,
        default=100,
        metavar="N",
        help="length of a continuation; past the model's positions each token costs a pass over the last of them",
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="text before which a continuation ends, may be repeated; it ends at the end of a document anyway",
    )
    parser.add_argument(
        "--num-samples", action=Number, kind="int", ge=1, default=1, metavar="N", help="continuations of each text"
    )
    parser.add_argument(
        "--batch-size",
        action=Number,
        kind="int",
        ge=1,
        default=8,
        metavar="N",
        help="texts that are continued at the same time, for each of which there is a cache of keys and values",
    )
    parser.add_argument(
        "--seed", action=Number, kind="int", ge=0, lt=2**63, default=0, metavar="N", help="seed of the random choices"
    )
    choice = parser.add_argument_group("choice of the next token")
    choice.add_argument("--greedy", action="store_true", help="always the best one")
    choice.add_argument(
        "--temperature", action=Number, kind="float", default=1.0, metavar="T", help="divides the logits; 0 is greedy"
    )
    choice.add_argument("--top-k", action=Number, kind="int", default=0, metavar="K", help="among the K best; 0 is all")
    choice.add_argument(
        "--top-p", action=Number, kind="float", default=1.0, metavar="P", help="among the best that make up P together"
    )
    add_place_arguments(parser, "the product is their number")
    return parser.parse_args(words)


def wrong_flags(options: argparse.Namespace) -> Iterator[Problem]:
    """Yield the problems of the flags by themselves."""
    for flag, texts in (("--prompt", options.prompt or ()), ("--stop", options.stop or ())):
        yield from (Problem(f"{flag} {text!a}", "must be UTF-8 text") for text in texts if has_surrogates(text))
    if "" in (options.stop or ()):
        yield Problem("--stop ''", "an empty text is everywhere", "--stop TEXT")
    if options.output is not None:
        yield from wrong_new_file("--output", options.output)


def main(words: Sequence[str]) -> int:
    """Load the model, continue the prompts, print or write the continuations; return the exit status."""
    job = read_job(words)
    options, launch = parse_arguments(job.rest), job.launch
    raise_problems(ConfigError, wrong_flags(options))
    prompts = [*(options.prompt or ()), *(read_prompts(options.prompts_file) if options.prompts_file else ())] or [""]
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    console = Console(launch.rank)
    for notice in job.notices:
        console.line(notice)
    # These import torch; the flags are parsed without it.
    from megazero.checkpoint.reader import open_complete
    from megazero.comm.startup import choose_device
    from megazero.generate.job import joined
    from megazero.generate.sampling import Sampling
    from megazero.generate.session import load_session, saved_vocab_size
    from megazero.parallel.threads import use_cpu_threads

    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.greedy)
    checkpoint = open_complete(options.load, step=options.step)
    config = from_yaml(checkpoint.config_yaml, origin=f"the configuration in {checkpoint.folder}")
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    layout = choose_layout(config.model, tp=tp, pp=pp, nodes=launch.nodes, across_nodes=options.across_nodes)
    data = with_tokenizer_flags(config.data, options)
    tokenizer = tokenizer_of_run(data, vocab_size=saved_vocab_size(checkpoint))
    device, minutes = choose_device(options.device, launch), derived.collective_limit_minutes(config.limits)
    use_cpu_threads(None, launch, device)
    stops = StopTexts(tokenizer, options.stop or ())
    ids = [tokenizer.encode(prompt) or [tokenizer.eod] for prompt in prompts]
    with joined(launch, layout, device, timeout_minutes=minutes) as mesh:
        continuations = load_session(config, checkpoint, mesh).generate(
            ids,
            sampling=sampling,
            max_new_tokens=options.max_new_tokens,
            num_samples=options.num_samples,
            seed=options.seed,
            eod=tokenizer.eod,
            ends=stops.are_in if options.stop else None,
            batch_size=options.batch_size,
            notice=console.notice,
        )
    texts = [
        Text(prompt, number, stops.cut(tokens, each.tokens), len(each.tokens), each.end)
        for prompt, tokens, samples in zip(prompts, ids, continuations, strict=True)
        for number, each in enumerate(samples, start=1)
    ]
    if options.output is None:
        for line in shown(texts, options.num_samples):
            console.line(line)
    elif launch.rank == 0:
        write_texts(options.output, texts, options.num_samples)
    return 0
