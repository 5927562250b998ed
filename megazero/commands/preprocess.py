"""Turn text into token files: PREFIX_KEY_document.bin, .idx and .json (counts, tokenizer) for every JSON key."""

import argparse
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console
from megazero.dialects.megatron import PREPROCESSING_ACCEPTED, PREPROCESSING_FIXED, PREPROCESSING_REFUSED
from megazero.errors import ConfigError, Problem, raise_problems
from megazero.prepare.arguments import (
    add_input_arguments,
    add_shard_arguments,
    add_tokenizer_arguments,
    chosen_shard,
    input_rules,
    tokenizer_spec,
)
from megazero.prepare.text.chunks import DocumentRules
from megazero.prepare.tokens.preprocess import PreprocessRequest, preprocess
from megazero.units import counted, format_bytes, format_count, format_duration


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero preprocess", description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    text = parser.add_argument_group("text")
    add_input_arguments(text)
    text.add_argument("--skip-bad-lines", action="store_true", help="skip lines that cannot be read, and list them")
    answers = parser.add_argument_group("dialogues, of which answers alone are learnt (PREFIX_KEY_document_loss_mask)")
    answers.add_argument("--prompt-key", metavar="KEY", help="key of the text before the answer")
    answers.add_argument("--answer-key", metavar="KEY", help="key of the answer, after which the files are named")
    answers.add_argument("--chat-key", metavar="KEY", help="key of a list of messages; the assistant's are answers")
    tokenizer = parser.add_argument_group("tokenizer")
    add_tokenizer_arguments(tokenizer, required=True)
    tokenizer.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document id")
    tokenizer.add_argument(
        "--split-documents",
        action=Number,
        kind="int",
        ge=1,
        metavar="TOKENS",
        help="cut longer documents into sequences of at most this",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="prefix of the files to write")
    output.add_argument("--workers", action=Number, kind="int", ge=1, default=1, metavar="N", help="processes")
    output.add_argument(
        "--log-interval", action=Number, kind="int", ge=1, default=100_000, metavar="N", help="documents a line of log"
    )
    interrupted = parser.add_argument_group("interruptions")
    interrupted.add_argument(
        "--resume", action="store_true", help="continue after the last partition that was finished"
    )
    interrupted.add_argument(
        "--partitions",
        action=Number,
        kind="int",
        ge=1,
        metavar="N",
        help="parts of the input to finish one by one (default: of 256 MiB)",
    )
    add_shard_arguments(parser.add_argument_group("several machines, each with a shard of one corpus"))
    for name in (*PREPROCESSING_ACCEPTED, *PREPROCESSING_FIXED, *PREPROCESSING_REFUSED):
        parser.add_argument(f"--{name}", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args([dashed(word) for word in words])


def dashed(word: str) -> str:
    """Return a flag with dashes instead of underscores; any other word is returned unchanged."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def document_rules(arguments: argparse.Namespace) -> DocumentRules:
    """Return the document rules that the flags set; raise ConfigError for flags of several kinds of documents."""
    rules = input_rules(arguments)
    prompt, answer, chat = arguments.prompt_key, arguments.answer_key, arguments.chat_key
    if prompt is None and answer is None and chat is None:
        return rules
    named = {"--prompt-key": prompt, "--answer-key": answer, "--chat-key": chat}
    given = " ".join(flag for flag, key in named.items() if key is not None)
    legal = "--prompt-key KEY --answer-key KEY, or --chat-key KEY"
    if (prompt is None) != (answer is None) or (chat is not None and answer is not None):
        raise ConfigError(Problem(given, "a dialogue is a prompt and an answer, or a list of messages", legal))
    if rules.json_keys != DocumentRules().json_keys:
        rule = "a dialogue's keys are those of its parts"
        raise ConfigError(Problem(f"{given} with --json-keys {' '.join(rules.json_keys)}", rule, legal))
    if chat is not None:
        return replace(rules, json_keys=(chat,), answers="chat")
    return replace(rules, json_keys=(prompt, answer), answers="pair")


def check_foreign_flags(arguments: argparse.Namespace, console: Console) -> None:
    """Print the flags of other tools that have no effect; raise ConfigError for those whose effect is missing."""
    given = {name.replace("_", "-"): words for name, words in vars(arguments).items() if words is not None}
    problems = []
    for name, rule in PREPROCESSING_REFUSED.items():
        if name in given:
            problems.append(Problem(f"--{name}", f"refused: {rule}", f"leave out --{name}"))
    for name, fixed in PREPROCESSING_FIXED.items():
        if name in given and tuple(given[name]) not in {(value,) for value in fixed.values}:
            legal = ", ".join(f"--{name} {value}" for value in fixed.values)
            problems.append(Problem(" ".join([f"--{name}", *given[name]]), f"refused: {fixed.rule}", legal))
    raise_problems(ConfigError, problems)
    effects = {**PREPROCESSING_ACCEPTED, **{name: fixed.rule for name, fixed in PREPROCESSING_FIXED.items()}}
    for name in (name for name in effects if name in given):
        console.line(f"--{name}: accepted, without effect: {effects[name]}")


def main(words: Sequence[str]) -> None:
    """Encode the input, write the corpora, print the counts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # finished partitions stay, as after Ctrl-C
    arguments, console, started = parse_arguments(words), Console(), time.monotonic()
    check_foreign_flags(arguments, console)
    request = PreprocessRequest(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer=tokenizer_spec(arguments),
        rules=document_rules(arguments),
        append_eod=arguments.append_eod,
        split_documents=arguments.split_documents or 0,
        workers=arguments.workers,
        log_interval=arguments.log_interval,
        shard=chosen_shard(arguments),
        partitions=arguments.partitions or 0,
        resume=arguments.resume,
        skip_bad_lines=arguments.skip_bad_lines,
    )
    done = preprocess(request, console)
    for prefix, sidecar in done.corpora:
        ratio = f"{sidecar.text_bytes / sidecar.tokens:.2f} bytes a token" if sidecar.tokens else "no token"
        console.line(
            f"{prefix}: {counted(sidecar.documents, 'document')}, {sidecar.tokens} tokens, "
            f"vocabulary {sidecar.vocab_size}, {format_bytes(sidecar.text_bytes)} of text, {ratio}"
        )
    if done.bad_lines:
        console.line(f"{format_count(done.bad_lines)} lines skipped, listed in {done.bad_lines_file}")
    library = f", encoded by {done.library}" if done.library else ""
    console.line(f"done in {format_duration(time.monotonic() - started)}{library}")
