"""Tests that all ranks are filled from the same, newest sound checkpoint, and damaged ones are only passed over."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support.late_communicator import LateCommunicator
from support.sharded_state import Layout, assert_same, blank, make_state, write_checkpoint
from support.thread_world import run_threads

from megazero.checkpoint.fallback import Taken, first_complete, refusal, report, restore_first_sound, set_damaged_aside
from megazero.checkpoint.folders import candidates, free_name, newest
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.restore import restore
from megazero.errors import CheckpointError, DamageError, Problem
from megazero.parallel.param_spec import StateFragment

CPU = torch.device("cpu")
LAYOUT = Layout(tp=2)
STEPS = (2, 4, 6)


class Resumed(NamedTuple):
    taken: Taken | None
    state: list[StateFragment]


def make_root(root: Path) -> Path:
    """Write the checkpoints of STEPS, with a file for each of two ranks; the state of step n is drawn with seed n."""
    for step in STEPS:
        write_checkpoint(root, make_state(step), LAYOUT, step=step)
    return root


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def resume(path: Path, world: LateCommunicator, check: Callable[[Checkpoint], None] = lambda _: None) -> Resumed:
    state = blank(LAYOUT.fragments(world.rank, make_state()))
    taken = restore_first_sound(
        path,
        check,
        lambda found: restore(found, state, control=world),
        lambda _: None,
        control=world,
    )
    return Resumed(taken, state)


def resumed(path: Path, step: int) -> Taken:
    """Resume on two ranks, and return what rank 0 has taken; all of the state must be that of `step`."""
    ranks = run_threads(2, lambda world: resume(path, world))
    for rank, (taken, state) in enumerate(ranks):
        assert taken is not None and taken.checkpoint.step == step
        assert_same(state, LAYOUT.fragments(rank, make_state(step)))
    return ranks[0].taken


def test_the_newest_is_taken_if_it_is_sound(tmp_path: Path) -> None:
    assert resumed(make_root(tmp_path), 6).is_newest


@pytest.mark.parametrize("name", ["rank_00000.safetensors", "rank_00001.safetensors"])
def test_damage_in_the_data_of_one_rank_makes_all_ranks_take_the_next(tmp_path: Path, name: str) -> None:
    """Both ranks have filled half of their state from the damaged checkpoint; nothing of it may stay."""
    root = make_root(tmp_path)
    flip_last_byte(root / "step_0000006" / name)
    taken = resumed(root, 4)
    assert [each.folder.name for each in taken.damaged] == ["step_0000006"]
    first, last = report(taken)
    assert "step_0000006 is damaged: rank" in first and f"{name} do not match the hash" in first
    assert last == f"WARNING: {root / 'step_0000004'} is sound and taken instead; steps after 4 are trained again"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("change", [lambda content: content[:-9] + b"x" * 9, lambda content: content + b"\n"])
def test_ranks_share_the_hashing_of_indices_and_all_learn_of_damage(
    tmp_path: Path, number: int, change: Callable[[bytes], bytes]
) -> None:
    """Each index is read whole by one rank of two; rank 0 confirms the damage that only rank 1 has looked for."""
    for step in STEPS:
        write_checkpoint(tmp_path, make_state(step), LAYOUT, step=step, boxes_per_index=10)
    path = tmp_path / "step_0000006" / f"index_0000{number}.jsonl"
    path.write_bytes(change(path.read_bytes()))
    (damaged,) = resumed(tmp_path, 4).damaged
    assert path.name in damaged.problems[0].given and f"rank {number % 2}: " in damaged.problems[0].given


def test_a_data_file_that_one_rank_looks_at_is_confirmed_by_its_size(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    path = root / "step_0000006" / "rank_00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (damaged,) = resumed(root, 4).damaged
    assert f"{path.name}: {path.stat().st_size} bytes" in damaged.problems[0].given


def test_several_damaged_ones_are_passed_over(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    flip_last_byte(root / "step_0000004" / "rank_00001.safetensors")
    (root / "step_0000006" / "config.yaml").unlink()
    assert len(resumed(root, 2).damaged) == 2
    assert newest(root) == root / "step_0000006", "resuming alone renames nothing"
    flip_last_byte(root / "step_0000002" / "manifest.json")
    for result in run_threads(2, lambda world: resume(root, world)):
        assert isinstance(result, DamageError)
        assert all(f"step_000000{step}" in str(result) for step in STEPS)


def test_a_folder_that_is_named_is_never_replaced(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    flip_last_byte(root / "step_0000006" / "rank_00001.safetensors")
    for result in run_threads(2, lambda world: resume(root / "step_0000006", world)):
        assert isinstance(result, DamageError) and "do not match the hash" in str(result)
    assert resumed(root / "step_0000002", 2).is_newest


def test_damage_that_rank_0_does_not_find_is_a_fault_of_the_node(tmp_path: Path) -> None:
    """A node with broken memory would find every checkpoint damaged, and none must be passed over for it."""
    root = make_root(tmp_path)

    def action(world: LateCommunicator) -> Resumed:
        def check(_: Checkpoint) -> None:
            if world.rank == 1:
                raise DamageError(Problem("a box", "does not match its hash"), files=("rank_00001.safetensors",))

        return resume(root, world, check)

    for result in run_threads(2, action):
        assert isinstance(result, CheckpointError) and not isinstance(result, DamageError)
        assert "rank 1: a box" in str(result) and "rank 0 reads the same files and finds no damage" in str(result)


def test_a_rank_that_does_not_see_the_checkpoints_is_named(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    (tmp_path / "empty").mkdir()
    paths = [root, tmp_path / "empty"]
    for result in run_threads(2, lambda world: resume(paths[1 - world.rank], world)):
        assert "rank 0 finds no checkpoint there, rank 1 does" in str(result)
    for taken, _ in run_threads(2, lambda world: resume(paths[world.rank], world)):
        assert taken is not None and taken.checkpoint.step == 6, "the list of rank 0 is that of all"


def to_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_zeros(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage",
    [
        lambda latest: latest.write_text("step_0000009\n"),
        lambda latest: latest.write_bytes(os.urandom(100)),
        lambda latest: latest.write_text("../elsewhere"),
        lambda latest: os.truncate(latest, 10 << 30),
        to_fifo,
        to_zeros,
        lambda latest: (latest.unlink(), latest.mkdir()),
    ],
    ids=["nothing", "noise", "elsewhere", "10 GB", "fifo", "zeros", "folder"],
)
def test_a_wrong_latest_is_reported_and_mended(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    root = make_root(tmp_path)
    damage(root / "latest")
    with pytest.raises(CheckpointError, match=r"latest(.|\n)*complete checkpoints here: step_0000002, step_0000004"):
        newest(root)
    taken = resumed(root, 6)
    assert not taken.is_newest and "latest" in next(iter(report(taken)))
    assert list(set_damaged_aside(taken)) == []
    assert newest(root) == root / "step_0000006"
    assert len(candidates(root).folders) == 3


def test_the_choice_of_the_user_in_latest_is_not_overruled_by_a_newer_one(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    (root / "latest").write_text("step_0000004\n")
    assert resumed(root, 4).is_newest
    flip_last_byte(root / "step_0000004" / "rank_00000.safetensors")
    resumed(root, 2)


def test_the_damaged_one_is_set_aside_and_its_step_can_be_saved_again(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    for number in (1, 2):
        if number == 1:
            (root / "step_0000006" / "manifest.json").unlink()
        else:
            flip_last_byte(root / "step_0000006" / "manifest.json")
        taken = resumed(root, 4)
        (line,) = set_damaged_aside(taken)
        name = "damaged_step_0000006" + (".2" if number == 2 else "")
        assert "step_0000006 is set aside as" in line and f"{name};" in line
        assert (root / name / "config.yaml").exists()
        assert newest(root) == root / "step_0000004"
        assert free_name(root, 6) == "step_0000006"
        write_checkpoint(root, make_state(6), LAYOUT, step=6)
        assert resumed(root, 6).is_newest


def test_what_cannot_be_renamed_is_said(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    flip_last_byte(root / "step_0000006" / "manifest.json")
    taken = resumed(root, 4)
    root.rename(tmp_path / "away")
    root.write_text("")
    (line,) = set_damaged_aside(taken)
    assert line.startswith("WARNING: what is damaged could not be set aside")


def test_a_strict_run_names_the_sound_one(tmp_path: Path) -> None:
    root = make_root(tmp_path)
    flip_last_byte(root / "step_0000006" / "manifest.json")
    found = first_complete(root, lambda _: None)
    assert found is not None and found.checkpoint.step == 4
    for is_read, word in ((True, "which is sound"), (False, "which is complete; megazero checkpoint verify")):
        text = str(refusal(found, root, is_read=is_read))
        assert "step_0000006/manifest.json" in text and "only the newest checkpoint is taken" in text
        assert f"or --load {root / 'step_0000004'}, {word}" in text


def test_a_root_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert first_complete(tmp_path, lambda _: None) is None
    assert [each.taken for each in run_threads(2, lambda world: resume(tmp_path, world))] == [None, None]
