"""Inspect a corpus: counts, documents, lengths, samples as a run reads them; verify it, compare it with another."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.samples import SPLIT_NAMES
from megazero.data.sidecar import Sidecar, read_sidecar, recorded_tokenizer, sidecar_path
from megazero.data.storage import Access
from megazero.data.tokenizers import FILES, Tokenizer, load_tokenizer
from megazero.errors import ConfigError, Problem
from megazero.prepare.arguments import add_tokenizer_arguments, local_path, tokenizer_spec
from megazero.prepare.inspect.compare import difference_lines, find_difference
from megazero.prepare.inspect.inspect import SampleRequest, header_lines, shown_document, whole_document, whole_sample
from megazero.prepare.inspect.lengths import (
    count_lengths,
    document_lengths,
    length_lines,
    num_blocks,
    write_length_picture,
)
from megazero.prepare.inspect.verify import verify
from megazero.rules.files import DEFAULT_SPLIT

DIFFERENT = 1
# Token files are read instead of mapped: a failing disk is then an error, not a signal that ends the process.
BY_READING = Access(maps=False)


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(prog="megazero inspect", description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="the corpus: PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--documents", action=Number, kind="int", metavar="N", help="documents to show the beginnings of (default: 3)"
    )
    parser.add_argument("--tokens", action=Number, kind="int", default=64, metavar="N", help="tokens to show of each")
    parser.add_argument(
        "--document", action=Number, kind="int", metavar="N", help="show all of document N, counted from 0"
    )
    parser.add_argument("--lengths", action="store_true", help="lengths of the documents, in tokens")
    parser.add_argument("--picture", type=local_path, metavar="FILE.svg", help="the lengths as a picture too")
    parser.add_argument(
        "--verify", action="store_true", help="read everything: check the index, the files' digests, the ids"
    )
    parser.add_argument("--compare", metavar="PREFIX", help="another corpus: first difference (exit status 1), or none")
    sample = parser.add_argument_group("samples", "as a run over this corpus alone reads them")
    sample.add_argument("--sample", action=Number, kind="int", metavar="K", help="show sample K, counted from 0")
    sample.add_argument("--data-part", choices=SPLIT_NAMES, default="train", help="part of the corpus")
    sample.add_argument("--split", default=DEFAULT_SPLIT, help="the run's --split")
    sample.add_argument(
        "--seq-length", action=Number, kind="int", default=1024, metavar="N", help="the run's --seq-length"
    )
    sample.add_argument("--seed", action=Number, kind="int", default=1234, metavar="N", help="the run's --seed")
    add_tokenizer_arguments(parser.add_argument_group("tokenizer", "to show text instead of ids"), required=False)
    arguments = parser.parse_args(words)
    if arguments.picture is not None and arguments.picture.suffix != ".svg":
        legal = f"--picture {arguments.picture.with_suffix('.svg')}"
        raise ConfigError(Problem(f"--picture {arguments.picture}", "the picture is drawn as SVG", legal))
    return arguments


def print_lengths(dataset: IndexedDataset, picture: Path | None, console: Console) -> None:
    """Count lengths, print bars, write the picture."""
    blocks = console.track(document_lengths(dataset), total=num_blocks(dataset), description="blocks of documents")
    lengths = count_lengths(blocks)
    console.line("\n".join(length_lines(lengths)))
    if picture is not None:
        write_length_picture(picture, lengths, title=dataset.name)
        console.line(f"picture        {picture}")


def compare(dataset: IndexedDataset, other: IndexedDataset, tokenizer: Tokenizer | None, console: Console) -> int:
    """Print the first difference, and return the exit status."""
    with console.progress() as progress:
        task = progress.add_task("tokens", total=min(dataset.num_tokens, other.num_tokens))
        difference = find_difference(dataset, other, lambda tokens: progress.advance(task, tokens))
    console.line("\n".join(difference_lines(dataset, other, difference, tokenizer)))
    return 0 if difference is None else DIFFERENT


def _tokenizer_flags(sidecar: Sidecar | None) -> str:
    """Return the flags that name the tokenizer of a corpus, as far as they are known."""
    if sidecar is None or sidecar.tokenizer_type not in FILES:
        return "--tokenizer-type and its files"
    files = (f" --{name.replace('_', '-')} FILE" for name in FILES[sidecar.tokenizer_type])
    return f"--tokenizer-type {sidecar.tokenizer_type}{''.join(files)}"


def main(words: Sequence[str]) -> int:
    """Open the corpus (which checks the index, or parts of a large one), then print the parts that the flags select."""
    arguments, console = parse_arguments(words), Console()
    tokenizer = load_tokenizer(tokenizer_spec(arguments)) if arguments.tokenizer_type else None
    dataset = IndexedDataset(arguments.prefix, BY_READING)
    sidecar = read_sidecar(dataset)
    if tokenizer is None and sidecar is not None:
        spec = recorded_tokenizer(sidecar, sidecar_path(dataset.prefix).parent)
        tokenizer = None if spec is None else load_tokenizer(spec)
    console.line("\n".join(header_lines(dataset, sidecar)))
    selected = (arguments.document, arguments.sample, arguments.compare)
    beginnings = arguments.documents if arguments.documents is not None else 3 * (selected == (None, None, None))
    if beginnings and tokenizer is None:
        console.line(f"shown          as ids; as text with {_tokenizer_flags(sidecar)}")
    for number in range(min(beginnings, dataset.num_documents)):
        console.line(f"document {number}     {shown_document(dataset, number, arguments.tokens, tokenizer)}")
    if arguments.lengths or arguments.picture is not None:
        print_lengths(dataset, arguments.picture, console)
    if arguments.document is not None:
        print(*whole_document(dataset, arguments.document, tokenizer), sep="\n")
    if arguments.sample is not None:
        of_samples = (arguments.data_part, arguments.split, arguments.seq_length, arguments.seed)
        print(*whole_sample(dataset, SampleRequest(arguments.sample, *of_samples), tokenizer), sep="\n")
    if arguments.verify:
        known = tokenizer or sidecar
        console.line("\n".join(verify(dataset, sidecar, known.vocab_size if known else None, console)))
    if arguments.compare is not None:
        return compare(dataset, IndexedDataset(arguments.compare, BY_READING), tokenizer, console)
    return 0
