"""Plan a run: `megazero plan --hardware dgx-h100 --nodes 16 --preset gpt2-1.5b --zero-stage 3 ...`."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megazero.console import Console
from megazero.errors import ConfigError, Problem
from megazero.parallel.job import read_job
from megazero.planner.machines import MACHINES
from megazero.planner.words import HARDWARE, Words, machine, nodes_of, read_run, split_words
from megazero.report.summary import read_records
from megazero.train.start.outline import outline_sizes

USAGE = f"""usage: megazero plan [--hardware NAME|FILE.yaml] [--nodes N | --world-size N] [--format text|json] FLAGS
       megazero plan --compare RUN/metrics.jsonl [--hardware ...] FLAGS
       megazero plan --calibrate FILE.yaml [--processes N]
       megazero plan --paper [--format text|json]

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
--compare    a metrics file of the same run, whose steps are put beside their prediction, part by part
--calibrate  measures this machine by all processes at once, those of --processes or of a launcher, and writes its
             description to a new file, for --hardware
--paper      the ZeRO paper's tables, its figure 1 and its communication volumes, from this code run dry, beside the
             paper's values
"""


def main(words: Sequence[str]) -> int:
    """Read the words, run the job dry, and print the plan; return the exit status."""
    console = Console()
    if {"--help", "-h"} & {*words}:
        console.line(USAGE.rstrip("\n"))
        return 0
    own = split_words(words)
    as_json = own.values.get("--format") == "json"
    if own.is_paper:
        return _paper(own.rest, as_json=as_json)
    if "--calibrate" in own.values:
        return _calibrate(own)
    hardware = machine(own.values)
    run = Path(own.values["--compare"]) if "--compare" in own.values else None
    records = [] if run is None else list(read_records(run))
    wanted = read_run(own.rest, nodes_of(own.values, hardware))
    # These import torch, so they come after all checks that don't need it.
    from megazero.planner.compare import compared
    from megazero.planner.compare import lines as side_by_side
    from megazero.planner.dry_run import DryJob
    from megazero.planner.plan import make_plan
    from megazero.planner.predict import forecast_of
    from megazero.planner.show import lines

    job = DryJob(wanted.config, wanted.vocab_size, wanted.nodes, is_gpu=hardware.device == "cuda")
    if not as_json:
        for line in (*wanted.notices, f"planned for {hardware.name}, {wanted.nodes.describe()}"):
            console.line(line)
        for line in outline_sizes(wanted.config, job.world_size):
            console.line(line)
        console.line("")
    plan = make_plan(job, hardware)
    forecast = forecast_of(plan)
    rows = () if run is None else compared(forecast.step, records, origin=str(run))
    if as_json:
        beside = {} if run is None else {"compared": [asdict(row) for row in rows]}
        console.line(json.dumps({**plan.to_json(), "time": forecast.to_json(), **beside}, indent=1))
    else:
        for line in (*forecast.lines(), "", *(side_by_side(rows) if rows else ()), "", *lines(plan)):
            console.line(line)
    return 0 if plan.fits else 1


def _paper(rest: Sequence[str], *, as_json: bool) -> int:
    """Print the paper's figures from the running code, each table when it has been computed."""
    if rest:
        raise ConfigError(
            Problem(f"--paper {' '.join(rest)}", "the paper's tables have settings of their own", "--paper")
        )
    from megazero.planner.paper import lines_of, tables

    console = Console()
    if as_json:
        found = [{"title": one.title, "rows": [row._asdict() for row in one.rows]} for one in tables()]
        console.line(json.dumps(found, indent=1))
        return 0
    console.line(f"{'':<36}{'this code':>14} {'the paper':>12}")
    for one in tables():
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
    from megazero.planner.calibrate import calibrate

    calibrate(Path(own.values["--calibrate"]), job.launch)
    return 0
