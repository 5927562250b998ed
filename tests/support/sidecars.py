"""Writes the sidecars of corpora for tests."""

from pathlib import Path

from megazero.data.sidecar import Sidecar, sidecar_bytes, sidecar_path


def write_sidecar(prefix: str | Path, sidecar: Sidecar) -> None:
    """Write the sidecar of a corpus."""
    sidecar_path(prefix).write_bytes(sidecar_bytes(sidecar))
