"""Plan a run: `megazero plan --hardware dgx-h100 --nodes 16 --preset gpt2-1.5b --zero-stage 3 ...`."""

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from megazero.console import Console
from megazero.errors import ConfigError, Problem
from megazero.files import written_aside
from megazero.parallel.job import read_job
from megazero.planner.advice.choices import read
from megazero.planner.hardware import Hardware
from megazero.planner.machines import MACHINES
from megazero.planner.page.controls import CONTROLS, DEFAULT, read_controls
from megazero.planner.paper.names import ALL, read_names
from megazero.planner.paper.names import NAMES as PAPER
from megazero.planner.paper.rows import HEAD, lines_of
from megazero.planner.words import (
    HARDWARE,
    Wanted,
    Words,
    machine,
    nodes_left,
    nodes_of,
    read_run,
    split_words,
    vocabulary,
)
from megazero.report.summary import read_records
from megazero.train.start.outline import outline_sizes
from megazero.units import counted

USAGE = f"""usage: megazero plan [--hardware NAME|FILE.yaml] [--nodes N | --world-size N]
                     [--format text|json|html] [--output FILE.html] [--what-if LIST] FLAGS
       megazero plan --advise [--hardware ...] [--nodes N] [--without-nodes N]
                     [--format text|json|html] [--output FILE.html] FLAGS
       megazero plan --compare RUN/metrics.jsonl [--hardware ...] FLAGS
       megazero plan --calibrate FILE.yaml [--quick] [--processes N]
       megazero plan --paper [LIST] [--format text|json]

Runs a job dry, on this machine alone and without its memory: the real code of the first, a middle and the last pipeline
stage on tensors without values, through start-up, two steps, an evaluation and, with --save, a save. Prints what a
device's memory holds at its peak, where in the step that is, what is sent over which links, whether the job fits, and
how long a step takes by a model of the machine: tokens a second, MFU, what binds; days, device-hours and energy.
Exit status 0: it fits; 1: it does not.

FLAGS are those of megazero pretrain, whose --help lists them: --preset, --config, --deepspeed-config too. Without a
corpus made-up tokens are planned; nothing is trained, loaded or saved.

--hardware   {", ".join(MACHINES)}, or a file that describes a machine (default: {HARDWARE})
--nodes N    nodes of as many ranks as the machine has devices (default: 1)
--world-size N   the number of ranks instead; the last node may have fewer
--advise     tries all layouts instead of the given one (tensor and pipeline parallelism, schedules, ZeRO's stages,
             groups and number formats of messages, offloading, recomputation, micro-batch), and prints the ten fastest
             that fit with their commands, what each limit costs, and the fewest nodes. Exit status 1: none fits
--without-nodes N   advice for the same job when N of its nodes are gone
--compare    a metrics file of the same run, whose steps are put beside their prediction, part by part
--calibrate  measures this machine by all processes at once, those of --processes or of a launcher, and writes its
             description to a new file, for --hardware; two minutes on CPUs
--quick      measures fewer sizes for a shorter time: a coarse description in half a minute
--format     text, json (everything in bytes), or html: a page with pictures and tables that stands alone, with --advise
             of all layouts that were run dry, as points of memory and time
--output FILE.html   the file of the page (default: standard output)
--what-if LIST   what a reader of the page may change: {", ".join(CONTROLS)}, or none (default: {DEFAULT});
             each value is run dry with two sizes of micro-batch
--paper [LIST]   the ZeRO paper's tables, figures and communication volumes from this code run dry, beside the paper's
             values, with the model's error where these were measured. All take a good minute of one core; LIST
             are some of {", ".join(PAPER[:7])},
             {", ".join(PAPER[7:])}
"""


