"""Clean a corpus: mend texts; drop short, long or unreadable ones, other languages and duplicates; write jsonl.

The chosen steps are applied in the order of the flags below; a dropped document goes through no further step.
Without any step the input becomes jsonl.  Other keys of an object are copied.
"""

import argparse
import time
from collections.abc import Sequence

from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console
from megazero.prepare.arguments import add_input_arguments, input_rules, local_path
from megazero.prepare.clean.cleaning import CleaningRequest, StepChoice, clean_corpus, summary_lines
from megazero.prepare.clean.cleaning_steps import LANGUAGE_CHARACTERS
from megazero.prepare.clean.deduplication import DEFAULT_NEAR_THRESHOLD, DUPLICATES, EXACT_BYTES, NEAR_BYTES
from megazero.prepare.text.bad_lines import BadLines
from megazero.units import format_bytes, format_duration

SHOWN_BAD_LINES = 10


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero clean", description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    text = parser.add_argument_group("text")
    add_input_arguments(text)
    text.add_argument(
        "--json-key", dest="json_keys", nargs=1, default=argparse.SUPPRESS, metavar="KEY", help="the same"
    )
    text.add_argument("--skip-bad-lines", action="store_true", help="skip lines that cannot be used, and list them")
    add_step_arguments(parser.add_argument_group("steps"))
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        type=local_path,
        required=True,
        metavar="FILE",
        help="kept documents: .jsonl, .jsonl.gz or .jsonl.zst",
    )
    output.add_argument(
        "--dropped",
        type=local_path,
        metavar="FILE",
        help='dropped documents, with reasons: {"reason": ..., "document": {...}}',
    )
    return parser.parse_args(words)


def add_step_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the steps, in their order."""
    group.add_argument(
        "--fix-text", action="store_true",
        help="mend wrong encodings, HTML's names of characters, control characters, quotes, line ends (ftfy)",
    )  # fmt: skip
    group.add_argument("--min-characters", action=Number, kind="int", metavar="N", help="shortest text")
    group.add_argument("--max-characters", action=Number, kind="int", metavar="N", help="longest text")
    group.add_argument(
        "--min-printable",
        action=Number,
        kind="float",
        metavar="FRACTION",
        help="least share of printable characters and white space",
    )
    group.add_argument(
        "--languages", nargs="+", metavar="CODE",
        help=f"languages to keep, en de ..., identified by the first {LANGUAGE_CHARACTERS} characters (py3langid)",
    )  # fmt: skip
    group.add_argument(
        "--min-language-probability", action=Number, kind="float", metavar="P",
        help="least probability of the language; without it, the most probable one counts",
    )  # fmt: skip
    group.add_argument(
        "--deduplicate", nargs="+", choices=DUPLICATES,
        help=f"drop duplicates of earlier documents: exact, the same text ({EXACT_BYTES} bytes of memory a document),"
        f" near, about the same five-word runs ({NEAR_BYTES} bytes; datasketch), or both",
    )  # fmt: skip
    group.add_argument(
        "--near-threshold", action=Number, kind="float", metavar="S",
        help=f"similarity from which two texts are near (default: {DEFAULT_NEAR_THRESHOLD})",
    )  # fmt: skip


def step_choice(arguments: argparse.Namespace) -> StepChoice:
    """Return the steps that the flags set."""
    return StepChoice(
        fix_text=arguments.fix_text,
        min_characters=arguments.min_characters,
        max_characters=arguments.max_characters,
        min_printable=arguments.min_printable,
        languages=tuple(arguments.languages or ()),
        min_language_probability=arguments.min_language_probability,
        deduplicate=tuple(arguments.deduplicate or ()),
        near_threshold=arguments.near_threshold,
    )


def main(words: Sequence[str]) -> None:
    """Clean the corpus and print the counts."""
    arguments, console, started = parse_arguments(words), Console(), time.monotonic()
    request = CleaningRequest(
        inputs=tuple(arguments.input),
        output=arguments.output,
        rules=input_rules(arguments),
        choice=step_choice(arguments),
        dropped=arguments.dropped,
    )
    bad = BadLines() if arguments.skip_bad_lines else None
    counts = clean_corpus(request, console, bad)
    for line in summary_lines(counts):
        console.line(line)
    if bad and bad.count:
        console.line(f"{bad.count} bad lines skipped, such as")
        for line in bad.lines()[:SHOWN_BAD_LINES]:
            console.line(f"  {line}")
    size = format_bytes(request.output.stat().st_size)
    console.line(f"{request.output}: {size}, {format_duration(time.monotonic() - started)}")
