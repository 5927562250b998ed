"""Error feedback: what a codec has rounded off is added to the same numbers when they are encoded next.

This is LoCo (Xie et al., 2024) as DeepSpeed has it (`zeropp_loco_param`).  For the numbers x of one key, with the error
e kept for them, zero at first:

    h = x + e         h is encoded and sent, as d
    e = beta e + (1 - beta) (h - d)

The error is that of an average over calls, with weights that fall by beta, so that one call's noise is not fed back
whole.  That is e + (1 - beta) (x - d), so the sum of all d differs from that of all x by e / (1 - beta), which stays
bounded, where without feedback the difference grows with each call.  After `reset_interval` calls of a key
its error is zero again, because the weights have moved on since.  It is zero too where h was not finite: a step that
overflowed is not part of a later one.

Errors are kept encoded, in about a byte a number, and are rounded by that once more.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megazero.comm.wires.codec import BlockCodec, compute_dtype

Place = tuple[int, int]  # the key, and the hop's number in the call


class ErrorFeedback:
    """The errors of one rank by key.

    beta: the weight of those before.  allocate: makes the memory of a key's errors, uint8 [bytes].
    codec: that in which they are kept; by default 8 bits in blocks of 256.
    """

    def __init__(
        self,
        beta: float,
        reset_interval: int,
        allocate: Callable[[int], Tensor],
        *,
        codec: BlockCodec | None = None,
    ) -> None:
        assert 0 <= beta < 1 <= reset_interval
        self._beta = beta
        self._reset_interval = reset_interval
        self._allocate = allocate
        self.codec = codec or BlockCodec(8, 256)
        self._errors: dict[Place, Tensor] = {}  # flat
        self._num_calls: dict[Place, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all errors, which are allocated at the first call of a key."""
        return sum(kept.nbytes for kept in self._errors.values())

    def encode(
        self, codec: BlockCodec, source: Tensor, encoded: Tensor, place: Place, generator: torch.Generator | None
    ) -> None:
        """Encode rows and their error as `codec.encode` does, and keep what that has rounded off."""
        n, dtype = source.shape[-1], compute_dtype(source.dtype)
        errors = self._take(place, (*source.shape[:-1], self.codec.encoded_bytes(n)))
        for piece, kept in zip(codec.pieces(encoded, n), self.codec.pieces(errors, n), strict=True):
            error = self.codec.decode_piece(kept, dtype)
            compensated = source[..., piece.place] + error
            codec.encode_piece(compensated, piece, generator)
            lost = compensated.sub_(codec.decode_piece(piece, dtype))
            error.mul_(self._beta).add_(lost, alpha=1 - self._beta)
            self.codec.encode_piece(error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0), kept, generator)

    def calls(self) -> Tensor:
        """Return what has errors, int64 [places, 4]: the key, the hop, the calls since the last reset, the bytes."""
        rows = [[*place, self._num_calls[place], kept.numel()] for place, kept in sorted(self._errors.items())]
        return torch.tensor(rows, dtype=torch.int64).view(-1, 4)

    def errors(self) -> Iterator[Tensor]:
        """Yield the encoded errors of each row of `calls`, flat; writing to them writes the state."""
        return (kept for _, kept in sorted(self._errors.items()))

    def restore(self, calls: Sequence[Sequence[int]]) -> None:
        """Forget all errors, and make those that `calls` describes, whose bytes the caller fills."""
        self._errors.clear()
        self._num_calls.clear()
        for key, hop, num_calls, nbytes in calls:
            self._errors[key, hop] = self._allocate(nbytes).zero_()
            self._num_calls[key, hop] = num_calls

    def _take(self, place: Place, shape: tuple[int, ...]) -> Tensor:
        """Return the encoded errors, zero at the first call and at each reset: bytes of zero decode to it."""
        if place not in self._errors:
            self._errors[place] = self._allocate(math.prod(shape)).zero_()
        errors, before = self._errors[place], self._num_calls.get(place, 0)
        if before == self._reset_interval:
            errors.zero_()
            before = 0
        self._num_calls[place] = before + 1
        assert errors.numel() == math.prod(shape), f"key {place[0]} is another tensor's"
        return errors.view(shape)
