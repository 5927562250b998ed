"""Adds documents, given as lists, to an IndexedDatasetWriter."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megazero.prepare.tokens.indexed_writer import IndexedDatasetWriter


def add_documents(writer: IndexedDatasetWriter, tokens: NDArray[Any], lengths: Sequence[int]) -> None:
    """Add documents of one sequence each: `tokens` [sum of lengths]; a length of 0 is an empty document."""
    sizes = np.array(lengths, np.int64)
    writer.add(tokens, sizes[sizes > 0], sizes > 0)


def add_nested(writer: IndexedDatasetWriter, documents: Sequence[Sequence[Sequence[int]]]) -> None:
    """Add documents one by one, each a list of non-empty sequences."""
    for document in documents:
        tokens = np.array([token for sequence in document for token in sequence], np.int64)
        writer.add(tokens, np.array([len(sequence) for sequence in document], np.int64), np.array([len(document)]))
