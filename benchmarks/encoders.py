"""Times a library's encoding alone, in a process of its own: the most that preprocessing with it can reach.

    python benchmarks/encoders.py gigatoken --input FILE.jsonl --vocab-file V --merge-file M [--count-reading]

Prints one JSON object: CPU and wall seconds of encoding the key `text` of all lines with GPT-2's byte-level BPE, and
the number of tokens.  The file is read 16 MiB at a time; reading and decoding JSON counts only with --count-reading,
start-up never.  Ids are not converted from what the library returns, and none are kept.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

END = "<|endoftext|>"
_BLOCK = 16 << 20
# A function that maps texts to the number of their tokens.
Count = Callable[[list[str]], int]


def gigatoken(vocab_file: str, merge_file: str) -> Count:
    from gigatoken.gigatoken_rs import load_hf_json

    encoder = load_hf_json(_tokenizer(vocab_file, merge_file).to_str())
    return lambda texts: sum(len(encoder.encode(text)) for text in texts)


def tokenizers(vocab_file: str, merge_file: str) -> Count:
    """Return a count by Hugging Face's tokenizers, which takes one thread if TOKENIZERS_PARALLELISM is false."""
    encoder = _tokenizer(vocab_file, merge_file)
    return lambda texts: sum(len(found.ids) for found in encoder.encode_batch(texts, add_special_tokens=False))


def tiktoken(vocab_file: str, merge_file: str) -> Count:
    """Return a count by tiktoken, which takes ranks in place of merges.

    A token's rank is its id, since merged tokens stand in the order of their merges in GPT-2's files.
    """
    import tiktoken as library
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
    symbols = sorted(ByteLevel.alphabet())
    printable = [symbol for symbol in symbols if ord(symbol) < 256]
    others = [byte for byte in range(256) if chr(byte) not in printable]
    byte_of = {symbol: ord(symbol) for symbol in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    ranks = {bytes(byte_of[sign] for sign in token): number for token, number in vocabulary.items() if token != END}
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoder = library.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: vocabulary[END]})
    return lambda texts: sum(len(encoder.encode(text, allowed_special="all")) for text in texts)


LIBRARIES: dict[str, Callable[[str, str], Count]] = {
    "gigatoken": gigatoken,
    "tokenizers": tokenizers,
    "tiktoken": tiktoken,
}


def _tokenizer(vocab_file: str, merge_file: str) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    tokenizer = Tokenizer(BPE.from_file(vocab_file, merge_file))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(END, normalized=False)])
    return tokenizer


def train(text: Path, vocab_size: int, folder: Path) -> tuple[Path, Path]:
    """Train a byte-level BPE on a jsonl file, and return the paths of its vocab.json and merges.txt."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator((part for texts in blocks(text) for part in texts), trainer)
    vocab_file, merge_file = (Path(path) for path in tokenizer.model.save(str(folder)))
    vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    vocab_file.write_text(json.dumps({**vocabulary, END: len(vocabulary)}), encoding="utf-8")
    return vocab_file, merge_file


def blocks(text: Path) -> Iterator[list[str]]:
    """Yield the texts of a jsonl file, those of about 16 MiB of lines at a time."""
    with open(text, "rb") as stream:
        while lines := stream.readlines(_BLOCK):
            yield [orjson.loads(line)["text"] for line in lines]


def rate(count: Count, text: Path, *, count_reading: bool) -> dict[str, float]:
    """Count the tokens of a text, and return their number and the CPU and wall seconds that it took."""
    cpu = wall = 0.0
    tokens, parts = 0, blocks(text)
    while True:
        began = (time.process_time(), time.perf_counter())
        texts = next(parts, None)
        if not count_reading:
            began = (time.process_time(), time.perf_counter())
        if texts is not None:
            tokens += count(texts)
        cpu, wall = cpu + time.process_time() - began[0], wall + time.perf_counter() - began[1]
        if texts is None:
            return {"cpu": cpu, "wall": wall, "tokens": tokens}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--vocab-file", required=True)
    parser.add_argument("--merge-file", required=True)
    parser.add_argument("--count-reading", action="store_true", help="what reading and JSON take counts too")
    options = parser.parse_args(words)
    count = LIBRARIES[options.library](options.vocab_file, options.merge_file)
    print(json.dumps(rate(count, options.input, count_reading=options.count_reading)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
