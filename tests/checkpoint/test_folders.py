"""Tests of a checkpoint root's step folders and its file `latest`."""

from pathlib import Path

import pytest

from megazero.checkpoint.folders import free_name, list_steps, newest, part_name, resolve
from megazero.errors import CheckpointError


def make(root: Path, *names: str, latest: str | None = None) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "manifest.json").write_text("{}")
    if latest is not None:
        (root / "latest").write_text(latest)
    return root


def test_steps_are_sorted_by_number_and_revision(tmp_path: Path) -> None:
    make(tmp_path, "step_10000000", "step_0000020_10", "step_0000020_2", "step_0000020", "step_0000009")
    make(tmp_path, ".saving_step_0000030", "step_abc", "step_000001", "other")
    (tmp_path / "step_0000040").mkdir()  # no manifest: not a checkpoint
    found = [folder.path.name for folder in list_steps(tmp_path)]
    assert found == ["step_0000009", "step_0000020", "step_0000020_2", "step_0000020_10", "step_10000000"]
    assert list_steps(tmp_path / "absent") == []


def test_latest_decides_even_if_it_is_not_the_highest(tmp_path: Path) -> None:
    make(tmp_path, "step_0000010", "step_0000020", latest="step_0000010\n")
    assert newest(tmp_path) == tmp_path / "step_0000010"
    assert resolve(tmp_path) == tmp_path / "step_0000010"


def test_without_latest_the_highest_step_counts(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "absent") is None
    make(tmp_path, "step_0000010", "step_0000020")
    assert newest(tmp_path) == tmp_path / "step_0000020"


@pytest.mark.parametrize("name", ["step_0000030", "../elsewhere", "", "/etc", "x" * 100_000])
def test_latest_that_names_nothing_lists_what_is_there(tmp_path: Path, name: str) -> None:
    make(tmp_path, "step_0000010", "step_0000020", latest=name)
    make(tmp_path.parent, f"{tmp_path.name}_side")
    with pytest.raises(CheckpointError, match=r"must name a complete(.|\n)*step_0000010, step_0000020") as caught:
        newest(tmp_path)
    assert len(str(caught.value)) < 1000


def test_resolve_takes_a_step_folder_a_root_or_a_step(tmp_path: Path) -> None:
    make(tmp_path, "step_0000010", "step_0000020", "step_0000020_2", latest="step_0000020_2")
    assert resolve(tmp_path / "step_0000010") == tmp_path / "step_0000010"
    assert resolve(tmp_path, 10) == tmp_path / "step_0000010"
    assert resolve(tmp_path, 20) == tmp_path / "step_0000020_2"
    with pytest.raises(CheckpointError, match=r"step 15\n.*no such step\n.*step_0000010, step_0000020"):
        resolve(tmp_path, 15)


def test_a_step_folder_holds_no_other_step(tmp_path: Path) -> None:
    make(tmp_path, "step_0000010", "step_0000020_2")
    assert resolve(tmp_path / "step_0000020_2", 20) == tmp_path / "step_0000020_2"
    with pytest.raises(CheckpointError, match="step 20"):
        resolve(tmp_path / "step_0000010", 20)


def test_resolve_tells_an_absent_folder_from_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        resolve(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no checkpoint in this folder"):
        resolve(tmp_path)


def test_names(tmp_path: Path) -> None:
    assert free_name(tmp_path, 20) == "step_0000020"
    make(tmp_path, "step_0000020", "step_0000020_2")
    assert free_name(tmp_path, 20) == "step_0000020_3"
    make(tmp_path, "step_0000030_5")  # older revisions have been removed; a new one must still have the highest number
    (tmp_path / "step_0000030_6").mkdir()
    assert free_name(tmp_path, 30) == "step_0000030_7"
    assert part_name(3) == "rank_00003.safetensors"
