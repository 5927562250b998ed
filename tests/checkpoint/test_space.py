"""Tests of the room that checkpoints need, against what saving them one after the other takes."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each
from support.late_communicator import LateCommunicator
from support.saved_runs import ONE, OTHER
from support.sharded_state import Layout, make_state
from support.thread_world import run_threads

from megazero.checkpoint.retention import ALL_STAY, Retention
from megazero.checkpoint.runs import RunIdentity
from megazero.checkpoint.space import check_space, peak_growth, saved_bytes, steps_to_save
from megazero.checkpoint.writer import Draft, save
from megazero.comm.local import LocalCommunicator
from megazero.errors import CheckpointError

CPU = torch.device("cpu")


def test_the_size_of_a_checkpoint_is_close_to_that_of_its_files(tmp_path: Path) -> None:
    fragments = Layout().fragments(0, make_state())
    folder = save(Draft(tmp_path, 1, {}, ""), fragments, control=LocalCommunicator())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= saved_bytes(fragments, ("exp_avg", "exp_avg_sq")) <= size + 16_000
    weights = [fragment for fragment in fragments if fragment.kind == "weight"]
    nbytes = sum(fragment.tensor.nbytes for fragment in weights)
    more = saved_bytes(weights, ("exp_avg", "exp_avg_sq")) - saved_bytes(weights, ())
    assert more == 2 * nbytes, "moments that do not exist yet will"


@each(
    ("iteration", "train_iters", "interval", "steps"),
    [
        (0, 10, 3, [3, 6, 9, 10]),
        (0, 9, 3, [3, 6, 9]),
        (6, 10, 3, [9, 10]),
        (4, 10, None, [10]),
        (0, 10, 99, [10]),
        (10, 10, 5, []),
        (10, 10, None, []),
        (0, 0, None, []),
    ],
)
def test_the_steps_that_a_run_saves(iteration: int, train_iters: int, interval: int | None, steps: list[int]) -> None:
    assert steps_to_save(iteration, train_iters, interval) == steps


@given(
    st.sets(st.integers(1, 20)),
    st.sets(st.integers(1, 20), min_size=1),
    st.none() | st.integers(1, 4),
    st.none() | st.integers(1, 6),
)
def test_growth_is_that_of_a_folder(old: set[int], new: set[int], last: int | None, every: int | None) -> None:
    there, steps, retention = dict.fromkeys(old, 3), sorted(new), Retention(last, every)
    folder = [(step, 3) for step in old]
    most = 0
    for step in steps:
        folder = [*folder, (step, 5)]
        most = max(most, sum(size for _, size in folder))
        folder = [each for each in folder if each[0] != step] + [(step, 5)]
        expired = retention.expired({each for each, _ in folder if each <= step})
        folder = [each for each in folder if each[0] not in expired]
    assert peak_growth(5, steps, there, retention) == max(0, most - 3 * len(old))


def with_free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    figures = SimpleNamespace(f_bavail=nbytes, f_frsize=1, f_blocks=10**9)
    monkeypatch.setattr(os, "statvfs", lambda path: figures)


def test_a_disk_without_room_is_an_error_on_all_ranks_and_one_that_fills_up_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(free: int, steps: list[int], retention: Retention = ALL_STAY) -> set[str]:
        with_free(monkeypatch, free)

        def on_rank(world: LateCommunicator) -> str:
            return check_space(tmp_path, 1 << 19, steps, retention=retention, run=None, control=world)

        return set(map(str, run_threads(2, on_rank)))

    assert check(1 << 20, [5]) == {""}
    (message,) = check(1 << 19, [5])
    assert re.search(r"512\.0 KiB free\n.*this run takes 1\.0 MiB\n.*1\.0 MiB free there", message)
    (notice,) = check(5 << 19, [5, 10, 15])
    assert "2.5 MiB free; this run's checkpoints, 1.0 MiB each, take up to 3.0 MiB" in notice
    assert check(5 << 19, [5, 10, 15], Retention(keep_last=1)) == {""}
    (message,) = check(5 << 19, [5, 10, 15], Retention(keep_last=2))
    assert "grows by 3.0 MiB" in message and "3.0 MiB free there" in message


def test_checkpoints_that_will_go_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fragments = Layout().fragments(0, make_state())
    for step in (1, 2):
        save(Draft(tmp_path, step, {"run": ONE.to_json()}, ""), fragments, control=LocalCommunicator())
    size = saved_bytes(fragments, ())
    with_free(monkeypatch, size + 100)

    def check(run: RunIdentity) -> str:
        return check_space(tmp_path, size, [3, 4], retention=Retention(1), run=run, control=LocalCommunicator())

    assert check(ONE) == "", "the first save lets both go, and the second one finds their room"
    with pytest.raises(CheckpointError, match="grows by"):
        check(OTHER)
