"""Pretrain a GPT: `megazero pretrain --processes 4 --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

from collections.abc import Iterable, Sequence
from importlib import import_module

from megazero.command_line.help import help_of
from megazero.command_line.parse import ResolvedRun, resolve
from megazero.command_line.processes import leave_status, split_processes
from megazero.command_line.questions import split_questions
from megazero.command_line.sources import with_sources
from megazero.config.yaml_file import to_annotated_yaml
from megazero.console import Console
from megazero.errors import ConfigError, TopologyError, raise_problems
from megazero.parallel.launch import Launch, NodeShare, several_nodes_notice
from megazero.rules import run as rules
from megazero.train.check import check
from megazero.train.inputs import RunInputs
from megazero.train.outline import outline, outline_sizes


def main(words: Sequence[str]) -> int:
    """Read the command line and check it; then join the other ranks, build the run and train; return the status."""
    questions = split_questions(words)
    if questions.topics is not None:
        Console().line(help_of(questions.topics).rstrip("\n"))
        return 0
    if "version" in questions.asked:
        Console().line(import_module("megazero").__version__)
        return 0
    own = split_processes(questions.rest)
    launch = Launch.from_environment()
    share = None if own.number is None else NodeShare.from_environment(own.number)
    nodes = 1 if share is None else share.nodes
    world_size = launch.world_size if own.number is None else own.number * nodes
    if "print-config" in questions.asked:
        return _print_config(resolve(own.rest, world_size=world_size), world_size)
    resolved = resolve(own.rest, world_size=world_size)
    if resolved.problems:
        _print(resolved.notices)
    raise_problems(ConfigError, with_sources(resolved.problems, resolved.sources))
    if "check" in questions.asked:
        ranks = () if own.number is None else (own.number,) * nodes
        return _check(resolved, launch if own.number is None else Launch(0, world_size, 0, ranks_per_node=ranks))
    if own.number is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(own.number, launch, share)
    alone = several_nodes_notice() if launch.world_size == 1 else ""
    _print((*resolved.notices, *filter(None, [alone])))
    inputs = _checked(resolved, launch)
    # This imports torch, which takes a second, so a mistyped flag is reported before it.
    from megazero.train.program import pretrain

    status = pretrain(resolved.config, launch, inputs)
    leave_status(status, launch.rank)
    return status


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
    if config.checkpoint.load is not None:
        from megazero.train.build import check_checkpoint  # loads torch

        check_checkpoint(config, inputs)
    _print((*outline(config, launch.world_size, inputs), "ok"))
    return 0
