"""Actions that either succeed on all ranks or fail on all of them.

A rank that raises alone leaves the others waiting in their next collective; here the ranks exchange problems first.
"""

import errno
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from megazero.comm.interface import Communicator
from megazero.comm.mesh import gather_json
from megazero.errors import CheckpointError, DamageError, Problem, UserError

_SHOWN_RANKS = 8


def all_or_none(control: Communicator, action: Callable[[], Any], *, doing: str) -> list[Any]:
    """Run `action` on every rank; return the JSON-able results of all ranks, in rank order.

    If it raises on any rank, all raise: CheckpointError with every problem and its ranks where the reason is one that a
    user can mend (a full disk, say), DamageError where every reason is damage, and the original exception on a rank
    where it is a bug in megazero.
    control: `Mesh.control`, or another communicator of CPU tensors.
    doing: the action in words, for errors of the operating system.
    """
    value, error = None, None
    try:
        value = action()
    # Any exception is reported to the other ranks first, and raised again below.
    except Exception as caught:
        error = caught
    damaged = sorted(error.files) if isinstance(error, DamageError) else None
    reports = gather_json(control, {"value": value, "problems": _problems(error, doing), "damaged": damaged})
    if error is not None and not isinstance(error, UserError | OSError):
        raise error
    failed = [report for report in reports if report["problems"]]
    if not failed:
        return [report["value"] for report in reports]
    problems = _merged([report["problems"] for report in reports])
    if all(report["damaged"] is not None for report in failed):
        raise DamageError(*problems, files=(name for report in failed for name in report["damaged"])) from error
    raise CheckpointError(*problems) from error


def _problems(error: Exception | None, doing: str) -> list[tuple[str, ...]]:
    if error is None:
        return []
    if isinstance(error, UserError):
        return [astuple(problem) for problem in error.problems]
    if isinstance(error, OSError):
        reason = str(error.strerror or error)
        legal = "free space, or another path" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return [(str(error.filename), f"{doing}: {reason}", legal) if error.filename else (doing, reason, legal)]
    return [(doing, f"{type(error).__name__}: {error}", "")]


def _merged(reports: list[list[list[str]]]) -> list[Problem]:
    """Return the problems of all ranks, each once, with the ranks that have it unless all do."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, problems in enumerate(reports):
        for problem in problems:
            ranks.setdefault(tuple(problem), []).append(rank)
    return [_located(problem, where, len(reports)) for problem, where in ranks.items()]


def _located(problem: tuple[str, ...], ranks: list[int], size: int) -> Problem:
    given, rule, legal = problem
    if len(set(ranks)) == size and size > 1:
        return Problem(given, rule, legal)
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS])) + (", ..." if len(ranks) > _SHOWN_RANKS else "")
    return Problem(f"rank{'s' if len(ranks) > 1 else ''} {shown}: {given}" if size > 1 else given, rule, legal)
