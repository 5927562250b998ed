"""Runs preflight on processes that have not joined a job yet, some of them slow.

The pool of `processes.py` cannot be used: its ranks have a default process group, and preflight makes its own.
"""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megazero.cluster import preflight
from megazero.cluster.preflight import Board, ClusterNode, Demands, Survey

MESSAGE_BYTES = 2**16
# A slow rank needs 50 ms for an all-reduce that takes others a few.
DEMANDS = Demands(gpus=0, bandwidth=MESSAGE_BYTES / 0.03, clock_skew=1.0, shared_memory=0)
HOUR = 3600.0
PATIENCE_SECONDS = 120.0


class Reply(NamedTuple):
    """The survey of one rank, and the problems it found in it."""

    survey: Survey
    problems: list[str]


def survey_job(crews: Sequence[Sequence[int]], slow: Sequence[int] = ()) -> list[Reply]:
    """Survey nodes with the ranks of `crews`, one process a rank; return one reply a rank.

    Ranks in `slow` come late to all-reduces, and their clocks are an hour ahead.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    workers = []
    for rank in sorted(rank for crew in crews for rank in crew):
        here, there = context.Pipe()
        arguments = (rank, [list(crew) for crew in crews], rank in slow, store.port, there)
        process = context.Process(target=_survey, args=arguments)
        process.start()
        workers.append((process, here))
    try:
        for process, pipe in workers:
            assert pipe.poll(PATIENCE_SECONDS), f"no answer from process {process.pid}"
        return [pipe.recv() for _, pipe in workers]
    finally:
        for process, _ in workers:
            process.kill()
            process.join()


def _survey(rank: int, crews: list[list[int]], slow: bool, port: int, answer: Connection) -> None:
    torch.set_num_threads(1)
    board = Board(dist.TCPStore("127.0.0.1", port, None, False), rank, 30.0)
    nodes = tuple(ClusterNode(f"n{number}", tuple(ranks), 0, 1) for number, ranks in enumerate(crews))
    reduce_now, now = dist.all_reduce, time.time

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return reduce_now(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        if slow:
            patch.setattr(dist, "all_reduce", late)
            patch.setattr(time, "time", lambda: now() + HOUR)
        found = preflight.survey(board, nodes, torch.device("cpu"), DEMANDS, MESSAGE_BYTES)
    problems = [problem.given for problem in preflight.survey_problems(found, DEMANDS)]
    answer.send(Reply(found, problems))
    answer.recv()  # blocks until the parent has all answers and kills this process
