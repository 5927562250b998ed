"""Merges corpora into the same files, byte for byte, as if all their text had been preprocessed at once."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megazero.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megazero.data.sidecar import Sidecar, loss_mask_prefix, read_sidecar, sidecar_bytes
from megazero.data.storage import Access, output_problems
from megazero.errors import DataError, Problem, raise_problems
from megazero.files import written_aside
from megazero.prepare.tokens.array_shards import names
from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter

# Fields of the sidecar that corpora have in common when one tokenizer and one --append-eod made them.
_ALIKE = ("tokenizer_type", "tokenizer_files", "vocab_size", "eod", "append_eod", "split_documents", "loss_mask")
# Token files are read instead of mapped: a failing disk is then an error, not a signal that ends the process.
_BY_READING = Access(maps=False)


class MergeInput(NamedTuple):
    """A corpus to be merged, opened and closed again: most systems limit open files to fewer than a thousand."""

    prefix: str
    dtype: "np.dtype[Any]"
    has_modes: bool
    documents: int
    tokens: int
    sidecar: Sidecar | None


class MergedCorpus(NamedTuple):
    """A corpus that was written; it has a sidecar unless some of its inputs are `without`."""

    documents: int
    tokens: int
    sidecar: Sidecar | None
    without: tuple[str, ...]


def open_inputs(prefixes: Sequence[str], output_prefix: str) -> tuple[MergeInput, ...]:
    """Open every corpus once; raise DataError with all rules that a merge of them would break."""
    problems = _output_problems(prefixes, output_prefix)
    parts: list[MergeInput] = []
    for prefix in prefixes:
        try:
            parts.append(_open_input(prefix))
        except DataError as error:
            problems += error.problems
    raise_problems(DataError, [*problems, *_mode_problems(parts), *_disagreements(parts)])
    return tuple(parts)


def merge(parts: Sequence[MergeInput], output_prefix: str, advance: Callable[[int], None]) -> MergedCorpus:
    """Write OUTPUT-PREFIX.{bin,idx,json}, and the mask if the inputs have one; call advance(tokens) after every input.

    Raises DataError when an input is damaged or has changed, or the disk is full; no file has its final name then.
    """
    name = Path(output_prefix).name
    scratch = Path(output_prefix).with_name(f".{name}.{os.getpid()}.tmp")
    if all(part.sidecar is not None and part.sidecar.loss_mask for part in parts):
        masks = [_open_input(loss_mask_prefix(part.prefix)) for part in parts]
        merge(masks, loss_mask_prefix(output_prefix), lambda _: None)
    try:
        with IndexedDatasetWriter(output_prefix, parts[0].dtype, scratch=scratch) as writer:
            for part in parts:
                writer.append(_reopened(part))
                advance(part.tokens)
            writer.seal()
            sidecar = _merged_sidecar(parts, writer)
            if sidecar is not None:
                with written_aside(scratch / f"{name}.json") as stream:
                    stream.write(sidecar_bytes(sidecar))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    without = tuple(part.prefix for part in parts if part.sidecar is None)
    return MergedCorpus(writer.num_documents, writer.num_tokens, sidecar, without)


def _open_input(prefix: str) -> MergeInput:
    dataset = IndexedDataset(prefix)
    counts = dataset.num_documents, dataset.num_tokens
    return MergeInput(prefix, dataset.dtype, dataset.has_modes, *counts, read_sidecar(dataset))


def _reopened(part: MergeInput) -> IndexedDataset:
    """Open the corpus again; the part that is unchecked on opening a large one is checked as it is copied."""
    dataset = IndexedDataset(part.prefix, _BY_READING)
    if (dataset.dtype, dataset.num_documents, dataset.num_tokens) != (part.dtype, part.documents, part.tokens):
        raise DataError(
            Problem(f"{part.prefix}: has changed since it was opened first", "a corpus is not changed while it is read")
        )
    return dataset


def _merged_sidecar(parts: Sequence[MergeInput], writer: IndexedDatasetWriter) -> Sidecar | None:
    sidecars = [part.sidecar for part in parts if part.sidecar is not None]
    if len(sidecars) < len(parts):
        return None
    return replace(
        sidecars[0],
        documents=writer.num_documents,
        sequences=writer.num_sequences,
        tokens=writer.num_tokens,
        text_bytes=sum(sidecar.text_bytes for sidecar in sidecars),
        digests=writer.digests,
    )


def _output_problems(prefixes: Sequence[str], output_prefix: str) -> list[Problem]:
    """Return the problem of an output that is one of the inputs."""
    output = {os.path.realpath(path) for path in (bin_path(output_prefix), idx_path(output_prefix))}
    read = [p for p in prefixes if {os.path.realpath(path) for path in (bin_path(p), idx_path(p))} & output]
    rule = "the merged corpus gets files of its own"
    among = [Problem(f"--output-prefix {output_prefix}: among the inputs", rule, "another prefix")] if read else []
    return [*among, *output_problems(output_prefix)]


def _mode_problems(parts: Sequence[MergeInput]) -> list[Problem]:
    found = [part.prefix for part in parts if part.has_modes]
    if not found:
        return []
    return [Problem(f"multimodal: {names(found)}", "corpora are of text alone: modes would be lost", "leave them out")]


def _disagreements(parts: Sequence[MergeInput]) -> list[Problem]:
    """Return one problem for every field that differs between inputs, with the inputs on each side."""
    types = _sides((part.dtype.name, part.prefix) for part in parts)
    problems = [_disagreement("token types", types)] if len(types) > 1 else []
    for field in _ALIKE:
        known = [(part.prefix, part.sidecar) for part in parts if part.sidecar is not None]
        sides = _sides((_shown(getattr(sidecar, field)), prefix) for prefix, sidecar in known)
        if len(sides) > 1:
            problems.append(_disagreement(field, sides))
    return problems


def _sides(found: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    sides: dict[str, list[str]] = {}
    for value, prefix in found:
        sides.setdefault(value, []).append(prefix)
    return sides


def _disagreement(what: str, sides: dict[str, list[str]]) -> Problem:
    given = "; ".join(f"{value} in {names(prefixes)}" for value, prefixes in sides.items())
    rule = "one corpus has one tokenizer, one integer type and one way to end documents"
    return Problem(f"{what}: {given}", rule, "the corpora of one side, or --data-path with several corpora")


def _shown(value: Any) -> str:
    return json.dumps(value, sort_keys=True) if not isinstance(value, str) else value
