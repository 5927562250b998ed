"""Cuts the samples of a step into micro-batches, and reads them ahead in the background (pinned for a GPU).

Step i of a run with global batch size B takes samples [i * B, (i + 1) * B), whatever the layout; where batch sizes
change, every step takes the samples that follow those of the step before.  With D data-parallel
ranks and micro-batch size b, micro-batch m of rank d starts at sample

    first + (m * D + d) * b

so a layout determines which rank reads a sample, never which samples a step has.  The state of a loader is one integer:
the number of samples consumed; with it comes the number of steps where their rows are cut to a length of their own: the
first tokens of every row, of what the sample is with all that rearranges or masks it.

If the layout distinguishes documents, every token has the number of its document (`documents`, counted from 0 in each
sample) and its position in it (`positions`).  A document ends with its end-of-document token; without one it
continues in the next text.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from megazero.config.curriculum import RowLengths
from megazero.config.step_sizes import StepSizes
from megazero.data.samples import Samples

# The interval at which a thread that waits for room checks whether it should stop.
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class BatchLayout:
    """The distribution of a step's samples over data-parallel ranks and micro-batches, and this rank's part of it.

    masked_token: positions whose input is this id do not count in the loss (--eod-mask-loss); None: all of them count.
    document_end: the id of end-of-document tokens; required by the two that follow.
    resets_positions, resets_attention: micro-batches have `positions`, and `documents`.
    pins: batches lie in pinned memory, from where a GPU copies them while the host continues.
    length: the tokens to which rows are cut; None: they are whole.
    """

    global_batch_size: int
    micro_batch_size: int
    data_rank: int = 0
    data_size: int = 1
    masked_token: int | None = None
    document_end: int | None = None
    resets_positions: bool = False
    resets_attention: bool = False
    pins: bool = False
    length: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.data_rank < self.data_size, f"rank {self.data_rank} of {self.data_size}"
        assert self.global_batch_size % (self.micro_batch_size * self.data_size) == 0, (
            f"global batch {self.global_batch_size} is not a multiple of micro-batch {self.micro_batch_size} x "
            f"data-parallel size {self.data_size}"
        )
        resets = self.resets_positions or self.resets_attention
        assert not resets or self.document_end is not None, "documents are recognised by the token at their end"

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of one rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_size)

    def first_samples(self, first_sample: int) -> list[int]:
        """Return the first sample of every micro-batch of this rank in the step that starts at `first_sample`."""
        return [
            first_sample + (index * self.data_size + self.data_rank) * self.micro_batch_size
            for index in range(self.num_micro_batches)
        ]


class MicroBatch(NamedTuple):
    """Samples [first_sample, first_sample + b): b rows of s tokens."""

    first_sample: int
    tokens: Tensor  # int64 [b, s]
    labels: Tensor  # int64 [b, s]: the token after each input
    loss_mask: Tensor | None  # float32 [b, s], 1 where the loss counts; None: everywhere
    positions: Tensor | None = None  # int64 [b, s], of every input in its document; None: in its row
    documents: Tensor | None = None  # int32 [b, s], the number of an input's document in its row; None: not needed


class StepBatch(NamedTuple):
    """This rank's micro-batches of the step that starts at `first_sample`."""

    first_sample: int
    micro_batches: list[MicroBatch]

    @property
    def seq_length(self) -> int:
        """The tokens of a row, the same on every rank."""
        return self.micro_batches[0].tokens.shape[1]

    @property
    def num_positions(self) -> int:
        """The number of this rank's token positions, the same on every rank."""
        return sum(batch.tokens.numel() for batch in self.micro_batches)


def build_step_batch(source: Samples, first_sample: int, layout: BatchLayout) -> StepBatch:
    """Build the batch of the step that starts at sample `first_sample`; raises every error of `source.sample`."""
    return StepBatch(
        first_sample, [_micro_batch(source, first, layout) for first in layout.first_samples(first_sample)]
    )


def _micro_batch(source: Samples, first: int, layout: BatchLayout) -> MicroBatch:
    rows = np.stack([source.sample(first + row) for row in range(layout.micro_batch_size)])  # [b, s + 1]
    rows = rows if layout.length is None else rows[:, : layout.length + 1]
    tokens = torch.from_numpy(np.ascontiguousarray(rows[:, :-1]))
    labels = torch.from_numpy(np.ascontiguousarray(rows[:, 1:]))
    mask = _loss_mask(source, first, tokens, layout)
    batch = MicroBatch(first, tokens, labels, mask, *_document_positions(tokens, layout))
    return _pinned(batch) if layout.pins else batch


def _loss_mask(source: Samples, first: int, tokens: Tensor, layout: BatchLayout) -> Tensor | None:
    """Return 1 for the positions [b, s] that count in the loss; None: all of them."""
    mask = None if layout.masked_token is None else (tokens != layout.masked_token).float()
    learnt = [source.loss_mask(first + row) for row in range(layout.micro_batch_size)]
    for row, found in enumerate(learnt):
        if found is not None:
            mask = torch.ones(tokens.shape) if mask is None else mask
            mask[row] *= torch.from_numpy(
                found[1 : tokens.shape[1] + 1].astype(np.float32)
            )  # a position's label is the token after it
    return mask


