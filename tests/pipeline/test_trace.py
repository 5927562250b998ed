"""Tests spans of computations: when they are kept, what they measure, and how spans of ranks become a timeline."""

import json
import time

import pytest
import torch
from support.schedule_drawings import computations

from megazero.pipeline.schedule import Action, Kind, Shape
from megazero.pipeline.timeline import Span, simulate
from megazero.pipeline.trace import NO_TRACE, AnyTrace, Trace, mean_durations, rows, timeline

CPU = torch.device("cpu")
F0, B0 = Action(Kind.FORWARD, 0), Action(Kind.BACKWARD, 0)
F1_2 = Action(Kind.FORWARD, 1, 2)


def compute(trace: AnyTrace, *actions: Action, seconds: float = 0.0) -> None:
    for action in actions:
        with trace.computing(action):
            time.sleep(seconds)


def test_spans_are_kept_between_begin_and_take() -> None:
    trace = Trace(CPU)
    compute(trace, F0)
    trace.begin()
    compute(trace, F0, F1_2)
    assert [span.action for span in trace.end()] == [F0, F1_2]
    compute(trace, B0)
    assert trace.end() == []
    trace.begin()
    compute(trace, F0)
    trace.begin()  # begins again after a step that was not finished
    compute(trace, B0)
    assert [span.action for span in trace.end()] == [B0]


def test_a_span_is_the_time_inside_on_the_clock_of_the_machine() -> None:
    trace = Trace(CPU)
    before = time.monotonic()
    trace.begin()
    compute(trace, F0, seconds=0.02)
    time.sleep(0.03)
    compute(trace, B0, seconds=0.01)
    after = time.monotonic()
    first, second = trace.end()
    assert before <= first.start and second.end <= after
    assert first.end - first.start >= 0.02 and second.end - second.start >= 0.01
    assert second.start - first.end >= 0.03


def test_a_computation_that_fails_leaves_no_span_and_its_error() -> None:
    trace = Trace(CPU)
    trace.begin()
    with pytest.raises(ZeroDivisionError), trace.computing(F0):
        raise ZeroDivisionError
    assert trace.end() == []


def test_no_trace_keeps_nothing() -> None:
    NO_TRACE.begin()
    compute(NO_TRACE, F0)
    assert NO_TRACE.end() == []


@pytest.mark.cuda
def test_kernels_are_waited_for() -> None:
    trace = Trace(torch.device("cuda", 0))
    trace.begin()
    with trace.computing(F0):
        torch.cuda._sleep(100_000_000)
    (span,) = trace.end()
    assert span.end - span.start > 0.01


@pytest.mark.parametrize(("name", "chunks"), [("zero-bubble", 1), ("interleaved", 2)])
def test_a_timeline_comes_back_from_its_rows(name: str, chunks: int) -> None:
    """A timeline survives JSON and clocks that began long ago; rank 0's first span is its beginning."""
    shape = Shape(3, 6, chunks)
    simulated = simulate(computations(name, shape), shape)
    late = [[Span(action, 1024 + start, 1024 + end) for action, start, end in spans] for spans in simulated.stages]
    assert timeline(json.loads(json.dumps([rows(spans) for spans in late]))) == simulated


def test_mean_durations() -> None:
    spans = (Span(F0, 0, 1), Span(F1_2, 1, 4)), (Span(B0, 4, 4.5),)
    measured = timeline([rows(stage) for stage in spans])
    assert mean_durations(measured) == {Kind.FORWARD: 2, Kind.BACKWARD: 0.5}
