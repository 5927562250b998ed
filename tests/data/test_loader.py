"""Tests that the same samples make up a step in any layout, from any start, and with or without a background thread."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.token_files import count_up, write_corpus

from megazero.config.curriculum import RowLengths
from megazero.config.step_sizes import StepSizes
from megazero.data.indexed_dataset import IndexedDataset
from megazero.data.loader import BatchLayout, BatchLoader, build_step_batch
from megazero.data.samples import SampleSource
from megazero.errors import DataError


class Counting:
    """A source whose sample k is [k, k + 1, k + 2, k + 3], and which fails from sample `broken` on."""

    seq_length = 3

    def __init__(self, broken: int = 10**9) -> None:
        self.broken = broken

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        return None

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


class Given:
    """A source whose every sample consists of the given tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = np.array(tokens)
        self.seq_length = len(tokens) - 1

    def loss_mask(self, k: int) -> None:
        """Every token is learnt."""

    def sample(self, k: int) -> NDArray[np.int64]:
        return self.tokens


def places(*tokens: int) -> tuple[list[int], list[int]]:
    """Return positions and documents of a sample's inputs, where 0 ends a document; the last token is only a label."""
    layout = BatchLayout(1, 1, document_end=0, resets_positions=True, resets_attention=True)
    (piece,) = build_step_batch(Given(*tokens), 0, layout).micro_batches
    assert piece.positions is not None and piece.documents is not None
    assert (piece.positions.dtype, piece.documents.dtype) == (torch.int64, torch.int32)
    return piece.positions[0].tolist(), piece.documents[0].tolist()


def test_a_documents_end_belongs_to_it_and_the_next_counts_anew() -> None:
    assert places(5, 6, 0, 7, 0, 8) == ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    assert places(5, 6, 7, 8) == ([0, 1, 2], [0, 0, 0])
    assert places(0, 5, 6, 9) == ([0, 0, 1], [0, 1, 1])  # the rest of a document that began in another sample
    assert places(5, 0, 0, 0, 6, 9) == ([0, 1, 0, 0, 0], [0, 0, 1, 2, 3])
    assert places(5, 6, 0, 9) == ([0, 1, 2], [0, 0, 0])
    assert places(5, 0) == ([0], [0])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40))
def test_places_are_those_of_documents_read_one_by_one(tokens: list[int]) -> None:
    positions, documents, position, document = [], [], 0, 0
    for token in tokens[:-1]:
        positions.append(position)
        documents.append(document)
        position, document = (0, document + 1) if token == 0 else (position + 1, document)
    assert places(*tokens) == (positions, documents)


def test_places_are_told_as_far_as_they_are_asked_for() -> None:
    for positions, attention in ((False, False), (True, False), (False, True)):
        layout = BatchLayout(2, 2, document_end=6, resets_positions=positions, resets_attention=attention)
        (piece,) = build_step_batch(Counting(), 5, layout).micro_batches
        assert (piece.positions is not None, piece.documents is not None) == (positions, attention)
        assert piece.positions is None or piece.positions.tolist() == [[0, 1, 0], [0, 0, 1]]
        assert piece.documents is None or piece.documents.tolist() == [[0, 0, 1], [0, 1, 1]]
    with pytest.raises(AssertionError, match="token at their end"):
        BatchLayout(2, 2, resets_attention=True)


class Clock:
    """A clock that moves only when a test sets `now`; `was_read` is set once the clock has been read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.was_read = threading.Event()

    def __call__(self) -> float:
        self.was_read.set()
        return self.now


class Slow(Counting):
    """A counting source that takes 2 seconds of the clock for each sample, and begins once `may_read` is set."""

    def __init__(self, clock: Clock, may_read: threading.Event) -> None:
        super().__init__()
        self.clock, self.may_read = clock, may_read

    def sample(self, k: int) -> NDArray[np.int64]:
        assert self.may_read.wait(timeout=60)
        tokens = super().sample(k)
        self.clock.now += 2.0
        return tokens


def test_reading_when_needed_is_waiting() -> None:
    clock, may_read = Clock(), threading.Event()
    may_read.set()
    with BatchLoader(Slow(clock, may_read), BatchLayout(3, 3), prefetch=0, clock=clock) as loader:
        assert loader.waited_seconds == 0.0
        assert [(next(loader).first_sample, loader.waited_seconds) for _ in range(2)] == [(0, 6.0), (3, 12.0)]


def test_a_batch_that_is_not_there_yet_is_waited_for() -> None:
    """The source begins only when the loader has started to wait, so that all of the source's time counts as waited."""
    clock = Clock()
    source = Slow(clock, clock.was_read)
    source.broken = 3  # nothing can be read ahead, which would take time too
    with BatchLoader(source, BatchLayout(3, 3), prefetch=1, clock=clock) as loader:
        next(loader)
        assert loader.waited_seconds == 6.0


