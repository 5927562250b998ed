"""What a corpus holds, told to a person."""

from typing import NamedTuple

from megazero.data.indexed_dataset import CHECK_BLOCK, IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.data.tokenizers import Tokenizer
from megazero.units import format_bytes


class IdRange(NamedTuple):
    """The smallest and the largest id; (0, -1) for a corpus without tokens."""

    lowest: int
    highest: int


def header_lines(dataset: IndexedDataset, sidecar: Sidecar | None) -> list[str]:
    """Counts and types, one fact a line."""
    size = dataset.num_tokens * dataset.dtype.itemsize
    lines = [
        f"corpus         {dataset.prefix}",
        f"documents      {dataset.num_documents}",
        f"sequences      {dataset.num_sequences}{' with modes' if dataset.has_modes else ''}",
        f"tokens         {dataset.num_tokens} of {dataset.dtype.name}, {format_bytes(size)}",
    ]
    if sidecar is None:
        return [*lines, "tokenizer      unknown (no .json beside the corpus)"]
    files = " ".join(f"{name} {digest[:12]}" for name, digest in sidecar.tokenizer_files.items())
    ratio = sidecar.text_bytes / max(1, sidecar.tokens)
    return [
        *lines,
        f"tokenizer      {sidecar.tokenizer_type} {files}".rstrip(),
        f"vocabulary     {sidecar.vocab_size}, end of document {sidecar.eod}"
        + ("" if sidecar.append_eod else " (not appended)"),
        f"text           {format_bytes(sidecar.text_bytes)}, {ratio:.2f} bytes a token",
    ]


def shown_document(dataset: IndexedDataset, number: int, limit: int, tokenizer: Tokenizer | None) -> str:
    """The first `limit` tokens of a document: as text with a tokenizer, else as ids."""
    tokens = dataset.document(number)
    ids = [int(token) for token in tokens[:limit]]
    rest = f" ... ({len(tokens)} tokens)" if len(tokens) > limit else f" ({len(tokens)} tokens)"
    return (repr(tokenizer.decode(ids)) if tokenizer else str(ids)) + rest


def find_id_range(dataset: IndexedDataset) -> IdRange:
    """Read every token, a block at a time."""
    found = IdRange(0, -1)
    for start in range(0, dataset.num_tokens, CHECK_BLOCK):
        block = dataset.tokens(start, min(start + CHECK_BLOCK, dataset.num_tokens))
        lowest, highest = int(block.min()), int(block.max())
        found = IdRange(min(found.lowest, lowest) if start else lowest, max(found.highest, highest))
    return found
