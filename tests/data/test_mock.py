"""Tests the synthetic samples."""

import numpy as np

from megazero.data.mock import MockSamples


def test_a_sample_counts_upwards_modulo_the_vocabulary() -> None:
    source = MockSamples(vocab_size=11, seq_length=20, seed=1)
    for k in range(30):
        sample = source.sample(k)
        assert sample.shape == (21,) and sample.dtype == np.int64
        assert set(np.diff(sample) % 11) == {1}
        assert sample.min() >= 0 and sample.max() == 10


def test_starts_come_once_an_epoch_and_depend_on_the_seed() -> None:
    def starts(seed: int) -> list[int]:
        source = MockSamples(vocab_size=50, seq_length=2, seed=seed)
        return [int(source.sample(k)[0]) for k in range(50)]

    assert sorted(starts(1)) == list(range(50))
    assert starts(1) == starts(1) != starts(2)
