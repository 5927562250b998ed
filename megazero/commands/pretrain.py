"""Pretrain a GPT: `megazero pretrain --processes 4 --tensor-model-parallel-size 2 --zero-stage 2 ...`."""

from collections.abc import Sequence

from megazero.command_line.parse import parse
from megazero.command_line.processes import split_processes
from megazero.console import Console
from megazero.parallel.launch import Launch, NodeShare, several_nodes_notice
from megazero.train.check import check


def main(words: Sequence[str]) -> int:
    """Read the command line and check it; then join the other ranks, build the run and train; return the status."""
    own = split_processes(words)
    launch = Launch.from_environment()
    share = None if own.number is None else NodeShare.from_environment(own.number)
    nodes = 1 if share is None else share.nodes
    parsed = parse(own.rest, world_size=launch.world_size if own.number is None else own.number * nodes)
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
