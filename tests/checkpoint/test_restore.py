"""Tests that a restore succeeds on all ranks or on none, with threads and with real processes as ranks."""

from pathlib import Path

import pytest
import torch
from support.late_communicator import LateCommunicator
from support.processes import mesh_in_worker, run_ranks
from support.sharded_state import PADDING, Layout, State, assert_same, blank, make_state, write_checkpoint
from support.thread_world import run_threads

from megazero.checkpoint.reader import open_checkpoint
from megazero.checkpoint.restore import restore
from megazero.comm.interface import Communicator
from megazero.errors import CheckpointError
from megazero.parallel.param_spec import StateFragment

CPU = torch.device("cpu")
WANTED = Layout(tp=2, dp=2, pad_to=2, seed=9)


def restore_rank(
    root: Path, world: Communicator, state: State, wanted: Layout = WANTED
) -> tuple[list[StateFragment], list[StateFragment]]:
    expected = wanted.fragments(world.rank, state)
    got = blank(expected)
    restore(open_checkpoint(root), got, control=world)
    return got, expected


def test_all_ranks_are_filled(tmp_path: Path) -> None:
    state = make_state()
    write_checkpoint(tmp_path, state, Layout(3, 1))
    for got, expected in run_threads(4, lambda world: restore_rank(tmp_path, world, state)):
        assert_same(got, expected)


def _restore_in_a_worker(rank: int, root: str) -> bool:
    got, expected = restore_rank(Path(root), mesh_in_worker(rank, tp=2).world, make_state(), Layout(tp=2))
    assert_same(got, expected)
    return True


@pytest.mark.gloo
def test_real_ranks_are_filled(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, make_state(), Layout(1, 3, seed=2))
    assert run_ranks(2, _restore_in_a_worker, str(tmp_path)) == [True] * 2


def test_a_checkpoint_with_more_than_the_model_has_is_refused(tmp_path: Path) -> None:
    state = make_state()
    write_checkpoint(tmp_path, state, Layout())
    fewer = {key: full for key, full in state.items() if key[0] not in ("scalar", "wte.weight")}
    results = run_threads(4, lambda world: restore_rank(tmp_path, world, fewer))
    for result in results:
        assert isinstance(result, CheckpointError)
        assert [problem.given.split()[0] for problem in result.problems] == ["scalar", "wte.weight"]
        assert "the model has no such parameter" in str(result)


def test_a_problem_of_one_rank_stops_all_before_they_copy(tmp_path: Path) -> None:
    state = make_state()
    write_checkpoint(tmp_path, state, Layout())
    filled = {rank: blank(Layout(dp=2).fragments(rank, state)) for rank in range(2)}
    wrong = filled[1][0].spec.__class__("other", (4,), (4,), (0,))
    filled[1].append(StateFragment(wrong, "weight", 0, 4, torch.zeros(4)))

    def action(world: LateCommunicator) -> None:
        restore(open_checkpoint(tmp_path), filled[world.rank], control=world)

    results = run_threads(2, action)
    assert [str(result) for result in results] == [str(results[0])] * 2
    assert "rank 1: weight of other" in str(results[0])
    assert all((fragment.tensor == PADDING).all() for fragment in filled[0])


def test_damage_that_one_rank_meets_is_told_by_all(tmp_path: Path) -> None:
    state = make_state()
    folder = write_checkpoint(tmp_path, state, Layout(tp=2))
    path = folder / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff\xff\xff")

    def action(world: LateCommunicator) -> None:
        restore(open_checkpoint(tmp_path), blank(Layout(tp=2).fragments(world.rank, state)), control=world)

    results = run_threads(2, action)
    for result in results:
        assert isinstance(result, CheckpointError)
        assert "rank 1: " in str(result) and "rank_00001.safetensors do not match the hash" in str(result)
