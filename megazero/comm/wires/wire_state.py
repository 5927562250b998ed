"""Has what the wires of one rank remember from step to step: errors that are fed back, and generators of rounding.

It is no state of a parameter: a message's slices, ranks and nodes decide what is rounded off.  So it fits the same
layout only, which `layout` describes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megazero.comm.wires.codec import BlockCodec
from megazero.comm.wires.error_feedback import ErrorFeedback


@dataclass(frozen=True)
class WireState:
    """The state of one rank's wires.

    layout: the words that decide what is in the state, beside the ranks of the job and the buckets.
    feedback: None where nothing is fed back.  error_rows: the rows of a bucket's slices that an exchange encodes, for
    each exchange of a reduction.  generators: by the communicator's key, of those that round at random.
    """

    layout: str = ""
    feedback: ErrorFeedback | None = None
    error_rows: Sequence[int] = ()
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)

    def largest_error_bytes(self, slice_numels: Sequence[int]) -> int:
        """Return the bytes of all errors once every bucket has been reduced; slice_numels: of a rank, by bucket."""
        if self.feedback is None:
            return 0
        codec: BlockCodec = self.feedback.codec
        return sum(rows * codec.encoded_bytes(numel) for rows in self.error_rows for numel in slice_numels)

    def draws(self) -> Tensor:
        """Return the states of all generators, one behind the other, uint8 on the host."""
        states = [generator.get_state() for generator in self.generators.values()]
        return torch.cat(states) if states else torch.empty(0, dtype=torch.uint8)

    def restore_draws(self, draws: Tensor) -> None:
        """Set the states of all generators to those of `draws`."""
        for generator, state in zip(self.generators.values(), draws.chunk(max(len(self.generators), 1)), strict=False):
            generator.set_state(state.clone())


NOTHING_REMEMBERED = WireState()
