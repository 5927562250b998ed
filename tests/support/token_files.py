"""Token files and tokenizer files for tests, written from the format's description alone; no code of megazero."""

import json
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
Documents = Sequence[Sequence[Sequence[int]]]


def index_bytes(documents: Documents, code: int = 8, *, modes: bool = False) -> bytes:
    """The .idx of documents, each a list of sequences."""
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
    """The .bin of documents."""
    tokens = [token for document in documents for sequence in document for token in sequence]
    return struct.pack(f"<{len(tokens)}{TYPES[code]}", *tokens)


def write_corpus(prefix: Path, documents: Documents, code: int = 8, *, modes: bool = False) -> str:
    """Both files; returns the prefix as text."""
    Path(f"{prefix}.bin").write_bytes(token_bytes(documents, code))
    Path(f"{prefix}.idx").write_bytes(index_bytes(documents, code, modes=modes))
    return str(prefix)


def write_sparse_corpus(prefix: Path, num_documents: int, num_tokens: int) -> str:
    """A valid corpus of many documents that takes next to no disk: all are empty but the last, whose tokens are 0.

    Every document has a sequence, all of length 0 but the last; document indices are 0 up to the last, which counts
    every sequence: of numbers that are not 0 there are three.
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
    """Documents of one sequence whose tokens, in a row, are 0, 1, 2, ...; lengths as even as can be."""
    cuts = [num_tokens * number // num_documents for number in range(num_documents + 1)]
    return [[list(range(first, last))] for first, last in pairwise(cuts)]


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable}
    table.update({byte: chr(256 + number) for number, byte in enumerate(others)})
    return table


def write_gpt2_files(folder: Path, merges: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """vocab.json and merges.txt: 256 bytes, then one token a merge, then <|endoftext|>."""
    tokens = [*byte_symbols().values(), *("".join(pair) for pair in merges), "<|endoftext|>"]
    vocab, merge = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    merge.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(vocab), str(merge)
