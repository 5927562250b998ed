"""Describes this rank's memory besides its model states: activations, buffers and arenas (ZeRO-R)."""

from megazero.activations.recompute import Recomputation
from megazero.memory.fused_buffers import FusedBuffers
from megazero.units import format_bytes
from megazero.zero.engine import Engine


def opening_line(activations: str, logits_chunk_bytes: int, buffers: FusedBuffers, *, mask_bytes: int = 0) -> str:
    """Describe the chosen settings.

    activations: the phrase about activations.  buffers: the buffers of constant size.
    mask_bytes: the bytes of one micro-batch's attention mask, 0 without one.
    """
    mask = f" | an attention mask of {format_bytes(mask_bytes)} for every micro-batch in flight" if mask_bytes else ""
    return (
        f"{activations}{mask} | logits in chunks of at most"
        f" {format_bytes(logits_chunk_bytes)} | constant-size buffers of {format_bytes(buffers.buffer_bytes)}"
    )


def closing_lines(engine: Engine, recomputation: Recomputation | None) -> list[str]:
    """Return statistics of arenas and of host memory."""
    lines = [f"gradient arena, {name}: {figures.describe()}" for name, figures in engine.gradient_arenas.items()]
    copies = None if recomputation is None else recomputation.checkpoints.copies
    return lines if copies is None else [*lines, *copies.describe()]
