"""A plan as one HTML page that needs no server and no network: pictures, tables, and runs with other settings.

Every picture has its figures as a table below.  A script of its own serves the controls alone; without it the page has
the runs as a table.  `<data value>` has the exact figure of a cell, and the element `plan` the whole plan as JSON.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

from megazero.memory.ledger_figures import CATEGORIES
from megazero.planner.compare import ComparedPart
from megazero.planner.dry.rank import RankRecord
from megazero.planner.forecast import Forecast
from megazero.planner.job_plan import Plan, between_nodes, constants, phase_at_peak
from megazero.planner.page import pictures
from megazero.planner.page.controls import CONTROLS, MICRO_BATCH
from megazero.planner.page.document import document
from megazero.planner.page.stages import lanes_of, shares_of
from megazero.planner.page.tables import figure, folded, nbytes, share, swatch, table, word
from megazero.planner.page.what_if import Point
from megazero.planner.seconds import StepTime
from megazero.planner.show import AXES, line_of, verdict
from megazero.planner.trace import Part
from megazero.report.pictures.ledger_picture import CATEGORY_COLOURS, drawing, joined, sections
from megazero.units import format_bytes, format_count

_COLUMNS = 500  # of the areas of a picture of memory
_MOST_ROWS = 40
_TITLES: Mapping[str, str] = MappingProxyType(
    {
        MICRO_BATCH: "Micro-batch",
        "stage": "ZeRO stage",
        "recomputation": "Recomputation",
        "homes": "Home of the optimizer's states",
    }
)
_WORDS: Mapping[tuple[str, str], str] = MappingProxyType({("homes", "none"): "device", ("homes", "cpu"): "host memory"})


@dataclass(frozen=True)
class PageStory:
    """The parts of a plan that a page shows.

    forecast: with spans.  points: runs with other settings, the plan's own first.  rows: of a run beside the forecast.
    command: the one that has made the plan.
    """

    plan: Plan
    forecast: Forecast
    points: Sequence[Point]
    rows: Sequence[ComparedPart]
    command: str


def plan_page(story: PageStory) -> str:
    """Return the HTML page."""
    plan, step, points = story.plan, story.forecast.step, story.points
    title = f"{plan.job.topology.describe()} on {plan.hardware.name}"
    recorded = {
        "plan": {**plan.to_json(), "time": story.forecast.to_json()},
        "points": [each.to_json() for each in points],
    }
    body = [
        ("What if", _what_if(plan, points) if len(points) > 1 else ""),
        ("Memory through a step", "\n".join(_memory(plan, rank) for rank in plan.ranks)),
        ("Timeline of a step", _timeline(plan, step)),
        ("The forecast beside a run", _beside(story.rows) if story.rows else ""),
        ("Traffic of a step", "\n".join(_traffic(plan, rank) for rank in plan.ranks)),
        ("Every part", _parts(plan)),
    ]
    drawn = "\n".join(f'<section aria-label="{name}"><h2>{name}</h2>\n{text}</section>' for name, text in body if text)
    scale = {"device": plan.hardware.memory_bytes, "colours": dict(CATEGORY_COLOURS)}
    return document(
        f"Plan: {title}",
        story.command,
        f"{_verdict(plan)}\n{_tiles(plan, story.forecast)}\n{drawn}",
        data={"plan": recorded, "scale": scale},
        script="what_if.js",
    )


def _verdict(plan: Plan) -> str:
    kind = "fits" if plan.fits else "fails"
    return f'<p class="verdict {kind}">{"<br>".join(map(escape, verdict(plan)))}</p>'


def _tiles(plan: Plan, forecast: Forecast) -> str:
    seconds, rate, mfu = forecast.step_seconds, forecast.tokens_per_second, forecast.mfu
    needs = plan.need(*plan.binding).total
    tiles = [
        (format_bytes(needs), f"of {format_bytes(plan.hardware.memory_bytes)} on a device"),
        (_shown(seconds.value), f"a step, by the model of time ({_shown(seconds.low)} to {_shown(seconds.high)})"),
        (format_count(rate.value), f"tokens/s ({format_count(rate.low)} to {format_count(rate.high)})"),
        (f"{100 * mfu.value:.1f} %", f"MFU ({100 * mfu.low:.1f} to {100 * mfu.high:.1f})"),
        (escape(forecast.step.binding), "takes most of a step"),
    ]
    return '<div class="tiles">' + "".join(f"<div><b>{a}</b><span>{b}</span></div>" for a, b in tiles) + "</div>"


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _memory(plan: Plan, rank: RankRecord) -> str:
    """Draw a rank's steady step, and list the figures of its peak and the way to it."""
    part: Part = "steady step"
    record = rank.parts[part]
    stated = sum(constants(plan.hardware, rank).values())
    line = line_of(record)
    place = ", ".join(word for word in (record.unit, line) if word)
    short = ", ".join(word for word in (record.unit, line.rpartition("/")[2]) if word)
    room = max(plan.hardware.memory_bytes - stated, 0)
    drawn = drawing(record.memory, room=room, place=short, most_columns=_COLUMNS)
    need = plan.need(rank, part)
    name = f"Rank {rank.trace.rank}, stage {rank.trace.coordinates['pp']}"
    rows = [
        (swatch(each, CATEGORY_COLOURS[each]), nbytes(record.memory.at_peak[each]), nbytes(record.memory.peaks[each]))
        for each in CATEGORIES
        if record.memory.peaks[each]
    ]
    rows += [("all tensors", nbytes(need.tensors), nbytes(need.tensors))]
    peak = table(f"{name}: bytes by category", ("category", "at the peak", "most at any moment"), rows)
    where = ", ".join(word for word in (phase_at_peak(record), place) if word)
    lead = (
        f"Peak of all tensors {format_bytes(need.tensors)}, in {where}. With rounding and fragments"
        f" {format_bytes(need.segments)}, and {format_bytes(stated)} of stated constants, {format_bytes(need.total)}."
    )
    through = folded(f"The way through the step of rank {rank.trace.rank} as a table", _through(name, rank))
    return f"<h3>{name}</h3>\n<p>{escape(lead)}</p>\n<figure>{drawn}</figure>\n{peak}\n{through}"


