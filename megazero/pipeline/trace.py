"""Traces of computations: the spans of one rank in a step, and several ranks' as one timeline."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from megazero.pipeline.schedule import Action, Kind
from megazero.pipeline.timeline import Span, Timeline


class AnyTrace(Protocol):
    """The interface of a trace; `NO_TRACE` records nothing."""

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Record the computation inside as a span."""

    def begin(self) -> None:
        """Begin to record spans."""

    def end(self) -> list[Span]:
        """Stop recording; return the spans since `begin`, in seconds on the host's clock, in order."""


class _NoTrace:
    def computing(self, action: Action) -> AbstractContextManager[None]:
        return nullcontext()

    def begin(self) -> None:
        return None

    def end(self) -> list[Span]:
        return []


NO_TRACE: AnyTrace = _NoTrace()


class Trace:
    """A trace that records spans between `begin` and `end`: of computations alone, without the wait for their input.

    On CUDA the host waits for kernels at both ends of a span, which slows down the traced step, and no other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[Span] = []
        self._is_recording = False

    def computing(self, action: Action) -> AbstractContextManager[None]:
        """Record the computation inside as a span, if recording."""
        return self._span(action) if self._is_recording else nullcontext()

    def begin(self) -> None:
        """Begin to record spans; those from before are dropped."""
        self._spans, self._is_recording = [], True

    def end(self) -> list[Span]:
        """Stop recording; return the spans since `begin`, none without it."""
        spans, self._spans, self._is_recording = self._spans, [], False
        return spans

    @contextmanager
    def _span(self, action: Action) -> Iterator[None]:
        start = self._now()
        yield
        self._spans.append(Span(action, start, self._now()))

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # waits for no receive that is posted ahead
        return time.monotonic()  # one clock for all processes of a machine


SpanRow = tuple[str, int, int, float, float]  # a span: kind, micro-batch, chunk, start, end


def rows(spans: Sequence[Span]) -> list[SpanRow]:
    """Return spans as values that JSON can represent."""
    return [(span.action.kind.value, *span.action[1:], span.start, span.end) for span in spans]


def timeline(stages: Sequence[Sequence[Sequence[Any]]]) -> Timeline:
    """Return the stages' `rows` as one timeline, which begins at 0 with the first span."""
    begin = min(row[3] for stage in stages for row in stage)
    return Timeline(tuple(tuple(_span(row, begin) for row in stage) for stage in stages))


def mean_durations(measured: Timeline) -> Mapping[Kind, float]:
    """Return the mean seconds of every kind that occurs, over all stages and micro-batches."""
    by_kind: dict[Kind, list[float]] = {}
    for span in (span for spans in measured.stages for span in spans):
        by_kind.setdefault(span.action.kind, []).append(span.end - span.start)
    return {kind: sum(found) / len(found) for kind, found in by_kind.items()}


def _span(row: Sequence[Any], begin: float) -> Span:
    kind, micro_batch, chunk, start, end = row
    return Span(Action(Kind(kind), micro_batch, chunk), start - begin, end - begin)
