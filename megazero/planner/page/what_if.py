"""The plan's run with one or two settings changed, run dry, for the controls of the page.

Every value of a control is run with two sizes of micro-batch, the global batch staying what it is; between these two a
page may draw a straight line.  Settings other than the micro-batch are changed one at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megazero.config.run import RunConfig
from megazero.errors import Problem
from megazero.planner.dry.hollow import Operators
from megazero.planner.dry.rank import DryJob
from megazero.planner.job_plan import Plan, between_nodes, make_plan, phase_at_peak
from megazero.planner.page.controls import CONTROLS, MICRO_BATCH
from megazero.planner.predict import forecast_of
from megazero.planner.show import line_of
from megazero.planner.trace import Part
from megazero.rules import run as rules

_PARTS: tuple[Part, ...] = ("start-up", "first step", "steady step")
_WIDEST = 4  # times the plan's micro-batch

# The values of all controls, by name.
Setting = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """A run with these settings: why it is refused, or what it takes on the rank and in the part that need most.

    at_peak: bytes by category.  segments, constants: as in `Need`, `segments` with all tensors.  place: the phase,
    module and line of the peak.  sent: bytes of the rank that sends most in a step; across: those to other nodes.
    seconds: of a step.
    """

    setting: Setting
    refused: str = ""
    rank: int = 0
    part: str = ""
    place: tuple[str, str, str] = ("", "", "")
    at_peak: Mapping[str, int] = field(default_factory=dict)
    segments: int = 0
    constants: int = 0
    host: int = 0
    sent: int = 0
    across: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return self.segments + self.constants

    def to_json(self) -> dict[str, Any]:
        """Return the point as the page's script reads it."""
        setting = dict(self.setting)
        if self.refused:
            return {"setting": setting, "refused": self.refused}
        return {
            "setting": setting,
            "rank": self.rank,
            "part": self.part,
            "place": list(self.place),
            "at_peak": dict(self.at_peak),
            "segments": self.segments,
            "constants": self.constants,
            "host": self.host,
            "sent": self.sent,
            "across": self.across,
            "seconds": self.seconds,
        }


def setting_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of all controls in a configuration."""
    return {name: getattr(getattr(config, section), attribute) for name, (section, attribute, _) in CONTROLS.items()}


def with_setting(job: DryJob, setting: Setting) -> DryJob:
    """Return the job with these values and the same global batch."""
    config = job.config
    samples = job.num_micro_batches * config.training.micro_batch_size * job.topology.dp
    config = replace(config, training=replace(config.training, global_batch_size=samples))
    for name, value in setting.items():
        section, attribute, _ = CONTROLS[name]
        config = replace(config, **{section: replace(getattr(config, section), **{attribute: value})})
    return replace(job, config=config)


def problems_of(job: DryJob) -> tuple[Problem, ...]:
    """Return what the rules have against a job."""
    return rules.check(job.config, job.world_size)


def other_micro_batch(job: DryJob) -> int | None:
    """Return a second size of micro-batch that divides the global batch: up to 4 times as large, or else smaller."""
    given = job.config.training.micro_batch_size
    samples = job.num_micro_batches * given
    larger = [size for size in range(_WIDEST * given, given, -1) if samples % size == 0]
    smaller = [size for size in range(given - 1, 0, -1) if samples % size == 0]
    legal = (size for size in (*larger, *smaller) if not problems_of(with_setting(job, {MICRO_BATCH: size})))
    return next(legal, None)


def settings(job: DryJob, controls: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the settings to run, that of the job itself first."""
    given = setting_of(job.config)
    sizes = [given[MICRO_BATCH]]
    other = other_micro_batch(job) if MICRO_BATCH in controls else None
    sizes += [other] if other else []
    changed = [
        {**given, name: value}
        for name, (_, _, values) in CONTROLS.items()
        if name in controls
        for value in values
        if value != given[name]
    ]
    for setting in (given, *changed):
        for size in sizes:
            yield {**setting, MICRO_BATCH: size}


def points(plan: Plan, controls: Sequence[str], report: Callable[[str], None] = lambda line: None) -> tuple[Point, ...]:
    """Return the runs that the controls need, the plan's own first.  report: gets a line before each is run dry."""
    found = [point_of(plan)]
    wanted = list(settings(plan.job, controls))[1:]
    operators = Operators()
    for number, setting in enumerate(wanted):
        job = with_setting(plan.job, setting)
        if problems := problems_of(job):
            found.append(Point(setting, refused=f"{problems[0].given}: {problems[0].rule}"))
            continue
        report(f"run {number + 1} of {len(wanted)}: " + ", ".join(f"{name} {value}" for name, value in setting.items()))
        found.append(point_of(make_plan(job, plan.hardware, parts=_PARTS, operators=operators)))
    return tuple(found)


def point_of(plan: Plan) -> Point:
    """Return what the controls show of a plan, by the parts that every run has."""
    pairs = [(rank, part) for rank in plan.ranks for part in _PARTS]
    rank, part = max(pairs, key=lambda pair: plan.need(*pair).total)
    need, record = plan.need(rank, part), rank.parts[part]
    traffic = {
        each.trace.rank: [
            (count.nbytes, between_nodes(each, axis, name, count))
            for axis, row in each.parts["steady step"].traffic.items()
            for name, count in row.items()
        ]
        for each in plan.ranks
    }
    sums = [tuple(map(sum, zip(*counts, strict=True))) or (0, 0) for counts in traffic.values()]
    host = max(sum(each.parts[name].host.values()) for each in plan.ranks for name in _PARTS)
    sent, across = max(sums)
    return Point(
        setting_of(plan.job.config),
        rank=rank.trace.rank,
        part=part,
        place=(phase_at_peak(record), record.unit, line_of(record)),
        at_peak={name: nbytes for name, nbytes in record.memory.at_peak.items() if nbytes},
        segments=need.segments,
        constants=need.constants,
        host=host * max(plan.job.nodes.ranks_per_node),
        sent=sent,
        across=across,
        seconds=forecast_of(plan).step.seconds,
    )
