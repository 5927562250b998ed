"""A start takes up what --load names, and refuses to save over another run's checkpoints."""

from pathlib import Path
from typing import Any

import pytest
from support.saved_runs import ONE, OTHER, save_for

from megazero.checkpoint.folders import MANIFEST
from megazero.checkpoint.runs import RUN_FILE, RunIdentity, write_run
from megazero.config.run import CheckpointConfig
from megazero.errors import CheckpointError
from megazero.train.start.resume_point import Start, find_start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of two runs, of one without an id, and of none."""
    for name, run in (("one", ONE), ("other", OTHER), ("earlier", None)):
        for step in (10, 20):
            save_for(tmp_path / name, step, run)
    (tmp_path / "empty").mkdir()
    return tmp_path


def start(folder: Path, *, load: str | None = None, save: str | None = None, **settings: Any) -> Start:
    places = {"load": load and folder / load, "save": save and folder / save}
    return find_start(CheckpointConfig(**places, **settings))


def refused(folder: Path, **settings: Any) -> tuple[str, str, str]:
    with pytest.raises(CheckpointError) as caught:
        start(folder, **settings)
    (problem,) = caught.value.problems
    given, rule, legal = (text.replace(f"{folder}/", "") for text in (problem.given, problem.rule, problem.legal))
    return given, rule, legal


@pytest.mark.parametrize(
    ("settings", "source", "run"),
    [
        ({}, None, None),
        ({"save": "new"}, None, None),
        ({"save": "new", "load": "new"}, None, None),
        ({"save": "empty", "load": "empty"}, None, None),
        ({"save": "new", "load": "one/../new"}, None, None),
        ({"load": "nowhere", "begin_without_checkpoint": True}, None, None),
        ({"load": "empty", "begin_without_checkpoint": True, "save": "new"}, None, None),
        ({"load": "one"}, "one/step_0000020", ONE),
        ({"load": "one", "save": "one"}, "one/step_0000020", ONE),
        ({"load": "one/step_0000010", "save": "one"}, "one/step_0000010", ONE),
        ({"load": "one", "save": "new"}, "one/step_0000020", ONE),
        ({"load": "one", "save": "new", "finetune": True}, "one/step_0000020", None),
        ({"load": "earlier", "save": "earlier"}, "earlier/step_0000020", None),
        ({"load": "earlier", "save": "new"}, "earlier/step_0000020", None),
    ],
    ids=str,
)
def test_what_starts(folder: Path, settings: dict[str, Any], source: str | None, run: RunIdentity | None) -> None:
    assert start(folder, **settings) == Start(None if source is None else folder / source, run)


A, B = f"run {ONE.id} (started {ONE.started} on node1)", f"run {OTHER.id} (started {OTHER.started} on node2)"


@pytest.mark.parametrize(
    ("settings", "given", "legal"),
    [
        ({}, "without --load, this start is a new run", "--load one to go on with it"),
        (
            {"load": "nowhere", "begin_without_checkpoint": True},
            "with nothing in --load nowhere, this start is a new run",
            "--load one to go on with it",
        ),
        ({"load": "other"}, f"--load other goes on with {B} from step_0000020", "another folder as --save"),
        ({"load": "other", "finetune": True}, "--finetune begins a new run from other/step_0000020", "without --fine"),
        ({"load": "one", "finetune": True}, "--finetune begins a new run from one/step_0000020", "without --finetune"),
        ({"load": "earlier"}, "--load earlier goes on with a run without an id from step_0000020", "--load one"),
    ],
    ids=str,
)
def test_another_runs_folder_is_refused(folder: Path, settings: dict[str, Any], given: str, legal: str) -> None:
    before = sorted(folder.rglob("*"))
    told = refused(folder, save="one", **settings)
    assert told[0] == f"--save one holds checkpoints of {A}, the newest step_0000020; {given}"
    assert "only a run's own checkpoints are ever replaced" in told[1] and legal in told[2]
    assert sorted(folder.rglob("*")) == before


def test_a_run_without_an_id_is_a_run(folder: Path) -> None:
    assert refused(folder, save="earlier")[0].startswith("--save earlier holds checkpoints of a run without an id, the")
    assert "a run without an id" in refused(folder, save="earlier", load="one")[0]


def test_a_run_without_an_id_goes_on_with_the_one_it_gets(folder: Path) -> None:
    """A start that dies before its first checkpoint has written the id; a later one finds checkpoints of both kinds."""
    earlier = folder / "earlier"
    (earlier / RUN_FILE).write_text((folder / "one" / RUN_FILE).read_text())
    assert start(folder, load="earlier", save="earlier").run == ONE
    save_for(earlier, 30, ONE)
    assert start(folder, load="earlier", save="earlier") == Start(earlier / "step_0000030", ONE)
    assert start(folder, load="earlier/step_0000010", save="earlier").run == ONE


def test_a_checkpoint_that_was_put_beside_another_runs_is_refused(folder: Path) -> None:
    (folder / "other" / "step_0000020").rename(folder / "one" / "step_0000030")
    (folder / "one" / "latest").write_text("step_0000030\n")
    assert f"holds checkpoints of {A}, the newest step_0000020" in refused(folder, load="one", save="one")[0]


def test_a_damaged_manifest_is_left_to_its_reader(folder: Path) -> None:
    manifest = folder / "one" / "step_0000020" / MANIFEST
    manifest.write_text(manifest.read_text()[:60])
    assert start(folder, load="one", save="one").run == ONE


@pytest.mark.parametrize("settings", [{"load": "one", "save": "one"}, {"load": "one", "save": "new"}], ids=str)
def test_a_bit_flipped_in_an_id_makes_no_other_run(folder: Path, settings: dict[str, Any]) -> None:
    manifest = folder / "one" / "step_0000020" / MANIFEST
    manifest.write_text(manifest.read_text().replace(ONE.id, ONE.id.replace("a1", "a0")))
    assert start(folder, **settings) == Start(manifest.parent, ONE)


def test_a_run_that_ended_before_its_first_checkpoint_keeps_its_id(folder: Path) -> None:
    write_run(folder / "empty", ONE)
    assert start(folder, load="empty", save="empty") == Start(None, ONE)
    assert start(folder, save="empty") == Start(None, None)


def test_a_damaged_latest_is_left_to_its_reader(folder: Path) -> None:
    (folder / "one" / "latest").write_text("step_0000077\n")
    assert start(folder, load="one", save="one") == Start(folder / "one" / "step_0000020", ONE)


@pytest.mark.parametrize("settings", [{}, {"save": "new"}, {"finetune": True}, {"save": "nowhere", "finetune": True}])
def test_a_mistyped_load_is_refused(folder: Path, settings: dict[str, Any]) -> None:
    flag = " --finetune" * ("finetune" in settings)
    told = refused(folder, load="nowhere", **settings)
    assert told[:2] == (f"--load nowhere{flag}", "--load takes up a checkpoint, and there is no such folder")
    assert ("--begin-without-checkpoint" in told[2]) is not bool(flag)
    assert "this folder holds none" in refused(folder, load="empty", **settings)[1]
    assert refused(folder, load="onne", **settings)[2].startswith("--load one")


def test_finetuning_into_the_folder_it_loads_from_needs_a_checkpoint(folder: Path) -> None:
    for name in ("nowhere", "empty"):
        assert "--load takes up a checkpoint" in refused(folder, load=name, save=name, finetune=True)[1]