def main(words: Sequence[str]) -> int:
    """Read the words, run the job dry, and print the plan; return the exit status."""
    console = Console()
    if {"--help", "-h"} & {*words}:
        console.line(USAGE.rstrip("\n"))
        return 0
    own = split_words(words)
    chosen = own.values.get("--format", "text")
    as_json, as_page = chosen == "json", chosen == "html"
    controls = read_controls(own.values.get("--what-if", DEFAULT))
    if own.is_paper:
        if as_page:
            raise ConfigError(Problem("--paper --format html", "the paper's tables are text or JSON", "--format json"))
        return _paper(own, as_json=as_json)
    if "--calibrate" in own.values:
        return _calibrate(own)
    output = Path(own.values["--output"]) if "--output" in own.values else None
    if output is not None and (output.exists() or not output.parent.is_dir()):
        rule = "a page is a new file in a folder that is there"
        raise ConfigError(Problem(f"--output {output}", rule, "the name of a file that is not there yet"))
    hardware = machine(own.values)
    if own.is_advice:
        return _advise(own, hardware, chosen, output, shlex.join(("megazero", "plan", *words)))
    run = Path(own.values["--compare"]) if "--compare" in own.values else None
    records = [] if run is None else list(read_records(run))
    wanted = read_run(own.rest, nodes_of(own.values, hardware))
    # These import torch, so they come after all checks that don't need it.
    from megazero.planner.compare import compared
    from megazero.planner.compare import lines as side_by_side
    from megazero.planner.decide import choose
    from megazero.planner.dry.rank import DryJob
    from megazero.planner.hops import with_hops
    from megazero.planner.predict import forecast_of
    from megazero.planner.show import lines

    job = DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=hardware.device == "cuda")
    job, hops = with_hops(job, hardware)
    if chosen == "text":
        for line in (*wanted.notices, f"planned for {hardware.name}, {wanted.nodes.describe()}"):
            console.line(line)
        for line in outline_sizes(wanted.config, job.world_size):
            console.line(line)
        console.line("")
    plan, decisions = choose(job, hardware)
    reasons = (*hops, *decisions)
    forecast = forecast_of(plan, draws=as_page)
    rows = () if run is None else compared(forecast.step, records, origin=str(run))
    if as_page:
        from megazero.planner.page.page import PageStory, plan_page
        from megazero.planner.page.what_if import points
        from megazero.planner.show import verdict

        tried = points(plan, controls, lambda line: print(line, file=sys.stderr))
        story = PageStory(plan, forecast, tried, rows, shlex.join(("megazero", "plan", *words)))
        _page(plan_page(story), output, verdict(plan))
    elif as_json:
        beside = {} if run is None else {"compared": [asdict(row) for row in rows]}
        near = {} if plan.fits else {"nearest": _nearest(own, wanted, hardware)[1]}
        decided = {"auto": reasons} if reasons else {}
        console.line(json.dumps({**plan.to_json(), **decided, "time": forecast.to_json(), **beside, **near}, indent=1))
    else:
        for line in (*reasons, *forecast.lines(), "", *(side_by_side(rows) if rows else ()), "", *lines(plan)):
            console.line(line)
        for line in () if plan.fits else _nearest(own, wanted, hardware)[0]:
            console.line(line)
    return 0 if plan.fits else 1


def _advise(own: Words, hardware: Hardware, chosen: str, output: Path | None, command: str) -> int:
    """Search layouts and print the fastest that fit, as text, JSON or a page (html)."""
    all_nodes = nodes_of(own.values, hardware)
    nodes = nodes_left(own.values, all_nodes)
    run = read(own.rest, all_nodes.world_size)
    # These import torch.
    from megazero.planner.advice.advise import advise, to_json
    from megazero.planner.advice.search import Search
    from megazero.planner.advice.show import lines

    search = Search(run, vocabulary(run.config), hardware, lambda line: print(line, file=sys.stderr))
    advice = advise(search, nodes)
    console = Console()
    if chosen == "html":
        from megazero.planner.page.layouts import layouts_page

        _page(layouts_page(advice, command), output, (f"{counted(len(advice.outcome.found), 'layout')} that fit",))
    elif chosen == "json":
        console.line(json.dumps(to_json(advice), indent=1))
    else:
        for line in lines(advice):
            console.line(line)
    return 0 if advice.fits else 1


def _nearest(own: Words, wanted: Wanted, hardware: Hardware) -> tuple[Sequence[str], object]:
    """Return the layout nearest to one that does not fit, as text and for JSON."""
    from megazero.planner.advice.advise import found_to_json, remedies
    from megazero.planner.advice.search import Search
    from megazero.planner.advice.show import remedy

    try:
        run = read(own.rest, wanted.nodes.world_size)
    except ConfigError:  # a DeepSpeed configuration has the layout
        return (), None
    search = Search(run, wanted.vocab_size, hardware)
    near = remedies(search, search.candidates(wanted.nodes), wanted.nodes)[1]
    return tuple(remedy(search, near)), None if near is None else found_to_json(search, near)


def _page(page: str, output: Path | None, lines: Iterable[str]) -> None:
    """Write the page to a file and print these lines about it, or print the page alone."""
    if output is None:
        sys.stdout.write(page)
        return
    with written_aside(output) as stream:
        stream.write(page.encode())
    for line in (*lines, f"written: {output}"):
        Console().line(line)


def _paper(own: Words, *, as_json: bool) -> int:
    """Print the paper's figures from the running code, each table when it has been computed."""
    chosen = own.values.get("--paper", ALL)
    others = [*own.rest, *(name for name in own.values if name not in ("--paper", "--format"))]
    if others:
        rule = "the paper's tables have settings of their own"
        raise ConfigError(Problem(f"--paper {chosen} with {' '.join(others)}", rule, "--paper, --paper figure-2"))
    names = read_names(chosen)
    from megazero.planner.paper.parts import parts

    console = Console()
    if as_json:
        found = [{"title": one.title, "rows": [row.to_json() for row in one.rows]} for one in parts(names)]
        console.line(json.dumps(found, indent=1))
        return 0
    console.line(HEAD)
    for one in parts(names):
        for line in (*lines_of(one), ""):
            console.line(line)
    return 0


def _calibrate(own: Words) -> int:
    """Measure this machine with all processes of the job, started here or by a launcher."""
    job = read_job(own.rest)
    others = [*job.rest, *(name for name in own.values if name != "--calibrate")]
    if others:
        rule = "a calibration is of this machine, whatever will run on it: it has no other flags"
        raise ConfigError(Problem(" ".join(others), rule, "--calibrate FILE.yaml --processes N"))
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    from megazero.planner.calibration.machine import calibrate

    calibrate(Path(own.values["--calibrate"]), job.launch, is_quick=own.is_quick)
    return 0
