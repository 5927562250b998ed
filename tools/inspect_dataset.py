"""Show what a corpus holds: its counts, its first documents, and (--verify) the ids in it."""

import argparse
import sys

from megazero.console import Console, HelpFormatter, run_program
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.inspect import find_id_range, header_lines, shown_document
from megazero.data.sidecar import read_sidecar
from megazero.data.tokenizers import FILES, TokenizerSpec, load_tokenizer
from megazero.errors import DataError, Problem


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=HelpFormatter)
    parser.add_argument("prefix", metavar="PREFIX", help="the corpus: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--documents", type=int, default=3, metavar="N", help="documents to show")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="tokens to show of each")
    parser.add_argument("--verify", action="store_true", help="read every token and compare with the vocabulary")
    parser.add_argument("--tokenizer-type", choices=tuple(FILES), help="to show text instead of ids")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    parser.add_argument("--tokenizer-model", metavar="FILE", help="model of SentencePieceTokenizer")
    return parser.parse_args()


def verify(dataset: IndexedDataset, vocab_size: int | None, console: Console) -> None:
    """Print the range of ids; raise DataError if it leaves the vocabulary."""
    lowest, highest = find_id_range(dataset)
    console.line(f"ids            {lowest} to {highest}")
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        rule = f"ids are at least 0 and below the vocabulary size {vocab_size}"
        raise DataError(Problem(f"{dataset.prefix}: ids from {lowest} to {highest}", rule))


def main() -> None:
    """Open (which checks the index), show, verify."""
    arguments, console = parse_arguments(), Console()
    dataset = IndexedDataset(arguments.prefix)
    sidecar = read_sidecar(dataset)
    tokenizer = None
    if arguments.tokenizer_type:
        spec = TokenizerSpec(
            arguments.tokenizer_type, arguments.vocab_file, arguments.merge_file, arguments.tokenizer_model
        )
        tokenizer = load_tokenizer(spec)
    console.line("\n".join(header_lines(dataset, sidecar)))
    for number in range(min(arguments.documents, dataset.num_documents)):
        console.line(f"document {number}     {shown_document(dataset, number, arguments.tokens, tokenizer)}")
    if arguments.verify:
        known = tokenizer or sidecar
        verify(dataset, known.vocab_size if known else None, console)


if __name__ == "__main__":
    sys.exit(run_program(main))
