"""Reports pipeline traces, which show when a step's stages computed and idled, as a figure and a picture.

A *traced step* is the run's second (the first is slower, for it allocates buffers), every log_interval-th, and the
last; in all others nothing is recorded and nothing is synchronised.  Pipelines are data-parallel and tensor-parallel
copies of one another; only rank 0's is traced.  Waits of ZeRO and tensor parallelism inside a computation count as
computing.
"""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megazero.comm.mesh import Mesh, gather_json_on_first
from megazero.files import written_aside
from megazero.pipeline.picture import caption, picture
from megazero.pipeline.schedule import Shape
from megazero.pipeline.stage_plan import StagePlan
from megazero.pipeline.timeline import EQUAL_PARTS, Timeline, predicted_idle_share, without_waits
from megazero.pipeline.trace import AnyTrace, SpanRow, mean_durations, rows, timeline
from megazero.report.metrics import StepPicture

_FIRST_TRACED = 2


class PipelineReport:
    """A tracer that writes files about steps into `folder`; with None it traces no step.

    `begin_step` and `publish` are collectives of all ranks, of their hosts alone.  Raises DataError when a file
    can't be written.
    """

    def __init__(self, mesh: Mesh, plan: StagePlan, trace: AnyTrace, *, folder: Path | None, interval: int) -> None:
        self._mesh = mesh
        self._plan = plan
        self._trace = trace
        self._folder = folder
        self._interval = interval
        self._is_due = False
        self._num_steps = 0
        self._together = 0.0
        self._closing: list[str] = []
        self._picture: StepPicture | None = None

    def begin_step(self, iteration: int, *, is_last: bool) -> None:
        """Begin to trace the coming step, if it is to be traced."""
        self._num_steps += 1
        due = self._num_steps == _FIRST_TRACED or iteration % self._interval == 0 or is_last
        self._is_due = self._folder is not None and due
        if self._is_due:
            self._mesh.control.barrier()
            self._together = time.monotonic()
            if self._mesh.coordinate("dp") == self._mesh.coordinate("tp") == 0:
                self._trace.begin()

    def end_step(self) -> Sequence[SpanRow] | None:
        """Return this rank's spans of the step that ends, None unless it was traced."""
        spans = rows(self._trace.end())
        return spans if self._is_due else None

    def publish(self, iteration: int, spans: Sequence[SpanRow] | None) -> float | None:
        """Gather a step's spans on rank 0, which writes files and returns the idle share.

        None elsewhere, and of a step that was not traced.
        """
        if self._folder is None or spans is None:
            return None
        mine = {"machine": platform.node(), "together": self._together, "spans": spans} if spans else None
        everyone = gather_json_on_first(self._mesh, mine)
        if not everyone:
            return None
        measured = timeline(on_one_clock([everyone[rank] for rank in self._mesh.topology.group_of(0, "pp")]))
        self._write(self._folder, iteration, measured)
        return measured.idle_share

    def take_picture(self) -> StepPicture | None:
        """Return the picture that rank 0 has drawn since the last call; None without one."""
        picture, self._picture = self._picture, None
        return picture

    def closing_lines(self) -> list[str]:
        """Return a line about the last traced step, for the end of a run."""
        return self._closing

    def _write(self, folder: Path, iteration: int, measured: Timeline) -> None:
        record, ideal = summary(measured, self._plan), ideal_of(measured, self._plan)
        predicted = record["predicted_idle_share"]
        drawing = folder / f"step_{iteration}.svg"
        title = f"Step {iteration}: {self._plan.schedule}, {record['num_micro_batches']} micro-batches"
        svg = picture(measured, title=title, predicted=predicted, ideal=ideal)
        self._picture = StepPicture("pipeline", iteration, svg)
        with written_aside(drawing) as stream:
            stream.write(svg.encode())
        with written_aside(drawing.with_suffix(".json")) as stream:
            stream.write((json.dumps({"iteration": iteration, **record}) + "\n").encode())
        self._closing = [f"pipeline, step {iteration}: {caption(measured, predicted)}; {drawing}"]


def on_one_clock(ranks: Sequence[Mapping[str, Any]]) -> list[list[SpanRow]]:
    """Return every rank's spans on one clock.

    Processes of a machine share one clock.  Those of several machines are aligned at `together`, the time at which
    the ranks left a barrier, which is exact to within the spread of the barrier.
    """
    alike = len({rank["machine"] for rank in ranks}) == 1
    return [
        [
            (kind, micro_batch, chunk, start - shift, end - shift)
            for shift in (0.0 if alike else rank["together"],)
            for kind, micro_batch, chunk, start, end in rank["spans"]
        ]
        for rank in ranks
    ]


def _shape(measured: Timeline, plan: StagePlan) -> Shape:
    last = max(span.action.micro_batch for spans in measured.stages for span in spans)
    return Shape(plan.num_stages, last + 1, plan.num_chunks)


def ideal_of(measured: Timeline, plan: StagePlan) -> Timeline:
    """Return the timeline of the step if messages took no time, and every computation the mean time of its kind."""
    return without_waits(measured, _shape(measured, plan), mean_durations(measured))


def summary(measured: Timeline, plan: StagePlan) -> dict[str, Any]:
    """Return the content of the .json file.

    `stages` has every stage's spans: kind, micro-batch, chunk, start, end in seconds.  The formula of the predicted
    idle share takes the measured mean durations, if it depends on durations.
    """
    shape = _shape(measured, plan)
    means = mean_durations(measured)
    return {
        "schedule": plan.schedule,
        "num_stages": shape.num_stages,
        "num_micro_batches": shape.num_micro_batches,
        "num_chunks": shape.num_chunks,
        "seconds": measured.makespan,
        "idle_share": measured.idle_share,
        "predicted_idle_share": predicted_idle_share(plan.schedule, shape, {**EQUAL_PARTS, **means}),
        "mean_seconds": {kind.value: seconds for kind, seconds in means.items()},
        "stages": [rows(spans) for spans in measured.stages],
    }