def _through(name: str, rank: RankRecord) -> str:
    """Return the most bytes in each stretch of the step: modules of one family together where there are many."""
    step = rank.parts["steady step"].memory
    timeline, found = step.timeline, sections(step.timeline)
    least = 1
    while len(found) > _MOST_ROWS and least < timeline.num_operations:
        least *= 2
        found = joined(found, least=least)
    rows = []
    for each in found[: 2 * _MOST_ROWS]:
        inside = (timeline.operations > each.begin) & (timeline.operations <= each.end)
        if inside.any():
            most = int(timeline.totals[inside].max())
            operations = f"{each.begin + 1} to {each.end}"
            rows.append((escape(each.unit), word(each.phase), word(operations), nbytes(most)))
    return table(f"{name}: most bytes by module", ("modules", "phase", "operations", "all tensors"), rows)


def _timeline(plan: Plan, step: StepTime) -> str:
    lanes = list(lanes_of(step))
    rows = [
        (f"stage {number}", *(share(found.get(kind, 0.0)) for kind in kinds))
        for kinds in [_kinds(step)]
        for number, found in ((each.number, shares_of(step.stages[each.number], step.seconds)) for each in lanes)
    ]
    few = "" if len(lanes) == len(step.stages) else f" {len(lanes)} of {len(step.stages)} stages are drawn."
    lead = (
        f"Modelled, not run: {plan.hardware.source}. A thin line leads from the end of a message to where the device"
        f" goes on behind a wait for it; messages that nothing waits for on the device are not drawn. Where the host is"
        f" late, its time is part of the device's; the table has it.{few}"
    )
    shares = table("Shares of the step, by stage", ("stage", *_kinds(step)), rows)
    return f"<p>{escape(lead)}</p>\n<figure>{pictures.timeline(lanes, step.seconds)}</figure>\n{shares}"


def _beside(rows: Sequence[ComparedPart]) -> str:
    cells = []
    for row in rows:
        pair = [
            share(amount) if row.is_share else figure(amount, _shown(amount))
            for amount in (row.predicted, row.measured)
        ]
        cells.append((escape(row.name), *pair, share(row.error)))
    return table("Parts of a step", ("part", "predicted", "measured", "error"), cells)


def _kinds(step: StepTime) -> list[str]:
    return list(dict.fromkeys(kind for stage in step.stages for kind in shares_of(stage, step.seconds)))


