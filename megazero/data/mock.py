"""Makes synthetic samples for timing and for trying a layout without a corpus (--mock-data).

Every sample counts upwards through the vocabulary from a start that depends on (seed, k), so a model learns it within
minutes and a falling loss still means something.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megazero.data.permutation import Epochs


@dataclass(frozen=True)
class MockSamples:
    """Samples without a file: sample k is start, start + 1, ... modulo the vocabulary."""

    vocab_size: int
    seq_length: int
    seed: int
    _starts: Epochs = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", Epochs(self.vocab_size, (self.seed,)))

    def sample(self, k: int) -> NDArray[np.int64]:
        """Return sample k: int64 [seq_length + 1]."""
        return (self._starts[k] + np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocab_size

    def loss_mask(self, k: int) -> None:
        """Return None: every token is learnt."""
