"""A cache of the keys and values of texts that grow by a token at a time, so that only the new token is computed.

One tensor, allocated once, has those of all layers of this rank, behind norms and rotations, as attention reads them:

    [layers, 2, rows, heads, positions, d]        heads: of keys and values on this rank

A row is a text, and a token's place in it is its position.  So texts of different lengths lie side by side: a batch of
prompts is read with padding behind the shorter ones, which no token before it attends to, and later tokens are written
over it before any attends so far.

    n = new tokens of a text, b = texts, d = a head's width
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megazero.units import counted, format_bytes


class KeyValueCache:
    """The keys and values of up to `rows` texts of up to `positions` tokens.

    layers: the attention layers of this rank.  heads, width: those of one layer's keys on this rank.

    lengths: the tokens of every text that is held, in the order of rows.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        rows: int,
        positions: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._index = {layer: index for index, layer in enumerate(layers)}
        shape = (len(self._index), 2, rows, heads, positions, width)
        # Zeros, since attention multiplies what has not been written yet by a weight of 0.
        self._stored = torch.zeros(shape, dtype=dtype, device=device)
        self._numbers = torch.arange(rows, device=device).unsqueeze(1)
        self.lengths: list[int] = []

    @property
    def nbytes(self) -> int:
        """The bytes of its memory."""
        return self._stored.nbytes

    def describe(self) -> str:
        """Return a line about its memory."""
        layers, _, rows, heads, positions, width = self._stored.shape
        return (
            f"keys and values: {format_bytes(self.nbytes)} on this process (2 x {counted(layers, 'layer')} x"
            f" {counted(rows, 'text')} x {counted(positions, 'token')} x {counted(heads, 'head')} x"
            f" {counted(width, 'element')} x {counted(self._stored.itemsize, 'byte')})"
        )

    def update(self, layer: nn.Module, key: Tensor, value: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values [b, n, heads, d]; return those that these tokens may attend to.

        positions: [b, n], where the tokens go on the texts that are held; None: they are the first of new texts, which
        are held from `add` on.
        """
        stored, held = self._stored[self._index[layer]], len(self.lengths)
        if positions is None:
            new = stored[:, held : held + key.shape[0], :, : key.shape[1]]
            new[0], new[1] = key.transpose(1, 2), value.transpose(1, 2)
            return key, value
        rows, reach = self._numbers[:held], max(self.lengths) + positions.shape[1]
        stored[0, rows, :, positions], stored[1, rows, :, positions] = key, value
        key, value = stored[:, :held, :, :reach].transpose(2, 3)
        return key, value

    def add(self, lengths: Sequence[int]) -> None:
        """Hold new texts of these lengths, whose keys and values every layer has stored, behind the others."""
        self.lengths += lengths

    def grow(self) -> None:
        """Count a token more in every text that is held, once every layer has stored its keys and values."""
        self.lengths = [length + 1 for length in self.lengths]

    def keep(self, rows: Sequence[int]) -> None:
        """Hold only the texts of these rows, which ascend, and move them to the first rows."""
        for row, source in enumerate(rows):
            if row != source:
                length = self.lengths[source]
                self._stored[:, :, row, :, :length] = self._stored[:, :, source, :, :length]
        self.lengths = [self.lengths[row] for row in rows]
