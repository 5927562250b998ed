"""Pretrain a GPT: `megazero pretrain --processes 4 --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

from collections.abc import Sequence
from importlib import import_module

from megazero.command_line.help import help_of
from megazero.command_line.parse import ParsedRun, ResolvedRun, parse, resolve
from megazero.command_line.processes import split_processes
from megazero.command_line.questions import split_questions
from megazero.config.yaml_file import to_annotated_yaml
from megazero.console import Console
from megazero.errors import ConfigError, raise_problems
from megazero.parallel.launch import Launch, NodeShare, several_nodes_notice
from megazero.rules import run as rules
from megazero.train.check import check
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
    parsed = parse(own.rest, world_size=world_size)
    if "check" in questions.asked:
        ranks = () if own.number is None else (own.number,) * nodes
        return _check(parsed, launch if own.number is None else Launch(0, world_size, 0, ranks_per_node=ranks))
    if own.number is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(own.number, launch, share)
    alone = several_nodes_notice() if launch.world_size == 1 else ""
    for notice in (*parsed.notices, *filter(None, [alone])):
        Console().line(notice)
    inputs = check(parsed.config, launch)
    # This imports torch, which takes a second, so a mistyped flag is reported before it.
    from megazero.train.program import pretrain

    return pretrain(parsed.config, launch, inputs)


def _print_config(resolved: ResolvedRun, world_size: int) -> int:
    """Print the resolved configuration as YAML; raise ConfigError with its problems after that."""
    problems = resolved.problems or tuple(rules.check(resolved.config, world_size))
    head = resolved.notices if problems else (*resolved.notices, *outline_sizes(resolved.config, world_size))
    Console().line(to_annotated_yaml(resolved.config, resolved.sources, head))
    raise_problems(ConfigError, problems)
    return 0


def _check(parsed: ParsedRun, launch: Launch) -> int:
    """Check what a start checks before its processes meet, and print what the run would be."""
    inputs = check(parsed.config, launch)
    lines = (*parsed.notices, *outline(parsed.config, launch.world_size, inputs))
    if parsed.config.checkpoint.load is not None:
        from megazero.train.build import check_checkpoint  # loads torch

        check_checkpoint(parsed.config, inputs)
    for line in (*lines, "ok"):
        Console().line(line)
    return 0