def _traffic(plan: Plan, rank: RankRecord) -> str:
    """Draw what a rank sends in a steady step, and list it."""
    found = rank.parts["steady step"].traffic
    bars, rows = [], []
    for axis, by_name in found.items():
        links = dict.fromkeys(pictures.LINK_COLOURS, 0)
        for name, count in by_name.items():
            across = between_nodes(rank, axis, name, count)
            links[AXES.get(axis, "between nodes")] += count.nbytes if axis in AXES else across
            links["inside a node"] += 0 if axis in AXES else count.nbytes - across
            figures = figure(count.calls, f"{count.calls:,}"), nbytes(count.nbytes), nbytes(across)
            rows.append((escape(AXES.get(axis, axis)), word(name.replace("_", "-")), *figures))
        if any(links.values()):
            bars.append((AXES.get(axis, axis), links))
    if not rows:
        return ""
    name = f"Rank {rank.trace.rank}, stage {rank.trace.coordinates['pp']}"
    head = ("axis", "collective or copy", "messages", "bytes", "of them between nodes")
    drawn = f"<figure>{pictures.traffic(bars)}</figure>" if bars else ""
    return f"<h3>{name}</h3>\n{drawn}\n" + folded(f"Figures of rank {rank.trace.rank}", table(name, head, rows))


def _parts(plan: Plan) -> str:
    head = ("part", *(f"rank {rank.trace.rank}" for rank in plan.ranks))
    rows = [(part, *(nbytes(plan.need(rank, part).total) for rank in plan.ranks)) for part in plan.ranks[0].parts]
    return table("Device memory that each part needs, with constants", head, rows)


def _what_if(plan: Plan, points: Sequence[Point]) -> str:
    """Return the controls, which the script brings to life, and the runs as a table."""
    names = [name for name in CONTROLS if len({point.setting[name] for point in points}) > 1]
    controls = "\n".join(_control(plan, name, points) for name in names)
    recorded = sum(not point.refused for point in points)
    lead = (
        f"{recorded} runs are recorded: each was run dry through start-up and two steps, with the same global batch. A"
        " micro-batch between two recorded ones is computed."
    )
    return (
        f'<p>{lead}</p>\n<form id="what-if" hidden>\n<div class="controls">{controls}</div>\n'
        '<p id="status" role="status"></p>\n<figure id="drawn"></figure>\n<div class="wide"><table>'
        "<caption>The plan and this setting, bytes of the rank that needs most</caption>\n"
        '<thead><tr><th scope="col"></th><th scope="col">the plan</th><th scope="col">this setting</th>'
        '<th scope="col">difference</th></tr></thead><tbody id="figures"></tbody></table></div></form>\n'
        + folded("All recorded runs as a table", _points(names, points))
    )


def _control(plan: Plan, name: str, points: Sequence[Point]) -> str:
    """Return a slider for micro-batches, or a choice."""
    values = list(dict.fromkeys(point.setting[name] for point in points))
    given = points[0].setting[name]
    if name == MICRO_BATCH:
        low, high = min(values), max(values)
        samples = plan.job.num_micro_batches * given
        sizes = [size for size in range(low, high + 1) if samples % size == 0]
        shown = ",".join(map(str, sizes))
        return (
            f'<fieldset><legend><label for="{name}">{_TITLES[name]}</label></legend>'
            f'<input type="range" id="{name}" data-values="{shown}" min="0" max="{len(sizes) - 1}"'
            f' value="{sizes.index(given)}"> <output for="{name}">{given}</output></fieldset>'
        )
    order = [value for value in CONTROLS[name][2] if value in values]
    choices = "".join(
        f'<label><input type="radio" name="{name}" value="{value}"{" checked" * (value == given)}>'
        f" {_WORDS.get((name, value), value)}</label> "
        for value in order
    )
    return f"<fieldset><legend>{_TITLES[name]}</legend>{choices}</fieldset>"


def _points(names: Sequence[str], points: Sequence[Point]) -> str:
    head = (*(_TITLES[name] for name in names), "needed", "step", "sent by a rank", "host memory of a node", "")
    return table("Recorded runs", head, _point_rows(names, points))


def _point_rows(names: Sequence[str], points: Sequence[Point]) -> Iterator[Sequence[str]]:
    for point in points:
        words = [str(_WORDS.get((name, point.setting[name]), point.setting[name])) for name in names]
        cells = [escape(words[0]), *map(word, words[1:])]
        if point.refused:
            yield (*cells, *map(word, ("-", "-", "-", "-", f"refused: {point.refused}")))
        else:
            figures = nbytes(point.total), figure(point.seconds, _shown(point.seconds)), nbytes(point.sent)
            yield (*cells, *figures, nbytes(point.host), word(", ".join(filter(None, point.place))))
