"""Batches: the same samples make a step whatever the layout, from any start, in the background or not."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.token_files import count_up, write_corpus

from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.loader import BatchLayout, BatchLoader, build_step_batch
from megazero.data.samples import SampleSource
from megazero.errors import DataError


class Counting:
    """Sample k is k, k + 1, k + 2, k + 3; it fails from `broken` on."""

    seq_length = 3

    def __init__(self, broken: int = 10**9) -> None:
        self.broken = broken

    def sample(self, k: int) -> NDArray[np.int64]:
        if k >= self.broken:
            raise DataError(f"sample {k} is broken")
        return np.arange(k, k + 4)


@settings(max_examples=60, deadline=None)
@given(micro=st.integers(1, 4), size=st.integers(1, 4), num=st.integers(1, 4), first=st.integers(0, 1000))
def test_the_ranks_of_any_layout_share_out_exactly_the_steps_samples(
    micro: int, size: int, num: int, first: int
) -> None:
    seen: list[int] = []
    for rank in range(size):
        layout = BatchLayout(micro * size * num, micro, rank, size)
        batch = build_step_batch(Counting(), first, layout)
        assert batch.first_sample == first
        assert len(batch.micro_batches) == layout.num_micro_batches == num
        for index, piece in enumerate(batch.micro_batches):
            assert piece.first_sample == first + (index * size + rank) * micro
            seen += piece.tokens[:, 0].tolist()
    assert sorted(seen) == list(range(first, first + micro * size * num))


def test_a_micro_batch_holds_inputs_and_their_labels() -> None:
    (piece,) = build_step_batch(Counting(), 5, BatchLayout(2, 2)).micro_batches
    assert piece.tokens.tolist() == [[5, 6, 7], [6, 7, 8]]
    assert piece.labels.tolist() == [[6, 7, 8], [7, 8, 9]]
    assert piece.tokens.dtype == piece.labels.dtype == torch.int64
    assert piece.tokens.is_contiguous() and piece.labels.is_contiguous()
    assert piece.loss_mask is None


def test_the_mask_leaves_out_positions_whose_input_is_the_token() -> None:
    (piece,) = build_step_batch(Counting(), 5, BatchLayout(2, 2, masked_token=7)).micro_batches
    assert piece.loss_mask is not None
    assert piece.loss_mask.dtype == torch.float32
    assert piece.loss_mask.tolist() == [[1, 1, 0], [1, 0, 1]]


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_the_state_is_one_integer(prefetch: int) -> None:
    layout = BatchLayout(4, 2)
    with BatchLoader(Counting(), layout, prefetch=prefetch) as loader:
        whole = [next(loader) for _ in range(6)]
        assert loader.consumed_samples == 24
    for done in range(6):
        with BatchLoader(Counting(), layout, start_sample=4 * done, prefetch=prefetch) as loader:
            for expected in whole[done:]:
                batch = next(loader)
                assert batch.first_sample == expected.first_sample
                for one, other in zip(batch.micro_batches, expected.micro_batches, strict=True):
                    assert torch.equal(one.tokens, other.tokens)
            assert loader.consumed_samples == 24


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_is_raised_by_the_next_that_would_return_its_batch(prefetch: int) -> None:
    with BatchLoader(Counting(broken=9), BatchLayout(4, 4), prefetch=prefetch) as loader:
        assert [next(loader).first_sample, next(loader).first_sample] == [0, 4]
        for _ in range(2):
            with pytest.raises(DataError, match="sample 9 is broken"):
                next(loader)
        assert loader.consumed_samples == 8


def test_close_ends_the_thread_even_when_nobody_reads() -> None:
    loader = BatchLoader(Counting(), BatchLayout(1, 1), prefetch=1)
    names = [thread.name for thread in threading.enumerate()]
    assert "batches" in names
    loader.close()
    assert "batches" not in [thread.name for thread in threading.enumerate()]
    loader.close()


@pytest.mark.cuda
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_for_a_gpu_are_pinned(prefetch: int) -> None:
    layout = BatchLayout(4, 2, masked_token=3, pins=True)
    with BatchLoader(Counting(), layout, prefetch=prefetch) as loader:
        for piece in next(loader).micro_batches:
            assert piece.loss_mask is not None
            assert all(part.is_pinned() for part in (piece.tokens, piece.labels, piece.loss_mask))


def test_pinning_takes_place_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nothing can be pinned, so that a copy stands in for it."""
    threads: list[str] = []

    def pin(part: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return part + 1000

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    plain = build_step_batch(Counting(), 0, BatchLayout(2, 2, masked_token=1)).micro_batches
    assert threads == []
    with BatchLoader(Counting(), BatchLayout(2, 2, masked_token=1, pins=True), prefetch=1) as loader:
        found = next(loader).micro_batches
    assert set(threads) == {"batches"}
    for one, other in zip(plain, found, strict=True):
        parts = zip(one[1:], other[1:], strict=True)
        assert all(torch.equal(part + 1000, pinned) for part, pinned in parts)  # type: ignore[operator]


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a multiple"):
        BatchLayout(6, 2, 0, 2)


def test_reading_a_real_corpus(tmp_path: Path) -> None:
    """Two epochs by four ranks: every input of the corpus twice."""
    dataset = IndexedDataset(write_corpus(tmp_path / "c", count_up(97, 7)))
    source = SampleSource(dataset, sequences=range(7), seq_length=8, seed=3, vocab_size=97)
    seen: list[int] = []
    for rank in range(4):
        with BatchLoader(source, BatchLayout(8, 1, rank, 4)) as loader:
            for _ in range(3):
                for piece in next(loader).micro_batches:
                    seen += piece.tokens.flatten().tolist()
    assert sorted(seen) == sorted([*range(96), *range(96)])
