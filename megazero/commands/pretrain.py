"""Pretrain a GPT: `megazero pretrain --processes 4 --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from megazero.command_line.help import help_of
from megazero.command_line.parse import ResolvedRun, resolve
from megazero.command_line.processes import leave_status
from megazero.command_line.questions import split_questions
from megazero.command_line.sources import with_sources
from megazero.config.run import RunConfig
from megazero.config.yaml_file import to_annotated_yaml
from megazero.console import Console
from megazero.errors import ConfigError, TopologyError, raise_problems
from megazero.parallel.job import read_job
from megazero.parallel.launch import Launch
from megazero.rules import run as rules
from megazero.train.start.check import check
from megazero.train.start.inputs import RunInputs
from megazero.train.start.outline import outline, outline_sizes

if TYPE_CHECKING:
    import torch

    from megazero.train.decisions import Decide, Decision


def main(words: Sequence[str]) -> int:
    """Read the command line and check it; then join the other ranks, build the run and train; return the status."""
    questions = split_questions(words)
    if questions.topics is not None:
        Console().line(help_of(questions.topics).rstrip("\n"))
        return 0
    if "version" in questions.asked:
        Console().line(import_module("megazero").__version__)
        return 0
    job = read_job(questions.rest)
    resolved = resolve(job.rest, world_size=job.world_size)
    if "print-config" in questions.asked:
        return _print_config(resolved, job.world_size)
    if resolved.problems:
        _print(resolved.notices)
    raise_problems(ConfigError, with_sources(resolved.problems, resolved.sources))
    if "check" in questions.asked:
        return _check(resolved, job.first_rank)
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    _print((*resolved.notices, *job.notices))
    inputs = _checked(resolved, job.launch)
    # This imports torch, which takes a second, so a mistyped flag is reported before it.
    from megazero.train.program import pretrain

    status = pretrain(resolved.config, job.launch, inputs, deciding(inputs))
    leave_status(status, job.launch.rank)
    return status


def deciding(inputs: RunInputs) -> "Decide":
    """Return what decides the settings of a run that are "auto": its plan on this machine."""

    def decide(config: RunConfig, device: "torch.device", launch: Launch) -> "Decision":
        from megazero.planner.decide import decide_by_plan  # loads what a dry run needs, which takes seconds

        return decide_by_plan(config, inputs.vocab_size, device, launch)

    return decide


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        Console().line(line)


def _checked(resolved: ResolvedRun, launch: Launch) -> RunInputs:
    """Return the opened inputs of a run that passes all checks; its problems name the sources of settings."""
    try:
        return check(resolved.config, launch)
    except (ConfigError, TopologyError) as error:
        raise type(error)(*with_sources(error.problems, resolved.sources)) from None


def _print_config(resolved: ResolvedRun, world_size: int) -> int:
    """Print the resolved configuration as YAML; raise ConfigError with its problems after that."""
    problems = resolved.problems or tuple(rules.check(resolved.config, world_size))
    head = resolved.notices if problems else (*resolved.notices, *outline_sizes(resolved.config, world_size))
    Console().line(to_annotated_yaml(resolved.config, resolved.sources, head))
    raise_problems(ConfigError, with_sources(problems, resolved.sources))
    return 0


def _check(resolved: ResolvedRun, launch: Launch) -> int:
    """Check what a start checks before its processes meet, and print what the run would be."""
    _print(resolved.notices)
    config, inputs = resolved.config, _checked(resolved, launch)
    if config.optimizer.param_groups:
        from megazero.train.build import check_param_groups  # loads torch

        check_param_groups(config, inputs.vocab_size)
    source = None
    if config.checkpoint.load is not None:
        from megazero.checkpoint.fallback import report
        from megazero.train.build import check_checkpoint  # loads torch

        found = check_checkpoint(config, inputs, launch.world_size)
        source = found and found.checkpoint.folder
        _print(() if found is None or found.is_newest else report(found, is_read=False))
    _print((*outline(config, launch.world_size, inputs, source=source), "ok"))
    return 0