def test_a_batch_that_is_there_is_not_waited_for() -> None:
    clock, may_read = Clock(), threading.Event()
    may_read.set()
    source = Slow(clock, may_read)
    source.broken = 6
    with BatchLoader(source, BatchLayout(3, 3), prefetch=3, clock=clock) as loader:
        assert loader._thread is not None
        loader._thread.join(timeout=60)  # the thread ends with the failure, behind two batches
        assert (next(loader).first_sample, next(loader).first_sample) == (0, 3)
        assert clock.now == 12.0 and loader.waited_seconds == 0.0


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
    before = set(threading.enumerate())
    loader = BatchLoader(Counting(), BatchLayout(1, 1), prefetch=1)
    assert [thread.name for thread in set(threading.enumerate()) - before] == ["batches"]
    loader.close()
    assert set(threading.enumerate()) <= before
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
    """Without a GPU nothing can be pinned, so a copy of the tensor plus 1000 stands in for the pinned tensor."""
    threads: list[str] = []

    def pin(part: torch.Tensor) -> torch.Tensor:
        threads.append(threading.current_thread().name)
        return part + 1000

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    layout = BatchLayout(2, 2, masked_token=1, document_end=1, resets_positions=True, resets_attention=True)
    plain = build_step_batch(Counting(), 0, layout).micro_batches
    assert threads == []
    with BatchLoader(Counting(), replace(layout, pins=True), prefetch=1) as loader:
        found = next(loader).micro_batches
    assert set(threads) == {"batches"}
    for one, other in zip(plain, found, strict=True):
        parts = zip(one[1:], other[1:], strict=True)
        assert all(torch.equal(part + 1000, pinned) for part, pinned in parts)


def test_a_layout_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a multiple"):
        BatchLayout(6, 2, 0, 2)


