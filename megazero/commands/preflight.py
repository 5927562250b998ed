"""Test the nodes of a job before it trains: one process a GPU, started as training will be; bad nodes are named.

Prints a table with a line for each node.  Exit status 0: all nodes are sound; 2: problems, printed; 3: ranks are gone.
"""

import argparse
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megazero.command_line.processes import HELP
from megazero.command_line.tools import Flags, HelpFormatter, Number
from megazero.console import Console, print_error
from megazero.errors import TopologyError, raise_problems
from megazero.parallel.job import read_job
from megazero.parallel.launch import Launch

if TYPE_CHECKING:
    from megazero.cluster.preflight import Board

DAY = 24 * 60 * 60
_PRINTED = "printed"  # the topic under which rank 0 posts that it has printed the problems


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Flags(
        prog="megazero preflight",
        description=__doc__,
        epilog=HELP,
        allow_abbrev=False,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--gpus-per-node",
        action=Number,
        kind="int",
        ge=0,
        le=1024,
        required=True,
        metavar="N",
        help="GPUs of every node; 0 on CPUs",
    )
    parser.add_argument("--nodes", default="", metavar="A,B", help="nodes in the order of ranks, to name absent ones")
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    parser.add_argument("--node-name", default=name, metavar="A", help="name of this process's node")
    numbers: tuple[tuple[str, dict[str, Any], float, str, str], ...] = (  # (flag, bounds, default, unit, help)
        ("--min-bandwidth", {"ge": 0, "le": 10**6}, 0.0, "GB/S", "least all-reduce bandwidth"),
        ("--max-clock-skew", {"gt": 0, "le": DAY}, 1.0, "S", "most that clocks may differ"),
        ("--min-shared-memory", {"ge": 0, "le": 10**9}, 0.0, "GIB", "least free in /dev/shm"),
        ("--message-mib", {"gt": 0, "le": 2**16}, 256.0, "MIB", "size of the all-reduces"),
        ("--timeout", {"gt": 0, "le": DAY}, 120.0, "S", "seconds that a rank may be late"),
    )
    for flag, bounds, default, unit, text in numbers:
        parser.add_argument(flag, action=Number, kind="float", default=default, metavar=unit, help=text, **bounds)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device to measure on")
    return parser.parse_args(words)


def inspect(arguments: argparse.Namespace, board: "Board", launch: Launch) -> None:
    """Gather the nodes, measure, print the table; raise TopologyError with all problems, on all ranks."""
    from megazero.cluster.preflight import (
        Demands,
        gather_nodes,
        node_problems,
        own_facts,
        survey,
        survey_problems,
        table,
    )
    from megazero.comm.startup import choose_device

    console = Console(launch.rank)
    demands = Demands(
        gpus=arguments.gpus_per_node,
        bandwidth=arguments.min_bandwidth * 1e9,
        clock_skew=arguments.max_clock_skew,
        shared_memory=int(arguments.min_shared_memory * 2**30),
    )
    names = [name for name in arguments.nodes.split(",") if name]
    nodes = gather_nodes(board, launch, own_facts(arguments.node_name), names)
    raise_problems(TopologyError, node_problems(nodes, demands))
    device = choose_device(arguments.device, launch)
    found = survey(board, nodes, device, demands, int(arguments.message_mib * 2**20))
    console.line("\n".join(table(found)))
    raise_problems(TopologyError, survey_problems(found, demands))
    console.line(f"preflight: {len(nodes)} {'nodes are' if len(nodes) > 1 else 'node is'} sound")


def main(words: Sequence[str]) -> int:
    """Inspect the job; rank 0 prints the problems for all ranks."""
    job = read_job(words)
    arguments, launch = parse_arguments(job.rest), job.launch
    if job.processes is not None:
        from megazero.cluster.local_processes import start_processes

        return start_processes(job)
    for notice in job.notices:
        Console(launch.rank).line(notice)
    # This imports torch; the flags are parsed without it.
    from megazero.cluster.preflight import Board, open_store

    board = Board(open_store(launch, arguments.timeout), launch.rank, arguments.timeout)
    try:
        inspect(arguments, board, launch)
    except TopologyError as error:
        if launch.rank == 0:
            print_error(error)
            board.post(_PRINTED, None)
        else:  # a launcher ends all processes when the first one fails, so that nothing would be printed
            board.find(_PRINTED, arguments.timeout)
        return error.exit_code
    finally:
        board.close(launch.world_size)
    return 0