def _document_positions(tokens: Tensor, layout: BatchLayout) -> tuple[Tensor | None, Tensor | None]:
    """Return (positions, documents) of the inputs, [b, s], each None if the layout doesn't need it."""
    if not (layout.resets_positions or layout.resets_attention):
        return None, None
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == layout.document_end  # the token itself is of the document before
    positions = documents = None
    if layout.resets_positions:
        index = torch.arange(tokens.shape[1])
        positions = index - torch.where(begins, index, 0).cummax(dim=1).values
    if layout.resets_attention:
        documents = begins.cumsum(dim=1, dtype=torch.int32)
    return positions, documents


def _pinned(batch: MicroBatch) -> MicroBatch:
    first, tokens, labels, *optional = batch
    pinned = (None if tensor is None else tensor.pin_memory() for tensor in optional)
    return MicroBatch(first, tokens.pin_memory(), labels.pin_memory(), *pinned)


class BatchLoader:
    """An endless iterator over StepBatches that reads `prefetch` steps ahead in one background thread.

    An error of the source is raised by the `next` that would have returned its batch.  With prefetch 0 there is no
    thread.  Close it, or use it as a context manager.  clock: a function that returns seconds, which never decrease.
    sizes: the global batch sizes of the steps; by default the layout's.  lengths: those of their rows; None: rows are
    whole.  start_step, start_sample: the steps and samples that are finished.
    unread: spans of steps, counted from 1, whose samples are not read: `pass_over` takes them in place of `next`.
    """

    def __init__(
        self,
        source: Samples,
        layout: BatchLayout,
        *,
        start_sample: int = 0,
        start_step: int = 0,
        prefetch: int = 2,
        clock: Callable[[], float] = time.perf_counter,
        sizes: StepSizes | None = None,
        lengths: RowLengths | None = None,
        unread: Sequence[range] = (),
    ) -> None:
        self._source = source
        self._unread = unread
        self._layout = layout
        self._sizes = sizes or StepSizes.constant(layout.global_batch_size)
        self._lengths = lengths
        self._clock = clock
        self._consumed, self._steps = start_sample, start_step
        self._waited = 0.0
        self._closing = threading.Event()
        self._ready: queue.Queue[StepBatch | Exception] = queue.Queue(maxsize=max(1, prefetch))
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        if prefetch > 0:
            self._thread = threading.Thread(
                target=self._read_ahead, args=(start_sample, start_step), daemon=True, name="batches"
            )
            self._thread.start()

    @property
    def consumed_samples(self) -> int:
        """The loader's state: samples of all ranks in the steps returned so far, from the start of the run."""
        return self._consumed

    @property
    def waited_seconds(self) -> float:
        """The seconds spent in `next` so far: near 0 while batches are read faster than they are used."""
        return self._waited

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """Return this rank's part of the next step."""
        assert not self.is_unread, f"step {self._steps + 1} has no batch"
        began = self._clock()
        batch = self._next_ready() if self._thread else self._read(self._consumed, self._steps)
        self._waited += self._clock() - began
        self._count_step()
        return batch

    @property
    def is_unread(self) -> bool:
        """True if the next step is one whose samples are not read."""
        return self._is_unread(self._steps)

    def pass_over(self) -> tuple[int, int]:
        """Use up the samples of the next step, which are not read; return their number, over all ranks, and tokens."""
        assert self.is_unread, f"step {self._steps + 1} has a batch"
        length = self._source.seq_length if self._lengths is None else self._lengths.at(self._steps)
        num_samples = self._count_step()
        return num_samples, num_samples * length

    def _count_step(self) -> int:
        """Count the next step; return its samples over all ranks."""
        num_samples = self._sizes.at(self._consumed)
        self._consumed, self._steps = self._consumed + num_samples, self._steps + 1
        return num_samples

    def _is_unread(self, steps: int) -> bool:
        return any(steps + 1 in span for span in self._unread)

    def close(self) -> None:
        """Stop the thread and drop the batches it has read; the loader cannot be used afterwards."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _next_ready(self) -> StepBatch:
        assert not self._closing.is_set(), "the loader is closed"
        if self._failure is None:
            item = self._ready.get()
            if isinstance(item, StepBatch):
                return item
            self._failure = item
        raise self._failure

    def _read_ahead(self, first_sample: int, steps: int) -> None:
        while not self._closing.is_set():
            if not self._is_unread(steps):
                item = self._build(first_sample, steps)
                self._offer(item)
                if isinstance(item, Exception):
                    return
            first_sample, steps = first_sample + self._sizes.at(first_sample), steps + 1

    def _read(self, first_sample: int, steps: int) -> StepBatch:
        size, length = self._sizes.at(first_sample), None if self._lengths is None else self._lengths.at(steps)
        layout = replace(self._layout, global_batch_size=size, length=length)
        return build_step_batch(self._source, first_sample, layout)

    def _build(self, first_sample: int, steps: int) -> StepBatch | Exception:
        try:
            return self._read(first_sample, steps)
        except Exception as error:  # raised to the caller of `next`, of whatever kind
            return error

    def _offer(self, item: StepBatch | Exception) -> None:
        while not self._closing.is_set():
            try:
                return self._ready.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue
