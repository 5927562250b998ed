"""Writes the sidecars of corpora for tests."""

from pathlib import Path
from typing import Any

from megazero.data.sidecar import Sidecar, sidecar_bytes, sidecar_path


def byte_sidecar(*, documents: int, tokens: int, text_bytes: int, **changes: Any) -> Sidecar:
    """Return the sidecar of a corpus made by ByteTokenizer with a token at the end of each document.

    Every document is one sequence.  `changes` are fields with other values.
    """
    fields: dict[str, Any] = {
        "documents": documents,
        "sequences": documents,
        "tokens": tokens,
        "text_bytes": text_bytes,
        "tokenizer_type": "ByteTokenizer",
        "vocab_size": 257,
        "eod": 256,
        "append_eod": True,
        "tokenizer_files": {},
        "token_bytes": [1] * 256 + [0],
    }
    return Sidecar(**{**fields, **changes})


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write the sidecar of a corpus."""
    sidecar_path(prefix).write_bytes(sidecar_bytes(sidecar))