def test_reading_a_real_corpus(tmp_path: Path) -> None:
    """Four ranks read every input of the corpus exactly twice in two epochs."""
    dataset = IndexedDataset(write_corpus(tmp_path / "c", count_up(97, 7)))
    source = SampleSource(dataset, sequences=range(7), seq_length=8, seed=3, vocab_size=97)
    seen: list[int] = []
    for rank in range(4):
        with BatchLoader(source, BatchLayout(8, 1, rank, 4)) as loader:
            for _ in range(3):
                for piece in next(loader).micro_batches:
                    seen += piece.tokens.flatten().tolist()
    assert sorted(seen) == sorted([*range(96), *range(96)])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_steps_of_growing_sizes_take_the_same_samples_in_the_same_order(prefetch: int) -> None:
    """A loader that goes on from any step, in another layout, returns the rest of the steps of the first one."""
    sizes, steps = StepSizes((0, 7, 20), (4, 8, 12)), []
    with BatchLoader(Counting(), BatchLayout(12, 2), prefetch=prefetch, sizes=sizes) as loader:
        for _ in range(6):
            steps.append((loader.consumed_samples, next(loader)))
    assert [first for first, _ in steps] == [0, 4, 8, 16, 24, 36]
    assert [len(batch.micro_batches) for _, batch in steps] == [2, 2, 4, 4, 6, 6]
    for start, (first, _) in enumerate(steps):
        layouts = [BatchLayout(12, 1, rank, 4) for rank in range(4)]
        for layout in layouts:
            with BatchLoader(Counting(), layout, start_sample=first, prefetch=prefetch, sizes=sizes) as loader:
                rests = [next(loader) for _ in steps[start:]]
            expected = [
                whole[layout.data_rank :: 4]
                for _, batch in steps[start:]
                for whole in [[row for piece in batch.micro_batches for row in piece.tokens[:, 0].tolist()]]
            ]
            assert [[piece.tokens[0, 0].item() for piece in rest.micro_batches] for rest in rests] == expected


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_samples_of_unread_steps_are_used_up_and_never_read(prefetch: int) -> None:
    """Steps 1, 3 and 4 of 2, 2, 4, 4 and 4 samples are not read; a loader that goes on inside them agrees."""
    read: list[int] = []

    class Noting(Counting):
        def sample(self, k: int) -> NDArray[np.int64]:
            read.append(k)
            return super().sample(k)

    sizes, lengths, unread = StepSizes((0, 4), (2, 4)), RowLengths((0, 3), (2, 3)), (range(1, 2), range(3, 5))
    given: dict[str, Any] = {"sizes": sizes, "lengths": lengths, "unread": unread, "prefetch": prefetch}
    for start, consumed in enumerate((0, 2, 4, 8)):
        read.clear()
        places, found = {"start_sample": consumed, "start_step": start}, []
        with BatchLoader(Noting(), BatchLayout(4, 2), **given, **places) as loader:
            for _ in range(start, 5):
                found.append(loader.pass_over() if loader.is_unread else next(loader).first_sample)
            assert loader.consumed_samples == 16 and not loader.is_unread
            with pytest.raises(AssertionError, match="step 6 has a batch"):
                loader.pass_over()
        assert found == [(2, 4), 2, (4, 8), (4, 12), 12][start:]
        assert not {*read} & {0, 1, 4, 5, 6, 7, 8, 9, 10, 11}
    with (
        BatchLoader(Counting(), BatchLayout(4, 2), **given) as loader,
        pytest.raises(AssertionError, match="step 1 has no batch"),
    ):
        next(loader)


class Learnt(Counting):
    """A counting source of which an odd sample's tokens are learnt from its second label on, and all of an even one."""

    def loss_mask(self, k: int) -> NDArray[np.uint8] | None:
        return np.array([1, 0, 1, 1], np.uint8) if k % 2 else None


def test_the_mask_of_a_position_is_that_of_its_label() -> None:
    (piece,) = build_step_batch(Learnt(), 5, BatchLayout(2, 2)).micro_batches
    assert piece.loss_mask is not None and piece.loss_mask.dtype == torch.float32
    assert piece.loss_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    (piece,) = build_step_batch(Learnt(), 5, BatchLayout(2, 2, masked_token=7)).micro_batches
    assert piece.loss_mask is not None
    assert piece.loss_mask.tolist() == [[0, 1, 0], [1, 0, 1]], "neither after an input that does not count"


@pytest.mark.parametrize("prefetch", [0, 2])
def test_every_steps_rows_are_cut_to_its_length(prefetch: int) -> None:
    """Samples, masks and positions are those of whole rows; a loader that goes on cuts as the first one did."""
    lengths, layout = (
        RowLengths((0, 1, 3), (1, 2, 3)),
        BatchLayout(2, 2, masked_token=6, document_end=6, resets_positions=True),
    )
    whole = [build_step_batch(Learnt(), 2 * step, layout).micro_batches[0] for step in range(5)]
    for start in (0, 2):
        places = {"start_sample": 2 * start, "start_step": start}
        with BatchLoader(Learnt(), layout, prefetch=prefetch, lengths=lengths, **places) as loader:
            found = [next(loader) for _ in range(start, 5)]
        assert [step.seq_length for step in found] == [1, 2, 2, 3, 3][start:]
        for step, uncut in zip(found, whole[start:], strict=True):
            (piece,), length = step.micro_batches, step.seq_length
            assert piece.first_sample == uncut.first_sample
            for name in ("tokens", "labels", "loss_mask", "positions"):
                assert torch.equal(getattr(piece, name), getattr(uncut, name)[:, :length]), name
