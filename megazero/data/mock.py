"""Synthetic samples for timing and for trying a layout without a corpus (--mock-data).

Every sample counts upwards through the vocabulary from a start that depends on (seed, k), so a model learns it within
minutes and a falling loss still means something.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megazero.data.permutation import Permutation


@dataclass(frozen=True)
class MockSamples:
    """Samples without a file: sample k is start, start + 1, ... modulo the vocabulary."""

    vocab_size: int
    seq_length: int
    seed: int

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k: int64 [seq_length + 1]."""
        epoch, index = divmod(k, self.vocab_size)
        start = Permutation(self.vocab_size, (self.seed, epoch))[index]
        return (start + np.arange(self.seq_length + 1, dtype=np.int64)) % self.vocab_size
