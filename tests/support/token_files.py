"""Writes token files and tokenizer files for tests from the formats' descriptions alone, without code of megazero."""

import io
import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
Documents = Sequence[Sequence[Sequence[int]]]


def index_bytes(documents: Documents, code: int = 8, *, modes: bool = False) -> bytes:
    """Return the content of the .idx file of documents, each a list of sequences; `code` is the token type's code."""
    itemsize = struct.calcsize("<" + TYPES[code])
    lengths = [len(sequence) for document in documents for sequence in document]
    out = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    out += struct.pack("<Q", len(lengths)) + struct.pack("<Q", len(documents) + 1)
    out += b"".join(struct.pack("<i", length) for length in lengths)
    position = 0
    for length in lengths:
        out += struct.pack("<q", position)
        position += length * itemsize
    count = 0
    out += struct.pack("<q", 0)
    for document in documents:
        count += len(document)
        out += struct.pack("<q", count)
    return out + (b"\x00" * len(lengths) if modes else b"")


def token_bytes(documents: Documents, code: int = 8) -> bytes:
    """Return the content of the .bin file of documents."""
    tokens = [token for document in documents for sequence in document for token in sequence]
    return struct.pack(f"<{len(tokens)}{TYPES[code]}", *tokens)


def write_corpus(prefix: Path, documents: Documents, code: int = 8, *, modes: bool = False) -> str:
    """Write both files of a corpus and return its prefix as a string."""
    Path(f"{prefix}.bin").write_bytes(token_bytes(documents, code))
    Path(f"{prefix}.idx").write_bytes(index_bytes(documents, code, modes=modes))
    return str(prefix)


def write_sparse_corpus(prefix: Path, num_documents: int, num_tokens: int) -> str:
    """Write a valid corpus of many documents as sparse files: all are empty but the last, whose tokens are 0.

    Every sequence but the last has length 0, and every document index but the last is 0; that one counts all sequences.
    So after the header only two numbers of the index are not 0, and the files take next to no disk.
    """
    with open(f"{prefix}.idx", "wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, num_documents, num_documents + 1))
        stream.seek(34 + 4 * (num_documents - 1))
        stream.write(struct.pack("<i", num_tokens))
        stream.seek(34 + 20 * num_documents)
        stream.write(struct.pack("<q", num_documents))
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * num_tokens)
    return str(prefix)


def count_up(num_tokens: int, num_documents: int = 1) -> list[list[list[int]]]:
    """Return documents of one sequence whose tokens, in a row, are 0, 1, 2, ...; lengths differ by at most one."""
    cuts = [num_tokens * number // num_documents for number in range(num_documents + 1)]
    return [[list(range(first, last))] for first, last in pairwise(cuts)]


def byte_symbols() -> dict[int, str]:
    """Return GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + number) for number, byte in enumerate(others)})
    return table


def write_gpt2_files(folder: Path, merges: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Write vocab.json and merges.txt: 256 bytes, then one token a merge, then <|endoftext|>; return their paths."""
    tokens = [*byte_symbols().values(), *("".join(pair) for pair in merges), "<|endoftext|>"]
    vocab, merge = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    merge.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(vocab), str(merge)


def write_sentence_piece_model(folder: Path, text: str, **options: Any) -> str:
    """Train a SentencePiece model on lines with the settings of `megazero train-tokenizer`; return its path.

    options: of the trainer, over these settings.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    settings = {
        "vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False, "add_dummy_prefix": False, "allow_whitespace_only_pieces": True,
        "split_by_unicode_script": False, "bos_id": -1, "num_threads": 1, "minloglevel": 2,
    }  # fmt: skip
    lines = iter(text.split("\n"))
    SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **{**settings, **options})
    (folder / "t.model").write_bytes(model.getvalue())
    return str(folder / "t.model")
