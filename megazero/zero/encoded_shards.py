"""Partitions of frozen parameters that are stored as blocks of integers (`zero_quantized_nontrainable_weights`).

A rank has of every bucket of a section the encoded row of its partition, one behind the other, and nothing else: a
frozen parameter has no master weights.  The layout gives every parameter blocks of its own, so that values do not
depend on its neighbours or on the number of partitions.  Rounding is to the nearest: what has been decoded is encoded
to the same again, so that a checkpoint, which has the decoded values, is read as it was written.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from megazero.comm.wires.codec import BlockCodec, compute_dtype
from megazero.memory.homes import StateHome


class EncodedShard:
    """This rank's partitions of a section's buckets, encoded; values are of `dtype`."""

    def __init__(self, codec: BlockCodec, numels: Sequence[int], dtype: torch.dtype, home: StateHome) -> None:
        """numels: the elements of this rank's partition of each bucket, whole blocks."""
        assert all(numel % codec.block == 0 for numel in numels), "partitions are whole blocks"
        self.dtype = dtype
        self._codec = codec
        self._numels = tuple(numels)
        self._rows = list(accumulate(map(codec.encoded_bytes, numels), initial=0))
        self.stored = home.zeros(self._rows[-1], torch.uint8)
        """The rows, one behind the other, which are those of zeros at first."""
        self._open: dict[tuple[int, int], Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self.stored.nbytes

    def row(self, bucket: int) -> Tensor:
        """Return the encoded row of the section's bucket of this number, a view."""
        return self.stored[self._rows[bucket] : self._rows[bucket + 1]]

    def read(self, bucket: int, start: int, stop: int) -> Tensor:
        """Return the values of the elements [start, stop) of the row; start is a block's first."""
        values = torch.empty(stop - start, dtype=self.dtype, device=self.stored.device)
        for piece in self._codec.pieces(self.row(bucket), self._numels[bucket], slice(start, stop)):
            place = slice(piece.place.start - start, piece.place.stop - start)
            values[place] = self._codec.decode_piece(piece, compute_dtype(self.dtype))
        return values

    def write(self, bucket: int, start: int, values: Tensor) -> None:
        """Store values from `start`, a block's first, to the parameter's last element in the row or the row's end."""
        stop = start + values.numel()
        for piece in self._codec.pieces(self.row(bucket), self._numels[bucket], slice(start, stop)):
            place = slice(piece.place.start - start, piece.place.stop - start)
            self._codec.encode_piece(values[place].to(self.stored.device), piece)

    def opened(self, bucket: int, start: int, stop: int) -> Tensor:
        """Return the values of these elements in host memory, which `close` stores as they are then."""
        if (bucket, start) not in self._open:
            self._open[bucket, start] = self.read(bucket, start, stop).cpu()
        return self._open[bucket, start]

    def close(self, *, discards: bool = False) -> None:
        """Store what has been opened, or discard it."""
        for (bucket, start), values in () if discards else self._open.items():
            self.write(bucket, start, values)
        self._open.clear()


class EncodedSlice:
    """Elements of an encoded shard, decoded when they are asked for; is_written: what is written to them is stored."""

    def __init__(self, shard: EncodedShard, bucket: int, start: int, stop: int, *, is_written: bool) -> None:
        self._shard = shard
        self._place = bucket, start, stop
        self._is_written = is_written

    @property
    def dtype(self) -> torch.dtype:
        return self._shard.dtype

    def view(self) -> Tensor:
        """Return the values; with is_written, those that `EncodedShard.close` stores."""
        return self._shard.opened(*self._place) if self._is_written else self._shard.read(*self._place)
