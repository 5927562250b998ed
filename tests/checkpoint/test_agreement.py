"""Tests that an action on every rank fails on all ranks or on none."""

from pathlib import Path

import pytest
from support.late_communicator import LateCommunicator
from support.thread_world import run_threads

from megazero.checkpoint.agreement import all_or_none
from megazero.comm.local import LocalCommunicator
from megazero.errors import CheckpointError, DamageError, DataError, Problem


def fail_on(rank: int, error: Exception, world: LateCommunicator) -> list[object]:
    def action() -> int:
        if world.rank == rank:
            raise error
        return world.rank * 10

    return all_or_none(world, action, doing="trying")


def test_results_of_all_ranks_reach_all_ranks() -> None:
    results = run_threads(3, lambda world: all_or_none(world, lambda: [world.rank, None], doing="x"))
    assert results == [[[0, None], [1, None], [2, None]]] * 3


def test_an_error_of_the_system_reaches_all_ranks_with_rank_and_cause() -> None:
    results = run_threads(3, lambda world: fail_on(1, OSError(28, "No space left on device", "/disk/x"), world))
    assert {type(result) for result in results} == {CheckpointError}
    assert {str(result) for result in results} == {
        "checkpoint error: rank 1: /disk/x\n    rule:  trying: No space left on device"
        "\n    legal: free space, or another path"
    }
    assert isinstance(results[1].__cause__, OSError)


def test_damage_stays_damage_unless_a_rank_has_another_problem() -> None:
    """A run passes over what is damaged, but not over what one rank cannot read for another reason."""

    def action(world: LateCommunicator, others: Exception | None) -> None:
        def fail() -> None:
            if world.rank == 1:
                raise DamageError(Problem("box", "damaged"), files=("rank_00003.safetensors",))
            if world.rank == 2 and others is not None:
                raise others

        all_or_none(world, fail, doing="reading")

    for result in run_threads(3, lambda world: action(world, None)):
        assert isinstance(result, DamageError) and result.files == {"rank_00003.safetensors"}
    for result in run_threads(3, lambda world: action(world, PermissionError(13, "Permission denied"))):
        assert isinstance(result, CheckpointError) and not isinstance(result, DamageError)
        assert "rank 1: box" in str(result) and "Permission denied" in str(result)


def test_a_user_error_keeps_its_problems() -> None:
    error = DataError(Problem("a", "b", "c"), Problem("d", "e"))
    results = run_threads(2, lambda world: fail_on(0, error, world))
    for result in results:
        assert isinstance(result, CheckpointError)
        assert result.problems == (Problem("rank 0: a", "b", "c"), Problem("rank 0: d", "e"))


def test_what_all_ranks_say_is_said_once() -> None:
    def action() -> None:
        raise CheckpointError(Problem("given", "rule"))

    results = run_threads(3, lambda world: all_or_none(world, action, doing="x"))
    assert [result.problems for result in results] == [(Problem("given", "rule"),)] * 3


def test_a_bug_stays_itself_where_it_is_and_stops_the_others() -> None:
    bug = ZeroDivisionError("oops")
    results = run_threads(2, lambda world: fail_on(1, bug, world))
    assert results[1] is bug
    assert isinstance(results[0], CheckpointError)
    assert "rank 1: trying\n    rule:  ZeroDivisionError: oops" in str(results[0])


def test_one_rank_alone_takes_the_same_path() -> None:
    world = LocalCommunicator()
    assert all_or_none(world, lambda: "x", doing="y") == ["x"]
    with pytest.raises(CheckpointError) as caught:
        all_or_none(world, Path("/nonexistent/file").read_bytes, doing="reading")
    assert caught.value.problems == (Problem("/nonexistent/file", "reading: No such file or directory"),)
