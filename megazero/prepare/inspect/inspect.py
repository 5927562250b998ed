"""Describes the content of a corpus for the user."""

from typing import NamedTuple

from megazero.data.corpora import Corpora
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.sidecar import Sidecar
from megazero.data.tokenizers import Tokenizer
from megazero.errors import DataError, Problem
from megazero.units import format_bytes


class SampleRequest(NamedTuple):
    """One sample of a run: its number from 0, and the run's --split, --seq-length and --seed."""

    number: int
    part: str
    split: str
    seq_length: int
    seed: int


def header_lines(dataset: IndexedDataset, sidecar: Sidecar | None) -> list[str]:
    """Return lines with counts and types, one fact a line."""
    size = dataset.num_tokens * dataset.dtype.itemsize
    cut = f", of at most {sidecar.split_documents} tokens" if sidecar and sidecar.split_documents else ""
    lines = [
        f"corpus         {dataset.name}",
        f"documents      {dataset.num_documents}",
        f"sequences      {dataset.num_sequences}{cut}{' with modes' if dataset.has_modes else ''}",
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
    """Return the first `limit` tokens of a document, as text if there is a tokenizer, else as ids."""
    tokens = dataset.document(number)
    ids = [int(token) for token in tokens[:limit]]
    rest = f" ... ({len(tokens)} tokens)" if len(tokens) > limit else f" ({len(tokens)} tokens)"
    return (repr(tokenizer.decode(ids)) if tokenizer else str(ids)) + rest


def whole_document(dataset: IndexedDataset, number: int, tokenizer: Tokenizer | None) -> list[str]:
    """Return a line that names the document, then the whole document, as its text or its ids.

    Raises DataError when there is no such document.
    """
    if not 0 <= number < dataset.num_documents:
        raise DataError(Problem(f"--document {number}", *_from_zero(dataset.num_documents)))
    ids = dataset.document(number).tolist()
    return [f"document {number}     {len(ids)} tokens", tokenizer.decode(ids) if tokenizer else _listed(ids)]


def whole_sample(dataset: IndexedDataset, request: SampleRequest, tokenizer: Tokenizer | None) -> list[str]:
    """Return a line that names the sample, then the whole sample, as a run over this corpus alone reads it.

    The last of its seq_length + 1 tokens is a label only.  Raises DataError when the part has no sample.
    """
    if request.number < 0:
        raise DataError(Problem(f"--sample {request.number}", "samples count from 0, without end"))
    corpora = Corpora([dataset.name], split=request.split)
    known = tokenizer.vocab_size if tokenizer else corpora.vocab_size
    samples = corpora.samples(
        request.part,
        seq_length=request.seq_length,
        seed=request.seed,
        vocab_size=known or _any_id(dataset),
    )
    ids = samples.sample(request.number).tolist()
    head = f"sample {request.number}       {len(ids)} tokens of {request.part}, seed {request.seed}"
    return [head, tokenizer.decode(ids) if tokenizer else _listed(ids)]


def _from_zero(count: int) -> tuple[str, str]:
    return f"the corpus has {count} documents", f"0 to {count - 1}" if count else "a corpus with documents"


def _listed(ids: list[int]) -> str:
    return " ".join(map(str, ids))


def _any_id(dataset: IndexedDataset) -> int:
    """Return a vocabulary size that covers the integer type."""
    return 1 << (8 * dataset.dtype.itemsize)
